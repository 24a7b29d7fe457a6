"""Names that carry their owner: which process made a directory beside a checkpoint, and whether it still lives.

Owns the three kinds of such directories: `partial` (a checkpoint being written), `retired` (one being removed) and
`reading` (an empty one: a process reads that checkpoint). Must not know what is done in them.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from orlop.store import files
from orlop.store.catalog import Kind, Unpublished, parse_unpublished, unpublished_name

_log = logging.getLogger(__name__)

# A process on another host can't be asked whether it lives; one that changed nothing for this long counts as
# dead. A writer that lives after all fails over a missing file and publishes nothing that is not whole. A reader
# changes nothing while it reads, and what it would lose is worth more than a checkpoint that stays a day too long.
SILENT_SECONDS = {"partial": 3600.0, "retired": 3600.0, "reading": 86400.0}

# What this process owns now: a later look must not take it for a leftover.
_ours: set[Path] = set()


def claim(final: Path, kind: Kind) -> Path:
    """A new name beside `final` for this process; nothing is made. To be given up by `disclaim`."""
    path = final.with_name(sign(final.name, kind))
    _ours.add(path)
    return path


def sign(final: str, kind: Kind) -> str:
    """A new name that says what this process does with the checkpoint named `final`."""
    host, token = socket.gethostname(), secrets.token_hex(4)
    return unpublished_name(final, kind=kind, host=host, pid=os.getpid(), token=token)


def disclaim(path: Path) -> None:
    """From now on `path`, where it is still there, counts as a leftover."""
    _ours.discard(path)


@contextmanager
def reading(final: Path) -> Iterator[None]:
    """Within the block, other processes see that `final` is being read; where that can't be shown, it isn't."""
    lease = claim(final, "reading")
    try:
        files.mark(lease)
    except OSError as error:
        # A read-only or full root must not keep a run from resuming.
        _log.debug("can't show that %s is being read: %s", final, error)
    try:
        yield
    finally:
        disclaim(lease)
        try:
            files.remove_tree(lease)
        except OSError as error:
            _log.debug("could not remove %s: %s", lease, error)


def being_read(directory: Path) -> set[str]:
    """The names under `directory` that a living process reads."""
    return {
        found.final
        for path, found in _owned(directory)
        if found.kind == "reading" and not _is_dead(path, found)
    }


def find_strays(directory: Path) -> list[Path]:
    """The directories under `directory` with such a name whose process is dead, sorted."""
    return [path for path, found in _owned(directory) if _is_dead(path, found)]


def _owned(directory: Path) -> Iterator[tuple[Path, Unpublished]]:
    for name in files.directory_names(directory):
        found = parse_unpublished(name)
        if found is not None:
            yield directory / name, found


def _is_dead(path: Path, found: Unpublished) -> bool:
    return is_dead(found, path in _ours, lambda: files.last_change(path))


def is_dead(found: Unpublished, is_ours: bool, last_change: Callable[[], float]) -> bool:
    """Whether the process that made such a name is gone.

    Args:
        found: The name.
        is_ours: Whether it belongs to something that this process does right now.
        last_change: Gives the time of the last change to what it names, in seconds since the epoch.
    """
    if is_ours:
        return False
    if found.host != socket.gethostname():
        return time.time() - last_change() > SILENT_SECONDS[found.kind]
    if found.pid == os.getpid():
        # Not among those owned here: an earlier process of the same id left it (common in containers), or a
        # save of this one that could not even clean up.
        return True
    return not _runs(found.pid)


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
