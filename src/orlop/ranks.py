"""What ranks tell each other: gather, broadcast, sum in rank order, and fail together.

Owns the control group: a gloo group over all ranks, made once per default process group, so that orlop's own
collectives never run on the training group. Without a process group the world has one rank and nothing is sent.
Must not know what is saved or loaded.

Blocks of `together` follow one another and are never nested: every rank meets the same gathers in the same order,
whether or not its block failed.
"""

from __future__ import annotations

import logging
import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from orlop import errors
from orlop.errors import OrlopError, RankFailed

__all__ = ["Ranks"]

T = TypeVar("T")

_log = logging.getLogger("orlop")

# The default group is held weakly: a destroyed group must not live on here until the interpreter exits.
_control_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """One rank's failure as plain text: an exception that can't be pickled must not break the gather."""

    kind: str
    what: str
    where: str | None = None
    expected: str | None = None
    found: str | None = None
    todo: str | None = None


class Ranks:
    """The ranks of one run, on a gloo control group.

    Attributes:
        rank: This rank, from 0.
        world_size: How many ranks there are; 1 without a process group.
        group: The control group, or None without a process group.
    """

    def __init__(self, rank: int, world_size: int, group: dist.ProcessGroup | None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.group = group

    @classmethod
    def create(cls, process_group: dist.ProcessGroup | None = None) -> Ranks:
        """Make the ranks of this run. Collective: every rank calls it at the same point.

        Args:
            process_group: A group to use as control group; it must carry CPU tensors. By default a gloo group over
                all ranks, shared by all callers under the same default group.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return cls(0, 1, None)
        group = process_group if process_group is not None else _control_group()
        return cls(dist.get_rank(group), dist.get_world_size(group), group)

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank does what only one rank may do."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """All ranks' plain values, in rank order, on every rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return cast("list[T]", values)

    def broadcast(self, value: T, src: int = 0) -> T:
        """Rank `src`'s plain value, on every rank."""
        if self.group is None:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=dist.get_global_rank(self.group, src), group=self.group)
        return cast("T", values[0])

    def equal(self, value: object) -> bool:
        """Whether all ranks gave the same (small, plain) value."""
        values = self.gather(value)
        return all(other == values[0] for other in values)

    def sum(self, value: float) -> float:
        """The float64 sum over ranks, added in rank order: the same bits on every rank and in every run."""
        if self.group is None:
            return value
        values = [torch.zeros((), dtype=torch.float64) for _ in range(self.world_size)]
        dist.all_gather(values, torch.tensor(value, dtype=torch.float64), group=self.group)
        total = 0.0
        for other in values:
            total += other.item()
        return total

    def on_coordinator(self, what: str, act: Callable[[], T]) -> T:
        """Run `act` on the coordinator alone and give its result to all ranks; its failure is every rank's.

        Raises:
            OrlopError: As `together`.
        """
        result: T | None = None
        with self.together(what):
            if self.is_coordinator:
                result = act()
        return cast("T", self.broadcast(result))

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Run the block on every rank; if it failed on any, raise one typed error on all.

        The error has the type that orlop raised on the failing rank, or is RankFailed; it names the ranks and the
        first real cause. KeyboardInterrupt and SystemExit stay themselves on the rank that they hit.

        Args:
            what: What the block is to do, for the message: "collect the parts".

        Raises:
            OrlopError: The failing rank's own error, or RankFailed.
        """
        raised: BaseException | None = None
        try:
            yield
        except BaseException as error:
            raised = error
        failures = self._exchange(what, raised)
        if isinstance(raised, (KeyboardInterrupt, SystemExit)):
            raise raised
        if failures:
            # Every rank says the one cause in one error; its tracebacks are for those who turn on debugging.
            raise _as_error(what, failures, self.world_size) from None

    def _exchange(self, what: str, raised: BaseException | None) -> dict[int, _Failure]:
        mine = {} if raised is None else _failures(raised, self.rank)
        if raised is not None:
            _log.debug("rank %d could not %s", self.rank, what, exc_info=raised)
        try:
            everyone = self.gather(mine)
        except Exception as error:
            # A failed gather is final: the peer is gone or stuck, and this group with it.
            raise _lost_rank(what, self.rank, raised if raised is not None else error) from None
        merged: dict[int, _Failure] = {}
        for failures in everyone:
            for rank, failure in failures.items():
                merged.setdefault(rank, failure)
        return dict(sorted(merged.items()))


def _control_group() -> dist.ProcessGroup:
    default = dist.group.WORLD
    assert default is not None
    group = _control_groups.get(default)
    if group is None:
        group = cast("dist.ProcessGroup", dist.new_group(backend="gloo"))
        _control_groups[default] = group
    return group


def _failures(raised: BaseException, rank: int) -> dict[int, _Failure]:
    # Torch's CheckpointException carries the causes of all ranks, and every rank raises it.
    if isinstance(raised, CheckpointException) and raised.failures:
        return {at: _failure(*wrapped) for at, wrapped in raised.failures.items()}
    return {rank: _failure(raised, traceback.extract_tb(raised.__traceback__))}


def _failure(raised: BaseException, frames: Iterable[traceback.FrameSummary]) -> _Failure:
    if isinstance(raised, OrlopError):
        return _Failure(
            kind=type(raised).__name__,
            what=raised.what,
            where=raised.where,
            expected=raised.expected,
            found=raised.found,
            todo=raised.todo,
        )
    return _Failure(kind="", what=_one_line(raised) + _place(frames))


def _lost_rank(what: str, rank: int, seen: BaseException) -> RankFailed:
    cause = _one_line(seen)
    stuck = re.search(r"timed? ?out", cause, re.IGNORECASE) is not None
    story = "a rank did not answer within the group's timeout" if stuck else "a rank went away"
    return RankFailed(
        f"{story}; could not {what}",
        where=f"seen on rank {rank}",
        found=cause,
        todo="look at the other ranks' logs for the one that died or hangs, and restart all ranks",
    )


def _place(frames: Iterable[traceback.FrameSummary]) -> str:
    """Where it was raised, since no traceback is shown: ` (filesystem.py:861 in read_data)`."""
    last = next(reversed(list(frames)), None)
    return "" if last is None else f" ({os.path.basename(last.filename)}:{last.lineno} in {last.name})"


def _one_line(raised: BaseException) -> str:
    text = str(raised).strip()
    return f"{type(raised).__name__}: {text}" if text else type(raised).__name__


def _as_error(what: str, failures: dict[int, _Failure], world_size: int) -> OrlopError:
    # An error of orlop's own names the cause; another rank's OSError or lost connection may only be its echo.
    rank, first = next(((r, f) for r, f in failures.items() if f.kind), next(iter(failures.items())))
    kind = getattr(errors, first.kind, None) if first.kind else None
    ranks = ", ".join(map(str, failures))
    place = None if world_size == 1 else f"rank {rank}" + (f" (failed: {ranks})" if len(failures) > 1 else "")
    where = "; ".join(text for text in (place, first.where) if text) or None
    if isinstance(kind, type) and issubclass(kind, OrlopError):
        return kind(first.what, where=where, expected=first.expected, found=first.found, todo=first.todo)
    return RankFailed(f"could not {what}", where=where, found=first.what)
