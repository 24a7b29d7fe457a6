"""One optimizer's load: which state and groups it takes from a checkpoint, and putting them in place.

Owns the order: check every parameter's state, match the groups, then (only when all fits) install. Must not know
files or ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from orlop import compat
from orlop.state.absence import LoadPolicy, Stored, Wanted, WantedState, check_state, state_index
from orlop.state.groups import match_groups, plan_group, read_groups, write_group
from orlop.state.names import ParameterNames, group_names
from orlop.state.report import Finding, GroupDifference, Verdict
from orlop.state.stock import OptimizerState, keeps_state, state_of

__all__ = ["OptimizerLoad"]


@dataclass(slots=True, kw_only=True)
class OptimizerLoad:
    """What one optimizer expects, then what it takes.

    Attributes:
        label: Its name among the parts, with the key prefix.
        wanted: The state that each parameter can take.
        slots: The tensors that are filled, by parameter.
        index: The state keys that the checkpoint has, by name.
        group_names: The names in each live group, over all ranks.
        order: For each live group, the saved group's index; None while groups are not taken.
        values: What each live group takes.
        present: The name in the checkpoint of each parameter that has state there.
        absent: The parameters that get a fresh state.
        through: Whether it has load hooks of its own, so that its `load_state_dict` must run.
    """

    label: str
    optimizer: Optimizer
    names: ParameterNames
    door: OptimizerState
    stored: Mapping[str, Stored]
    load_states: bool
    load_args: bool
    policy: LoadPolicy
    wanted: dict[Tensor, WantedState] = field(default_factory=dict)
    slots: dict[Tensor, dict[str, Tensor]] = field(default_factory=dict)
    index: dict[str, set[str]] = field(default_factory=dict)
    group_names: list[list[str]] = field(default_factory=list)
    order: list[int] | None = None
    values: list[dict[str, Any]] = field(default_factory=list)
    present: dict[Tensor, str] = field(default_factory=dict)
    absent: list[Tensor] = field(default_factory=list)
    through: bool = False

    @classmethod
    def of(
        cls,
        label: str,
        optimizer: Optimizer,
        names: ParameterNames,
        stored: Mapping[str, Stored],
        *,
        load_states: bool,
        load_args: bool,
        policy: LoadPolicy,
    ) -> OptimizerLoad:
        """What `optimizer` expects; where the checkpoint has nothing under its label, it expects nothing."""
        known = any(key.startswith(f"{label}.") for key in stored)
        load = cls(
            label=label,
            optimizer=optimizer,
            names=names,
            door=state_of(optimizer),
            stored=stored,
            load_states=load_states and known,
            load_args=load_args and known,
            policy=policy,
            group_names=group_names(names, optimizer),
            through=bool(compat.load_pre_hooks(optimizer)),
        )
        load.door.synchronize()
        if load.load_states:
            load.index = state_index(stored, load.state_prefix)
            load._expect_state()
        return load

    @property
    def state_prefix(self) -> str:
        """What every key of its state starts with."""
        return f"{self.label}.state."

    @property
    def groups_prefix(self) -> str:
        """What every key of its groups starts with."""
        return f"{self.label}.param_groups."

    @property
    def params(self) -> list[Tensor]:
        """Its parameters, in order."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def _expect_state(self) -> None:
        for param in self.params:
            names = self.names.fqns[param]
            if not any(name in self.index for name in names):
                # Asking for slots makes room: not for what is absent, nor for frozen parameters.
                told = param.requires_grad and keeps_state(self.door, param)
                self.wanted[param] = WantedState(names=names, tensors={}, is_stateful=told)
                continue
            slots = self.door.slots(param)
            self.wanted[param] = WantedState(
                names=names,
                tensors={k: Wanted(shape=tuple(t.shape), dtype=t.dtype) for k, t in slots.items()},
                numbers=self.door.number_keys(param),
                is_stateful=bool(slots),
            )
            self.slots[param] = {k: torch.empty_like(t) for k, t in slots.items()} if self.through else slots

    def unclaimed(self) -> frozenset[str]:
        """The names that have state in the checkpoint and are none of these parameters'."""
        claimed = {name for wanted in self.wanted.values() for name in wanted.names}
        return frozenset(set(self.index) - claimed)

    def small_leaves(self) -> list[str]:
        """The keys to read before deciding: groups, numbers, and plain data where a tensor was expected."""
        keys = [key for key in self.stored if self.load_args and key.startswith(self.groups_prefix)]
        for name, state_keys in self.index.items():
            leaves = (f"{self.state_prefix}{name}.{key}" for key in state_keys)
            keys += [leaf for leaf in leaves if self.stored[leaf].is_bytes]
        return keys

    def decide(
        self, small: Mapping[str, Any], paths: Mapping[str, Sequence[Any]] | None
    ) -> tuple[list[Finding], list[GroupDifference], dict[str, Tensor]]:
        """Findings, changed hyperparameters and the leaves to fill. Changes nothing live.

        Raises:
            CheckpointMismatch: The groups do not match.
        """
        findings, fills = self._decide_state(small)
        differences: list[GroupDifference] = []
        if self.load_args:
            saved = read_groups(self.groups_prefix, small, paths, self.group_names)
            if saved:
                differences = self._decide_groups(saved)
            else:
                verdict: Verdict = "kept" if self.policy.allow_missing else "missing"
                findings.append(Finding(verdict=verdict, leaf=self.groups_prefix.rstrip(".")))
        return findings, differences, fills

    def _decide_state(self, small: Mapping[str, Any]) -> tuple[list[Finding], dict[str, Tensor]]:
        if not self.load_states:
            self.absent = self.params
            known = any(key.startswith(f"{self.label}.") for key in self.stored)
            detail = "load_states=False" if known else "the checkpoint holds weights only"
            verdict: Verdict = "ignored" if known else "absent"
            return [Finding(verdict=verdict, leaf=self.state_prefix.rstrip("."), detail=detail)], {}
        findings: list[Finding] = []
        fills: dict[str, Tensor] = {}
        for param, wanted in self.wanted.items():
            decided = check_state(self.state_prefix, wanted, self.index, self.stored, small, self.policy)
            findings += decided.findings
            if decided.name is None:
                self.absent.append(param)
                continue
            self.present[param] = decided.name
            for key, slot in self.slots[param].items():
                fills[f"{self.state_prefix}{decided.name}.{key}"] = slot
        if self.through:
            findings.append(
                Finding(verdict="through", leaf=self.label, detail="it has load_state_dict hooks")
            )
        return findings, fills

    def _decide_groups(self, saved: list[dict[str, Any]]) -> list[GroupDifference]:
        saved_names = [[self.names.canonical(name) for name in group["params"]] for group in saved]
        self.order = match_groups(self.group_names, saved_names, self.label)
        differences: list[GroupDifference] = []
        for index, (live, partner) in enumerate(zip(self.optimizer.param_groups, self.order)):
            values, changed = plan_group(f"{self.label}[{index}]", live, saved[partner])
            self.values.append(values)
            differences += changed
        return differences

    def install(self, small: Mapping[str, Any]) -> None:
        """Make the filled slots the optimizer's state, and write the groups' values into the live dicts."""
        numbers = {
            param: {
                key: small[f"{self.state_prefix}{name}.{key}"]
                for key in self.wanted[param].numbers & self.index[name]
            }
            for param, name in self.present.items()
        }
        if self.through and self.load_states:
            self._install_through(numbers)
            return
        self.door.restored(numbers, self.absent)
        for group, values in zip(self.optimizer.param_groups, self.values):
            write_group(group, values)
        for hook in compat.load_post_hooks(self.optimizer):
            hook(self.optimizer)

    def _install_through(self, numbers: Mapping[Tensor, Mapping[str, Any]]) -> None:
        ids = {param: index for index, param in enumerate(self.params)}
        groups = self.optimizer.param_groups
        values = self.values or [{} for _ in groups]
        self.optimizer.load_state_dict(
            {
                "state": {ids[param]: {**self.slots[param], **numbers[param]} for param in self.present},
                "param_groups": [
                    {**group, **new, "params": [ids[param] for param in group["params"]]}
                    for group, new in zip(groups, values)
                ],
            }
        )
