"""What the live objects expect of a checkpoint, what they will take of it, and taking it.

Owns one load from `expect` over `decide` to `install`: the first two change nothing live. Must not know files, nor
talk to other ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from orlop import compat
from orlop.state.absence import LoadPolicy, Stored, Wanted, check_tensor, check_unclaimed, state_index
from orlop.state.agreement import find_part
from orlop.state.groups import path_below, permute_scheduler
from orlop.state.model import ModelView, install, view_model
from orlop.state.names import require_all_named
from orlop.state.optimizer import OptimizerLoad
from orlop.state.parts import Live, plain_parts
from orlop.state.report import Finding, GroupDifference, faults

__all__ = ["Claims", "Expectation", "Options", "expect", "merge_claims"]

_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a load was asked for; see `resume_checkpoint`."""

    load_states: bool
    load_args: bool
    policy: LoadPolicy
    key_prefix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """Under one prefix: the checkpoint's names that are not taken, and some of the names that are expected here."""

    unclaimed: frozenset[str]
    expected: tuple[str, ...]


def merge_claims(everyone: Iterable[Mapping[str, Claims]]) -> dict[str, Claims]:
    """All ranks' claims as one: a name is unclaimed when no rank that looks under its prefix takes it."""
    merged: dict[str, Claims] = {}
    for theirs in everyone:
        for what, claim in theirs.items():
            known = merged.get(what, claim)
            merged[what] = Claims(
                unclaimed=known.unclaimed & claim.unclaimed,
                expected=tuple(sorted({*known.expected, *claim.expected})[:_SHOWN]),
            )
    return merged


@dataclass(slots=True, kw_only=True)
class Expectation:
    """One load, seen from the live objects of this rank.

    Attributes:
        fills: The tensors to fill, by key; final after `decide`.
        findings: What was found, leaf by leaf; final after `decide`.
        differences: The hyperparameters that will change; final after `decide`.
        unclaimed: The checkpoint's names that this rank does not take, by prefix; final after `decide`.
    """

    options: Options
    stored: Mapping[str, Stored]
    view: ModelView
    targets: dict[str, Tensor]
    optimizers: dict[str, OptimizerLoad]
    part_keys: dict[str, tuple[str, ...]]
    paths: Mapping[str, Sequence[Any]] | None = None
    fills: dict[str, Tensor] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    differences: list[GroupDifference] = field(default_factory=list)
    unclaimed: dict[str, frozenset[str]] = field(default_factory=dict)

    @property
    def model_prefix(self) -> str:
        """What every key of the model starts with."""
        return f"{self.options.key_prefix}model."

    def faults(self) -> list[Finding]:
        """The findings that this load can't go on with."""
        return faults(self.findings)

    def small_leaves(self) -> dict[str, Any]:
        """The leaves to read before deciding: plain data, and the groups' tensors; none of them live."""
        keys = [key for load in self.optimizers.values() for key in load.small_leaves()]
        keys += [key for found in self.part_keys.values() for key in found]
        keys += [key for key in self.stored if self._is_model_data(key)]
        return {key: _scratch(self.stored[key]) for key in keys}

    def _is_model_data(self, key: str) -> bool:
        fqn = key.removeprefix(self.model_prefix)
        wanted = fqn in self.view.entries or self.view.through is not None
        return key.startswith(self.model_prefix) and self.stored[key].is_bytes and wanted

    def decide(self, small: Mapping[str, Any], paths: Mapping[str, Sequence[Any]] | None) -> None:
        """Classify every leaf and choose what to fill. Changes nothing live.

        Args:
            small: The leaves of `small_leaves`, read.
            paths: The checkpoint's nested paths, where it has them.

        Raises:
            CheckpointMismatch: Param groups do not match.
        """
        self.paths = paths
        self._decide_model()
        for load in self.optimizers.values():
            findings, differences, fills = load.decide(small, paths)
            self.findings += findings
            self.differences += differences
            self.fills.update({key: tensor for key, tensor in fills.items() if key in self.stored})
            self.unclaimed[load.state_prefix] = load.unclaimed()
        for name, keys in self.part_keys.items():
            self.findings.append(self._decide_part(name, keys))

    def _decide_model(self) -> None:
        mine = {
            key.removeprefix(self.model_prefix) for key in self.stored if key.startswith(self.model_prefix)
        }
        frozen_saved = any(self.view.is_frozen(fqn) for fqn in mine)
        for fqn in self.view.entries:
            if fqn in mine:
                self._decide_model_leaf(fqn)
            elif not mine.intersection(self._aliases(fqn)) and self.view.through is None:
                # A save with include_frozen=False has none of the frozen ones; some of them missing is a fault.
                leave = self.options.policy.allow_missing or (self.view.is_frozen(fqn) and not frozen_saved)
                self._find("kept" if leave else "missing", fqn)
        strangers = mine - set(self.view.entries)
        if self.view.through is not None:
            detail = f"by load_state_dict: {self.view.through}"
            self.findings.append(
                Finding(verdict="through", leaf=self.model_prefix.rstrip("."), detail=detail)
            )
            self._fill_strangers(strangers)
            strangers = set()
        self.unclaimed[self.model_prefix] = frozenset(strangers)

    def _decide_model_leaf(self, fqn: str) -> None:
        key = f"{self.model_prefix}{fqn}"
        target = self.targets.get(fqn)
        if target is None:
            self._find("loaded" if self.stored[key].is_bytes else "kind", fqn)
            return
        wanted = Wanted(shape=tuple(target.shape), dtype=target.dtype)
        self.findings.append(check_tensor(key, wanted, self.stored[key], self.options.policy))
        self.fills[key] = target

    def _find(self, verdict: Any, fqn: str) -> None:
        self.findings.append(Finding(verdict=verdict, leaf=f"{self.model_prefix}{fqn}"))

    def _aliases(self, fqn: str) -> tuple[str, ...]:
        tensor = self.view.names.tensors.get(fqn)
        return () if tensor is None else self.view.names.fqns[tensor]

    def _fill_strangers(self, strangers: set[str]) -> None:
        # The model's own hooks may know these names from an older version of it.
        for fqn in sorted(strangers):
            key = f"{self.model_prefix}{fqn}"
            if not self.stored[key].is_bytes:
                self.targets[fqn] = self.fills[key] = _scratch(self.stored[key])

    def _decide_part(self, name: str, keys: tuple[str, ...]) -> Finding:
        leaf = f"{self.options.key_prefix}{name}"
        if keys:
            return Finding(verdict="loaded", leaf=leaf)
        weights_only = all(key.startswith(self.model_prefix) for key in self.stored)
        leave = weights_only or self.options.policy.allow_missing
        return Finding(verdict="kept" if leave else "missing", leaf=leaf)

    def claims(self) -> dict[str, Claims]:
        """What this rank leaves and expects, by prefix; for `merge_claims`."""
        expected = {
            load.state_prefix: sorted(name for wanted in load.wanted.values() for name in wanted.names)
            for load in self.optimizers.values()
        }
        return {
            what: Claims(unclaimed=names, expected=tuple(expected.get(what, [])[:_SHOWN]))
            for what, names in self.unclaimed.items()
        }

    def check_unclaimed(self, claims: Mapping[str, Claims]) -> list[Finding]:
        """Findings for the checkpoint's names that no rank takes: from all ranks' claims, the same on every rank."""
        findings: list[Finding] = []
        for what, claim in claims.items():
            total = len(state_index(self.stored, what)) if claim.unclaimed else 0
            findings += check_unclaimed(what, claim.unclaimed, total, claim.expected, self.options.policy)
        return findings

    def install(self, live: Live, small: Mapping[str, Any]) -> None:
        """Hand over what was loaded: model, optimizers, scheduler, other parts, RNG last."""
        loaded = {fqn: self.fills.get(f"{self.model_prefix}{fqn}") for fqn in self.targets}
        plain_data = {
            key.removeprefix(self.model_prefix): value
            for key, value in small.items()
            if self._is_model_data(key)
        }
        values = {fqn: value for fqn, value in loaded.items() if value is not None} | plain_data
        install(live.model, self.view, values, strict=not self.options.policy.allow_missing)
        for load in self.optimizers.values():
            load.install(small)
        for name, part in plain_parts(live).items():
            if keys := self.part_keys.get(name):
                state = self._part_state(name, keys, small)
                part.load_state_dict(self._in_live_order(part, state) if name == "scheduler" else state)

    def _part_state(self, name: str, keys: tuple[str, ...], small: Mapping[str, Any]) -> Any:
        base = f"{self.options.key_prefix}{name}"
        if keys == (base,) or (len(keys) == 1 and keys[0].startswith(f"{base}.rank_")):
            return small[keys[0]]
        below = {key: ("part", *path_below(key, f"{base}.", self.paths)) for key in keys}
        return compat.unflatten_state_dict({key: small[key] for key in keys}, below)["part"]

    def _in_live_order(self, scheduler: Any, state: Any) -> Any:
        """A scheduler's lists follow the live groups; without `load_args` its learning rates stay the live ones."""
        steered = getattr(scheduler, "optimizer", None)
        load = next((load for load in self.optimizers.values() if load.optimizer is steered), None)
        if load is None:
            return state
        order = load.order if load.order is not None else list(range(len(load.optimizer.param_groups)))
        return permute_scheduler(state, order, None if load.load_args else scheduler.state_dict())


def _scratch(stored: Stored) -> Any:
    return None if stored.shape is None else torch.empty(stored.shape, dtype=stored.dtype)


def expect(live: Live, stored: Mapping[str, Stored], options: Options) -> Expectation:
    """Look at the live objects: what they can take of the checkpoint. Changes nothing.

    Raises:
        ParameterReplaced: An optimizer holds parameters that are not in the model.
        CheckpointMismatch: The model is on the meta device, or a part was saved by another number of ranks.
    """
    view = view_model(live.model)
    require_all_named(view.names, live.optimizers)
    optimizers = {
        label: OptimizerLoad.of(
            f"{options.key_prefix}{label}",
            optimizer,
            view.names,
            stored,
            load_states=options.load_states,
            load_args=options.load_args,
            policy=options.policy,
        )
        for label, optimizer in live.optimizers.items()
    }
    part_keys = {
        name: find_part(f"{options.key_prefix}{name}", stored, live.ranks)
        for name in plain_parts(live)
        if name not in options.policy.skip_parts
    }
    return Expectation(
        options=options,
        stored=stored,
        view=view,
        targets=view.targets(),
        optimizers=optimizers,
        part_keys=part_keys,
    )
