"""`orlop.record`: what a script with a training loop of its own leaves for a drill to compare.

Owns the two files that it writes. `orlop.Trainer` keeps its own records and needs none of this. Needs torch.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

from orlop.state.fingerprint import fingerprint
from orlop.state.parts import Live
from orlop.state.plain import digest
from orlop.store import files

__all__ = ["record"]

RECORDS_NAME = "records.jsonl"
FINGERPRINT_NAME = "fingerprint.json"


def record(step: int, engine: Live, *, run: str | os.PathLike[str], **values: float) -> None:
    """Note the state after a step, for `orlop drill`; collective, changes nothing.

    It reads all state once, so it is meant for drills, not for long runs.

    Args:
        step: The step that is done, counted from the start of the training.
        engine: Whose state.
        run: The run's directory, `{run}` of the drill's command.
        **values: What else is to be compared bit for bit: the loss, say.
    """
    found = fingerprint(engine)

    def write() -> None:
        root = Path(run)
        parts: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for leaf, value in found.leaves.items():
            parts[leaf.partition(".")[0]][leaf] = value
        line = {"step": step, **values, "state": {part: digest(leaves) for part, leaves in parts.items()}}
        files.make_directory(root)
        # A line begins with its newline: after a torn one, the next still stands by itself.
        files.append_file(root / RECORDS_NAME, b"\n" + json.dumps(line).encode() + b"\n")
        state = {"step": step, "leaves": dict(found.leaves)}
        files.replace_file(root / FINGERPRINT_NAME, json.dumps(state).encode())

    engine.ranks.on_coordinator("record a step", write)
