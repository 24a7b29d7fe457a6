"""Every byte that orlop itself puts on disk goes through here: open, write, fsync, rename, remove.

Owns the file operations and the order inside each of them; all of them survive signals and short writes. Must not
know what a checkpoint is. Each operation that changes the disk, or makes a change durable, is first told to the
observers (`observed`, see `operations`).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from orlop.store.operations import Observer as Observer
from orlop.store.operations import Operation, naming, perform
from orlop.store.operations import observed as observed

# What a file system that can't fsync a directory answers (some FUSE and network mounts); they give no
# ordering to wait for, and refusing to save there would help nobody.
_NO_DIRECTORY_FSYNC = frozenset({errno.EINVAL, errno.ENOTSUP})


# -- changes -----------------------------------------------------------------------------------------------


def make_directory(path: Path) -> None:
    """Creates `path` and what is missing above it, durably; an existing directory is left alone."""
    if path.is_dir():
        return
    make_directory(path.parent)
    perform(Operation(kind="make", path=path), lambda _: path.mkdir(exist_ok=True))
    fsync_directory(path.parent)


def mark(path: Path) -> None:
    """Creates one empty directory, whose name says it all; a crash may undo it."""
    perform(Operation(kind="make", path=path), lambda _: path.mkdir())


class NewFile:
    """A file that is being written from its start; made by `new_file`.

    Attributes:
        path: The file.
        size: Bytes written so far.
    """

    def __init__(self, path: Path, descriptor: int, kind: Literal["write", "append"]) -> None:
        self.path = path
        self.size = 0
        self._descriptor = descriptor
        self._kind: Literal["write", "append"] = kind

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Adds all of `data`, however often the system takes only a part of it."""
        rest = memoryview(data).cast("B")
        while rest:
            operation = Operation(kind=self._kind, path=self.path, size=len(rest))
            taken = perform(operation, lambda limit, rest=rest: os.write(self._descriptor, rest[:limit]))  # type: ignore[misc]
            if taken == 0:
                raise OSError(errno.EIO, "the system takes no more bytes", str(self.path))
            rest = rest[taken:]
            self.size += taken

    def fsync(self) -> None:
        """Makes what was written durable; its directory entry is durable after `fsync_directory`."""
        perform(Operation(kind="fsync", path=self.path), lambda _: os.fsync(self._descriptor))


@contextmanager
def new_file(path: Path) -> Iterator[NewFile]:
    """Opens `path` for writing from its start, in place of what it held."""
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
        yield NewFile(path, descriptor, "write")


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    opening = Operation(kind="open", path=path)
    descriptor = perform(opening, lambda _: os.open(path, flags | os.O_CLOEXEC, 0o666))
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes) -> None:
    """Writes a whole file and fsyncs it; its directory entry is durable after `fsync_directory`."""
    with new_file(path) as file:
        file.write(data)
        file.fsync()


def replace_file(path: Path, data: bytes) -> None:
    """Gives `path` a new content as a whole: a reader, or a crash, sees the old one or the new one."""
    fresh = path.with_name(f"{path.name}.new-{os.getpid()}")
    write_file(fresh, data)
    perform(Operation(kind="rename", path=fresh, target=path), lambda _: fresh.replace(path))
    fsync_directory(path.parent)


def append_file(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Adds `data` at the end, and fsyncs when `durable`; creates the file when it is missing."""
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as descriptor:
        file = NewFile(path, descriptor, "append")
        file.write(data)
        if durable:
            file.fsync()


def fsync_file(path: Path) -> None:
    """Makes a file's content durable, whoever wrote it."""
    # fsync acts on the file, not on the descriptor: a read-only one serves, and needs no write permission.
    perform(Operation(kind="fsync", path=path), lambda _: _fsync(path, os.O_RDONLY))


def fsync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    try:
        perform(Operation(kind="fsync", path=path), lambda _: _fsync(path, os.O_RDONLY | os.O_DIRECTORY))
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_FSYNC:
            raise


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Renames within one file system, atomically; a directory never replaces one that holds anything."""
    perform(Operation(kind="rename", path=old, target=new), lambda _: old.rename(new))


def remove_tree(path: Path) -> None:
    """Removes a directory and all it holds, or a file; what somebody else removed meanwhile is no error."""
    try:
        is_real_directory = stat.S_ISDIR(path.lstat().st_mode)
        names = sorted(os.listdir(path)) if is_real_directory else []
    except FileNotFoundError:
        return
    for name in names:
        remove_tree(path / name)
    try:
        remove = path.rmdir if is_real_directory else path.unlink
        perform(Operation(kind="remove", path=path), lambda _: remove())
    except FileNotFoundError:
        pass


# -- looks -------------------------------------------------------------------------------------------------


def read_file(path: Path) -> bytes:
    """The whole content of a file."""
    return path.read_bytes()


class RangedFile:
    """A file that is open for reading at any place, by several threads at once; made by `open_ranged`.

    Attributes:
        path: The file.
        size: Its bytes, when it was opened.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.size = os.fstat(descriptor).st_size
        self._descriptor = descriptor

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes from `offset` on; fewer than `nbytes` only where the file ends."""
        parts = []
        with naming(self.path):
            while nbytes > 0 and (part := os.pread(self._descriptor, nbytes, offset)):
                parts.append(part)
                offset, nbytes = offset + len(part), nbytes - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, offset: int, buffers: list[memoryview]) -> int:
        """Fills the buffers one after the other with the bytes from `offset` on, without a copy in between.

        Returns:
            How many bytes there were; fewer than the buffers take only where the file ends.
        """
        total = 0
        rest = [buffer for buffer in buffers if len(buffer)]
        with naming(self.path):
            while rest and (taken := os.preadv(self._descriptor, rest, offset + total)):
                total += taken
                while rest and taken >= len(rest[0]):
                    taken -= len(rest.pop(0))
                if taken:
                    rest[0] = rest[0][taken:]
        return total

    def expect_all(self) -> None:
        """Most of it will be read, from its start on: the system reads further ahead, several threads or one."""
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # only a hint
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def close(self) -> None:
        """Closes it; no thread may be reading."""
        os.close(self._descriptor)


def open_ranged(path: Path) -> RangedFile:
    """Opens an existing file for reading at any place; the caller closes it."""
    return RangedFile(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC))


def is_directory(path: Path) -> bool:
    """Whether this process sees a directory there."""
    return path.is_dir()


def free_bytes(path: Path) -> int | None:
    """How many bytes this user can still write in the file system of `path`, or of what is above it.

    Returns:
        None where the file system doesn't tell (some network mounts).
    """
    while not path.exists():
        path = path.parent
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize if found.f_blocks else None


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
