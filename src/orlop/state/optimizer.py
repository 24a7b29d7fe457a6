"""One optimizer's load: which state and groups it takes from a checkpoint, and putting them in place.

Owns the order: check every parameter's state, match the groups, then (only when all fits) install. Must not know
files or ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from orlop import compat
from orlop.errors import CheckpointMismatch, StateNotReady
from orlop.ranks import Ranks
from orlop.state.absence import Stored
from orlop.state.classes import contradicting_class
from orlop.state.containers import like_live
from orlop.state.foresight import Foresight
from orlop.state.group_values import plan_group, write_group
from orlop.state.groups import read_groups
from orlop.state.hooked import load_through
from orlop.state.moments import Recorded, StateLoad
from orlop.state.names import ParameterNames, group_names
from orlop.state.pairing import pair_groups
from orlop.state.policy import LoadPolicy, Options
from orlop.state.report import Finding, GroupDifference, Verdict
from orlop.state.schedule import GroupOrder, find_order, rates_in_place
from orlop.state.stock import class_name, state_of
from orlop.store.manifest import Manifest

__all__ = ["OptimizerLoad"]


def _finding(verdict: Verdict, error: CheckpointMismatch) -> Finding:
    detail = f"{error.what}: expected {error.expected}, found {error.found}"
    return Finding(verdict=verdict, leaf=error.where or "", detail=detail)


def _recorded(name: str, optimizer: Optimizer, manifest: Manifest | None) -> Recorded:
    if manifest is None:
        return Recorded()
    return Recorded(
        is_known=True,
        is_same_class=manifest.optimizer_classes.get(name) == class_name(optimizer),
        absent=frozenset(manifest.absent.get(name, [])),
        keys=manifest.state_keys.get(name),
        uneven=manifest.uneven.get(name, {}),
        aliases=manifest.aliases,
    )


@dataclass(slots=True, kw_only=True)
class OptimizerLoad:
    """What one optimizer expects, then what it takes.

    Attributes:
        name: Its name among the parts.
        label: The same, with the key prefix.
        is_known: Whether the checkpoint has anything of it.
        manifest: What orlop recorded at the save; None for a checkpoint from elsewhere.
        state: The state of its parameters.
        group_names: The names in each live group, over all ranks.
        saved: The saved groups, with live names.
        order: For each live group, the saved group's index; None for one that keeps its values.
        values: What each live group takes.
        through: Whether it has load hooks of its own, so that its `load_state_dict` must run.
    """

    name: str
    label: str
    is_known: bool
    manifest: Manifest | None
    optimizer: Optimizer
    names: ParameterNames
    stored: Mapping[str, Stored]
    state: StateLoad
    load_states: bool
    load_args: bool
    policy: LoadPolicy
    group_names: list[list[str]] = field(default_factory=list)
    saved: list[dict[str, Any]] = field(default_factory=list)
    order: tuple[int | None, ...] | None = None
    values: list[dict[str, Any]] = field(default_factory=list)
    through: bool = False

    @classmethod
    def of(
        cls,
        name: str,
        optimizer: Optimizer,
        names: ParameterNames,
        stored: Mapping[str, Stored],
        *,
        manifest: Manifest | None,
        ranks: Ranks,
        options: Options,
    ) -> OptimizerLoad:
        """What `optimizer` expects; where the checkpoint has nothing under its label, it expects nothing."""
        label = f"{options.key_prefix}{name}"
        through = bool(compat.load_pre_hooks(optimizer))
        door = state_of(optimizer)
        with contextlib.suppress(StateNotReady):  # a load is what makes it ready again
            door.synchronize()
        state = StateLoad(
            prefix=f"{label}.state.",
            params=[param for group in optimizer.param_groups for param in group["params"]],
            names=names,
            door=door,
            stored=stored,
            recorded=_recorded(name, optimizer, manifest),
            ranks=ranks,
            policy=options.policy,
            into_live=not through,
        )
        load = cls(
            name=name,
            label=label,
            is_known=any(key.startswith(f"{label}.") for key in stored),
            manifest=manifest,
            optimizer=optimizer,
            names=names,
            stored=stored,
            state=state,
            load_states=options.load_states,
            load_args=options.load_args,
            policy=options.policy,
            group_names=group_names(names, optimizer),
            through=through,
        )
        if load.load_states and load.is_known and load._other_class() is None:
            state.expect()
        return load

    def _other_class(self) -> str | None:
        """The name of the class that wrote the state, where it is not this one's."""
        saved = self.manifest.optimizer_classes.get(self.name) if self.manifest is not None else None
        differs = saved is not None and saved != class_name(self.optimizer)
        return saved if differs and not self.policy.allow_other_class else None

    @property
    def groups_prefix(self) -> str:
        """What every key of its groups starts with."""
        return f"{self.label}.param_groups."

    def small_leaves(self) -> list[str]:
        """The keys to read before deciding: groups, numbers, and plain data where a tensor was expected."""
        return [*(self.group_leaves() if self.load_args else []), *self.state.small_leaves()]

    def group_leaves(self) -> list[str]:
        """The keys of its groups."""
        whole = self.groups_leaf  # all of them in one leaf, as torch wrote them up to 2.3
        return [key for key in self.stored if key == whole or key.startswith(self.groups_prefix)]

    def decide(
        self, small: Mapping[str, Any], paths: Mapping[str, Sequence[Any]] | None, *, is_weights_only: bool
    ) -> tuple[list[Finding], list[GroupDifference], dict[str, Tensor]]:
        """Findings, hyperparameters that differ, and the leaves to fill. Changes nothing live."""
        wanted = self.load_states or self.load_args
        if wanted and (saved_class := self._other_class()) is not None:
            return [self._class_finding(saved_class)], [], {}
        if not self.is_known:
            return [self._not_there(is_weights_only)], [], {}
        findings = self._read_groups(small, paths)
        if wanted and (saved_class := self._contradicting_class()) is not None:
            return [self._class_finding(saved_class)], [], {}
        paired, differences = self._decide_groups()
        found, fills = self._decide_state(small)
        # State by position would be another parameter's, however the groups are taken.
        findings += [found for found in paired if self.load_args or found.verdict == "layout"]
        if self.load_args and not self.saved and not findings:
            verdict: Verdict = "kept" if self.policy.allow_missing else "missing"
            findings.append(Finding(verdict=verdict, leaf=self.groups_leaf))
        return [*found, *findings], differences, fills

    def _class_finding(self, saved_class: str) -> Finding:
        detail = f"saved by {saved_class}, and this run has {class_name(self.optimizer)}"
        return Finding(verdict="class", leaf=self.label, detail=detail)

    def _contradicting_class(self) -> str | None:
        """The class that the saved groups show, where nothing records it and it is not this one."""
        is_recorded = self.manifest is not None and self.name in self.manifest.optimizer_classes
        if is_recorded or self.policy.allow_other_class:
            return None
        telling = [group for group in self.saved if len(group) > 1]
        if not telling or not self.optimizer.param_groups:
            return None
        return contradicting_class(self.optimizer, self.optimizer.param_groups[0], telling[0])

    @property
    def groups_leaf(self) -> str:
        """What its groups are called as a whole."""
        return self.groups_prefix.rstrip(".")

    def _read_groups(
        self, small: Mapping[str, Any], paths: Mapping[str, Sequence[Any]] | None
    ) -> list[Finding]:
        firsts = self.manifest.group_firsts.get(self.name, []) if self.manifest is not None else []
        try:
            self.saved = read_groups(self.groups_prefix, small, paths, self.group_names, self._rename, firsts)
        except CheckpointMismatch as error:
            return [_finding("groups", error)] if self.load_args else []
        return self._lost_hyperparameters() if self.load_args else []

    def _lost_hyperparameters(self) -> list[Finding]:
        recorded = self.manifest.group_keys.get(self.name, []) if self.manifest is not None else []
        # Of a group that has nothing here, the flattened layout gives the names alone.
        return [
            Finding(
                verdict="lost",
                leaf=f"{self.groups_prefix}{index}.{key}",
                detail="it was there when it was saved",
            )
            for index, group in enumerate(self.saved)
            for key in recorded
            if len(group) > 1 and key not in group
        ]

    def _not_there(self, is_weights_only: bool) -> Finding:
        """The finding where the checkpoint has nothing of this optimizer: all state is fresh, or that is a fault."""
        self.state.start_afresh()
        leaf = self.state.prefix.rstrip(".")
        if self.manifest is not None and self.name in self.manifest.optimizer_classes:
            return Finding(
                verdict="lost", leaf=self.label, detail="the checkpoint's record says that it was saved"
            )
        if is_weights_only or not (self.load_states or self.load_args):
            return Finding(verdict="fresh", leaf=leaf, detail="the checkpoint holds weights only")
        verdict: Verdict = "kept" if self.policy.allow_missing else "missing"
        return Finding(verdict=verdict, leaf=self.label, detail="nothing of this optimizer is there")

    def _decide_state(self, small: Mapping[str, Any]) -> tuple[list[Finding], dict[str, Tensor]]:
        if not self.load_states:
            self.state.start_afresh()
            leaf = self.state.prefix.rstrip(".")
            return [Finding(verdict="ignored", leaf=leaf, detail="load_states=False")], {}
        saved_names = {name for group in self.saved for name in group["params"]}
        findings, fills = self.state.decide(small, saved_names, self._foresight())
        if self.through:
            detail = "it has load_state_dict hooks"
            findings.append(Finding(verdict="through", leaf=self.label, detail=detail))
        return findings, fills

    def _foresight(self) -> Foresight:
        saved = [{} if partner is None else self.saved[partner] for partner in self.order or ()]
        return Foresight(optimizer=self.optimizer, taken=self.values, saved=saved)

    def _rename(self, saved: Sequence[str]) -> list[str]:
        """A saved group's names as the live ones: tied names lead to the first one, and untied ones to both."""
        aliases = self.state.recorded.aliases
        live = {name for names in self.group_names for name in names}
        renamed = [self.names.canonical(name) for name in saved]
        grown = [alias for alias, first in aliases.items() if first in saved and alias in live]
        return list(dict.fromkeys([*renamed, *grown]))

    def _decide_groups(self) -> tuple[list[Finding], list[GroupDifference]]:
        if not self.saved:
            return [], []
        names = [group["params"] for group in self.saved]
        pairing = pair_groups(self.group_names, names, self.groups_leaf, self.policy)
        self.order = pairing.order
        findings = list(pairing.findings)
        differences: list[GroupDifference] = []
        added = compat.values_before_options(self.optimizer)
        for index, partner in enumerate(pairing.order or ()):
            live, label = self.optimizer.param_groups[index], f"{self.label}[{index}]"
            try:
                saved = self._saved_like(partner, live, label)
                values, changed = plan_group(label, live, saved, added, taken=self.load_args)
            except CheckpointMismatch as error:
                findings.append(_finding("kind", error))
                continue
            differences += changed
            self.values.append(values if self.load_args else {})
        return findings, differences

    def _saved_like(self, partner: int | None, live: Mapping[str, Any], label: str) -> Mapping[str, Any]:
        """A saved group, with the containers in it as they were: orlop's own files keep those, DCP's leave some out."""
        saved = {} if partner is None else self.saved[partner]
        is_whole = self.manifest is not None or self.groups_leaf in self.stored
        if partner is None or is_whole or not self.load_args:
            return saved
        found: Mapping[str, Any] = like_live(saved, live, label, keeps_missing=self.policy.allow_missing)
        return found

    def arrange_schedule(self, state: Any, live: Any) -> Any:
        """A scheduler's saved state for the live groups; without `load_args` its learning rates stay the live ones."""
        return GroupOrder(order=self._group_order(), keeps_rates=not self.load_args).arrange(state, live)

    def rates_in_place(self, state: Any, live: Any) -> tuple[float | None, ...]:
        """What the live groups' learning rates are where a saved schedule stands; see `schedule.rates_in_place`."""
        return rates_in_place(state, live, self._group_order())

    def _group_order(self) -> tuple[int | None, ...]:
        return self.order if self.order is not None else tuple(range(len(self.optimizer.param_groups)))

    def settle_order(self, scheduler: Any) -> Finding | None:
        """Find the order of saved groups by a scheduler's state, where the layout keeps none.

        Returns:
            A fault where it can't be told.
        """
        is_flattened = not any(key == self.groups_leaf for key in self.stored) and not any(
            key.startswith(f"{self.groups_prefix}0.params") for key in self.stored
        )
        has_record = self.manifest is not None and bool(self.manifest.group_firsts.get(self.name))
        if has_record or not is_flattened or self.order is None or len(self.saved) < 2:
            return None
        # Without values: names that no group here has.
        found = find_order(scheduler, [group for group in self.saved if len(group) > 1])
        if found is None:
            detail = (
                "the flattened layout keeps no order of groups, and the scheduler's rates fit more than one"
            )
            return Finding(verdict="groups", leaf=self.groups_leaf, detail=detail)
        self.order = tuple(None if index is None else found[index] for index in self.order)
        return None

    def install(self, small: Mapping[str, Any]) -> None:
        """Make what was loaded the optimizer's state, and write the groups' values into the live dicts."""
        states = self.state.complete(small)
        if self.through and self.load_states and self.is_known:
            load_through(self.optimizer, states, self.values or [{} for _ in self.optimizer.param_groups])
            return
        self.state.door.restored(states, self.state.absent)
        for group, values in zip(self.optimizer.param_groups, self.values):
            write_group(group, values)
        for hook in compat.load_post_hooks(self.optimizer):
            hook(self.optimizer)
