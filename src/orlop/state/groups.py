"""Param groups in both of torch's layouts: as leaves, and read from them.

Must not know which saved group is which live one (`pairing`), nor files or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from orlop import compat
from orlop.errors import CheckpointMismatch, OptimizerRefused
from orlop.state.containers import leaves_of
from orlop.state.group_values import text_of
from orlop.wording import counted

__all__ = ["group_leaves", "path_below", "read_groups"]


def group_leaves(
    label: str, groups: Sequence[Mapping[Any, Any]], *, is_flattened: bool
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The leaves of an optimizer's groups, each with its path.

    In the layout of `flatten_optimizer_state_dict=True` every parameter has its group's values.

    Args:
        label: The optimizer's name, with the key prefix.
        groups: The groups, with names for parameters.
        is_flattened: Which of the two layouts.

    Raises:
        CheckpointMismatch: The flattened layout has no place for a group.
        OptimizerRefused: A group's key could not be read back.
    """
    for index, group in enumerate(groups):
        _require_keys(f"{label}, group {index}", group, is_flattened=is_flattened)
        if not is_flattened:
            for key, value in group.items():
                for path, leaf in leaves_of(value).items():
                    yield (label, "param_groups", index, key, *path), leaf
            continue
        if not group["params"]:
            raise CheckpointMismatch(
                "the flattened layout has no place for the values of a param group without parameters",
                where=f"{label}, group {index}",
                todo='save with optimizer_layout="nested", or drop the empty group',
            )
        for fqn in group["params"]:
            for key, value in group.items():
                if key != "params":
                    yield (label, f"param_groups.{fqn}.{key}"), value


def _require_keys(where: str, group: Mapping[Any, Any], *, is_flattened: bool) -> None:
    """A file keeps keys as text, and in the flattened layout behind a parameter's name and a dot."""
    for key in group:
        if not isinstance(key, str) or (is_flattened and "." in key):
            raise OptimizerRefused(
                "this key of a param group could not be read back from a checkpoint",
                where=where,
                expected="a string without dots" if is_flattened else "a string",
                found=repr(key),
                todo='name it otherwise; optimizer_layout="nested" has a place for dots',
            )


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
        The groups, with renamed `params`, or with the numbers that stand for names there; in the flattened layout in
        the saved order if that is known, else in the live one, and without groups that have no parameters.

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
        # Numbers are positions in an optimizer's lists, whatever the parameters here are called.
        is_named = not any(isinstance(name, int) for name in names)
        named.append({**group, "params": rename(list(map(str, names))) if is_named else list(names)})
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
