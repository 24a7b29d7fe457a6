"""Reads a run's directory: which checkpoints stand there, and which of them are complete.

Owns the walk from a root to its `Checkpoint` entries; what makes one complete is decided in `catalog`. Opens
no data file and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from orlop.errors import CheckpointCorrupt, CheckpointError, CheckpointIncomplete
from orlop.store import files
from orlop.store.catalog import parse_step, step_name, why_incomplete
from orlop.store.manifest import MANIFEST_NAME, Manifest, read_manifest
from orlop.store.objects import Url


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A directory with a checkpoint's name.

    Attributes:
        step: From its name.
        path: The directory.
        size: Bytes of all its files.
        manifest: None when plain DCP wrote it, or when it can't be read (then `fault` says so).
        fault: Why it can't be resumed from; None when it is complete.
    """

    step: int
    path: Path | Url
    size: int
    manifest: Manifest | None
    fault: CheckpointError | None

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.name

    @property
    def skippable(self) -> bool:
        """Whether an automatic resume may pass over it: half there or damaged, but not merely too new."""
        return isinstance(self.fault, (CheckpointIncomplete, CheckpointCorrupt))


def read_checkpoint(path: Path, step: int) -> Checkpoint:
    """Reads one directory's entry. A directory that vanishes meanwhile reads as an empty one."""
    return judge(path, step, lambda: read_manifest(path), lambda: _sizes(path))


def judge(
    path: Path | Url,
    step: int,
    read: Callable[[], Manifest | None],
    look: Callable[[], Mapping[str, int]],
    *,
    needs_manifest: bool = False,
) -> Checkpoint:
    """The entry of one checkpoint, wherever it is.

    Args:
        path: Where.
        step: From its name.
        read: Reads its manifest; None when there is none.
        look: Gives the files that are there, with their sizes in bytes.
        needs_manifest: Whether only a manifest shows that the checkpoint was finished.
    """
    manifest: Manifest | None = None
    fault: CheckpointError | None = None
    try:
        manifest = read()
    except CheckpointError as error:
        fault = error
    except OSError as error:
        fault = CheckpointCorrupt("A manifest can't be read.", where=str(path), found=str(error))
    sizes = look()
    reason = why_incomplete(sizes, manifest.files if manifest is not None else None)
    if reason is None and manifest is None and needs_manifest:
        reason = f"{MANIFEST_NAME} is missing: it was never finished, or orlop did not write it"
    if fault is None and reason is not None:
        fault = CheckpointIncomplete(
            "A checkpoint is not complete.",
            where=str(path),
            found=reason,
            todo="resume from another step; remove the directory when nobody writes it any more",
        )
    return Checkpoint(step=step, path=path, size=sum(sizes.values()), manifest=manifest, fault=fault)


def list_checkpoints(root: Path) -> list[Checkpoint]:
    """Every checkpoint right under `root`, complete or not, by ascending step; none without `root`."""
    found: dict[int, str] = {}
    for name in files.directory_names(root):
        step = parse_step(name)
        # `step-12` and `step-00000012` are one step: the name that orlop itself gives wins.
        if step is not None and found.get(step) != step_name(step):
            found[step] = name
    return [read_checkpoint(root / found[step], step) for step in sorted(found)]


def _sizes(path: Path) -> dict[str, int]:
    try:
        return files.file_sizes(path)
    except FileNotFoundError:
        return {}
