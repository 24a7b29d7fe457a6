"""From a partial directory to a published checkpoint, and back out again.

    begin_partial -> (the caller writes data files, then the manifest) -> publish
                                                                        \\-> discard

Owns the order of these operations, which is what makes a checkpoint appear whole or not at all. Must not know
what the files hold. One rank calls `begin_partial`, `publish`, `discard` and `retire`; the others only write
files.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Literal

from orlop.errors import CheckpointExists
from orlop.store import files
from orlop.store.catalog import Unpublished, parse_unpublished, unpublished_name
from orlop.store.manifest import MANIFEST_NAME

# A writer on another host can't be asked whether it lives; one that changed nothing for this long counts as
# dead. Should it live after all, its save fails over a missing file: it publishes nothing that is not whole.
SILENT_SECONDS = 3600.0

# Partial directories that this process is writing now: a later save must not sweep them as strays.
_open_partials: set[Path] = set()


def begin_partial(final: Path) -> Path:
    """Creates the directory beside `final` that a checkpoint is written into, and what is missing above it.

    Raises:
        CheckpointExists: `final` is there already and holds something.
    """
    require_free(final)
    files.make_directory(final.parent)
    partial = final.with_name(_unique_name(final.name, "partial"))
    files.make_directory(partial)
    _open_partials.add(partial)
    return partial


def publish(partial: Path, final: Path) -> None:
    """Makes a finished partial directory visible as `final`, durably: after this a power cut can't undo it.

    The order: data files, the manifest, their directories, the rename, the parent directory. Whoever wrote a
    file may have synced it; here it is done again for all, since a file that is clean already costs next to
    nothing.

    Raises:
        CheckpointExists: Another writer published `final` meanwhile; `partial` is left as it is.
    """
    names = [name for name in files.file_sizes(partial) if name != MANIFEST_NAME]
    for name in names:
        files.fsync_file(partial / name)
    if (partial / MANIFEST_NAME).exists():
        files.fsync_file(partial / MANIFEST_NAME)
    for directory in sorted({(partial / name).parent for name in names} - {partial}, reverse=True):
        files.fsync_directory(directory)
    files.fsync_directory(partial)
    try:
        files.rename(partial, final)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise exists_error(final) from error
        raise
    files.fsync_directory(final.parent)
    _open_partials.discard(partial)


def discard(partial: Path) -> None:
    """Removes a partial directory whose save failed."""
    files.remove_tree(partial)
    _open_partials.discard(partial)


def retire(final: Path) -> None:
    """Removes a published checkpoint; a crash half way leaves no half of it under its final name."""
    retired = final.with_name(_unique_name(final.name, "retired"))
    files.rename(final, retired)
    files.fsync_directory(final.parent)
    files.remove_tree(retired)


def set_aside(final: Path) -> Path:
    """Frees the name of an incomplete checkpoint, keeping what it holds; returns its new path."""
    aside = final.with_name(f"{final.name}.incomplete-{secrets.token_hex(4)}")
    files.rename(final, aside)
    files.fsync_directory(final.parent)
    return aside


def require_free(final: Path) -> None:
    """Raises CheckpointExists when `final` is there and holds something, or is no directory."""
    try:
        occupied = next(final.iterdir(), None) is not None
    except FileNotFoundError:
        return
    except NotADirectoryError:
        occupied = True
    if occupied:
        raise exists_error(final)


def find_strays(directory: Path) -> list[Path]:
    """The partial and retired directories under `directory` whose process is dead, sorted."""
    strays = []
    for name in files.directory_names(directory):
        unpublished = parse_unpublished(name)
        if unpublished is not None and _is_dead(directory / name, unpublished):
            strays.append(directory / name)
    return strays


def _is_dead(path: Path, unpublished: Unpublished) -> bool:
    if path in _open_partials:
        return False
    if unpublished.host != socket.gethostname():
        return time.time() - files.last_change(path) > SILENT_SECONDS
    if unpublished.pid == os.getpid():
        # Not among those open here: an earlier process of the same id left it (common in containers), or a
        # save of this one that could not even clean up.
        return True
    return not _runs(unpublished.pid)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        # Another user's process; or a number that no process can have, in a name that orlop would not make:
        # what can't be shown to be dead stays.
        return True
    return True


def _unique_name(final: str, kind: Literal["partial", "retired"]) -> str:
    return unpublished_name(
        final, kind=kind, host=socket.gethostname(), pid=os.getpid(), token=secrets.token_hex(4)
    )


def exists_error(final: Path) -> CheckpointExists:
    """The error for a save whose name is taken."""
    return CheckpointExists(
        "A checkpoint stands there already; orlop never writes over one.",
        where=str(final),
        todo="save under another name, or remove it first",
    )
