"""One checkpoint's directory, as its reader and writer see it: names, whole small files, ranges of large ones.

Owns the seam behind which a checkpoint may lie somewhere else than on a file system. Must not know what files hold.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from orlop.store import files

__all__ = ["Directory", "LocalDirectory", "NewData", "RangedData"]


class RangedData(Protocol):
    """A file that is open for reading at any place, by several threads at once."""

    @property
    def size(self) -> int:
        """Its bytes."""

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes from `offset` on; fewer only where the file ends."""

    def read_into(self, offset: int, buffers: list[memoryview]) -> int:
        """Fills the buffers with the bytes from `offset` on; returns how many there were."""

    def expect_all(self) -> None:
        """Most of it will be read, from its start on: a hint."""

    def close(self) -> None:
        """Closes it."""


class NewData(Protocol):
    """A file that is being written from its start."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Adds all of `data`."""

    def fsync(self) -> None:
        """Makes what was written durable."""


class Directory(Protocol):
    """The files of one checkpoint."""

    def __str__(self) -> str:
        """For messages."""

    def exists(self, name: str) -> bool:
        """Whether there is such a file; the empty name means the directory itself."""

    def read(self, name: str) -> bytes:
        """A small file's content; raises FileNotFoundError."""

    def open(self, name: str) -> RangedData:
        """A large file, for ranges; raises FileNotFoundError."""

    def create(self, name: str) -> AbstractContextManager[NewData]:
        """A new file, in place of what that name held."""

    def replace(self, name: str, data: bytes) -> None:
        """Gives a small file its content as a whole, durably."""

    def make(self) -> None:
        """Creates the directory where it is missing."""

    def path_of(self, name: str) -> str:
        """A file's full name, for messages."""


class LocalDirectory:
    """A directory of a file system."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def exists(self, name: str) -> bool:
        """Whether there is such a file; the empty name means the directory itself."""
        return (self.path / name).exists()

    def read(self, name: str) -> bytes:
        """A small file's content."""
        return files.read_file(self.path / name)

    def open(self, name: str) -> RangedData:
        """A large file, for ranges."""
        return files.open_ranged(self.path / name)

    def create(self, name: str) -> AbstractContextManager[NewData]:
        """A new file, in place of what that name held."""
        return files.new_file(self.path / name)

    def replace(self, name: str, data: bytes) -> None:
        """Gives a small file its content as a whole, durably."""
        files.replace_file(self.path / name, data)

    def make(self) -> None:
        """Creates the directory where it is missing."""
        files.make_directory(self.path)

    def path_of(self, name: str) -> str:
        """A file's full name, for messages."""
        return str(self.path / name)
