"""The model's load: which of its leaves a checkpoint gives, and putting them in place.

Owns the verdict of every model leaf: left out, tied, missing, of another layout. Must not know optimizers, files or
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from orlop.state.absence import Stored, Wanted, check_tensor
from orlop.state.matching import check_model_layout
from orlop.state.model import ModelView, install, is_extra_state
from orlop.state.policy import LoadPolicy
from orlop.state.report import Finding, Verdict
from orlop.store.manifest import Manifest

__all__ = ["ModelLoad", "scratch"]


def scratch(stored: Stored) -> Any:
    """A place to read a leaf to that is not live: a new tensor, or None for plain data."""
    return None if stored.shape is None else torch.empty(stored.shape, dtype=stored.dtype)


@dataclass(slots=True, kw_only=True)
class ModelLoad:
    """What the model expects of a checkpoint, then what it takes.

    Attributes:
        prefix: What every key of the model starts with.
        targets: The tensors to fill, by FQN.
        manifest: What orlop recorded at the save; None for a checkpoint from elsewhere.
        fills: The tensors to fill, by key; final after `decide`.
        findings: One for each leaf; final after `decide`.
        unclaimed: The checkpoint's names that the model does not take; final after `decide`.
        is_foreign: Not one leaf is the model's; final after `decide`.
    """

    prefix: str
    view: ModelView
    targets: dict[str, Tensor]
    stored: Mapping[str, Stored]
    manifest: Manifest | None
    policy: LoadPolicy
    fills: dict[str, Tensor] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    unclaimed: frozenset[str] = frozenset()
    is_foreign: bool = False

    def small_leaves(self) -> list[str]:
        """The keys of plain data and of modules' extra state, which may be a tensor of any shape."""
        return [key for key in self.stored if self._is_data(key)]

    def _is_data(self, key: str) -> bool:
        fqn = key.removeprefix(self.prefix)
        wanted = fqn in self.view.entries or self.view.through is not None
        return key.startswith(self.prefix) and wanted and (self.stored[key].is_bytes or is_extra_state(fqn))

    def decide(self) -> None:
        """Give each leaf its verdict and choose what to fill. Changes nothing live."""
        prefix = self.prefix
        mine = {key.removeprefix(prefix) for key in self.stored if key.startswith(prefix)}
        left_out = set(self._frozen(mine) if self.manifest is None else self.manifest.left_out)
        if self.view.through is not None:
            self._decide_through(mine)
            return
        expected = [fqn for fqn in self.view.entries if fqn not in left_out]
        if (layout := check_model_layout(prefix, expected, self.stored)) is not None:
            self.findings.append(layout)
            self.is_foreign = True
            return
        aliases = self.view.aliases()
        for fqn in self.view.entries:
            if fqn in mine and aliases.get(fqn) in mine:
                self._decide_tied(fqn, aliases[fqn])
            elif fqn in mine:
                self._decide_leaf(fqn)
            elif mine.isdisjoint(self._names(fqn)):
                gone: Verdict = "kept" if self.policy.allow_missing else "missing"
                self._find("left out" if fqn in left_out else gone, fqn)
        self.unclaimed = frozenset(mine - set(self.view.entries))

    def _frozen(self, mine: set[str]) -> list[str]:
        """Without a record: a checkpoint that has none of the frozen parameters was saved without them."""
        frozen = [fqn for fqn in self.view.entries if self.view.is_frozen(fqn)]
        return frozen if mine and mine.isdisjoint(frozen) else []

    def _names(self, fqn: str) -> tuple[str, ...]:
        tensor = self.view.names.tensors.get(fqn)
        return (fqn,) if tensor is None else self.view.names.fqns[tensor]

    def _decide_through(self, mine: set[str]) -> None:
        """The model loads by its own hooks; those may know names from an older version of it."""
        detail = f"by load_state_dict: {self.view.through}"
        self.findings.append(Finding(verdict="through", leaf=self.prefix.rstrip("."), detail=detail))
        for fqn in (fqn for fqn in self.view.entries if fqn in mine):
            self._decide_leaf(fqn)
        for fqn in sorted(mine - set(self.view.entries)):
            key = f"{self.prefix}{fqn}"
            if not self._is_data(key):
                self.targets[fqn] = self.fills[key] = scratch(self.stored[key])

    def _decide_tied(self, fqn: str, first: str) -> None:
        """Two names of one live tensor, both stored: one of them is loaded."""
        aliases = self.manifest.aliases if self.manifest is not None else {}
        if self.manifest is None or aliases.get(fqn, fqn) == aliases.get(first, first):
            self._find("loaded", fqn, f"tied to {first}")
            return
        verdict: Verdict = "ignored" if self.policy.allow_unexpected else "untied"
        self._find(
            verdict, fqn, f"of its own in the checkpoint, tied to {first} here: only one can be loaded"
        )

    def _decide_leaf(self, fqn: str) -> None:
        key = f"{self.prefix}{fqn}"
        target = self.targets.get(fqn)
        stored = self.stored[key]
        if target is not None:
            self.findings.append(check_tensor(key, Wanted.of(key, target), stored, self.policy))
            self.fills[key] = target
        elif stored.shape is not None and stored.dtype is not None and self._is_data(key):
            whole = Wanted(shape=stored.shape, dtype=stored.dtype)
            self.findings.append(check_tensor(key, whole, stored, self.policy))
        else:
            self._find("loaded" if stored.is_bytes else "kind", fqn)

    def _find(self, verdict: Verdict, fqn: str, detail: str = "") -> None:
        self.findings.append(Finding(verdict=verdict, leaf=f"{self.prefix}{fqn}", detail=detail))

    def install(self, model: nn.Module, small: Mapping[str, Any]) -> None:
        """Finish: hand over extra state, fire hooks, or load through the model's own `load_state_dict`."""
        values: dict[str, Any] = {
            fqn: filled
            for fqn in self.targets
            if (filled := self.fills.get(f"{self.prefix}{fqn}")) is not None
        }
        values |= {key.removeprefix(self.prefix): small[key] for key in self.small_leaves()}
        install(model, self.view, values, strict=not self.policy.allow_missing)
