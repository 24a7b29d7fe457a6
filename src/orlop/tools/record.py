"""`orlop.record`: what a script with a training loop of its own leaves for a drill to compare.

Owns the two files that it writes. `orlop.Trainer` keeps its own records and needs none of this. Needs torch.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

from orlop.arguments import require_count, require_engine, require_path
from orlop.state.fingerprint import fingerprint
from orlop.state.parts import Live
from orlop.state.plain import digest
from orlop.store import files
from orlop.tools.drill.runs import FINGERPRINT_NAME, RECORDS_NAME, RUN_VARIABLE

__all__ = ["record"]


def record(step: int, engine: Live, *, run: str | os.PathLike[str] | None = None, **values: float) -> None:
    """Note the state after a step, for `orlop drill`; does nothing outside of one, and changes nothing.

    In a drill it is collective, and reads all state once.

    Args:
        step: The step that is done, counted from the start of the training.
        engine: Whose state.
        run: Where to note it, in a drill or not; by default in the run directory of the drill that started this
            process, `{run}` of its command.
        **values: What else is to be compared bit for bit: the loss, say.
    """
    require_count("step", step)
    require_engine(engine)
    if run is not None:
        require_path("run", run)
    # No setting: in this way a drill tells the processes that it starts, through torchrun and other launchers.
    directory = os.environ.get(RUN_VARIABLE) if run is None else run
    if directory is None:
        return
    found = fingerprint(engine)

    def write() -> None:
        root = Path(directory)
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
