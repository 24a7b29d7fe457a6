"""One rank's failure as plain text that others can be told, and the one typed error that all of them raise.

Owns the words for what is not an error of orlop's own: what the system refuses, another library's exception, a rank
that went away. Must not know how ranks talk.

DCP sends an exception itself to the other ranks. One that can't be pickled, or not unpickled elsewhere, breaks its
collectives: that rank leaves and the others wait. So no exception but orlop's own gets into them: see `told`.
"""

from __future__ import annotations

import errno
import os
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch.distributed.checkpoint import CheckpointException

from orlop import errors
from orlop.errors import OrlopError, RankFailed

__all__ = ["Failure", "as_error", "failures_of", "lost_rank", "told"]

# What the operating system refuses because of where it was asked to, each with what to do.
_PERMISSION = "give this user permission there, or give another path"
_NO_DIRECTORY = "something that is no directory stands in this path: give another one"
_ROOM = "make room there, or give another path; nothing was published"
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_REFUSALS: dict[int | None, str] = {
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.EROFS: "give a path that can be written: this file system is read-only",
    errno.ENOTDIR: _NO_DIRECTORY,
    errno.EEXIST: "something stands there already: give another one",
    errno.EISDIR: "a directory stands where a file is meant: give another path",
    errno.ENAMETOOLONG: "give a shorter path",
    **dict.fromkeys(_FULL, _ROOM),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One rank's failure as plain text: an exception that can't be pickled must not break the gather.

    Attributes:
        kind: The name of orlop's error that it is or becomes; empty for any other exception.
        is_refusal: It is what the system said alone: what was to be done goes before it.
    """

    kind: str
    what: str
    where: str | None = None
    expected: str | None = None
    found: str | None = None
    todo: str | None = None
    is_refusal: bool = False


class Told(Exception):
    """A failure as an exception that every rank can unpickle, whatever it was before."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure

    def __str__(self) -> str:
        return self.failure.what


@contextmanager
def told() -> Iterator[None]:
    """What the block raises can be sent to other ranks; also a decorator, for what DCP calls.

    Errors of orlop's own, KeyboardInterrupt and SystemExit stay as they are.

    Raises:
        Told: Another exception, as text.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, Told):
        raise
    except BaseException as error:
        if _own_kind(error) is type(error):
            raise
        raise Told(_failure(error, traceback.extract_tb(error.__traceback__))) from error


def failures_of(raised: BaseException, rank: int) -> dict[int, Failure]:
    """What failed, by rank.

    Args:
        raised: What this rank's attempt raised.
        rank: This rank.
    """
    # Torch's CheckpointException carries the causes of all ranks, and every rank raises it.
    if isinstance(raised, CheckpointException) and raised.failures:
        return {at: _failure(cause, frames) for at, (cause, frames) in raised.failures.items()}
    return {rank: _failure(raised, traceback.extract_tb(raised.__traceback__))}


def _own_kind(raised: BaseException) -> type[OrlopError] | None:
    """The class of orlop's tree that an error is of; a subclass made elsewhere counts as its parent here."""
    return next((kind for kind in type(raised).__mro__ if vars(errors).get(kind.__name__) is kind), None)


def _failure(raised: BaseException, frames: Iterable[traceback.FrameSummary]) -> Failure:
    if isinstance(raised, Told):
        return raised.failure
    if isinstance(raised, OrlopError):
        kind = _own_kind(raised)
        assert kind is not None
        return Failure(
            kind=kind.__name__,
            what=_text(raised.what),
            where=_optional_text(raised.where),
            expected=_optional_text(raised.expected),
            found=_optional_text(raised.found),
            todo=_optional_text(raised.todo),
        )
    if isinstance(raised, OSError) and raised.errno in _REFUSALS:
        is_full = raised.errno in _FULL
        if is_full or raised.filename is not None:
            # The path tells all; a line of code would tell nothing more.
            return Failure(
                kind="StorageFull" if is_full else "StorageRefused",
                what=_text(raised.strerror),
                where=_optional_text(raised.filename),
                todo=_REFUSALS[raised.errno],
                is_refusal=True,
            )
    return Failure(kind="", what=_one_line(raised) + _place(frames))


def _place(frames: Iterable[traceback.FrameSummary]) -> str:
    """Where it was raised, since no traceback is shown: ` (filesystem.py:861 in read_data)`."""
    last = next(reversed(list(frames)), None)
    return "" if last is None else f" ({os.path.basename(last.filename)}:{last.lineno} in {last.name})"


def _one_line(raised: BaseException) -> str:
    text = _text(raised).strip()
    return f"{type(raised).__name__}: {text}" if text else type(raised).__name__


def _text(value: object) -> str:
    """`str` of it. That another library's own `__str__` fails must not keep this rank from telling the others."""
    try:
        return str(value)
    except Exception as error:
        return f"(its text can't be had: {type(error).__name__})"


def _optional_text(value: object) -> str | None:
    return None if value is None else _text(value)


def as_error(what: str, failures: Mapping[int, Failure], world_size: int) -> OrlopError:
    """The error that every rank raises: of the type that orlop raised on one of them, else RankFailed."""
    # An error of orlop's own names the cause; another rank's OSError or lost connection may only be its echo.
    rank, first = next(((r, f) for r, f in failures.items() if f.kind), next(iter(failures.items())))
    kind = getattr(errors, first.kind, None) if first.kind else None
    ranks = ", ".join(map(str, failures))
    place = None if world_size == 1 else f"rank {rank}" + (f" (failed: {ranks})" if len(failures) > 1 else "")
    where = "; ".join(text for text in (place, first.where) if text) or None
    if isinstance(kind, type) and issubclass(kind, OrlopError):
        text = f"could not {what}: {first.what}" if first.is_refusal else first.what
        return kind(text, where=where, expected=first.expected, found=first.found, todo=first.todo)
    return RankFailed(f"could not {what}", where=where, found=first.what)


def lost_rank(what: str, rank: int, seen: BaseException) -> RankFailed:
    """The error for a rank that no answer came from."""
    cause = _one_line(seen)
    stuck = re.search(r"timed? ?out", cause, re.IGNORECASE) is not None
    story = "a rank did not answer within the group's timeout" if stuck else "a rank went away"
    return RankFailed(
        f"{story}; could not {what}",
        where=f"seen on rank {rank}",
        found=cause,
        todo="look at the other ranks' logs for the one that died or hangs, and restart all ranks",
    )
