"""Absent, lost, partly present, uncovered: what each leaf that is expected here is in the checkpoint.

Owns the rules. Pure: it takes what the live objects expect and what the checkpoint's metadata says, and gives findings
and the leaves to read. Must not know live objects, files or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from orlop.dcp.boxes import Box, overlap, tiling_fault
from orlop.dcp.layout import local_box, uncovered
from orlop.state.policy import LoadPolicy
from orlop.state.report import Finding, Verdict

__all__ = [
    "Stored",
    "Wanted",
    "WantedState",
    "check_state",
    "check_tensor",
    "is_lossless",
    "reset_if_allowed",
    "state_index",
    "stored_leaves",
]

_SHOWN = 4
_DAMAGE = frozenset({"partial", "lost", "uneven", "uncovered", "shape", "kind"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One leaf of the checkpoint.

    Attributes:
        shape: The global shape; None for a byte leaf.
        dtype: None for a byte leaf.
        chunks: The boxes that files hold.
    """

    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    chunks: tuple[Box, ...] = ()

    @property
    def is_bytes(self) -> bool:
        """Whether the leaf is plain data rather than a tensor."""
        return self.shape is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A tensor that is to be filled.

    Attributes:
        shape: Its global shape.
        dtype: Its dtype.
        box: The region that this rank needs; None for all of it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box | None = None

    @classmethod
    def of(cls, leaf: str, tensor: Tensor) -> Wanted:
        """What filling `tensor` takes.

        Raises:
            CheckpointMismatch: This rank's part of it is not one box.
        """
        return cls(shape=tuple(tensor.shape), dtype=tensor.dtype, box=local_box(leaf, tensor))


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedState:
    """The optimizer state that one parameter can take.

    Attributes:
        names: The parameter's FQNs, the checkpoint's own first.
        tensors: By state key.
        numbers: The state keys whose value is no tensor: a number, or other plain data.
        optional: The keys that need not be there.
        recorded: The keys that were saved, by the checkpoint's own record.
        reasons: Says of a key which hyperparameter explains why it is wanted, or is not; empty where none does.
        is_stateful: Whether it would have state after a step: False for frozen parameters and stateless classes.
    """

    names: tuple[str, ...]
    tensors: Mapping[str, Wanted]
    numbers: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    recorded: frozenset[str] = frozenset()
    reasons: Callable[[str], str] = lambda key: ""
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
        chunks=tuple(Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks),
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
    if live.is_complex:
        return is_lossless(saved.to_real(), live.to_real())
    if saved.is_complex or live == torch.bool or not _has_limits(saved) or not _has_limits(live):
        return False
    if not live.is_floating_point:
        return saved == torch.bool or (not saved.is_floating_point and _is_wider_integer(saved, live))
    wide = torch.finfo(live)
    if not saved.is_floating_point:
        largest = 1 if saved == torch.bool else torch.iinfo(saved).max
        return wide.bits > 8 and largest <= 2 / wide.eps  # up to there a float counts in ones
    narrow = torch.finfo(saved)
    reaches = wide.max >= narrow.max and wide.tiny * wide.eps <= narrow.tiny * narrow.eps
    return wide.bits > narrow.bits and reaches and wide.eps <= narrow.eps


def _has_limits(dtype: torch.dtype) -> bool:
    """Whether torch says which values a dtype has; quantized and packed ones are equal, or not to be compared."""
    try:
        return dtype == torch.bool or bool(
            torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        )
    except (TypeError, RuntimeError, NotImplementedError):
        return False


def _is_wider_integer(saved: torch.dtype, live: torch.dtype) -> bool:
    narrow, wide = torch.iinfo(saved), torch.iinfo(live)
    return wide.min <= narrow.min and narrow.max <= wide.max


def check_tensor(leaf: str, wanted: Wanted, stored: Stored, policy: LoadPolicy) -> Finding:
    """What loading one stored leaf into one tensor comes to."""
    if stored.shape is None or stored.dtype is None:
        return Finding(verdict="kind", leaf=leaf, detail="expected a tensor, found plain data")
    if stored.shape != wanted.shape:
        return Finding(verdict="shape", leaf=leaf, detail=_other_shape(wanted, stored))
    if gap := _gap(wanted, stored):
        return Finding(verdict="uncovered", leaf=leaf, detail=gap)
    if stored.dtype == wanted.dtype:
        return Finding(verdict="loaded", leaf=leaf)
    change = f"expected {wanted.dtype}, found {stored.dtype}"
    if is_lossless(stored.dtype, wanted.dtype):
        return Finding(verdict="widened", leaf=leaf, detail=change)
    return Finding(verdict="cast" if policy.cast_dtypes else "dtype", leaf=leaf, detail=change)


def _other_shape(wanted: Wanted, stored: Stored) -> str:
    detail = f"expected {wanted.shape}, found {stored.shape}"
    if wanted.box is not None and stored.shape == wanted.box.sizes and len(stored.chunks) == 1:
        detail += (
            ": that is the shape of one rank's shard; it was saved as a plain tensor rather than a DTensor, and the "
            "other ranks' shards are not in the checkpoint"
        )
    return detail


def _gap(wanted: Wanted, stored: Stored) -> str:
    """Why the region that is needed is not covered exactly once; empty when it is."""
    assert stored.shape is not None
    fault = tiling_fault(stored.shape, stored.chunks)
    if fault is None:
        return ""
    need = wanted.box if wanted.box is not None else Box((0,) * len(stored.shape), stored.shape)
    holes = uncovered(need, stored.chunks)
    if not holes:
        # What is wrong may be wrong with other ranks' regions only.
        held = sum(common.volume for chunk in stored.chunks if (common := overlap(need, chunk)) is not None)
        return "" if fault.kind != "outside" and held == need.volume else fault.text
    shown = "; ".join(f"{hole.sizes} at {hole.offsets}" for hole in holes[:_SHOWN])
    return f"{fault.text}; not covered: {shown}" + ("; …" if len(holes) > _SHOWN else "")


def check_state(
    prefix: str,
    wanted: WantedState,
    index: Mapping[str, Collection[str]],
    stored: Mapping[str, Stored],
    values: Mapping[str, Any],
    policy: LoadPolicy,
    *,
    is_lost: bool = False,
) -> StateVerdict:
    """What becomes of one parameter's optimizer state: loaded, absent, or at fault.

    Args:
        prefix: Of all state of that optimizer: `optimizer.state.`.
        wanted: What the live optimizer takes.
        index: From `state_index`.
        stored: All leaves of the checkpoint.
        values: The content of byte leaves that were read already, by key.
        policy: What may be tolerated.
        is_lost: Whether the checkpoint's own record says that there was state, if none is there.
    """
    name = next((name for name in wanted.names if name in index), None)
    if name is None and is_lost:
        detail = "it had state when it was saved, and nothing of that is there"
        lost = Finding(verdict="lost", leaf=f"{prefix}{wanted.names[0]}", detail=detail)
        found = reset_if_allowed(wanted.names[0], prefix, [lost], policy).findings
        return StateVerdict(name=None, findings=found)
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
    return reset_if_allowed(name, prefix, found, policy)


def reset_if_allowed(name: str, prefix: str, found: list[Finding], policy: LoadPolicy) -> StateVerdict:
    """One parameter's findings, or a reset where they are of damage and the policy names the parameter."""
    damaged = [finding for finding in found if finding.verdict in _DAMAGE]
    if damaged and any(fnmatchcase(name, pattern) for pattern in policy.reset_damaged):
        detail = "; ".join(map(str, damaged[:_SHOWN]))
        return StateVerdict(
            name=None, findings=[Finding(verdict="reset", leaf=f"{prefix}{name}", detail=detail)]
        )
    return StateVerdict(name=name, findings=found)


def _check_keys(
    base: str, wanted: WantedState, present: set[str], values: Mapping[str, Any], policy: LoadPolicy
) -> list[Finding]:
    expected = set(wanted.tensors) | wanted.numbers
    found = [
        Finding(
            verdict="partial",
            leaf=f"{base}.{key}",
            detail=_explained(f"only {sorted(present)} are there", wanted, key),
        )
        for key in sorted((expected - wanted.optional | wanted.recorded) - present)
    ]
    for key in sorted(present - expected):
        leaf = f"{base}.{key}"
        # Some writers store a switched-off moment as None.
        nothing = leaf in values and values[leaf] is None
        verdict: Verdict = "ignored" if nothing or policy.allow_unexpected else "unexpected"
        detail = _explained(f"expected only {sorted(expected)}", wanted, key)
        found.append(Finding(verdict=verdict, leaf=leaf, detail=detail))
    return found


def _explained(detail: str, wanted: WantedState, key: str) -> str:
    reason = wanted.reasons(key)
    return f"{detail}; {reason}" if reason else detail
