"""Param groups: which saved group is which live one, and writing saved values into the live dicts.

Groups are matched by the names of their parameters, never by position. Owns that match and the in-place write. Must not
know files or ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from orlop import compat
from orlop.errors import CheckpointMismatch
from orlop.state.report import GroupDifference

__all__ = [
    "LIVE_FLAGS",
    "match_groups",
    "path_below",
    "permute_scheduler",
    "plan_group",
    "read_groups",
    "write_group",
]

_log = logging.getLogger("orlop")

# How a run computes, not what: always the live run's.
LIVE_FLAGS = frozenset({"foreach", "fused", "capturable", "differentiable"})
_NOT_VALUES = LIVE_FLAGS | {"params", "param_names"}
# What schedulers keep one of for each group.
_PER_GROUP = frozenset(
    {"base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "min_lrs", "base_momentums", "max_momentums"}
)
_LIVE_LRS = frozenset({"base_lrs", "_last_lr"})
_SHOWN = 4


def match_groups(live: Sequence[Sequence[str]], saved: Sequence[Sequence[str]], where: str) -> list[int]:
    """For each live group, the index of the saved group with the same set of parameter names.

    Raises:
        CheckpointMismatch: A group on either side has no partner; the message shows both sides.
    """
    named = [name for names in saved for name in names]
    if named and all(name.isdigit() for name in named):
        raise CheckpointMismatch(
            "the param groups name parameters by their position in an optimizer; nothing was changed",
            where=where,
            expected=_table(live),
            found=_table(saved),
            todo="save with names: by orlop, or by torch's get_optimizer_state_dict",
        )
    free = dict(enumerate(map(frozenset, saved)))
    order: list[int] = []
    for names in map(frozenset, live):
        partner = next((index for index, others in free.items() if others == names), None)
        if partner is None:
            break
        order.append(partner)
        del free[partner]
    if len(order) == len(live) and not free:
        return order
    raise CheckpointMismatch(
        "the param groups do not match by the names of their parameters; nothing was changed",
        where=where,
        expected=_table(live),
        found=_table(saved),
        todo="build the optimizer with the groups of the run that saved it, or load with load_args=False",
    )


def _table(groups: Sequence[Sequence[str]]) -> str:
    rows = []
    for index, names in enumerate(groups):
        more = ", …" if len(names) > _SHOWN else ""
        rows.append(f"\n    group {index}: {len(names)} parameters: {', '.join(list(names)[:_SHOWN])}{more}")
    return "".join(rows) or "no groups"


def plan_group(
    label: str,
    live: Mapping[str, Any],
    saved: Mapping[str, Any],
    added: Mapping[str, Any] | None = None,
    *,
    taken: bool = True,
) -> tuple[dict[str, Any], list[GroupDifference]]:
    """The values that a saved group changes or adds in a live one, and what differs. Changes nothing.

    Args:
        label: The group's name, for messages.
        live: The live group.
        saved: The saved one.
        added: Options that a class got over time, with the value of the time before: taken where the saved group,
            written by an older torch, lacks one that the live group has.
        taken: Whether the values are going to be written; only said in what is returned.

    Raises:
        CheckpointMismatch: A live tensor would have to take a value of another shape.
    """
    values = {key: value for key, value in saved.items() if key not in _NOT_VALUES}
    for key, value in (added or {}).items() if taken and len(saved) > 1 else ():
        if key in live and key not in values:
            values[key] = value
            _log.info("%s: the checkpoint knows no %s; set to %s, as before there was one", label, key, value)
    differences = []
    for key, value in values.items():
        held = live.get(key)
        if isinstance(held, Tensor) and isinstance(value, Tensor) and held.shape != value.shape:
            raise CheckpointMismatch(
                "a hyperparameter's shape differs; nothing was changed",
                where=f"{label} {key}",
                expected=str(tuple(held.shape)),
                found=str(tuple(value.shape)),
            )
        if isinstance(value, Tensor) and key in live and not isinstance(held, Tensor) and value.numel() == 1:
            values[key] = value = value.item()
        if key in live and _text(held) != _text(value):
            differences.append(
                GroupDifference(group=label, key=key, live=_text(held), saved=_text(value), taken=taken)
            )
    return values, differences


def write_group(live: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Put the planned values into the live dict; a live tensor stays the same object and is filled."""
    for key, value in values.items():
        held = live.get(key)
        if isinstance(held, Tensor):
            # A captured graph or a compiled step holds this very tensor.
            held.detach().copy_(value) if isinstance(value, Tensor) else held.detach().fill_(value)
        else:
            live[key] = value


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(value.item()) if value.numel() == 1 else f"tensor of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_text, value))})"
    return str(value)


def permute_scheduler(state: Any, order: Sequence[int], live: Any = None) -> Any:
    """A scheduler's saved state with its per-group lists in the live groups' order.

    Args:
        state: The saved state, with those of chained schedulers inside it.
        order: For each live group, its index in the saved ones.
        live: The live scheduler's state: its learning rates are kept (`load_args=False`); None to take the saved ones.
    """
    if isinstance(state, Mapping):
        return {
            key: _per_group(key, value, order, live.get(key) if isinstance(live, Mapping) else None)
            for key, value in state.items()
        }
    if isinstance(state, list):
        lives = live if isinstance(live, list) and len(live) == len(state) else [None] * len(state)
        return [permute_scheduler(item, order, other) for item, other in zip(state, lives)]
    return state


def _per_group(key: Any, value: Any, order: Sequence[int], live: Any) -> Any:
    if key in _LIVE_LRS and live is not None:
        return live
    if key in _PER_GROUP and isinstance(value, list) and len(value) == len(order):
        return [value[index] for index in order]
    return permute_scheduler(value, order, live) if key == "_schedulers" else value


def path_below(key: str, base: str, paths: Mapping[str, Sequence[Any]] | None) -> tuple[Any, ...]:
    """The nested path of a key below `base` (`optimizer.param_groups.`), by the checkpoint's own paths if it has any.

    Without them a key's dots are taken for levels and its whole numbers for list indices.
    """
    rest = key[len(base) :]
    path = tuple((paths or {}).get(key, ()))
    for start in range(len(path)):
        if ".".join(map(str, path[start:])) == rest:
            return path[start:]
    return tuple(int(segment) if segment.isdigit() else segment for segment in rest.split("."))


def read_groups(
    prefix: str,
    values: Mapping[str, Any],
    paths: Mapping[str, Sequence[Any]] | None,
    live: Sequence[Sequence[str]],
    rename: Callable[[Sequence[str]], list[str]] = list,
) -> list[dict[str, Any]]:
    """The saved groups, from leaves that were read already; none when there are no such leaves.

    Args:
        prefix: What the groups' keys start with: `optimizer.param_groups.`.
        values: Leaves by key, others among them.
        paths: The checkpoint's nested paths, where it has them.
        live: The live groups' names; torch's flattened layout has values per parameter and no groups of its own.
        rename: Saved names as the live ones.

    Returns:
        The groups, with renamed `params`.

    Raises:
        CheckpointMismatch: In the flattened layout, the parameters of a live group have different values, or are not
            the saved ones.
    """
    mine = {key: value for key, value in values.items() if key.startswith(prefix)}
    whole = values.get(prefix.rstrip("."))
    if isinstance(whole, list):
        return [{**group, "params": rename(list(map(str, group["params"])))} for group in whole]
    if not mine:
        return []
    if f"{prefix}0.params" in mine:
        below = {key: ("groups", *path_below(key, prefix, paths)) for key in mine}
        groups: list[dict[str, Any]] = compat.unflatten_state_dict(mine, below)["groups"]
        return [{**group, "params": rename(list(map(str, group["params"])))} for group in groups]
    by_name: dict[str, dict[str, Any]] = {}
    for key, value in mine.items():
        name, _, own = key[len(prefix) :].rpartition(".")
        for renamed in rename([name]):
            by_name.setdefault(renamed, {})[own] = value
    if set(by_name) != {name for names in live for name in names}:
        # Matching then refuses them, with a table of both sides.
        return [{"params": list(by_name)}]
    return [_one_group(prefix, names, by_name) if names else {"params": []} for names in live]


def _one_group(prefix: str, names: Sequence[str], by_name: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    for name in names[1:]:
        for key, value in by_name[name].items():
            first = by_name[names[0]].get(key)
            if _text(first) != _text(value):
                raise CheckpointMismatch(
                    "the parameters of one live group had different hyperparameters; nothing was changed",
                    where=f"{prefix}{name}.{key}",
                    expected=f"{_text(first)}, as for {names[0]}",
                    found=_text(value),
                    todo="build the optimizer with the groups of the run that saved it, or load with load_args=False",
                )
    return {**by_name[names[0]], "params": list(names)}
