"""Parameters whose optimizer state is not the same on all ranks that hold them: experts that got no token.

Owns who has what, who writes initial values so that a tensor is saved whole, and the record by which each rank later
gets its own back. Pure; must not know files, nor talk to other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from orlop.dcp.boxes import Box
from orlop.errors import CheckpointMismatch
from orlop.ranks import Ranks
from orlop.store.manifest import StateKeys, UnevenState
from orlop.wording import counted

__all__ = [
    "Fate",
    "decide_uneven",
    "Holding",
    "Scalars",
    "Told",
    "check_replicas",
    "find_torn",
    "find_uneven",
    "lacks_writer",
    "merge_keys",
    "record_uneven",
    "require_equal_replicas",
]

Scalars = dict[str, int | float]
_SHOWN = 4

Place = tuple[str, str]
"""An optimizer's name and a parameter's FQN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What one rank tells the others before a save.

    Attributes:
        names: For each optimizer the FQNs in each group.
        values: For each optimizer the hyperparameters of each group.
        stepped: For each optimizer the FQNs with state, each with the state's scalars.
        state_keys: For each optimizer the keys of that state.
        absent: For each optimizer the FQNs without state.
        aliases: Tied names, each with the name that is saved.
        left_out: FQNs of the model that are not saved.
        replicas: Digests of state that ranks must have alike, by key.
        extra: Digests of modules' extra state, by FQN.
    """

    names: dict[str, list[list[str]]] = field(default_factory=dict)
    values: dict[str, list[dict[str, object]]] = field(default_factory=dict)
    stepped: dict[str, dict[str, Scalars]] = field(default_factory=dict)
    state_keys: dict[str, StateKeys] = field(default_factory=dict)
    absent: dict[str, list[str]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    replicas: dict[str, str] = field(default_factory=dict)
    extra: dict[str, str] = field(default_factory=dict)

    def plain(self) -> list[object]:
        """As plain data, to be digested."""
        return [
            self.names,
            self.values,
            self.stepped,
            {label: keys.model_dump() for label, keys in self.state_keys.items()},
            self.absent,
            self.aliases,
            self.left_out,
            self.replicas,
            self.extra,
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One rank's part of a parameter: its box, and the layout of the whole as text."""

    box: Box
    layout: str


def find_uneven(everyone: Sequence[Told]) -> list[Place]:
    """The parameters of which some ranks have state and others none, or whose scalars differ; sorted."""
    seen: dict[Place, set[tuple[tuple[str, int | float], ...] | None]] = {}
    for told in everyone:
        for label, scalars_by_fqn in told.stepped.items():
            for fqn, scalars in scalars_by_fqn.items():
                seen.setdefault((label, fqn), set()).add(tuple(sorted(scalars.items())))
        for label, fqns in told.absent.items():
            for fqn in fqns:
                seen.setdefault((label, fqn), set()).add(None)
    return sorted(place for place, kinds in seen.items() if len(kinds) > 1)


def merge_keys(everyone: Sequence[Told]) -> dict[str, StateKeys]:
    """The keys of state that each parameter has on some rank, by optimizer name."""
    if len(everyone) == 1:
        return dict(everyone[0].state_keys)
    merged: dict[str, dict[str, set[str]]] = {}
    for told in everyone:
        for label, keys in told.state_keys.items():
            known = merged.setdefault(label, {})
            for fqn in told.stepped[label]:
                known.setdefault(fqn, set()).update(keys[fqn])
    return {label: StateKeys.of(keys) for label, keys in merged.items()}


def check_replicas(
    places: Sequence[Place], everyone: Sequence[Told], holdings: Sequence[Mapping[Place, Holding]]
) -> None:
    """Ranks that hold the same box have the same state, or none.

    Raises:
        CheckpointMismatch: Two ranks have different state for one box: a file could hold only one of them.
    """
    for label, fqn in places:
        first: dict[Box, tuple[int, Scalars]] = {}
        for rank, (told, held) in enumerate(zip(everyone, holdings)):
            scalars = told.stepped.get(label, {}).get(fqn)
            if scalars is None or (label, fqn) not in held:
                continue
            box = held[label, fqn].box
            known_rank, known = first.setdefault(box, (rank, scalars))
            if known != scalars and box.volume:
                raise CheckpointMismatch(
                    "ranks hold one part of a parameter with different optimizer state: a file could keep only one",
                    where=f"{label}.state.{fqn}",
                    expected=f"as on rank {known_rank}: {known}",
                    found=f"on rank {rank}: {scalars}",
                    todo="give parameters that belong to one rank alone a name of their own, or make them DTensors",
                )


def require_equal_replicas(everyone: Sequence[Told]) -> None:
    """Refuse state that DCP would take for the same on all ranks, and that is not.

    Raises:
        CheckpointMismatch: Names the leaf and the ranks.
    """
    first: dict[str, tuple[int, str]] = {}
    for rank, told in enumerate(everyone):
        for key, digest in told.replicas.items():
            known_rank, known = first.setdefault(key, (rank, digest))
            if known != digest:
                raise CheckpointMismatch(
                    "replica content differs: an optimizer keeps something of each rank's own (plain data, or plain "
                    "tensors for a sharded parameter), and a checkpoint would hold one rank's",
                    where=key,
                    expected=f"the same on all ranks, or a DTensor; as on rank {known_rank}",
                    found=f"other content on rank {rank}",
                    todo="use an optimizer whose state follows the parameter's placements (orlop.swap does for "
                    "elementwise classes)",
                )


def find_torn(everyone: Sequence[Told]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Extra state that ranks have otherwise: for each FQN the ranks, those of one content together."""
    found: dict[str, dict[str, list[int]]] = {}
    for rank, told in enumerate(everyone):
        for fqn, digest in told.extra.items():
            found.setdefault(fqn, {}).setdefault(digest, []).append(rank)
    return {fqn: tuple(map(tuple, kinds.values())) for fqn, kinds in found.items() if len(kinds) > 1}


def lacks_writer(
    place: Place, rank: int, everyone: Sequence[Told], holdings: Sequence[Mapping[Place, Holding]]
) -> bool:
    """Whether rank `rank` holds a part of the parameter for which no rank has state."""
    mine = holdings[rank].get(place)
    label, fqn = place
    if mine is None or not mine.box.volume:
        return False
    return not any(
        fqn in told.stepped.get(label, {}) and place in held and held[place].box == mine.box
        for told, held in zip(everyone, holdings)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What one rank does with such a parameter's state when it loads.

    Attributes:
        scalars: What its scalars become; None where the rank had no state.
        is_merged: They are not the rank's own, but the largest of all.
        fault: Why neither can be.
    """

    scalars: Scalars | None = None
    is_merged: bool = False
    fault: str | None = None


def decide_uneven(recorded: UnevenState, live: Holding, ranks: Ranks, merge: bool) -> Fate:
    """Each rank's own where ranks are cut as when it was saved; else a fault, or the largest scalars.

    Args:
        recorded: What the manifest says.
        live: This rank's part of the live parameter.
        ranks: Which rank this is, of how many.
        merge: Whether the policy allows the largest.
    """
    box = (live.box.offsets, live.box.sizes)
    if len(recorded.ranks) == ranks.world_size and recorded.boxes[ranks.rank] == box:
        return Fate(scalars=recorded.ranks[ranks.rank])
    if merge:
        largest: Scalars = {}
        for scalars in recorded.ranks:
            for key, value in (scalars or {}).items():
                largest[key] = max(value, largest.get(key, value))
        return Fate(scalars=largest, is_merged=True)
    each = "; ".join(
        f"rank {rank}: {'no state' if scalars is None else scalars}"
        for rank, scalars in enumerate(recorded.ranks[:_SHOWN])
    )
    more = "; …" if len(recorded.ranks) > _SHOWN else ""
    return Fate(
        fault=f"saved with a different one per rank ({each}{more}) on {recorded.layout or 'plain tensors'}, and it is "
        f"on {counted(ranks.world_size, 'rank')}, {live.layout or 'a plain tensor'} now"
    )


def record_uneven(
    places: Sequence[Place], everyone: Sequence[Told], holdings: Sequence[Mapping[Place, Holding]]
) -> dict[str, dict[str, UnevenState]]:
    """For the manifest: each rank's scalars, by optimizer name and FQN."""
    record: dict[str, dict[str, UnevenState]] = {}
    for label, fqn in places:
        layout = next(held[label, fqn].layout for held in holdings if (label, fqn) in held)
        mine = [held.get((label, fqn)) for held in holdings]
        record.setdefault(label, {})[fqn] = UnevenState(
            layout=layout,
            boxes=[None if held is None else (held.box.offsets, held.box.sizes) for held in mine],
            ranks=[told.stepped.get(label, {}).get(fqn) for told in everyone],
        )
    return record
