"""When each window travelled and was stepped, and the picture of it.

Owns: spans of one step and their rendering as a Chrome trace. Must not know: how they were measured.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Lane = Literal["up", "compute", "down"]
LANES: tuple[Lane, ...] = ("up", "compute", "down")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One piece of work of one step.

    Attributes:
        lane: `up` (host to device), `compute` (the class's own update) or `down` (device to host).
        window: Which window, from 0.
        begin_seconds: Since the step began.
        end_seconds: Since the step began.
        nbytes: Bytes that travelled; for `compute`, bytes of state that were on the device for it.
    """

    lane: Lane
    window: int
    begin_seconds: float
    end_seconds: float
    nbytes: int


def busy_seconds(spans: Sequence[Span]) -> dict[Lane, float]:
    """How long each lane was at work."""
    return {lane: sum(s.end_seconds - s.begin_seconds for s in spans if s.lane == lane) for lane in LANES}


def wall_seconds(spans: Sequence[Span]) -> float:
    """From the first begin to the last end; 0 without spans."""
    if not spans:
        return 0.0
    return max(s.end_seconds for s in spans) - min(s.begin_seconds for s in spans)


def link_share(spans: Sequence[Span]) -> float | None:
    """How near a step came to the link's limit: the time that its bytes need at the best rate seen, over the
    time it took.

    The limit is measured, not looked up: each direction's is that of its fastest window. None where nothing
    travelled."""
    needed = []
    for lane in ("up", "down"):
        mine = [s for s in spans if s.lane == lane and s.nbytes and s.end_seconds > s.begin_seconds]
        if mine:
            best = max(s.nbytes / (s.end_seconds - s.begin_seconds) for s in mine)
            needed.append(sum(s.nbytes for s in mine) / best)
    return max(needed) / wall_seconds(spans) if needed else None


def chrome_trace(spans: Sequence[Span]) -> str:
    """The spans as JSON that chrome://tracing and Perfetto open: one row per lane, one slice per window."""
    rows = {lane: number for number, lane in enumerate(LANES)}
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": rows[lane], "args": {"name": lane}}
        for lane in LANES
    ]
    events += [
        {
            "name": f"window {span.window}",
            "cat": span.lane,
            "ph": "X",
            "pid": 0,
            "tid": rows[span.lane],
            "ts": span.begin_seconds * 1e6,
            "dur": (span.end_seconds - span.begin_seconds) * 1e6,
            "args": {"bytes": span.nbytes},
        }
        for span in spans
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
