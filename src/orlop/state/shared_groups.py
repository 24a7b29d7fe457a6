"""Param groups over all ranks: one list of groups that every rank's are parts of.

Pure. Must not know files, nor talk to other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from orlop.errors import CheckpointMismatch
from orlop.state.group_values import LIVE_FLAGS, text_of
from orlop.state.plain import digest, plain
from orlop.wording import counted

__all__ = ["require_equal_values", "shared_values", "union_groups"]

_PER_RANK = LIVE_FLAGS | {"params", "param_names"}


def shared_values(group: Mapping[str, object]) -> dict[str, object]:
    """What of a group must be the same on all ranks, as plain data."""
    return {key: plain(value, key) for key, value in group.items() if key not in _PER_RANK}


def union_groups(everyone: Sequence[Mapping[str, list[list[str]]]]) -> dict[str, list[list[str]]]:
    """The parameter names of each group over all ranks (pipeline stages hold different ones), in rank order.

    Raises:
        CheckpointMismatch: Ranks have different numbers of groups, or one parameter in different ones.
    """
    union: dict[str, list[dict[str, None]]] = {}
    places: dict[tuple[str, str], tuple[int, int]] = {}
    for rank, groups_by_label in enumerate(everyone):
        for label, groups in groups_by_label.items():
            known = union.setdefault(label, [{} for _ in groups])
            if len(known) != len(groups):
                raise CheckpointMismatch(
                    "ranks have different numbers of param groups",
                    where=f"{label}, rank {rank}",
                    expected=counted(len(known), "group"),
                    found=f"{len(groups)}",
                )
            for index, names in enumerate(groups):
                known[index].update(dict.fromkeys(names))
                for name in names:
                    _require_one_place(
                        label, name, places.setdefault((label, name), (rank, index)), rank, index
                    )
    return {label: [list(names) for names in groups] for label, groups in union.items()}


def _require_one_place(label: str, name: str, first: tuple[int, int], rank: int, index: int) -> None:
    if first[1] != index:
        raise CheckpointMismatch(
            "ranks have a parameter in different param groups",
            where=f"{label}, {name}, rank {rank}",
            expected=f"group {first[1]}, as on rank {first[0]}",
            found=f"group {index}",
            todo="build the groups in the same order on all ranks: from lists, never by walking over a set",
        )


def require_equal_values(everyone: Sequence[Mapping[str, Sequence[Mapping[str, object]]]]) -> None:
    """Ranks have the same hyperparameters: a file holds one value for all of them.

    Args:
        everyone: For each rank and optimizer the `shared_values` of each group.

    Raises:
        CheckpointMismatch: Names the optimizer, the group, the value and the ranks.
    """
    first: dict[tuple[str, int, str], tuple[int, object]] = {}
    for rank, groups_by_label in enumerate(everyone):
        for label, groups in groups_by_label.items():
            for index, values in enumerate(groups):
                for key, value in values.items():
                    known_rank, known = first.setdefault((label, index, key), (rank, value))
                    # By content: two tensors, or two NaN, are not simply equal or not.
                    if known is not value and digest(known) != digest(value):
                        raise CheckpointMismatch(
                            "ranks have different hyperparameters: a file could keep only one",
                            where=f"{label}.param_groups.{index}.{key}, rank {rank}",
                            expected=f"{text_of(known)}, as on rank {known_rank}",
                            found=text_of(value),
                            todo="set hyperparameters alike on all ranks",
                        )
