"""What a leaf's key tells: optimizer, parameter and state key, or optimizer, group and hyperparameter.

Owns the two patterns. Pure: names alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["group_option", "optimizer_names", "split_state"]

_GROUP = re.compile(r"(?P<label>(?:.+\.)?[^.]+)\.param_groups\.(?P<name>.+)\.(?P<key>[^.]+)")
_STATE = re.compile(r"(?P<label>(?:.+?\.)?[^.]+?)\.state\.(?P<fqn>.+)\.(?P<key>[^.]+)")


def group_option(leaf: str) -> tuple[str, str, str] | None:
    """Optimizer, group (its index; a parameter in the flattened layout) and hyperparameter; None for another leaf."""
    match = _GROUP.fullmatch(leaf)
    return None if match is None else (match["label"], match["name"], match["key"])


def optimizer_names(leaves: Iterable[str]) -> set[str]:
    """The names of the optimizers: what stands before `.param_groups.`."""
    return {option[0] for leaf in leaves if (option := group_option(leaf)) is not None}


def split_state(leaf: str, optimizers: set[str]) -> tuple[str, str, str] | None:
    """Optimizer, parameter and state key of an optimizer's leaf; None for another leaf."""
    match = _STATE.fullmatch(leaf)
    if match is None or (match["label"] not in optimizers and match["label"] != "optimizer"):
        return None
    return match["label"], match["fqn"], match["key"]
