"""Whether two runs were the same, bit for bit: their metrics step by step, their final state leaf by leaf.

Pure but for reading the two files that a run leaves: `metrics.jsonl` and `fingerprint.json`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METRICS = ("loss", "grad_norm", "lr", "tokens")
# What an exact resume must bring back; a fingerprint that lacks one of these proves nothing.
KINDS = ("parameters and buffers", "moments", "step counters", "random generators", "sampler")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One row of the table.

    Attributes:
        what: What was compared.
        count: In how many places.
        difference: The first place that differs, with both values; None when none does.
    """

    what: str
    count: int
    difference: str | None


def read_metrics(path: Path, last: int | None = None) -> list[dict[str, Any]]:
    """The lines (or the `last` of them) of a `metrics.jsonl`; none without the file.

    A line at the end that is still being written is left out.
    """
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    whole = text[: text.rfind("\n") + 1].splitlines()
    return [json.loads(line) for line in (whole if last is None else whole[-last:])]


def compare_metrics(one: Sequence[Mapping[str, Any]], two: Sequence[Mapping[str, Any]]) -> list[Comparison]:
    """Compares two runs' steps: the same numbers in the same order, each metric equal in all its bits."""
    steps, other_steps = [line["step"] for line in one], [line["step"] for line in two]
    rows = [Comparison(what="steps", count=len(steps), difference=_first_step_off(steps, other_steps))]
    for metric in METRICS:
        difference = None
        for mine, other in zip(one, two):
            if bits(mine[metric]) != bits(other[metric]):
                difference = f"step {mine['step']}: {mine[metric]!r} and {other[metric]!r}"
                break
        rows.append(Comparison(what=metric, count=min(len(one), len(two)), difference=difference))
    return rows


def compare_fingerprints(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[Comparison]:
    """Compares two final fingerprints leaf by leaf, one row for each kind of state.

    A kind of `KINDS` without any leaf counts as a difference.
    """
    mine, other = one["leaves"], two["leaves"]
    kinds: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for leaf in sorted({*mine, *other}):
        kinds.setdefault(kind_of(leaf), []).append(leaf)
    rows = []
    for kind, leaves in kinds.items():
        off = next((leaf for leaf in leaves if mine.get(leaf) != other.get(leaf)), None)
        difference = None if off is None else f"{off}: {mine.get(off)} and {other.get(off)}"
        if not leaves:
            difference = "no leaf to compare"
        rows.append(Comparison(what=kind, count=len(leaves), difference=difference))
    difference = None if one["total"] == two["total"] else f"{one['total']} and {two['total']}"
    return [*rows, Comparison(what="whole state", count=1, difference=difference)]


def kind_of(leaf: str) -> str:
    """Which kind of state a leaf belongs to, in the words of the table."""
    if leaf.startswith("model."):
        return "parameters and buffers"
    if leaf.startswith("optimizer.state."):
        return "step counters" if leaf.endswith(".step") else "moments"
    if leaf.startswith("optimizer."):
        return "param groups"
    part = leaf.split(".")[0]
    return {"rng": "random generators", "data": "sampler", "progress": "progress counters"}.get(part, part)


def bits(value: Any) -> Any:
    """A value whose `==` compares floats by their bits: NaN equals itself, and -0.0 is not 0.0."""
    if isinstance(value, float):
        return "float", struct.pack(">d", value)
    if isinstance(value, list):
        return [bits(item) for item in value]
    return type(value).__name__, value


def _first_step_off(steps: Sequence[int], other_steps: Sequence[int]) -> str | None:
    for index in range(max(len(steps), len(other_steps))):
        mine = steps[index] if index < len(steps) else None
        other = other_steps[index] if index < len(other_steps) else None
        if mine != other or mine != index + 1:
            return f"line {index + 1}: step {mine} and step {other}"
    return None
