"""From a partial directory to a published checkpoint, and back out again.

    begin_partial -> (the caller writes data files, then the manifest) -> publish
                                                                        \\-> discard

Owns the order of these operations, which is what makes a checkpoint appear whole or not at all. Must not know
what the files hold. One rank calls `begin_partial`, `publish`, `discard` and `retire`; the others only write
files.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
import time
from pathlib import Path

from orlop.errors import CheckpointExists, RootNotShared, StorageFull
from orlop.store import files, owned
from orlop.store.manifest import MANIFEST_NAME
from orlop.wording import counted

# How long another node's client may show an old listing of a directory (NFS: 60 s by default).
VISIBLE_SECONDS = 65.0
_LOOK_SECONDS = 0.05
# What a checkpoint needs beside its tensors' bytes: plain parts, metadata, the file system's own books.
_SLACK_BYTES = 2**20


def begin_partial(final: Path) -> Path:
    """Creates the directory beside `final` that a checkpoint is written into, and what is missing above it.

    Raises:
        CheckpointExists: `final` is there already and holds something.
    """
    require_free(final)
    files.make_directory(final.parent)
    partial = owned.claim(final, "partial")
    try:
        files.make_directory(partial)
    except BaseException:
        # Its name may not be durable, but it may be there.
        with contextlib.suppress(OSError):
            discard(partial)
        raise
    return partial


def require_visible(partial: Path) -> None:
    """Waits until this process sees the directory that the coordinator made; its unique name is the token.

    Raises:
        RootNotShared: It does not appear: this node looks at another file system, or from another directory.
    """
    deadline = time.monotonic() + VISIBLE_SECONDS
    while not files.is_directory(partial):
        if time.monotonic() > deadline:
            raise RootNotShared(
                "The checkpoint directory is not shared between all ranks.",
                where=f"host {socket.gethostname()}, {partial.parent.absolute()}",
                expected=f"the directory {partial.name}, which the coordinator made",
                found=f"no such directory within {VISIBLE_SECONDS:.0f} s",
                todo="give all ranks one absolute path on a file system that all nodes mount",
            )
        time.sleep(_LOOK_SECONDS)


def require_space(directory: Path, needed: int) -> None:
    """Refuses a checkpoint that can't fit, before its first byte is written.

    Args:
        directory: Where the checkpoint is to be written.
        needed: Bytes of its tensors.

    Raises:
        StorageFull: The file system has less than that left, or does after its usual extras.
    """
    free = files.free_bytes(directory)
    if free is not None and free < needed + _SLACK_BYTES:
        raise StorageFull(
            "There is not enough space for the checkpoint.",
            where=str(directory),
            expected=counted(needed + _SLACK_BYTES, "byte") + " free",
            found=counted(free, "byte") + " free",
            todo="make room, or keep fewer checkpoints; none was removed",
        )


def publish(partial: Path, final: Path) -> None:
    """Makes a finished partial directory visible as `final`, durably: after this a power cut can't undo it.

    The order: data files, the manifest, their directories, the rename, the parent directory. Whoever wrote a
    file may have synced it; here it is done again for all, since a file that is clean already costs next to
    nothing. When it fails, the name `final` is free again.

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
    try:
        files.fsync_directory(final.parent)
    except BaseException:
        # A save that fails publishes nothing: what nobody was told of must not take the step's name.
        files.rename(final, partial)
        raise
    owned.disclaim(partial)


def discard(partial: Path) -> None:
    """Removes a partial directory whose save failed; what can't be removed, the next save sweeps."""
    owned.disclaim(partial)
    files.remove_tree(partial)


def retire(final: Path) -> None:
    """Removes a published checkpoint; a crash half way leaves no half of it under its final name."""
    retired = owned.claim(final, "retired")
    try:
        files.rename(final, retired)
        files.fsync_directory(final.parent)
        files.remove_tree(retired)
    finally:
        owned.disclaim(retired)


def set_aside(final: Path, why: str = "incomplete") -> Path:
    """Frees the name of a checkpoint that can't be resumed from, keeping what it holds; returns its new path."""
    aside = final.with_name(f"{final.name}.{why}-{secrets.token_hex(4)}")
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
        occupied = final.exists()  # or something above it is a file: to make its directory will say so
    if occupied:
        raise exists_error(final)


def exists_error(final: Path | str) -> CheckpointExists:
    """The error for a save whose name is taken."""
    return CheckpointExists(
        "A checkpoint stands there already; orlop never writes over one.",
        where=str(final),
        todo="save under another name, or remove it first",
    )
