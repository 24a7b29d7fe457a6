"""What ranks agree on before a save: one set of leaves, absence by name, and plain parts once or once per rank.

Owns the key of every leaf and the slots of parts that differ by rank, for writing them and for finding them again.
Must not know files or storage.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch.optim import Optimizer

from orlop.dcp.layout import describe_layout, local_box
from orlop.errors import CheckpointMismatch
from orlop.ranks import Ranks
from orlop.state.containers import leaves_of
from orlop.state.extra import is_extra_state
from orlop.state.groups import group_leaves
from orlop.state.initial import initial_state
from orlop.state.parts import LocalParts
from orlop.state.plain import digest
from orlop.state.shared_groups import require_equal_values, shared_values, union_groups
from orlop.state.uneven import (
    Holding,
    Told,
    check_replicas,
    find_torn,
    find_uneven,
    lacks_writer,
    merge_keys,
    record_uneven,
    require_equal_replicas,
)
from orlop.store.manifest import StateKeys, UnevenState

__all__ = [
    "Collected",
    "Layout",
    "PartKind",
    "SaveOptions",
    "agree",
    "part_slots",
    "require_apart",
]

Layout = Literal["nested", "flattened"]
PartKind = Literal["replicated", "per_rank"]
_SLOT = re.compile(r"\.rank_\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How a save was asked for; see `save_checkpoint`."""

    key_prefix: str = ""
    layout: Layout = "nested"
    materialize_absent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What all ranks save together.

    Attributes:
        leaves: This rank's leaves, by key; live tensors and plain data.
        paths: The nested path of each key.
        absent: For each optimizer the FQNs that have no state on any rank.
        state_keys: For each optimizer the keys of state that the others have on some rank.
        uneven: For each optimizer the parameters whose state differs by rank.
        left_out: The FQNs of the model that are not saved.
        aliases: Keys of tied entries, each with the key that its bytes are saved under; all ranks'.
        kinds: For each plain part whether it is one for all ranks.
        torn: Extra state that ranks have otherwise: for each key the ranks, those of one content together.
        group_firsts: In the flattened layout, for each optimizer the first FQN of each group.
        group_keys: For each optimizer the hyperparameters that all of its groups have.
    """

    leaves: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    absent: dict[str, list[str]] = field(default_factory=dict)
    state_keys: dict[str, StateKeys] = field(default_factory=dict)
    uneven: dict[str, dict[str, UnevenState]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, PartKind] = field(default_factory=dict)
    torn: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    group_firsts: dict[str, list[str]] = field(default_factory=dict)
    group_keys: dict[str, list[str]] = field(default_factory=dict)

    def add(self, path: tuple[Any, ...], value: Any) -> None:
        """Add one leaf under the key that torch gives its path."""
        key = ".".join(map(str, path))
        if key in self.leaves:
            raise CheckpointMismatch("two leaves have one key", where=key)
        self.leaves[key], self.paths[key] = value, path


def agree(
    local: LocalParts,
    ranks: Ranks,
    options: SaveOptions,
    optimizers: Mapping[str, Optimizer],
) -> Collected:
    """What ranks save together: one set of leaves, absence by name, plain parts once or per rank. Collective.

    Args:
        local: This rank's parts.
        ranks: Who agrees.
        options: How the save was asked for.
        optimizers: This rank's optimizers, for the initial state of parameters without any.

    Raises:
        CheckpointMismatch: Ranks have different param groups, different state for one part of a parameter, or two
            leaves have one key.
    """
    with ranks.together("describe the parts"):
        digests = {name: digest(data) for name, data in local.data.items()}
        mine = _tell(local)
    everyones_data = ranks.gather(digests)
    # Ranks nearly always agree; only where they don't do the lists of names travel.
    everyone = [mine] if ranks.equal(digest(mine.plain())) else ranks.gather(mine)
    places = find_uneven(everyone)
    with ranks.together("look at what differs by rank"):
        holding = _hold(local, places)
    holdings = ranks.gather(holding) if places else []
    with ranks.together("lay out the leaves"):
        require_apart([*local.groups, *local.data])
        names = union_groups([told.names for told in everyone])
        require_equal_values([told.values for told in everyone])
        require_equal_replicas(everyone)
        check_replicas(places, everyone, holdings)
        collected = _describe(everyone, record_uneven(places, everyone, holdings), options.key_prefix)
        for path, value in local.tensors.items():
            # Ranks that have other extra state may have other leaves of it: then one rank's is saved whole.
            is_nested = is_extra_state(path[1]) and options.key_prefix + ".".join(path) not in collected.torn
            for below, leaf in (leaves_of(value) if is_nested else {(): value}).items():
                collected.add((*_state_path(path, options), *below), leaf)
        for place in places:
            if lacks_writer(place, ranks.rank, everyone, holdings):
                _add_initial(collected, local, place, options, optimizers, whole=False)
        if options.materialize_absent:
            for label, fqns in local.absent.items():
                nowhere = frozenset(collected.absent[label])
                for fqn in (fqn for fqn in fqns if fqn in nowhere):
                    _add_initial(collected, local, (label, fqn), options, optimizers, whole=True)
        _add_groups(collected, local, names, options)
        for name, data in local.data.items():
            alike = all(other.get(name) == digests[name] for other in everyones_data)
            one = alike and name not in local.per_rank
            collected.kinds[name] = "replicated" if one else "per_rank"
            slot = () if one else (f"rank_{ranks.rank}",)
            collected.add((options.key_prefix + name, *slot), data)
    return collected


def require_apart(names: Sequence[str]) -> None:
    """Refuse a part or optimizer whose keys could not be told from another one's, or the model's.

    Raises:
        CheckpointMismatch: Names both.
    """
    for name in names:
        for other in ("model", *names):
            if name.startswith(f"{other}."):
                raise CheckpointMismatch(
                    "the keys of one part of a checkpoint would begin as those of another do",
                    where=name,
                    expected=f"a name that does not begin with {other + '.'!r}",
                    found=repr(name),
                    todo="name it without that dot",
                )


def _tell(local: LocalParts) -> Told:
    return Told(
        names={label: [list(group["params"]) for group in groups] for label, groups in local.groups.items()},
        values={label: list(map(shared_values, groups)) for label, groups in local.groups.items()},
        stepped=local.stepped,
        state_keys=local.state_keys,
        absent=local.absent,
        aliases=local.aliases,
        left_out=local.left_out,
        replicas=local.replicas,
        extra=local.extra,
    )


def _describe(
    everyone: Sequence[Told], uneven: dict[str, dict[str, UnevenState]], key_prefix: str
) -> Collected:
    """What ranks know together, before any leaf."""
    stepped = {(label, fqn) for told in everyone for label, fqns in told.stepped.items() for fqn in fqns}
    absent: dict[str, dict[str, None]] = {}
    for told in everyone:
        for label, fqns in told.absent.items():
            nowhere = (fqn for fqn in fqns if (label, fqn) not in stepped)
            absent.setdefault(label, {}).update(dict.fromkeys(nowhere))
    aliases = {alias: fqn for told in everyone for alias, fqn in told.aliases.items()}
    return Collected(
        absent={label: list(fqns) for label, fqns in absent.items()},
        state_keys=merge_keys(everyone),
        uneven=uneven,
        left_out=list(dict.fromkeys(fqn for told in everyone for fqn in told.left_out)),
        torn={f"{key_prefix}model.{fqn}": ranks for fqn, ranks in find_torn(everyone).items()},
        aliases={f"{key_prefix}model.{alias}": f"{key_prefix}model.{fqn}" for alias, fqn in aliases.items()},
    )


def _hold(local: LocalParts, places: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Holding]:
    holding: dict[tuple[str, str], Holding] = {}
    for label, fqn in places:
        if fqn in local.stepped.get(label, {}) or fqn in local.absent.get(label, []):
            param = local.params[fqn]
            holding[label, fqn] = Holding(box=local_box(fqn, param), layout=describe_layout(param))
    return holding


def _state_path(path: tuple[Any, ...], options: SaveOptions) -> tuple[Any, ...]:
    """Torch's flattened layout has one level below the optimizer; the key is the same in both."""
    first, *rest = path
    if options.layout == "flattened" and rest[0] == "state":
        rest = [".".join(map(str, rest))]
    return (options.key_prefix + first, *rest)


def _add_initial(
    collected: Collected,
    local: LocalParts,
    place: tuple[str, str],
    options: SaveOptions,
    optimizers: Mapping[str, Optimizer],
    *,
    whole: bool,
) -> None:
    """Add the state that the class starts from: all of it, or only what is spread over ranks like the parameter."""
    label, fqn = place
    param = local.params[fqn]
    state = initial_state(optimizers[label], param)
    if whole and (not state.is_exact or not param.requires_grad):
        # Zeros would not be what a first step starts from; and torch's own getter expects no state of frozen ones.
        return
    values = {**state.elementwise, **state.others} if whole else state.elementwise
    for key, value in values.items():
        collected.add(_state_path((label, "state", fqn, key), options), value)


def _add_groups(
    collected: Collected, local: LocalParts, names: Mapping[str, list[list[str]]], options: SaveOptions
) -> None:
    for label, groups in local.groups.items():
        named = [{**group, "params": fqns} for group, fqns in zip(groups, names[label])]
        is_flattened = options.layout == "flattened"
        if is_flattened:
            collected.group_firsts[label] = [group["params"][0] for group in named if group["params"]]
        for path, value in group_leaves(options.key_prefix + label, named, is_flattened=is_flattened):
            collected.add(path, value)
        common = set.intersection(*(set(group) for group in groups)) if groups else set()
        collected.group_keys[label] = sorted(common - {"params"})


def part_slots(name: str, stored: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A part's keys: its slots for each rank, else all keys that it has, in order; the other of the two is empty."""
    keys = dict.fromkeys(stored)
    if name in keys:
        return (), (name,)
    nested = tuple(key for key in keys if key.startswith(f"{name}."))
    slots = tuple(key for key in nested if _SLOT.fullmatch(key[len(name) :]))
    return (slots, ()) if slots and len(slots) == len(nested) else ((), nested)
