"""Absent, partly present, missing, unexpected: what each leaf that is expected here is in the checkpoint.

Owns the rules. Pure: it takes what the live objects expect and what the checkpoint's metadata says, and gives findings
and the leaves to read. Must not know live objects, files or ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from orlop.state.report import Finding, Verdict

__all__ = [
    "LoadPolicy",
    "Stored",
    "Wanted",
    "WantedState",
    "check_state",
    "check_tensor",
    "check_unclaimed",
    "is_lossless",
    "state_index",
    "stored_leaves",
]

_SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPolicy:
    """What a load may tolerate; by default nothing.

    Attributes:
        allow_missing: Leaves of the model and parts that the checkpoint lacks keep their live value.
        allow_unexpected: Leaves of the model and optimizers that nothing here takes are ignored.
        cast_dtypes: Values may be cast to a dtype that can't hold them all.
        reset_damaged: FQN patterns (`layers.*`) of parameters whose damaged state is reset to a fresh one.
        skip_parts: Parts (`scheduler`, `rng`, …) that are neither expected nor loaded.
    """

    allow_missing: bool = False
    allow_unexpected: bool = False
    cast_dtypes: bool = False
    reset_damaged: tuple[str, ...] = ()
    skip_parts: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One leaf of the checkpoint.

    Attributes:
        shape: The global shape; None for a byte leaf.
        dtype: None for a byte leaf.
        chunks: The boxes that files hold, as (offsets, sizes).
    """

    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()

    @property
    def is_bytes(self) -> bool:
        """Whether the leaf is plain data rather than a tensor."""
        return self.shape is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A tensor that is to be filled: its global shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedState:
    """The optimizer state that one parameter can take.

    Attributes:
        names: The parameter's FQNs, the checkpoint's own first.
        tensors: By state key.
        numbers: The state keys whose value is a Python number.
        is_stateful: Whether it would have state after a step: False for frozen parameters and stateless classes.
    """

    names: tuple[str, ...]
    tensors: Mapping[str, Wanted]
    numbers: frozenset[str] = frozenset()
    is_stateful: bool = True


@dataclass(slots=True, kw_only=True)
class StateVerdict:
    """What becomes of one parameter's state: its name in the checkpoint, or None for a fresh state."""

    name: str | None
    findings: list[Finding] = field(default_factory=list)


def stored_leaves(metadata: Metadata) -> dict[str, Stored]:
    """DCP's metadata as plain descriptions, by key."""
    return {key: _stored(entry) for key, entry in metadata.state_dict_metadata.items()}


def _stored(entry: Any) -> Stored:
    if not isinstance(entry, TensorStorageMetadata):
        return Stored()
    return Stored(
        shape=tuple(entry.size),
        dtype=entry.properties.dtype,
        chunks=tuple((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks),
    )


def state_index(stored: Iterable[str], prefix: str) -> dict[str, set[str]]:
    """The state keys that the checkpoint has for each parameter name under `prefix` (`optimizer.state.`)."""
    index: dict[str, set[str]] = {}
    for key in stored:
        if key.startswith(prefix):
            name, _, state_key = key[len(prefix) :].rpartition(".")
            index.setdefault(name, set()).add(state_key)
    return index


def is_lossless(saved: torch.dtype, live: torch.dtype) -> bool:
    """Whether every value of `saved` has the same value in `live`."""
    if saved == live:
        return True
    if saved.is_floating_point == live.is_floating_point and saved.is_complex == live.is_complex:
        try:
            return torch.promote_types(saved, live) == live
        except RuntimeError:  # 8-bit floats promote to nothing
            return False
    return saved.is_floating_point and live.is_complex and torch.promote_types(saved, live) == live


def check_tensor(leaf: str, wanted: Wanted, stored: Stored, policy: LoadPolicy) -> Finding:
    """What loading one stored leaf into one tensor comes to."""
    if stored.shape is None or stored.dtype is None:
        return Finding(verdict="kind", leaf=leaf, detail="expected a tensor, found plain data")
    if stored.shape != wanted.shape:
        return Finding(verdict="shape", leaf=leaf, detail=f"expected {wanted.shape}, found {stored.shape}")
    if gap := _gap(stored):
        return Finding(verdict="uncovered", leaf=leaf, detail=gap)
    if stored.dtype == wanted.dtype:
        return Finding(verdict="loaded", leaf=leaf)
    change = f"expected {wanted.dtype}, found {stored.dtype}"
    if is_lossless(stored.dtype, wanted.dtype):
        return Finding(verdict="widened", leaf=leaf, detail=change)
    return Finding(verdict="cast" if policy.cast_dtypes else "dtype", leaf=leaf, detail=change)


def _gap(stored: Stored) -> str:
    assert stored.shape is not None
    total = math.prod(stored.shape)
    held = 0
    for offsets, sizes in stored.chunks:
        if len(offsets) != len(stored.shape) or any(
            offset < 0 or size < 0 or offset + size > extent
            for offset, size, extent in zip(offsets, sizes, stored.shape)
        ):
            return f"a chunk at {offsets} of {sizes} lies outside the tensor of {stored.shape}"
        held += math.prod(sizes)
    return "" if held == total else f"files hold {held:,} of its {total:,} elements"


def check_state(
    prefix: str,
    wanted: WantedState,
    index: Mapping[str, Collection[str]],
    stored: Mapping[str, Stored],
    values: Mapping[str, Any],
    policy: LoadPolicy,
) -> StateVerdict:
    """What becomes of one parameter's optimizer state: loaded, absent, or at fault.

    Args:
        prefix: Of all state of that optimizer: `optimizer.state.`.
        wanted: What the live optimizer takes.
        index: From `state_index`.
        stored: All leaves of the checkpoint.
        values: The content of byte leaves that were read already, by key.
        policy: What may be tolerated.
    """
    name = next((name for name in wanted.names if name in index), None)
    if name is None:
        absent = [Finding(verdict="absent", leaf=f"{prefix}{wanted.names[0]}")]
        return StateVerdict(name=None, findings=absent if wanted.is_stateful else [])
    base = f"{prefix}{name}"
    found = _check_keys(base, wanted, set(index[name]), values, policy)
    for key, tensor in wanted.tensors.items():
        if key in index[name]:
            found.append(check_tensor(f"{base}.{key}", tensor, stored[f"{base}.{key}"], policy))
    for key in sorted(wanted.numbers & set(index[name])):
        right = stored[f"{base}.{key}"].is_bytes
        detail = "" if right else "expected a number, found a tensor"
        found.append(Finding(verdict="loaded" if right else "kind", leaf=f"{base}.{key}", detail=detail))
    damaged = [finding for finding in found if finding.verdict in ("partial", "uncovered", "shape", "kind")]
    if damaged and any(fnmatchcase(name, pattern) for pattern in policy.reset_damaged):
        detail = "; ".join(map(str, damaged[:_SHOWN]))
        return StateVerdict(name=None, findings=[Finding(verdict="reset", leaf=base, detail=detail)])
    return StateVerdict(name=name, findings=found)


def _check_keys(
    base: str, wanted: WantedState, present: set[str], values: Mapping[str, Any], policy: LoadPolicy
) -> list[Finding]:
    expected = set(wanted.tensors) | wanted.numbers
    found = [
        Finding(verdict="partial", leaf=f"{base}.{key}", detail=f"only {sorted(present)} are there")
        for key in sorted(expected - present)
    ]
    for key in sorted(present - expected):
        leaf = f"{base}.{key}"
        # Some writers store a switched-off moment as None.
        nothing = leaf in values and values[leaf] is None
        verdict: Verdict = "ignored" if nothing or policy.allow_unexpected else "unexpected"
        found.append(Finding(verdict=verdict, leaf=leaf, detail=f"expected only {sorted(expected)}"))
    return found


def check_unclaimed(
    what: str, unclaimed: Collection[str], total: int, expected: Collection[str], policy: LoadPolicy
) -> list[Finding]:
    """Findings for stored names that no rank takes.

    Args:
        what: The prefix that they stand under: `model.` or `optimizer.state.`.
        unclaimed: The names.
        total: How many names the checkpoint has under that prefix.
        expected: The names that are expected here.
        policy: What may be tolerated.
    """
    if what.endswith(".state.") and unclaimed and len(unclaimed) == total and expected:
        here, there = sorted(expected)[:_SHOWN], sorted(unclaimed)[:_SHOWN]
        detail = f"no parameter name matches: here {here}, in the checkpoint {there}"
        return [Finding(verdict="layout", leaf=what.rstrip("."), detail=detail)]
    verdict: Verdict = "ignored" if policy.allow_unexpected else "unexpected"
    return [Finding(verdict=verdict, leaf=f"{what}{name}") for name in sorted(unclaimed)]
