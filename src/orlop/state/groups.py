"""Param groups' values: reading them from both of torch's layouts, and writing them into the live dicts, in place.

Must not know which saved group is which live one (`pairing`), nor files or ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from orlop import compat
from orlop.errors import CheckpointMismatch
from orlop.state.report import GroupDifference
from orlop.wording import counted

__all__ = [
    "LIVE_FLAGS",
    "path_below",
    "plan_group",
    "read_groups",
    "text_of",
    "write_group",
]

_log = logging.getLogger("orlop")

# How a run computes, not what: always the live run's.
LIVE_FLAGS = frozenset({"foreach", "fused", "capturable", "differentiable"})
_NOT_VALUES = LIVE_FLAGS | {"params", "param_names"}


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
                "a hyperparameter's shape differs",
                where=f"{label} {key}",
                expected=str(tuple(held.shape)),
                found=str(tuple(value.shape)),
            )
        if isinstance(value, Tensor) and key in live and not isinstance(held, Tensor) and value.numel() == 1:
            values[key] = value = value.item()
        ours, theirs = _texts(held, saved.get(key, value))
        if key in live and ours != theirs:
            differences.append(GroupDifference(group=label, key=key, live=ours, saved=theirs, taken=taken))
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


def _texts(held: Any, value: Any) -> tuple[str, str]:
    """Both as text; with their kinds where a number meets a tensor, or a tensor one of another dtype.

    The live kind stays, and a value that it rounds, or another kernel, makes other bits of the next step."""
    texts = text_of(held), text_of(value)
    kinds = [str(each.dtype) if isinstance(each, Tensor) else type(each).__name__ for each in (held, value)]
    if kinds[0] != kinds[1] and (isinstance(held, Tensor) or isinstance(value, Tensor)):
        return f"{texts[0]} ({kinds[0]})", f"{texts[1]} ({kinds[1]})"
    return texts


def text_of(value: Any) -> str:
    """A hyperparameter as text: a tensor of one element as its number."""
    if isinstance(value, Tensor):
        return str(value.item()) if value.numel() == 1 else f"tensor of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(text_of, value))})"
    return str(value)


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
    firsts: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """The saved groups, from leaves that were read already; none when there are no such leaves.

    Args:
        prefix: What the groups' keys start with: `optimizer.param_groups.`.
        values: Leaves by key, others among them.
        paths: The checkpoint's nested paths, where it has them.
        live: The live groups' names; torch's flattened layout has values per parameter and no groups of its own.
        rename: Saved names as the live ones.
        firsts: The first name of each saved group, in order, where it is on record for the flattened layout.

    Returns:
        The groups, with renamed `params`; in the flattened layout in the saved order if that is known, else in the live
        one, and without groups that have no parameters.

    Raises:
        CheckpointMismatch: In the flattened layout, a live group's parameters were of different groups; or a group has
            no list of parameters.
    """
    mine = {key: value for key, value in values.items() if key.startswith(prefix)}
    whole = values.get(prefix.rstrip("."))
    if isinstance(whole, list):
        return _named(prefix, whole, rename)
    if not mine:
        return []
    if f"{prefix}0.params" in mine:
        below = {key: ("groups", *path_below(key, prefix, paths)) for key in mine}
        return _named(prefix, compat.unflatten_state_dict(mine, below)["groups"], rename)
    by_name: dict[str, dict[str, Any]] = {}
    for key, value in mine.items():
        name, _, own = key[len(prefix) :].rpartition(".")
        for renamed in rename([name]):
            by_name.setdefault(renamed, {})[own] = value
    cut = [[name for name in names if name in by_name] for names in live]
    known = {name for names in cut for name in names}
    groups = [_one_group(prefix, names, by_name) for names in cut if names]
    strange = [name for name in by_name if name not in known]
    if firsts:
        # Whichever groups those were in: they are named, and match nothing.
        groups = _in_saved_order(prefix, groups, [rename([first]) for first in firsts])
        names = [*groups[0]["params"], *(name for name in strange if name not in groups[0]["params"])]
        return [{**groups[0], "params": names}, *groups[1:]]
    return [*groups, {"params": strange}] if strange else groups


def _named(
    prefix: str, groups: Sequence[Any], rename: Callable[[Sequence[str]], list[str]]
) -> list[dict[str, Any]]:
    named: list[dict[str, Any]] = []
    for index, group in enumerate(groups):
        names = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(names, (list, tuple)):
            raise CheckpointMismatch(
                "a saved param group does not say which parameters are in it",
                where=f"{prefix}{index}.params",
                expected="a list of names",
                found=repr(names),
            )
        named.append({**group, "params": rename(list(map(str, names)))})
    return named


def _in_saved_order(
    prefix: str, groups: Sequence[dict[str, Any]], firsts: Sequence[Sequence[str]]
) -> list[dict[str, Any]]:
    """Groups that were cut as the live ones are, each where the saved group stood that begins in it.

    Args:
        prefix: For the message.
        groups: The groups.
        firsts: For each saved group the live names of its first parameter: several where that was tied.

    Returns:
        One for each saved group; of one of which nothing is here, the first name alone is left.
    """
    placed: list[dict[str, Any]] = [{"params": list(names)} for names in firsts]
    for group in groups:
        begins = [i for i, names in enumerate(firsts) if not set(names).isdisjoint(group["params"])]
        if len(begins) != 1:
            raise CheckpointMismatch(
                "the flattened layout keeps values by parameter, and groups were cut otherwise when saved",
                where=prefix.rstrip("."),
                expected=f"a group of {', '.join(group['params'])}",
                found=f"{counted(len(begins), 'saved group begins', 'saved groups begin')} in it; they all begin with "
                f"{', '.join(names[0] for names in firsts)}",
            )
        placed[begins[0]] = group
    return placed


def _one_group(prefix: str, names: Sequence[str], by_name: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    for name in names[1:]:
        for key, value in by_name[name].items():
            first = by_name[names[0]].get(key)
            if text_of(first) != text_of(value):
                raise CheckpointMismatch(
                    "the parameters of one live group had different hyperparameters",
                    where=f"{prefix}{name}.{key}",
                    expected=f"{text_of(first)}, as for {names[0]}",
                    found=text_of(value),
                )
    return {**by_name[names[0]], "params": list(names)}
