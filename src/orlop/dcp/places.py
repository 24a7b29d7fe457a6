"""What stands at a path where a checkpoint, or a run of them, was looked for and is not.

Owns the words of these errors: what is there instead, and what to give. Must not know torch; opens no file.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from orlop.dcp.contents import METADATA_NAME
from orlop.errors import CheckpointError, CheckpointNotFound, OrlopError
from orlop.store import files
from orlop.store.catalog import parse_step, parse_unpublished
from orlop.store.listing import Checkpoint
from orlop.store.manifest import MANIFEST_NAME
from orlop.store.objects import RemoteDirectory, Url
from orlop.store.roots import root_at

__all__ = ["checkpoints_at", "holds_checkpoint", "no_checkpoint", "no_run", "nothing_there", "reached"]

_SHOWN = 5
_NAMES = (METADATA_NAME, MANIFEST_NAME)
_PATTERNS = (*_NAMES, "*.distcp", "__*.index.json")  # not safetensors' own index
_READS = "orlop reads directories that torch.distributed.checkpoint wrote: .metadata and *.distcp"


@contextmanager
def reached(location: Path | Url) -> Iterator[None]:
    """Whatever the package of an object store raises becomes one error that names the address.

    Raises:
        CheckpointError: The address can't be read.
    """
    try:
        yield
    except (OrlopError, OSError):
        raise
    except Exception as error:
        # Unknown schemes, packages that are missing, credentials: each package has its own classes for them.
        if not isinstance(location, Url):
            raise
        said = str(error).splitlines() or [""]
        raise CheckpointError(
            "this address can't be read", where=str(location), found=f"{type(error).__name__}: {said[0]}"
        ) from error


def holds_checkpoint(location: Path | Url) -> bool:
    """Whether that is meant to be one checkpoint, whole or not: by its name, or by the files in it."""
    if isinstance(location, Url):
        names = RemoteDirectory(location).sizes()
        here = (name for name in names if "/" not in name)
        return (bool(names) and _is_named_as_one(location.name)) or any(
            fnmatchcase(name, pattern) for name in here for pattern in _PATTERNS
        )
    if not files.is_directory(location):
        return False
    return _is_named_as_one(location.name) or any(
        next(location.glob(pattern), None) is not None for pattern in _PATTERNS
    )


def _is_named_as_one(name: str) -> bool:
    unpublished = parse_unpublished(name)
    return parse_step(name if unpublished is None else unpublished.final) is not None


def checkpoints_at(location: Path | Url) -> list[Checkpoint]:
    """The checkpoints of a run, by ascending step; none of what is no directory."""
    is_there = isinstance(location, Url) or files.is_directory(location)
    return root_at(location).checkpoints() if is_there else []


def no_checkpoint(location: Path | Url) -> CheckpointNotFound:
    """The error for a path that is no checkpoint: what it is, and what to give instead.

    Raises:
        OSError: It can't be looked at.
    """
    steps = checkpoints_at(location)
    if steps:
        newest = next((each for each in reversed(steps) if each.fault is None), steps[-1])
        return CheckpointNotFound(
            "this is a run's directory, not one checkpoint",
            where=str(location),
            found=("step " if len(steps) == 1 else "steps ")
            + _listed([str(each.step) for each in reversed(steps)]),
            todo=f"give one of them, such as {newest.path}",
        )
    return _nothing(location)


def no_run(location: Path | Url) -> CheckpointNotFound:
    """The error for a path that is no run with checkpoints.

    Raises:
        OSError: It can't be looked at.
    """
    if holds_checkpoint(location):
        return CheckpointNotFound(
            "this is a checkpoint, not a run's directory of checkpoints",
            where=str(location),
            todo=f"give the directory above it; `orlop inspect {location}` shows what it holds",
        )
    return _nothing(location)


def nothing_there(location: Path) -> CheckpointNotFound:
    """The error for a path at which there is nothing, with what the nearest directory above it holds."""
    above = next(path for path in location.absolute().parents if files.is_directory(path))
    return CheckpointNotFound(
        "there is no such directory",
        where=str(location),
        found=f"{above}, which holds {_listed(files.directory_names(above)) or 'no directory'}",
        todo="give the directory of a checkpoint",
    )


def _nothing(location: Path | Url) -> CheckpointNotFound:
    if isinstance(location, Path):
        try:
            is_directory = stat.S_ISDIR(location.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return CheckpointNotFound("there is no such directory", where=str(location))
        if not is_directory:
            inside = holds_checkpoint(location.parent)
            todo = f"give the directory that it is in: {location.parent}" if inside else _READS
            return CheckpointNotFound("this is a file, not a directory", where=str(location), todo=todo)
    below, others = _below(location)
    todo = f"give one of these: {_listed(below)}" if below else _READS
    what = "there is no checkpoint in this directory"
    return CheckpointNotFound(what, where=str(location), found=_listed(others) or "nothing", todo=todo)


def _below(location: Path | Url) -> tuple[list[str], list[str]]:
    """The checkpoints in the two levels below, and the names right below."""
    if isinstance(location, Url):
        names = [name.split("/") for name in RemoteDirectory(location).sizes()]
        found = {"/".join(parts[:-1]) for parts in names if parts[-1] in _NAMES and 1 < len(parts) <= 3}
        return [str(location / name) for name in sorted(found)], sorted({parts[0] for parts in names})
    files.directory_names(location)  # raises where a glob would be silent
    paths = {
        path.parent
        for name in _NAMES
        for pattern in (f"*/{name}", f"*/*/{name}")
        for path in location.glob(pattern)
    }
    return [str(path) for path in sorted(paths)], sorted(path.name for path in location.iterdir())


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
