"""A run's directory as rows: each checkpoint, what state it is in, and which one a resume would take.

Owns the states' words. What makes a checkpoint complete is decided in `store.catalog`, what makes it sound in `check`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from orlop.errors import CheckpointIncomplete, CheckpointNotFound
from orlop.store import files
from orlop.store.catalog import parse_step, parse_unpublished
from orlop.store.listing import Checkpoint
from orlop.store.objects import Url, locate
from orlop.tools.check import check_checkpoint
from orlop.tools.opened import find_checkpoints

if TYPE_CHECKING:
    from datetime import datetime

__all__ = ["RunRow", "State", "list_run"]

State = Literal["complete", "verified", "incomplete", "damaged", "too new", "partial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One checkpoint of a run, or what a save that is not over (or died) has left.

    Attributes:
        step: From its name.
        path: The directory.
        state: `complete` by its files and their sizes; `verified` when every byte was checked as well; `partial` while
            it is being written, or when its writer died.
        reason: Why it is not complete, or what is damaged; empty otherwise.
        created: When it was written, where the manifest tells.
        nbytes: Of all its files.
        world_size: Ranks that wrote it, where the manifest tells.
        torch_version: Of the writer, where the manifest tells.
        is_next: Whether a resume would take this one.
    """

    step: int
    path: Path | Url
    state: State
    reason: str = ""
    created: datetime | None = None
    nbytes: int = 0
    world_size: int | None = None
    torch_version: str | None = None
    is_next: bool = False


def list_run(
    run: str | os.PathLike[str],
    *,
    verify: bool = False,
    on_checkpoint: Callable[[str], None] | None = None,
) -> list[RunRow]:
    """The checkpoints of a run, by ascending step.

    Args:
        run: Its directory.
        verify: Whether every byte of the complete ones is checked.
        on_checkpoint: Told the name of each one before it is verified.

    Raises:
        CheckpointNotFound: There are none, or it is a checkpoint itself.
    """
    location = locate(run)
    try:
        found = find_checkpoints(run)
    except CheckpointNotFound:
        left = _partial(location)
        if not left:
            raise
        return left  # the first save is under way, or died
    rows: list[RunRow] = []
    for each in found:
        if verify and each.fault is None and on_checkpoint is not None:
            on_checkpoint(each.name)
        rows.append(_row(each, verify))
    return sorted(_with_next(rows) + _partial(location), key=lambda row: (row.step, row.state == "partial"))


def _row(found: Checkpoint, verify: bool) -> RunRow:
    state, reason = _state(found, verify)
    manifest = found.manifest
    return RunRow(
        step=found.step,
        path=found.path,
        state=state,
        reason=reason,
        created=None if manifest is None else manifest.created,
        nbytes=found.size,
        world_size=None if manifest is None else manifest.world_size,
        torch_version=None if manifest is None else manifest.torch_version,
    )


def _state(found: Checkpoint, verify: bool) -> tuple[State, str]:
    if found.fault is not None:
        state: State = "too new"
        if found.skippable:
            state = "incomplete" if isinstance(found.fault, CheckpointIncomplete) else "damaged"
        return state, found.fault.found or found.fault.what
    if not verify:
        return "complete", ""
    faults = [finding for finding in check_checkpoint(found.path).findings if finding.is_fault]
    if not faults:
        return "verified", ""
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return "damaged", f"{faults[0]}{more}"


def _with_next(rows: list[RunRow]) -> list[RunRow]:
    """Marks the newest one that is complete; one too new for this orlop ends the search, as it does in a resume."""
    for number in reversed(range(len(rows))):
        row = rows[number]
        if row.state == "too new":
            break
        if row.state in ("complete", "verified"):
            rows[number] = replace(row, is_next=True)
            break
    return rows


def _partial(run: Path | Url) -> list[RunRow]:
    rows: list[RunRow] = []
    if isinstance(run, Url) or not files.is_directory(run):
        return rows
    for name in files.directory_names(run):
        unpublished = parse_unpublished(name)
        if unpublished is None or unpublished.kind != "partial":
            continue
        step = parse_step(unpublished.final)
        if step is not None:
            nbytes = sum(files.file_sizes(run / name).values())
            reason = f"being written, or left by process {unpublished.pid} on {unpublished.host}"
            rows.append(RunRow(step=step, path=run / name, state="partial", reason=reason, nbytes=nbytes))
    return rows
