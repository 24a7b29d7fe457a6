"""One optimizer's state in a load: what each parameter can take, what it takes, and who starts afresh.

Owns that for tensors and numbers of the state; groups and the optimizer's class are not its own. Must not know files or
other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from orlop import compat
from orlop.dcp.layout import describe_layout, local_box
from orlop.ranks import Ranks
from orlop.state.absence import (
    StateVerdict,
    Stored,
    Wanted,
    WantedState,
    check_state,
    reset_if_allowed,
    state_index,
)
from orlop.state.foresight import Foresight
from orlop.state.names import ParameterNames
from orlop.state.plain import placed
from orlop.state.policy import LoadPolicy
from orlop.state.report import Finding
from orlop.state.slots import fit_slots
from orlop.state.stock import OptimizerState, StockState
from orlop.state.uneven import Holding, Scalars, decide_uneven
from orlop.store.manifest import StateKeys, UnevenState

__all__ = ["Recorded", "StateLoad"]

_THERE = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What orlop's own record says of one optimizer's state.

    Attributes:
        is_known: Whether there is a record: what it does not call absent was there.
        is_same_class: Whether the class that the optimizer has here made the state.
        absent: The FQNs without state.
        keys: The keys of state that the others had; None where that is not known.
        uneven: The parameters whose state differed by rank.
        aliases: Tied names, each with the one that was saved.
    """

    is_known: bool = False
    is_same_class: bool = False
    absent: frozenset[str] = frozenset()
    keys: StateKeys | None = None
    uneven: Mapping[str, UnevenState] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class StateLoad:
    """What the state of one optimizer's parameters expects, then what it takes.

    Attributes:
        prefix: What every key of the state starts with.
        params: The optimizer's parameters, in order.
        into_live: Whether the live slots are filled; else new ones, for the optimizer's own `load_state_dict`.
        wanted: The state that each parameter can take.
        slots: The tensors that are filled, by parameter.
        index: The state keys that the checkpoint has, by name.
        present: The name in the checkpoint of each parameter that has state there.
        absent: The parameters that get a fresh state.
        copies: Slots that take what another one was filled with: two parameters that were tied when saved.
        scalars: The values that this rank's scalars had, where ranks differed.
    """

    prefix: str
    params: list[Tensor]
    names: ParameterNames
    door: OptimizerState
    stored: Mapping[str, Stored]
    recorded: Recorded
    ranks: Ranks
    policy: LoadPolicy
    into_live: bool
    wanted: dict[Tensor, WantedState] = field(default_factory=dict)
    slots: dict[Tensor, dict[str, Tensor]] = field(default_factory=dict)
    index: dict[str, set[str]] = field(default_factory=dict)
    present: dict[Tensor, str] = field(default_factory=dict)
    absent: list[Tensor] = field(default_factory=list)
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    scalars: dict[Tensor, Scalars] = field(default_factory=dict)

    def expect(self) -> None:
        """Look at what the checkpoint has."""
        index = state_index(self.stored, self.prefix)
        # Initial values that were stored for other readers are no state.
        self.index = {fqn: keys for fqn, keys in index.items() if fqn not in self.recorded.absent}

    def _prepare(self, param: Tensor, small: Mapping[str, Any], foresight: Foresight) -> None:
        """What the parameter can take of that."""
        names = self._stored_names(param)
        name = next((name for name in names if name in self.index), None)
        if name is None:
            # Making slots takes memory: not for what is absent, nor for frozen parameters.
            told = param.requires_grad and bool(self.door.slots(param) or foresight.then(param))
            self.wanted[param] = WantedState(names=names, tensors={}, is_stateful=told)
            return
        leaves = {key: f"{self.prefix}{name}.{key}" for key in sorted(self.index[name])}
        fitted = fit_slots(
            param,
            self.door,
            {key: self.stored[leaf] for key, leaf in leaves.items()},
            foresight,
            # Its own `load_state_dict` takes nothing that a host-resident class has no place for.
            is_vouched=self.recorded.is_same_class and (self.into_live or isinstance(self.door, StockState)),
            nothing=[key for key, leaf in leaves.items() if leaf in small and small[leaf] is None],
        )
        slots = fitted.tensors
        recorded = frozenset(self.recorded.keys[name] if self.recorded.keys is not None else ())
        self.wanted[param] = WantedState(
            names=names,
            tensors={k: Wanted.of(f"{self.prefix}{names[0]}.{k}", t) for k, t in slots.items()},
            numbers=fitted.numbers,
            optional=fitted.optional - recorded,
            recorded=recorded,
            reasons=lambda key: foresight.explain(param, key),
        )
        self.slots[param] = slots if self.into_live else {k: torch.empty_like(t) for k, t in slots.items()}

    def _stored_names(self, param: Tensor) -> tuple[str, ...]:
        """The names that the checkpoint may have the parameter's state under: its own, then what those were tied to."""
        names = self.names.fqns[param]
        aliases = self.recorded.aliases
        return (*names, *(aliases[name] for name in names if name in aliases and aliases[name] not in names))

    def unclaimed(self) -> frozenset[str]:
        """The names that have state in the checkpoint and are none of these parameters'."""
        claimed = {name for param in self.params for name in self._stored_names(param)}
        return frozenset(set(self.index) - claimed)

    def small_leaves(self) -> list[str]:
        """The keys of numbers, and of plain data where a tensor was expected."""
        leaves = (f"{self.prefix}{name}.{key}" for name, keys in self.index.items() for key in keys)
        return [leaf for leaf in leaves if self.stored[leaf].is_bytes]

    def start_afresh(self) -> None:
        """Take nothing: every parameter gets a fresh state."""
        self.absent = list(self.params)

    def decide(
        self, small: Mapping[str, Any], saved_names: set[str], foresight: Foresight
    ) -> tuple[list[Finding], dict[str, Tensor]]:
        """Findings, and the leaves to fill. Changes nothing live.

        Args:
            small: The leaves of `small_leaves`, read.
            saved_names: The parameters that were in the saved groups, by their live names.
            foresight: What the class makes, with the groups as the load leaves them.

        Raises:
            CheckpointMismatch: A rank's part of a tensor is not one box.
        """
        findings: list[Finding] = []
        fills: dict[str, Tensor] = {}
        # Some writers' word for no state at all.
        self.index = {
            name: keys
            for name, keys in self.index.items()
            if any(small.get(f"{self.prefix}{name}.{key}", _THERE) is not None for key in keys)
        }
        for param in self.params:
            self._prepare(param, small, foresight)
            wanted = self.wanted[param]
            decided = self._decide_param(param, wanted, small, saved_names)
            findings += decided.findings
            if decided.name is None:
                self.absent.append(param)
                continue
            self.present[param] = decided.name
            for key, slot in self._filled(param).items():
                first = fills.setdefault(f"{self.prefix}{decided.name}.{key}", slot)
                if first is not slot:
                    self.copies.append((slot, first))
        return findings, fills

    def _decide_param(
        self, param: Tensor, wanted: WantedState, small: Mapping[str, Any], saved_names: set[str]
    ) -> StateVerdict:
        name = next((name for name in wanted.names if name in self.recorded.uneven), None)
        if name is not None and name in self.index:
            return self._decide_uneven(name, param, wanted, small)
        was_there = wanted.names[0] in saved_names and self.recorded.absent.isdisjoint(wanted.names)
        is_lost = self.recorded.is_known and was_there
        return check_state(self.prefix, wanted, self.index, self.stored, small, self.policy, is_lost=is_lost)

    def _decide_uneven(
        self, name: str, param: Tensor, wanted: WantedState, small: Mapping[str, Any]
    ) -> StateVerdict:
        leaf = f"{self.prefix}{name}"
        held = Holding(box=local_box(name, param), layout=describe_layout(param))
        fate = decide_uneven(self.recorded.uneven[name], held, self.ranks, self.policy.merge_uneven)
        if fate.fault is not None:
            found = [Finding(verdict="uneven", leaf=leaf, detail=fate.fault)]
            return reset_if_allowed(name, self.prefix, found, self.policy)
        if fate.scalars is None:
            absent = Finding(verdict="absent", leaf=leaf, detail="on this rank, as when saved")
            return StateVerdict(name=None, findings=[absent])
        decided = check_state(self.prefix, wanted, self.index, self.stored, small, self.policy)
        self.scalars[param] = fate.scalars
        if fate.is_merged:
            detail = f"its ranks had different scalars; all have the largest now: {fate.scalars}"
            decided.findings.append(Finding(verdict="merged", leaf=leaf, detail=detail))
        return decided

    def _filled(self, param: Tensor) -> dict[str, Tensor]:
        keys = self.index[self.present[param]]
        return {key: slot for key, slot in self.slots[param].items() if key in keys}

    def complete(self, small: Mapping[str, Any]) -> dict[Tensor, dict[str, Any]]:
        """Finish the filled slots; returns the state of each parameter that has some, whole."""
        for slot, filled in self.copies:
            slot.copy_(filled)
        states: dict[Tensor, dict[str, Any]] = {}
        for param, name in self.present.items():
            own, slots = self.scalars.get(param, {}), self._filled(param)
            keys = self.wanted[param].numbers & self.index[name]
            numbers = {key: own.get(key, small[f"{self.prefix}{name}.{key}"]) for key in keys}
            for key in own.keys() & slots.keys():
                slots[key].fill_(own[key])
            device = compat.local_tensor(param).device
            states[param] = {**slots, **{key: placed(value, device) for key, value in numbers.items()}}
        return states
