"""The model's load: which of its leaves a checkpoint gives, and putting them in place.

Owns the verdict of every model leaf: left out, tied, missing, of another layout. Must not know optimizers, files or
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from orlop import compat
from orlop.state.absence import Stored, Wanted, check_tensor
from orlop.state.containers import like_live
from orlop.state.extra import extra_parts, is_extra_state, join_extra
from orlop.state.matching import check_model_layout
from orlop.state.model import ModelView, install
from orlop.state.policy import LoadPolicy
from orlop.state.report import Finding, Verdict
from orlop.store.manifest import Manifest

__all__ = ["ModelLoad", "scratch"]


# With these there is nothing to read.
_UNREADABLE = frozenset({"kind", "uncovered", "layout"})


def scratch(stored: Stored) -> Any:
    """A place to read a leaf to that is not live: a new tensor, or None for plain data."""
    return None if stored.shape is None else torch.empty(stored.shape, dtype=stored.dtype)


@dataclass(slots=True, kw_only=True)
class ModelLoad:
    """What the model expects of a checkpoint, then what it takes.

    Attributes:
        prefix: What every key of the model starts with.
        targets: The live tensors, by FQN.
        manifest: What orlop recorded at the save; None for a checkpoint from elsewhere.
        fills: The tensors to fill, by key; final after `decide`.
        findings: One for each leaf; final after `decide`.
        unclaimed: The checkpoint's names that the model does not take; final after `decide`.
        is_foreign: Not one leaf is the model's; final after `decide`.
        mine: The names that the checkpoint has for the model.
        parts: The extra states that it has in several leaves, each with their names.
        left_out: The FQNs that were not saved, on purpose.
        small: The names of plain data and of modules' extra state, which may be a tensor of any shape.
        data: Their values, whole; after `take`.
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
    mine: dict[str, Stored] = field(init=False)
    parts: dict[str, list[str]] = field(init=False)
    left_out: frozenset[str] = field(init=False)
    small: frozenset[str] = field(init=False)
    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        start = len(self.prefix)
        self.mine = {key[start:]: leaf for key, leaf in self.stored.items() if key.startswith(self.prefix)}
        found = extra_parts(self.mine)
        self.parts = {entry: leaves for entry, leaves in found.items() if self._wants(entry)}
        if self.manifest is None:
            # DCP makes no leaf of a dict that is empty; orlop does.
            absent = [fqn for fqn in self.view.entries if fqn not in {*self.mine, *self.parts}]
            self.parts |= {fqn: [] for fqn in absent if is_extra_state(fqn) and self._is_empty(fqn)}
        self.left_out = frozenset(self._frozen() if self.manifest is None else self.manifest.left_out)
        pieces = {leaf for leaves in self.parts.values() for leaf in leaves}
        data = {fqn for fqn, leaf in self.mine.items() if leaf.is_bytes or is_extra_state(fqn)}
        self.small = frozenset(pieces | {fqn for fqn in data if self._wants(fqn)})

    def _wants(self, fqn: str) -> bool:
        return fqn in self.view.entries

    def _is_empty(self, fqn: str) -> bool:
        return not compat.flatten_state_dict({fqn: self.view.entries[fqn]})[0]

    def _frozen(self) -> list[str]:
        """Without a record: a checkpoint that has none of the frozen parameters was saved without them."""
        frozen = [fqn for fqn in self.view.entries if self.view.is_frozen(fqn)]
        return frozen if self.mine and self.mine.keys().isdisjoint(frozen) else []

    def small_leaves(self) -> list[str]:
        """The keys of plain data and of modules' extra state, to be read and taken before `decide`."""
        return [f"{self.prefix}{fqn}" for fqn in self.mine if fqn in self.small]

    def take(self, small: Mapping[str, Any], paths: Mapping[str, Sequence[Any]] | None) -> None:
        """Make values of the small leaves, which were read.

        Raises:
            CheckpointMismatch: DCP took extra state apart, and what it was can't be told.
        """
        self.data = {fqn: small[self.key(fqn)] for fqn in self.small & self.there}
        for entry, leaves in self.parts.items():
            live = self.view.entries.get(entry)
            value = join_extra(self.key(entry), map(self.key, leaves), small, paths) if leaves else live
            if self.manifest is None:
                keeps = self.policy.allow_missing
                value = like_live(value, live, self.key(entry), keeps_missing=keeps)
            self.data[entry] = value

    @property
    def is_through(self) -> bool:
        """Whether the model is loaded by its own `load_state_dict`, when it is tried out."""
        return self.view.through is not None

    @property
    def is_readable(self) -> bool:
        """Whether the fills can be read; after `decide`."""
        return not any(finding.verdict in _UNREADABLE for finding in self.findings)

    @property
    def there(self) -> set[str]:
        """The names that the checkpoint has, extra state under one name."""
        return {*self.mine, *self.parts} - {leaf for leaves in self.parts.values() for leaf in leaves}

    @property
    def expected(self) -> list[str]:
        """The FQNs that should be there."""
        return [fqn for fqn in self.view.entries if fqn not in self.left_out]

    def decide(self) -> None:
        """Give each leaf its verdict and choose what to fill. Changes nothing live."""
        entries = [self.key(entry) for entry, leaves in self.parts.items() if leaves]
        layout = check_model_layout(self.prefix, self.expected, [*self.stored, *entries])
        if layout is not None:
            self.findings.append(layout)
            self.is_foreign = True
            return
        there = self.decide_named()
        for fqn in self.view.entries:
            if there.isdisjoint(self.names(fqn)):
                self.decide_gone(fqn)
        taken = {leaf for fqn in self.view.entries for leaf in self.parts.get(fqn, [fqn])}
        self.unclaimed = frozenset(self.mine.keys() - taken)

    def decide_named(self) -> set[str]:
        """Judge what the checkpoint has by its live name; gives all names that are there."""
        there, aliases = self.there, self.view.aliases()
        for fqn in self.view.entries:
            if fqn in there and aliases.get(fqn) in there:
                self._decide_tied(fqn, aliases[fqn])
            elif fqn in there:
                for leaf in self.parts.get(fqn, [fqn]):
                    self.decide_leaf(leaf)
        return there

    def decide_gone(self, fqn: str) -> None:
        """An entry that the checkpoint does not have."""
        gone: Verdict = "kept" if self.policy.allow_missing else "missing"
        self.find("left out" if fqn in self.left_out else gone, fqn)

    def key(self, fqn: str) -> str:
        """The checkpoint's key for a name."""
        return f"{self.prefix}{fqn}"

    def names(self, fqn: str) -> tuple[str, ...]:
        """All names of the tensor that has this one; several where it is tied."""
        tensor = self.view.names.tensors.get(fqn)
        return (fqn,) if tensor is None else self.view.names.fqns[tensor]

    def _decide_tied(self, fqn: str, first: str) -> None:
        """Two names of one live tensor, both stored: one of them is loaded."""
        aliases = self.manifest.aliases if self.manifest is not None else {}
        if self.manifest is None or aliases.get(fqn, fqn) == aliases.get(first, first):
            self.find("loaded", fqn, f"tied to {first}")
            return
        verdict: Verdict = "ignored" if self.policy.allow_unexpected else "untied"
        self.find(verdict, fqn, f"of its own in the checkpoint, tied to {first} here: only one can be loaded")

    def decide_leaf(self, fqn: str) -> None:
        """A leaf that the checkpoint has by its live name."""
        target, stored = self.targets.get(fqn), self.mine[fqn]
        if target is not None:
            self.findings.append(
                check_tensor(self.key(fqn), Wanted.of(self.key(fqn), target), stored, self.policy)
            )
            self.fills[self.key(fqn)] = target
        elif stored.shape is not None and stored.dtype is not None and fqn in self.small:
            whole = Wanted(shape=stored.shape, dtype=stored.dtype)
            self.findings.append(check_tensor(self.key(fqn), whole, stored, self.policy))
        else:
            self.find("loaded" if stored.is_bytes else "kind", fqn)

    def find(self, verdict: Verdict, fqn: str, detail: str = "") -> None:
        """Note one finding."""
        self.findings.append(Finding(verdict=verdict, leaf=self.key(fqn), detail=detail))

    def try_out(self, model: nn.Module) -> None:
        """Where only loading a model tells what fits: load it, and find out. Then `settle` or `undo`."""

    def settle(self) -> None:
        """Keep what `try_out` loaded."""

    def undo(self) -> None:
        """Put the model back as it was before `try_out`."""

    def install(self, model: nn.Module) -> None:
        """Finish: hand over extra state and fire hooks."""
        install(model, self.view, self.data)
