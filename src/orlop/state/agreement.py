"""What ranks agree on before a save: one set of leaves, absence by name, and plain parts once or once per rank.

Owns the key of every leaf and the slots of parts that differ by rank, for writing them and for finding them again.
Must not know files or storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from orlop import compat
from orlop.errors import CheckpointIncomplete, CheckpointMismatch
from orlop.ranks import Ranks
from orlop.state.parts import LocalParts
from orlop.state.plain import digest

__all__ = ["Collected", "PartKind", "agree", "find_part", "union_groups"]

PartKind = Literal["replicated", "per_rank"]
_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What all ranks save together.

    Attributes:
        leaves: This rank's leaves, by key; live tensors and plain data.
        paths: The nested path of each key.
        absent: For each optimizer the FQNs that never stepped on any rank.
        kinds: For each plain part whether it is one for all ranks.
    """

    leaves: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    absent: dict[str, list[str]] = field(default_factory=dict)
    kinds: dict[str, PartKind] = field(default_factory=dict)

    def add(self, path: tuple[Any, ...], value: Any) -> None:
        """Add one leaf under the key that torch gives its path."""
        key = ".".join(map(str, path))
        if key in self.leaves:
            raise CheckpointMismatch("two leaves have one key", where=key)
        self.leaves[key], self.paths[key] = value, path


def agree(local: LocalParts, ranks: Ranks, key_prefix: str) -> Collected:
    """What ranks save together: one set of leaves, absence by name, plain parts once or per rank. Collective.

    Raises:
        CheckpointIncomplete: A sharded parameter has state on some ranks only.
        CheckpointMismatch: Ranks have different numbers of param groups, or two leaves have one key.
    """
    digests = {name: digest(data) for name, data in local.data.items()}
    everyones_data = ranks.gather(digests)
    names = {label: [list(group["params"]) for group in groups] for label, groups in local.groups.items()}
    mine = (names, local.stepped, local.absent, local.sharded)
    # Ranks nearly always agree; only where they don't do the lists of names travel.
    same = ranks.equal(digest([names, local.stepped, local.absent]))
    everyone = [mine] if same else ranks.gather(mine)
    with ranks.together("lay out the leaves"):
        names = union_groups(each[0] for each in everyone)
        collected = Collected(absent=_union_absent([each[1:] for each in everyone]))
        for path, value in local.tensors.items():
            collected.add((key_prefix + path[0], *path[1:]), value)
        _add_groups(collected, local, names, key_prefix)
        for name, data in local.data.items():
            one = all(other.get(name) == digests[name] for other in everyones_data)
            collected.kinds[name] = "replicated" if one else "per_rank"
            slot = () if one else (f"rank_{ranks.rank}",)
            collected.add((key_prefix + name, *slot), data)
    return collected


def _add_groups(
    collected: Collected, local: LocalParts, names: Mapping[str, list[list[str]]], key_prefix: str
) -> None:
    for label, groups in local.groups.items():
        named = [{**group, "params": fqns} for group, fqns in zip(groups, names[label])]
        flat, paths = compat.flatten_state_dict({key_prefix + label: {"param_groups": named}})
        for key, value in flat.items():
            collected.add(paths[key], value)


def union_groups(everyone: Iterable[Mapping[str, list[list[str]]]]) -> dict[str, list[list[str]]]:
    """The parameter names of each group over all ranks (pipeline stages hold different ones), in rank order.

    Raises:
        CheckpointMismatch: Ranks have different numbers of groups.
    """
    union: dict[str, list[dict[str, None]]] = {}
    for rank, groups_by_label in enumerate(everyone):
        for label, groups in groups_by_label.items():
            known = union.setdefault(label, [{} for _ in groups])
            if len(known) != len(groups):
                raise CheckpointMismatch(
                    "ranks have different numbers of param groups",
                    where=f"{label}, rank {rank}",
                    expected=f"{len(known)} groups",
                    found=f"{len(groups)}",
                )
            for names, more in zip(known, groups):
                names.update(dict.fromkeys(more))
    return {label: [list(names) for names in groups] for label, groups in union.items()}


_Stepping = tuple[dict[str, list[str]], dict[str, list[str]], frozenset[str]]


def _union_absent(everyone: list[_Stepping]) -> dict[str, list[str]]:
    stepped = {
        (label, fqn) for with_state, _, _ in everyone for label in with_state for fqn in with_state[label]
    }
    union: dict[str, dict[str, None]] = {}
    for rank, (_, without, sharded) in enumerate(everyone):
        for label, fqns in without.items():
            torn = [fqn for fqn in fqns if fqn in sharded and (label, fqn) in stepped]
            if torn:
                raise CheckpointIncomplete(
                    f"{len(torn)} sharded parameters have state on some ranks only: no file could hold all of it",
                    where=f"{label}: rank {rank} lacks {', '.join(torn[:_SHOWN])}",
                    todo="step the optimizer on all ranks that hold a shard of the parameter",
                )
            union.setdefault(label, {}).update(dict.fromkeys(f for f in fqns if (label, f) not in stepped))
    return {label: list(fqns) for label, fqns in union.items()}


def find_part(name: str, stored: Iterable[str], ranks: Ranks) -> tuple[str, ...]:
    """The keys that hold a plain part for this rank: one leaf, or the leaves of a nested dict that plain DCP wrote.

    Args:
        name: The part's name, with the key prefix.
        stored: All keys of the checkpoint.
        ranks: Which slot is this rank's.

    Returns:
        The keys; none when the checkpoint does not have the part.

    Raises:
        CheckpointMismatch: The part is one per rank, of another number of ranks.
    """
    keys = set(stored)
    if name in keys:
        return (name,)
    nested = sorted(key for key in keys if key.startswith(f"{name}."))
    slots = [
        key for key in nested if key[len(name) + 1 :].removeprefix("rank_").isdigit() and ".rank_" in key
    ]
    if not slots or len(slots) != len(nested):
        return tuple(nested)
    if len(slots) != ranks.world_size:
        raise CheckpointMismatch(
            f"the part {name!r} was saved for each of {len(slots)} ranks, and there are {ranks.world_size} now; "
            "nothing was changed",
            where=name,
            expected=f"{ranks.world_size} slots",
            found=f"{len(slots)} slots",
            todo=f"skip it and start it afresh: LoadPolicy(skip_parts=frozenset({{{name!r}}}))",
        )
    return (f"{name}.rank_{ranks.rank}",)
