"""Whether two runs were the same, bit for bit: their records step by step, their final state leaf by leaf.

Owns the words of the comparison and the hints. Reads records; where the fingerprints come from it must not know.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orlop.store import files

__all__ = [
    "KINDS",
    "Comparison",
    "bits",
    "compare_fingerprints",
    "compare_records",
    "hint",
    "kind_of",
    "read_records",
]

# Wall time is no state.
_NOT_COMPARED = frozenset({"step", "seconds"})
# What an exact resume must bring back; a fingerprint that lacks one of these proves less.
KINDS = ("parameters and buffers", "moments", "step counters", "random generators", "sampler")
_HINTS = (
    (
        "random generators",
        "random streams are not restored: save orlop.RngState() as a part, and restore it last",
    ),
    (
        "sampler",
        "the data's position is not restored: the sampler has to save how far it is, and its generator",
    ),
    ("lr", "the learning rate's schedule is off: is the scheduler saved, and stepped once a step?"),
    ("scheduler", "the scheduler is not restored, or stepped once too often after a resume"),
    (
        "param groups",
        "hyperparameters differ: does the start of the script overwrite those of the checkpoint?",
    ),
    ("step counters", "optimizer state is not restored for all parameters (a step counter starts anew)"),
)
_LATE_HINTS = (
    ("moments", "moments are not restored exactly: are they cast, or is a part of them lost?"),
    ("progress counters", "the script counts something that it doesn't save"),
)
_SEED_HINT = (
    "everything but random streams is identical, so this one is probably never seeded: two starts of the script differ "
    "by themselves; seed all of them (random.seed, numpy.random.seed, torch.manual_seed)"
)
_NO_SCHEDULER_HINT = (
    "the learning rate is off, and there is no scheduler in the checkpoints: either the engine was not given the one "
    "that sets it, or the script computes it from something that it doesn't save"
)
_NO_STREAMS_HINT = (
    "there are no random generators in the checkpoints: where the training draws random numbers (dropout, a shuffle), "
    "save orlop.RngState() as a part"
)
_NO_POSITION_HINT = (
    "no data position is saved, as there is no part `data` in the checkpoints: give the DataStream, or the sampler, as "
    "that part; where the step alone decides on the data, random streams are not restored: do so last"
)
_LOSS_HINT = (
    "the loss is off while the schedule is not: data order (a shuffle that is not seeded by the saved epoch), "
    "dropout's random stream, or weights that were not restored"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One thing that was compared.

    Attributes:
        what: Its name.
        count: In how many places.
        difference: The first place that differs, with both values; None when none does.
        step: Of a record, the first step that differs.
    """

    what: str
    count: int
    difference: str | None
    step: int | None = None


def read_records(path: Path, last: int | None = None) -> list[dict[str, Any]]:
    """The lines of a file of step records, by step; none without the file.

    A line that is torn is left out. Of a step that was done again, the last line counts.

    Args:
        path: The file.
        last: Only so many of the newest lines, as they stand there.
    """
    try:
        content = files.read_file(path)
    except FileNotFoundError:
        return []
    whole = content[: content.rfind(b"\n") + 1].splitlines()
    if last is not None:
        return [record for line in whole[-2 * last :] if (record := _parsed(line)) is not None][-last:]
    by_step = {record["step"]: record for line in whole if (record := _parsed(line)) is not None}
    return [by_step[step] for step in sorted(by_step)]


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None


def compare_records(one: Sequence[Mapping[str, Any]], two: Sequence[Mapping[str, Any]]) -> list[Comparison]:
    """Compare two runs' steps: the same numbers in the same order, everything recorded equal in all its bits."""
    steps, other_steps = [line["step"] for line in one], [line["step"] for line in two]
    rows = [Comparison(what="steps", count=len(steps), difference=_first_step_off(steps, other_steps))]
    names = dict.fromkeys(name for line in (*one, *two) for name in line if name not in _NOT_COMPARED)
    for name in names:
        difference, step = None, None
        for mine, other in zip(one, two):
            if bits(mine.get(name)) != bits(other.get(name)):
                step = mine["step"]
                difference = f"step {step}: {_different(mine.get(name), other.get(name))}"
                break
        rows.append(Comparison(what=name, count=min(len(one), len(two)), difference=difference, step=step))
    return rows


def _different(mine: Any, other: Any) -> str:
    """Both values; of two dicts, the first key that differs."""
    if isinstance(mine, dict) and isinstance(other, dict):
        key = next(key for key in sorted({*mine, *other}) if bits(mine.get(key)) != bits(other.get(key)))
        return f"{key}: {mine.get(key)!r} and {other.get(key)!r}"
    return f"{mine!r} and {other!r}"


def compare_fingerprints(
    one: Mapping[str, str],
    two: Mapping[str, str],
    required: Collection[str] = (),
    describe: Callable[[str], str] | None = None,
) -> list[Comparison]:
    """Compare two final fingerprints leaf by leaf, one row for each kind of state.

    Args:
        one: Digest by leaf.
        two: Likewise.
        required: Kinds without which the comparison counts as failed.
        describe: Says how a leaf differs; the digests without.
    """
    kinds: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for leaf in sorted({*one, *two}):
        kinds.setdefault(kind_of(leaf), []).append(leaf)
    rows = []
    for kind, leaves in kinds.items():
        off = next((leaf for leaf in leaves if one.get(leaf) != two.get(leaf)), None)
        difference = None
        if off is not None:
            difference = f"{off}: {one.get(off)} and {two.get(off)}" if describe is None else describe(off)
        if not leaves and kind in required:
            difference = "no leaf to compare"
        rows.append(Comparison(what=kind, count=len(leaves), difference=difference))
    return rows


def kind_of(leaf: str) -> str:
    """Which kind of state a leaf belongs to, in the words of the table."""
    if leaf.startswith("model."):
        return "parameters and buffers"
    if ".param_groups." in leaf:
        return "param groups"
    if ".state." in leaf:
        return "step counters" if leaf.endswith(".step") else "moments"
    part = leaf.split(".")[0]
    return {"rng": "random generators", "data": "sampler", "progress": "progress counters"}.get(part, part)


def hint(rows: Sequence[Comparison], went_on_from: Collection[int] = ()) -> str | None:
    """The usual cause of what differs; None when nothing does, or nothing is known of it.

    Args:
        rows: What was compared.
        went_on_from: The steps of the checkpoints from which the killed run went on.
    """
    off = {row.what: row for row in rows if row.difference is not None}
    # `orlop.record` notes a digest of each part, so that its row differs as well.
    if "random generators" in off and off.keys() <= {"random generators", "sampler", "state"}:
        return _SEED_HINT
    counts = {row.what: row.count for row in rows}
    has_streams, has_position = (counts.get(kind) != 0 for kind in ("random generators", "sampler"))
    if has_streams and not has_position and off.keys() & {"random generators", "sampler"}:
        return _NO_POSITION_HINT
    for kind, text in _HINTS:
        if kind in off:
            return _NO_SCHEDULER_HINT if kind == "lr" and not counts.get("scheduler") else text
    loss_hint = _NO_STREAMS_HINT if not has_streams else _LOSS_HINT if has_position else _NO_POSITION_HINT
    # With the right weights and data the first loss after a resume is right, whatever the moments are.
    step = off["loss"].step if "loss" in off else None
    if step is not None and step - 1 in went_on_from:
        return loss_hint
    for kind, text in _LATE_HINTS:
        if kind in off:
            return text
    return loss_hint if "loss" in off else None


def bits(value: Any) -> Any:
    """A value whose `==` compares floats by their bits: NaN equals itself, and -0.0 is not 0.0."""
    if isinstance(value, float):
        return "float", struct.pack(">d", value)
    if isinstance(value, list):
        return [bits(item) for item in value]
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    return type(value).__name__, value


def _first_step_off(steps: Sequence[int], other_steps: Sequence[int]) -> str | None:
    for index in range(max(len(steps), len(other_steps))):
        mine = steps[index] if index < len(steps) else None
        other = other_steps[index] if index < len(other_steps) else None
        if mine != other:
            return f"line {index + 1}: step {mine} and step {other}"
    return None
