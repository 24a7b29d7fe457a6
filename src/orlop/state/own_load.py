"""The load of a model that has load hooks: it goes by the model's own `load_state_dict`, which is tried out first.

Owns the verdicts on what that did: only hooks know which names and shapes of an older version they can take. Must not
know optimizers, files or ranks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from orlop import compat
from orlop.dcp.boxes import Box
from orlop.state.absence import Stored, Wanted, check_tensor
from orlop.state.matching import check_model_layout
from orlop.state.report import Finding
from orlop.state.through import Outcome, load_by_itself
from orlop.state.undo import Undo
from orlop.state.weights import ModelLoad, scratch

__all__ = ["OwnModelLoad"]


@dataclass(slots=True, kw_only=True)
class OwnModelLoad(ModelLoad):
    """As `ModelLoad`; `decide` judges what has a live name, and `try_out` all the rest. The fills are not live."""

    before: Undo | None = None

    def _wants(self, fqn: str) -> bool:
        return True

    def decide(self) -> None:
        """Judge what the checkpoint has by its live name, and read everything else, too. Changes nothing live."""
        if not self.mine:
            ModelLoad.decide(self)
            return
        detail = f"by load_state_dict: {self.view.through}"
        self.findings.append(Finding(verdict="through", leaf=self.prefix.rstrip("."), detail=detail))
        there = self.decide_named()
        for fqn in self.view.entries:
            if fqn in self.left_out and there.isdisjoint(self.names(fqn)):
                self.decide_gone(fqn)
        for fqn in self.mine.keys() - self.view.entries.keys() - self.small:
            self.fills[self.key(fqn)] = scratch(self.mine[fqn])

    def decide_leaf(self, fqn: str) -> None:
        """A leaf that has a live name; one of another shape is for the hooks."""
        target, stored = self.targets.get(fqn), self.mine[fqn]
        is_same = target is None or stored.shape in (None, tuple(target.shape))
        if is_same:
            ModelLoad.decide_leaf(self, fqn)
        if target is not None and not stored.is_bytes:
            self.fills[self.key(fqn)] = _empty_like(target) if is_same else scratch(stored)

    def try_out(self, model: nn.Module) -> None:
        """Load the model by its own `load_state_dict`, and judge what that did. Changes the live model."""
        self.before = Undo.of(model, self.view)
        outcome = load_by_itself(model, self.view, self._values(), self.before)
        for words in outcome.refusals:
            self.findings.append(Finding(verdict="refused", leaf=self.prefix.rstrip("."), detail=words))
        self._judge(outcome)

    def _values(self) -> dict[str, Any]:
        """What was read, by all names that it has here; what was left out of the checkpoint as it is here."""
        start = len(self.prefix)
        values: dict[str, Any] = {key[start:]: filled for key, filled in self.fills.items()}
        values |= self.data
        for fqn, live in self.view.entries.items():
            known = [values[name] for name in (fqn, *self.names(fqn)) if name in values]
            if known or fqn in self.left_out:
                values[fqn] = known[0] if known else live
        return values

    def _judge(self, outcome: Outcome) -> None:
        missing = self._untouched(outcome) if outcome.missing is None else outcome.missing
        if missing is None:
            return  # It broke off, and said why.
        gone = {fqn for fqn in self.expected if missing.issuperset(self.names(fqn))}
        if self.expected and (len(gone) == len(self.expected) or self.there <= outcome.unexpected):
            self._find_foreign()
            return
        self.unclaimed = outcome.unexpected
        told = {finding.leaf for finding in self.findings}
        for fqn in self.expected:
            if fqn in gone:
                self._replace(fqn, [])
                self.decide_gone(fqn)
            elif fqn not in outcome.shapes and (taken := self._taken(fqn, outcome, told)):
                self._replace(fqn, [max(taken, key=lambda finding: finding.verdict != "loaded")])
        for fqn, words in outcome.shapes.items():
            self.find("shape", fqn, self._other_shape(fqn) or words)

    def _untouched(self, outcome: Outcome) -> frozenset[str] | None:
        """What is missing, where `load_state_dict` does not tell."""
        if outcome.refusals:
            return None
        known = self.there | outcome.copied.keys()
        return frozenset(fqn for fqn in self.targets if known.isdisjoint(self.names(fqn)))

    def _find_foreign(self) -> None:
        layout = check_model_layout(self.prefix, self.expected, self.stored)
        detail = "of what the checkpoint has, the model's load hooks took nothing"
        self.findings = [layout or Finding(verdict="layout", leaf=self.prefix.rstrip("."), detail=detail)]
        self.is_foreign = True

    def _taken(self, fqn: str, outcome: Outcome, told: Collection[str]) -> list[Finding]:
        """Findings for what hooks supplied; none where all is said."""
        key, target, first = self.key(fqn), self.targets.get(fqn), self.names(fqn)[0]
        if target is None or first != fqn:
            return []
        dtypes = outcome.copied.get(fqn, frozenset())
        if key in told and dtypes <= {target.dtype}:
            return []
        shape = tuple(target.shape)
        wanted, whole = Wanted(shape=shape, dtype=target.dtype), (Box((0,) * len(shape), shape),)
        taken = [Stored(shape=shape, dtype=dtype, chunks=whole) for dtype in dtypes or {target.dtype}]
        found = [check_tensor(key, wanted, each, self.policy) for each in taken]
        return [replace(each, detail=f"{each.detail}; by load hooks".removeprefix("; ")) for each in found]

    def _other_shape(self, fqn: str) -> str:
        if fqn not in self.mine or fqn not in self.targets:
            return ""
        wanted = Wanted.of(self.key(fqn), self.targets[fqn])
        return check_tensor(self.key(fqn), wanted, self.mine[fqn], self.policy).detail

    def _replace(self, fqn: str, findings: list[Finding]) -> None:
        key = self.key(fqn)
        self.findings = [finding for finding in self.findings if finding.leaf != key] + findings

    def settle(self) -> None:
        """Keep what was loaded, and drop what was read."""
        self.before = None
        self.fills.clear()

    def undo(self) -> None:
        """Put the model back."""
        if self.before is not None:
            self.before.restore()
            self.before = None

    def install(self, model: nn.Module) -> None:
        """All was done when the model was tried out."""


def _empty_like(target: Tensor) -> Tensor:
    return compat.empty_state_like(target, target.dtype, compat.local_tensor(target).device)
