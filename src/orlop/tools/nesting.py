"""The containers that a checkpoint's leaves were in, made again from their paths.

Owns what the paths don't tell: DCP saves every key of a dict as text. Must not know what the leaves hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orlop import compat
from orlop.state.containers import number_states

__all__ = ["nested"]


def nested(leaves: dict[str, object], paths: Mapping[str, tuple[Any, ...]] | None) -> dict[str, Any]:
    """The leaves as the containers that were saved; flat where the metadata doesn't tell."""
    if paths is None or not all(leaf in paths for leaf in leaves):
        return leaves
    found = compat.unflatten_state_dict(leaves, {leaf: paths[leaf] for leaf in leaves})
    number_states(found)
    return found
