"""One checkpoint opened to be looked at: its files, what they hold, and single records of them.

Owns how a tool finds its way in a checkpoint or a run. Must not know torch; executes nothing; changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

from orlop.dcp.catalog import Catalog, Extent
from orlop.dcp.contents import Contents
from orlop.dcp.places import checkpoints_at, holds_checkpoint, no_checkpoint, no_run, reached
from orlop.errors import CheckpointIncomplete
from orlop.store import files
from orlop.store.directory import RangedData
from orlop.store.listing import Checkpoint
from orlop.store.manifest import Manifest
from orlop.store.objects import RemoteDirectory, Url, directory_at, locate

__all__ = ["Opened", "OpenFile", "find_checkpoints", "is_checkpoint"]


class Opened:
    """A checkpoint's directory, on this machine or in an object store.

    Args:
        path: Where it is.

    Raises:
        CheckpointNotFound: It is no checkpoint, whole or damaged; says what is there instead.
        CheckpointError: That address can't be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.location = locate(path)
        with reached(self.location):
            if not holds_checkpoint(self.location):
                raise no_checkpoint(self.location)
            self.directory = directory_at(path)
        self.contents = Contents(self.directory)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of every file, by its name."""
        if isinstance(self.directory, RemoteDirectory):
            return self.directory.sizes()
        assert not isinstance(self.location, Url)
        return files.file_sizes(self.location)

    @property
    def manifest(self) -> Manifest | None:
        """`orlop.json`; raises as `Contents.manifest`."""
        return self.contents.manifest

    @cached_property
    def catalog(self) -> Catalog:
        """What it holds; raises as `Contents.catalog`."""
        return self.contents.catalog()

    def record(self, extent: Extent) -> bytes:
        """The bytes of one record.

        Raises:
            CheckpointIncomplete: Its file is missing, or too short.
        """
        with self.open(extent.path) as file:
            content = file.read(extent.offset, extent.nbytes)
        if len(content) != extent.nbytes:
            raise CheckpointIncomplete("a file is too short for what it should hold", where=extent.path)
        return content

    @contextmanager
    def open(self, name: str) -> Iterator[OpenFile]:
        """A data file.

        Raises:
            CheckpointIncomplete: It is missing.
        """
        try:
            file = self.directory.open(name)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointIncomplete(
                "a data file is missing", where=self.directory.path_of(name)
            ) from error
        try:
            yield file
        finally:
            file.close()


OpenFile = RangedData


def find_checkpoints(path: str | os.PathLike[str]) -> list[Checkpoint]:
    """The checkpoints of a run, by ascending step.

    Raises:
        CheckpointNotFound: There are none, or `path` is a checkpoint itself; says what is there instead.
        CheckpointError: That address can't be read.
    """
    location = locate(path)
    with reached(location):
        found = [] if is_checkpoint(path) else checkpoints_at(location)
        if not found:
            raise no_run(location)
    return found


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether that is one checkpoint, whole or damaged, rather than a run.

    Raises:
        CheckpointError: That address can't be read.
    """
    location = locate(path)
    with reached(location):
        return holds_checkpoint(location)
