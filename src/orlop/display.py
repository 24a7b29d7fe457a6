"""What a person at a terminal sees of a run. Must not touch what the run computes, its random streams included."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from orlop.store.metrics import StepRecord


@contextmanager
def progress_bar(wanted: bool, total_steps: int) -> Iterator[Callable[[StepRecord], None]]:
    """A progress bar on a terminal; elsewhere nothing is shown."""
    # Importing rich draws from Python's random stream: a run must not depend on who imports it first.
    stream = random.getstate()
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    random.setstate(stream)
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    bar = Progress(*columns, console=console, disable=not (wanted and console.is_terminal))
    with bar:
        task = bar.add_task("", total=total_steps)
        yield lambda record: bar.update(task, completed=record.step, description=f"loss {record.loss:.4f}")
