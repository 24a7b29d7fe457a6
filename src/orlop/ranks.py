"""What ranks tell each other: gather, broadcast, sum in rank order, and fail together.

Owns the control group: a gloo group over all ranks, made once per default process group, so that orlop's own
collectives never run on the training group. Without a process group the world has one rank and nothing is sent.
Must not know what is saved or loaded.

Blocks of `together` follow one another and are never nested: every rank meets the same gathers in the same order,
whether or not its block failed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from orlop import errors
from orlop.failures import Failure, as_error, failures_of, lost_rank

__all__ = ["Ranks", "add_up"]

T = TypeVar("T")

_log = logging.getLogger("orlop")

# The default group is held weakly: a destroyed group must not live on here until the interpreter exits.
_control_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


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

    def require_alike(self, what: str, asked: Mapping[str, object]) -> None:
        """Raise on every rank where they were asked for different things. Collective.

        Args:
            what: What they were asked to do, for the message: "save".
            asked: Arguments, by name; compared as text.

        Raises:
            CheckpointMismatch: Names the argument, the rank and both values.
        """
        everyone = self._gather_to(what, {name: repr(value) for name, value in asked.items()})
        for rank, theirs in enumerate(everyone):
            for name, value in theirs.items():
                if value != everyone[0][name]:
                    raise errors.CheckpointMismatch(
                        f"ranks were asked to {what} in different ways; nothing was changed",
                        where=f"{name}, rank {rank}",
                        expected=f"as on rank 0: {everyone[0][name]}",
                        found=value,
                        todo="give every rank the same arguments",
                    )

    def _gather_to(self, what: str, value: T, raised: BaseException | None = None) -> list[T]:
        """As `gather`; a rank that does not answer is said, with what was to be done, or with what this one raised."""
        try:
            return self.gather(value)
        except Exception as error:
            # A failed gather is final: the peer is gone or stuck, and this group with it.
            raise lost_rank(what, self.rank, raised if raised is not None else error) from None

    def gather_floats(self, *values: float) -> list[tuple[float, ...]]:
        """Every rank's float64 values, in rank order; all ranks give as many."""
        if self.group is None:
            return [values]
        gathered = [torch.zeros(len(values), dtype=torch.float64) for _ in range(self.world_size)]
        dist.all_gather(gathered, torch.tensor(values, dtype=torch.float64), group=self.group)
        return [tuple(other.tolist()) for other in gathered]

    def sum(self, value: float) -> float:
        """The float64 sum over ranks, added in rank order: the same bits on every rank and in every run."""
        if self.group is None:
            return value
        return add_up(other for (other,) in self.gather_floats(value))

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
            raise as_error(what, failures, self.world_size) from None

    @contextmanager
    def asked(self, what: str) -> Iterator[None]:
        """As `together`, for looking at what the caller handed in; alone, Python's own TypeError or ValueError stays.

        Otherwise an argument that only one rank got wrong would leave the others waiting for it in a collective.
        """
        if self.world_size == 1:
            yield
            return
        with self.together(what):
            yield

    def _exchange(self, what: str, raised: BaseException | None) -> dict[int, Failure]:
        mine = {} if raised is None else failures_of(raised, self.rank)
        if raised is not None:
            _log.debug("rank %d could not %s", self.rank, what, exc_info=raised)
        everyone = self._gather_to(what, mine, raised)
        merged: dict[int, Failure] = {}
        for failures in everyone:
            for rank, failure in failures.items():
                merged.setdefault(rank, failure)
        return dict(sorted(merged.items()))


def add_up(values: Iterable[float]) -> float:
    """The sum, one by one: from Python 3.12 on, `sum` compensates, and the bits would depend on the version."""
    total = 0.0
    for value in values:
        total += value
    return total


def _control_group() -> dist.ProcessGroup:
    default = dist.group.WORLD
    assert default is not None
    group = _control_groups.get(default)
    if group is None:
        group = cast("dist.ProcessGroup", dist.new_group(backend="gloo"))
        _control_groups[default] = group
    return group
