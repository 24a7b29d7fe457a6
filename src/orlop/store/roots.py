"""Where a run's checkpoints stand: a `Root` lists them, frees their names, and takes the expired ones away.

Owns what `CheckpointStore` asks of a place, and the answer for a local (or mounted) directory; `remote` answers for
object stores. Must not know what a checkpoint holds, nor when one is saved, resumed or expired.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from orlop.store import catalog, files, owned, publish
from orlop.store.listing import Checkpoint, list_checkpoints
from orlop.store.objects import Url
from orlop.store.remote import RemoteRoot

_log = logging.getLogger(__name__)


class Root(Protocol):
    """One run's checkpoints in one place. Only the coordinator calls these, but for `path`."""

    def path(self, name: str) -> Path | Url:
        """Where the checkpoint of that name is, or would be."""
        ...

    def checkpoints(self) -> list[Checkpoint]:
        """All of them, complete or not, by ascending step."""
        ...

    def sweep(self) -> None:
        """Removes what dead processes left; foreign names are never touched."""
        ...

    def set_aside(self, found: Checkpoint, why: str) -> str:
        """Frees the name of one that can't be resumed from; says what became of it."""
        ...

    def retire(self, found: Checkpoint) -> None:
        """Removes one that has expired; a crash half way leaves no half of it under its name."""
        ...

    def reading(self, name: str) -> AbstractContextManager[None]:
        """Within the block, other processes see that this checkpoint is being read."""
        ...

    def being_read(self) -> set[str]:
        """The names of those that a living process reads."""
        ...


class DirectoryRoot:
    """A directory that all ranks see.

    Args:
        directory: Created by the first save.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def path(self, name: str) -> Path:
        """See `Root`."""
        return self._directory / name

    def checkpoints(self) -> list[Checkpoint]:
        """See `Root`."""
        return list_checkpoints(self._directory)

    def sweep(self) -> None:
        """See `Root`."""
        for stray in owned.find_strays(self._directory):
            beside = catalog.parse_unpublished(stray.name)
            if beside is not None and catalog.parse_step(beside.final) is not None:
                _log.info("removing %s, left by a process that is dead", stray.name)
                try:
                    files.remove_tree(stray)
                except OSError as error:
                    # A leftover is not worth a failed save; the next one tries again.
                    _log.warning("could not remove %s: %s", stray, error)

    def set_aside(self, found: Checkpoint, why: str) -> str:
        """See `Root`."""
        return f"now {publish.set_aside(self._directory / found.name, why).name}"

    def retire(self, found: Checkpoint) -> None:
        """See `Root`."""
        publish.retire(self._directory / found.name)

    def reading(self, name: str) -> AbstractContextManager[None]:
        """See `Root`."""
        return owned.reading(self._directory / name)

    def being_read(self) -> set[str]:
        """See `Root`."""
        return owned.being_read(self._directory)


def root_at(location: Path | Url) -> Root:
    """The checkpoints of a run, wherever they are."""
    return RemoteRoot(location) if isinstance(location, Url) else DirectoryRoot(location)
