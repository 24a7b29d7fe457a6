"""`metrics.jsonl`: one line per training step, none twice and none missing when a run is resumed.

Owns the lines' form and how the file follows a resume. Must not know where the numbers come from.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from orlop.store import files


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One training step in numbers, the same on every rank but for `seconds`.

    Attributes:
        step: Which step, from 1.
        loss: Mean over the ranks of their mean losses, summed in rank order in double precision.
        grad_norm: Total norm over all ranks before clipping.
        lr: What each param group stepped with, groups in order (optimizer after optimizer).
        tokens: Seen by all ranks since the start of the run, this step's included.
        seconds: This rank's wall time of the step, saving not included.
        skipped: Whether the optimizer refused the step (norm not finite, or over the threshold).
    """

    step: int
    loss: float
    grad_norm: float
    lr: list[float]
    tokens: int
    seconds: float
    skipped: bool


class MetricsLog:
    """The file of `StepRecord` lines: JSON objects, floats in the shortest form that gives the same bits.

    Not-a-number and infinity are written as `NaN` and `Infinity`, as Python's `json` reads them.

    Args:
        path: The file; it and its directory are created when needed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: StepRecord) -> None:
        """Adds one line; durable after `make_durable`."""
        files.append_file(self.path, json.dumps(asdict(record)).encode() + b"\n")

    def make_durable(self) -> None:
        """Syncs the file and its name; to be called before the checkpoint that goes with it is published."""
        if self.path.exists():
            files.fsync_file(self.path)
            files.fsync_directory(self.path.parent)

    def rewind(self, step: int) -> None:
        """Drops the lines of later steps and a torn last line, so that the run can go on after `step`.

        The file is replaced as a whole, and only when there is something to drop.
        """
        files.make_directory(self.path.parent)
        if not self.path.exists():
            return
        content = files.read_file(self.path)
        kept = b"".join(line for line in content.splitlines(keepends=True) if _belongs(line, step))
        if kept != content:
            files.replace_file(self.path, kept)


def _belongs(line: bytes, last_step: int) -> bool:
    """Whether a line is whole and not of a step that is still to come."""
    if not line.endswith(b"\n"):
        return False
    try:
        return bool(json.loads(line)["step"] <= last_step)
    except (ValueError, LookupError, TypeError):
        return False
