"""What the live objects expect of a checkpoint, what they will take of it, and taking it.

Owns one load from `expect` over `decide` to `install`: the first two change nothing live. Must not know files, nor
talk to other ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from orlop.state.absence import Stored, state_index
from orlop.state.matching import check_unclaimed, nearest_prefix
from orlop.state.model import view_model
from orlop.state.names import require_all_named
from orlop.state.optimizer import OptimizerLoad
from orlop.state.own_load import OwnModelLoad
from orlop.state.part_load import PartsLoad
from orlop.state.parts import Live, plain_parts
from orlop.state.policy import Options
from orlop.state.report import Finding, GroupDifference, faults
from orlop.state.weights import ModelLoad, scratch
from orlop.store.manifest import Manifest

__all__ = ["Claims", "Expectation", "Options", "expect", "merge_claims"]

_log = logging.getLogger("orlop")
_SHOWN = 5
# Under which names claims list whole parts of the checkpoint, and what the policy skips; no prefix is called so.
_PARTS, _SKIPPED = "parts", "skip_parts"


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
        manifest: What orlop recorded at the save; None for a checkpoint from elsewhere.
        scheduled: The optimizer that the scheduler drives, by name.
        fills: The tensors to fill, by key; final after `decide`.
        findings: What was found, leaf by leaf; final after `decide`.
        differences: The hyperparameters that will change; final after `decide`.
        unclaimed: The checkpoint's names that this rank does not take, by prefix; final after `decide`.
        rates: Without `load_args`: the learning rate of each group that the scheduler drives, where the saved schedule
            stands; final after `install`.
        strangers: The parts of the checkpoint that no rank takes and no policy leaves; final after `check_unclaimed`.
    """

    options: Options
    stored: Mapping[str, Stored]
    manifest: Manifest | None
    model: ModelLoad
    optimizers: dict[str, OptimizerLoad]
    parts: PartsLoad
    scheduled: str | None = None
    fills: dict[str, Tensor] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    differences: list[GroupDifference] = field(default_factory=list)
    unclaimed: dict[str, frozenset[str]] = field(default_factory=dict)
    rates: tuple[float | None, ...] = ()
    strangers: list[str] = field(default_factory=list)

    def _is_models(self, key: str) -> bool:
        return key in self.model.stored and key.startswith(self.model.prefix)

    def faults(self) -> list[Finding]:
        """The findings that this load can't go on with."""
        return faults(self.findings)

    def small_leaves(self) -> dict[str, Any]:
        """The leaves to read before deciding: plain data, and the groups' tensors; none of them live."""
        keys = [key for load in self.optimizers.values() for key in load.small_leaves()]
        keys += self.parts.leaves()
        keys += self.model.small_leaves()
        return {key: scratch(self.stored[key]) for key in keys}

    def optional_leaves(self) -> dict[str, Any]:
        """Leaves that only tell more: the groups of which nothing is taken, to list what differs."""
        keys = [key for load in self.optimizers.values() for key in load.group_leaves()]
        return {key: scratch(self.stored[key]) for key in keys}

    @property
    def is_weights_only(self) -> bool:
        """Whether the checkpoint has no optimizer at all: neither by name, nor state under some other name."""
        if any(load.is_known for load in self.optimizers.values()):
            return False
        recorded = self.manifest.optimizer_classes if self.manifest is not None else {}
        return not recorded and not any(".state." in key for key in self._strange_keys())

    def _strange_keys(self) -> list[str]:
        """The keys that belong to no part that is known here."""
        known = tuple(f"{load.label}." for load in self.optimizers.values())
        return [
            key
            for key in self.stored
            if not (key.startswith(known) or self._is_models(key) or self.parts.is_known(key))
        ]

    def decide(self, small: Mapping[str, Any], paths: Mapping[str, Sequence[Any]] | None) -> None:
        """Classify every leaf and choose what to fill. Changes nothing live.

        Args:
            small: The leaves of `small_leaves`, read.
            paths: The checkpoint's nested paths, where it has them.
        """
        self.parts.paths = paths
        self.model.take(small, paths)
        self.model.decide()
        self.findings += self.model.findings
        self.fills.update(self.model.fills)
        self.unclaimed[self.model.prefix] = self.model.unclaimed
        if self.model.is_foreign:
            # All other verdicts would only repeat it.
            return
        for load in self.optimizers.values():
            findings, differences, fills = load.decide(small, paths, is_weights_only=self.is_weights_only)
            self.findings += findings
            self.differences += differences
            self.fills.update({key: tensor for key, tensor in fills.items() if key in self.stored})
            self.unclaimed[load.state.prefix] = load.state.unclaimed()
        if self.is_weights_only and self.optimizers:
            self._decide_weights_only()
        only_model = all(map(self._is_models, self.stored))
        self.findings += self.parts.decide(small, is_weights_only=only_model)
        self._decide_schedule(small)
        self._decide_strangers()

    def try_model(self, model: nn.Module) -> None:
        """Load a model of which only that tells what fits, from its fills, which are read by then.

        What was found of all else stays. Then either `settle_model`, or `model.undo`.
        """
        decided = len(self.model.findings)
        self.model.try_out(model)
        if self.model.is_foreign:
            self.findings, self.unclaimed = list(self.model.findings), {}
        else:
            self.findings[:decided] = self.model.findings
            self.unclaimed[self.model.prefix] = self.model.unclaimed

    def settle_model(self) -> None:
        """The model stays as it was tried: what was read for it is done with."""
        if self.model.is_through:
            self.fills = {key: fill for key, fill in self.fills.items() if key not in self.model.fills}
            self.model.settle()

    def _decide_weights_only(self) -> None:
        wants = self.options.load_states and not self.options.policy.allow_weights_only
        if self.options.is_auto and wants:
            detail = "the checkpoint has no optimizer, and a run that goes on with fresh state is another run"
            leaf = ", ".join(load.label for load in self.optimizers.values())
            self.findings.append(Finding(verdict="weights only", leaf=leaf, detail=detail))

    def _decide_strangers(self) -> None:
        strange = self._strange_keys()
        unknown = [load for load in self.optimizers.values() if not load.is_known]
        for load in unknown if self.options.load_states else []:
            names = [name for fqns in load.group_names for name in fqns]
            states = {key.rpartition(".")[0] for key in strange if ".state." in key}
            nearest = nearest_prefix(names, states)
            if nearest is not None:
                detail = (
                    f"its state is under {nearest!r} in the checkpoint, and {load.state.prefix!r} is expected"
                )
                self.findings.append(Finding(verdict="layout", leaf=load.label, detail=detail))
        self.findings += self.parts.decide_skipped(strange)
        self.unclaimed[_PARTS] = self.parts.strangers(strange)
        self.unclaimed[_SKIPPED] = self.parts.unknown(strange)

    def claims(self) -> dict[str, Claims]:
        """What this rank leaves and expects, by prefix; for `merge_claims`."""
        expected = {
            load.state.prefix: sorted(name for wanted in load.state.wanted.values() for name in wanted.names)
            for load in self.optimizers.values()
        }
        return {
            what: Claims(unclaimed=names, expected=tuple(expected.get(what, [])[:_SHOWN]))
            for what, names in self.unclaimed.items()
        }

    def check_unclaimed(self, claims: Mapping[str, Claims]) -> list[Finding]:
        """Findings for the checkpoint's names that no rank takes: from all ranks' claims, the same on every rank."""
        strangers = sorted(claims[_PARTS].unclaimed) if _PARTS in claims else []
        self.strangers = [] if self.options.policy.allow_unexpected else strangers
        trains = bool(self.optimizers) and self.options.load_states
        findings = self.parts.judge_strangers(strangers, self._strange_keys(), trains=trains)
        findings += self.parts.judge_unknown(claims[_SKIPPED].unclaimed if _SKIPPED in claims else ())
        for what, claim in claims.items():
            if what in (_PARTS, _SKIPPED):
                continue
            total = len(state_index(self.stored, what)) if claim.unclaimed else 0
            findings += check_unclaimed(what, claim.unclaimed, total, claim.expected, self.options.policy)
        return findings

    def install(self, live: Live, small: Mapping[str, Any]) -> None:
        """Hand over what was loaded: model, optimizers, scheduler, other parts, RNG last."""
        self.model.install(live.model)
        for load in self.optimizers.values():
            load.install(small)
        for name, part in plain_parts(live).items():
            if self.parts.keys.get(name):
                state = self.parts.state(name, small)
                part.load_state_dict(self._in_live_order(part, state) if name == "scheduler" else state)
        self._tell_of_kept_rates(live)

    def _tell_of_kept_rates(self, live: Live) -> None:
        """The next step is taken with the rates that were kept, whatever the schedule says of its place."""
        kept = [d for d in self.differences if d.key == "lr"] if not self.options.load_args else []
        moved = bool(self.parts.keys.get("scheduler"))
        if kept and moved and live.ranks.is_coordinator:
            _log.warning(
                "the scheduler stands where it was saved, but the groups keep their live learning rates "
                "(load_args=False): the next step is taken with those, and a schedule that computes each rate from the "
                "last one goes on from them; `scheduled_rates` of the report are the ones at that place. To start the "
                "schedule afresh, skip the part 'scheduler'"
            )

    def _decide_schedule(self, small: Mapping[str, Any]) -> None:
        if self.parts.keys.get("scheduler") and self.scheduled is not None:
            state = self.parts.state("scheduler", small)
            fault = self.optimizers[self.scheduled].settle_order(state)
            self.findings += [fault] if fault is not None else []

    def _in_live_order(self, scheduler: Any, state: Any) -> Any:
        """A scheduler's lists follow the live groups."""
        if self.scheduled is None:
            return state
        load, live = self.optimizers[self.scheduled], scheduler.state_dict()
        if not load.load_args:
            self.rates = load.rates_in_place(state, live)
        return load.arrange_schedule(state, live)


def _scheduled(live: Live) -> str | None:
    steered = getattr(live.scheduler, "optimizer", None)
    return next((label for label, each in live.optimizers.items() if each is steered), None)


def _model_leaves(
    prefix: str, fqns: Collection[str], stored: Mapping[str, Stored], manifest: Manifest | None
) -> tuple[str, Mapping[str, Stored]]:
    """What the model's keys start with, and the leaves there: some writers (torchtitan) leave out `model.`."""
    whole = f"{prefix}model."
    is_at_top = any(f"{prefix}{fqn}" in stored for fqn in fqns)
    if manifest is not None or not is_at_top or any(f"{whole}{fqn}" in stored for fqn in fqns):
        return whole, stored
    roots = tuple(f"{prefix}{root}." for root in {fqn.split(".")[0] for fqn in fqns})
    return prefix, {key: leaf for key, leaf in stored.items() if f"{key}.".startswith(roots)}


def expect(
    live: Live, stored: Mapping[str, Stored], manifest: Manifest | None, options: Options
) -> Expectation:
    """Look at the live objects: what they can take of the checkpoint. Changes nothing.

    Raises:
        ParameterReplaced: An optimizer holds parameters that are not in the model.
        CheckpointMismatch: The model is on the meta device, or a rank's part of a tensor is not one box.
    """
    view = view_model(live.model)
    model_load = ModelLoad if view.through is None else OwnModelLoad
    require_all_named(view.names, live.optimizers)
    optimizers = {
        label: OptimizerLoad.of(
            label,
            optimizer,
            view.names,
            stored,
            manifest=manifest,
            ranks=live.ranks,
            options=options,
        )
        for label, optimizer in live.optimizers.items()
    }
    prefix, leaves = _model_leaves(options.key_prefix, view.entries, stored, manifest)
    return Expectation(
        options=options,
        stored=stored,
        manifest=manifest,
        model=model_load(
            prefix=prefix,
            view=view,
            targets=view.targets(),
            stored=leaves,
            manifest=manifest,
            policy=options.policy,
        ),
        optimizers=optimizers,
        parts=PartsLoad.of(live, stored, manifest, options),
        scheduled=_scheduled(live),
    )
