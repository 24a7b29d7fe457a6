"""Every byte that orlop itself puts on disk goes through here: open, write, fsync, rename, remove.

Owns the file operations and the order inside each of them. Must not know what a checkpoint is. Each operation
that changes the disk, or makes a change durable, first tells the observers (`observed`): that is the one seam
through which a test records the order, refuses an operation, or ends the process at a chosen instant.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# What a file system that can't fsync a directory answers (some FUSE and network mounts); they give no
# ordering to wait for, and refusing to save there would help nobody.
_NO_DIRECTORY_FSYNC = frozenset({errno.EINVAL, errno.ENOTSUP})


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One change to the disk, about to happen.

    Attributes:
        kind: What is done.
        path: The file or directory that it is done to.
        target: The new name, for a rename.
        data: The bytes, for a write or an append.
    """

    kind: Literal["make", "write", "append", "fsync", "rename", "remove"]
    path: Path
    target: Path | None = None
    data: bytes | None = None


Observer = Callable[[Operation], None]
_observers: list[Observer] = []


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Within the block, `observer` is called just before every operation of this process; it may raise."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def _announce(
    kind: Literal["make", "write", "append", "fsync", "rename", "remove"],
    path: Path,
    *,
    target: Path | None = None,
    data: bytes | None = None,
) -> None:
    for observer in tuple(_observers):
        observer(Operation(kind=kind, path=path, target=target, data=data))


def make_directory(path: Path) -> None:
    """Creates `path` and what is missing above it, durably; an existing directory is left alone."""
    if path.is_dir():
        return
    make_directory(path.parent)
    _announce("make", path)
    path.mkdir(exist_ok=True)
    fsync_directory(path.parent)


def write_file(path: Path, data: bytes) -> None:
    """Writes a whole file and fsyncs it; its directory entry is durable after `fsync_directory`."""
    _announce("write", path, data=data)
    with path.open("wb") as file:
        file.write(data)
    fsync_file(path)


def replace_file(path: Path, data: bytes) -> None:
    """Gives `path` a new content as a whole: a reader, or a crash, sees the old one or the new one."""
    fresh = path.with_name(f"{path.name}.new-{os.getpid()}")
    write_file(fresh, data)
    _announce("rename", fresh, target=path)
    fresh.replace(path)
    fsync_directory(path.parent)


def append_file(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Adds `data` at the end in one write, and fsyncs when `durable`; creates the file when it is missing."""
    _announce("append", path, data=data)
    with path.open("ab", buffering=0) as file:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]
    if durable:
        fsync_file(path)


def read_file(path: Path) -> bytes:
    """The whole content of a file."""
    return path.read_bytes()


def fsync_file(path: Path) -> None:
    """Makes a file's content durable, whoever wrote it."""
    _announce("fsync", path)
    # fsync acts on the file, not on the descriptor: a read-only one serves, and needs no write permission.
    _fsync(path, os.O_RDONLY)


def fsync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    _announce("fsync", path)
    try:
        _fsync(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_FSYNC:
            raise


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Renames within one file system, atomically; a directory never replaces one that holds anything."""
    _announce("rename", old, target=new)
    old.rename(new)


def remove_tree(path: Path) -> None:
    """Removes a directory and all it holds; nothing there is no error."""
    _announce("remove", path)
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        # Somebody else (an earlier clean-up that still runs) removed a part under our hands: finish the rest.
        shutil.rmtree(path, ignore_errors=True)


def directory_names(path: Path) -> list[str]:
    """The names of the directories right under `path`, sorted; none when `path` is not there."""
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())
    except FileNotFoundError:
        return []


def file_sizes(directory: Path) -> dict[str, int]:
    """Bytes of every file under `directory`, by its name relative to it (with `/`), sorted."""
    found = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in sorted(found)}


def last_change(directory: Path) -> float:
    """When anything in `directory` last changed, in seconds since the epoch; 0.0 when it is gone."""
    latest = 0.0
    for path in (directory, *directory.rglob("*")):
        try:
            latest = max(latest, path.stat().st_mtime)
        except FileNotFoundError:
            continue
    return latest
