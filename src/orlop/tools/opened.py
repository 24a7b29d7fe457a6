"""One checkpoint opened to be looked at: its files, what they hold, and single records of them.

Owns how a tool finds its way in a checkpoint or a run. Must not know torch; executes nothing; changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

from orlop.dcp.catalog import Catalog, Extent
from orlop.dcp.contents import METADATA_NAME, Contents
from orlop.errors import CheckpointIncomplete, CheckpointNotFound
from orlop.store import files
from orlop.store.directory import RangedData
from orlop.store.listing import Checkpoint
from orlop.store.manifest import MANIFEST_NAME, Manifest
from orlop.store.objects import RemoteDirectory, Url, directory_at, locate
from orlop.store.roots import root_at

__all__ = ["Opened", "OpenFile", "find_checkpoints", "is_checkpoint"]


class Opened:
    """A checkpoint's directory, on this machine or in an object store.

    Args:
        path: Where it is.

    Raises:
        CheckpointNotFound: Nothing is there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.location = locate(path)
        self.directory = directory_at(path)
        self.contents = Contents(self.directory)
        if not self.sizes and not self.directory.exists(""):
            raise CheckpointNotFound("there is no checkpoint", where=str(self.location))

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


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether that is a checkpoint rather than a run."""
    directory = directory_at(path)
    return directory.exists(METADATA_NAME) or directory.exists(MANIFEST_NAME)


def find_checkpoints(path: str | os.PathLike[str]) -> list[Checkpoint]:
    """The checkpoints of a run, by ascending step; none where `path` is a checkpoint itself, whole or not.

    Raises:
        CheckpointNotFound: Nothing is there.
    """
    location = locate(path)
    if not isinstance(location, Url) and not files.is_directory(location):
        raise CheckpointNotFound("there is no such directory", where=str(location))
    return [] if is_checkpoint(path) else root_at(location).checkpoints()
