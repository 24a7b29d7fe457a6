"""The one seam under everything that orlop writes: each operation is told to the observers before it happens.

An observer records the order, refuses an operation by raising, shortens a write, or ends the process at a chosen
instant. Owns the notion of an operation, and that an interrupted one is simply done again. Must not know what the
files hold; `files` performs the operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

T = TypeVar("T")

Kind = Literal["make", "open", "write", "append", "fsync", "rename", "remove"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One change to the disk, about to happen.

    Attributes:
        kind: What is done: `make` a directory, `open` a file for writing (it is created, or emptied), `write` or
            `append` bytes, `fsync` a file or a directory, `rename`, `remove` one file or one empty directory.
        path: The file or directory that it is done to.
        target: The new name, for a rename.
        size: How many bytes, for a write or an append.
    """

    kind: Kind
    path: Path
    target: Path | None = None
    size: int | None = None


# What an observer returns matters for writes only: the most bytes that this one may take (a short write).
Observer = Callable[[Operation], int | None]
_observers: list[Observer] = []


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Within the block, `observer` is called just before every operation of this process; it may raise."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def perform(operation: Operation, act: Callable[[int | None], T]) -> T:
    """Tells the observers, then does it; an operation that a signal interrupted is done again.

    Args:
        operation: What is about to happen.
        act: Does it; it is given the most bytes that an observer lets it take, None for no limit.
    """
    while True:
        try:
            limits = [limit for observer in tuple(_observers) if (limit := observer(operation)) is not None]
            with naming(operation.path):
                return act(min(limits, default=None))
        except InterruptedError:
            continue


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """What the system says of an open file (a disk that fails, or is full) doesn't name it; this adds its name."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
