"""Decides, from names and sizes alone: which step a name stands for, what is complete, what has expired.

Pure: no file is touched here. Must not know how the names and sizes were found.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, cast

from orlop.wording import counted

METADATA_NAME = ".metadata"  # DCP writes it last, so it stands for "DCP has finished"

Kind = Literal["partial", "retired", "reading"]

_STEP = re.compile(r"step-([0-9]+)")
_UNPUBLISHED = re.compile(
    r"(?P<final>.+)\.(?P<kind>partial|retired|reading)-(?P<host>.+)-(?P<pid>[0-9]+)-[0-9a-f]{8}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpublished:
    """A directory that stands beside a checkpoint and is none itself, read from its name.

    Attributes:
        final: The checkpoint's name.
        kind: `partial` is being written, `retired` is being removed, `reading` says that a process reads it.
        host: Where its process runs.
        pid: That process.
    """

    final: str
    kind: Kind
    host: str
    pid: int


def step_name(step: int) -> str:
    """The directory name of a step's checkpoint; eight digits, so that names sort as their steps do."""
    if step < 0:
        raise ValueError(f"a step can't be negative: {step}")
    return f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """The step of a checkpoint's directory name, however it is padded; None for every other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def unpublished_name(final: str, *, kind: Kind, host: str, pid: int, token: str) -> str:
    """The name of a directory that stands beside a checkpoint for what one process does with it."""
    return f"{final}.{kind}-{host}-{pid}-{token}"


def parse_unpublished(name: str) -> Unpublished | None:
    """Reads such a name back; None for a name that orlop does not make."""
    match = _UNPUBLISHED.fullmatch(name)
    if match is None:
        return None
    kind = cast("Kind", match["kind"])
    return Unpublished(final=match["final"], kind=kind, host=match["host"], pid=int(match["pid"]))


def expired(
    steps: Collection[int], *, published: int, keep_last: int | None, keep_every: int | None
) -> list[int]:
    """The steps whose checkpoints may go, oldest first.

    Args:
        steps: Of all complete checkpoints; an incomplete one must not take the place of one that loads.
        published: The step that was just published; it stays, and so does the newest.
        keep_last: How many of the newest stay; None keeps all.
        keep_every: Multiples of this stay for good.
    """
    if keep_last is None:
        return []
    ordered = sorted(steps)
    kept = {published, *ordered[-keep_last:]}
    if keep_every is not None:
        kept.update(step for step in ordered if step % keep_every == 0)
    return [step for step in ordered if step not in kept]


def why_incomplete(present: Mapping[str, int], listed: Mapping[str, int] | None) -> str | None:
    """Why a directory is no complete checkpoint; None when it is one.

    Args:
        present: The files that are there, with their sizes in bytes.
        listed: The files that its manifest promises; None for a checkpoint that plain DCP wrote.
    """
    if not present:
        return "it is empty"
    if all(name.endswith(".tmp") for name in present):
        return f"it holds only temporary files ({', '.join(sorted(present))})"
    if METADATA_NAME not in present:
        return f"{METADATA_NAME} is missing"
    if present[METADATA_NAME] == 0:
        return f"{METADATA_NAME} has no content"
    for name, size in (listed or {}).items():
        if name not in present:
            return f"{name} is missing"
        if present[name] != size:
            return f"{name} has {counted(present[name], 'byte')} instead of {size:,}"
    return None
