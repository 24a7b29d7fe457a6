"""How the hyperparameters of two checkpoints differ: by the names of parameters, whatever groups these are in.

Owns which leaves are hyperparameters. Holds their values alone. Needs torch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor

from orlop.tools import param_groups
from orlop.tools.differences import first_difference, shown
from orlop.tools.findings import Finding, Kind, differing
from orlop.tools.leaf_names import group_option
from orlop.tools.stored_values import StoredValues
from orlop.wording import counted

__all__ = ["Hyperparameters", "by_parameter", "compare_hyperparameters", "hyperparameter_leaves"]

Hyperparameters = dict[tuple[str, str], dict[str, Any]]  # by optimizer and parameter

# Of the live run, not of its state: two runs of one training may well differ in them.
_FLAGS = frozenset({"foreach", "fused", "capturable", "differentiable"})
_SHOWN, _LONG = 3, 100


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


_NOTHING = _Nothing()


def compare_hyperparameters(one: Hyperparameters, two: Hyperparameters, exact: bool) -> Iterator[Finding]:
    """Each parameter's hyperparameters; one finding for all parameters that differ alike."""
    alike: defaultdict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    for (optimizer, param), options in one.items():
        others = two.get((optimizer, param))
        for key in sorted({*options, *(others or ())}):
            if others is None or (key in _FLAGS and not exact):
                continue
            mine, other = options.get(key, _NOTHING), others.get(key, _NOTHING)
            difference = first_difference(mine, other)
            if difference is not None:
                whole = shown(mine), shown(other)
                is_plain = whole[0] != whole[1] and max(map(len, whole)) <= _LONG
                at, *texts = ("", *whole) if is_plain else difference
                alike[optimizer, f"{key}{at}", texts[0], texts[1]].append(param)
    for (optimizer, key, text, other_text), params in alike.items():
        names = ", ".join(params[:_SHOWN]) + (", ..." if len(params) > _SHOWN else "")
        count = counted(len(params), "parameter")
        where = f"{optimizer}.param_groups: {key}"
        what = f"a hyperparameter differs for {count} ({names})"
        yield differing("hyperparameter", where, what, text, other_text)
    yield from _in_one_only(one, two)


def _in_one_only(one: Hyperparameters, two: Hyperparameters) -> Iterator[Finding]:
    sides: tuple[tuple[Kind, str, Hyperparameters, Hyperparameters], ...] = (
        ("missing", "A", one, two),
        ("unexpected", "B", two, one),
    )
    for kind, side, mine, other in sides:
        params = sorted(f"{optimizer}: {param}" for optimizer, param in mine.keys() - other.keys())
        if params and other:
            names = ", ".join(params[:_SHOWN]) + (", ..." if len(params) > _SHOWN else "")
            what = f"in the param groups of {side} only: {names}"
            yield differing(
                kind, "param_groups", f"{len(params)} of {counted(len(mine), 'parameter')} {what}"
            )


def by_parameter(side: StoredValues) -> Hyperparameters:
    """The hyperparameters of each parameter; raises CheckpointError when they can't be read."""
    return {
        (group.optimizer, param): group.options
        for group in param_groups.groups(side.opened, partial(_option, side))
        for param in group.params
    }


def hyperparameter_leaves(side: StoredValues, groups: Hyperparameters) -> set[str]:
    """The leaves that hold the `groups` of a checkpoint; all others are compared by their keys."""
    optimizers = {optimizer for optimizer, _ in groups}
    options = ((leaf, group_option(leaf)) for leaf in side.catalog.leaves)
    return {leaf for leaf, option in options if option and option[0] in optimizers and _is_option(side, leaf)}


def _is_option(side: StoredValues, leaf: str) -> bool:
    """Whether a leaf of a param group is a hyperparameter; a tensor of some size is compared as any other."""
    entry = side.catalog.leaves[leaf]
    return entry is None or math.prod(entry.sizes) == 1


def _option(side: StoredValues, leaf: str) -> Any:
    """The value of a hyperparameter; what DCP makes of it is undone: tuples are lists, numbers may be tensors."""
    if not _is_option(side, leaf):
        return None
    value = side.plain(leaf) if side.catalog.leaves[leaf] is None else side.tensor(leaf)
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return list(value) if isinstance(value, tuple) else value
