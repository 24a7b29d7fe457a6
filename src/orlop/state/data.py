"""The data part: an endless stream of batches over a rank's own data, whose position is saved exactly.

Owns epochs, the position inside one, and how the iterator is made again at that position. Must not know of
ranks, files or what a batch holds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from orlop.errors import CheckpointMismatch, OrlopError
from orlop.state.rng import RngState
from orlop.wording import counted

_log = logging.getLogger("orlop")


class DataStream:
    """Batches without end; epoch follows epoch.

    Data with `state_dict`/`load_state_dict` (torchdata's `StatefulDataLoader`, a sampler of one's own) is
    asked for its position: after its `load_state_dict`, `iter(data)` must go on right there. Other data is
    read again up to the saved position. In both cases the iterator is made under the random streams that it
    was first made under, since making one may draw from them; the live streams are then put back as they
    were.

    Args:
        data: A rank's own batches, iterable once per epoch. Before an epoch its `set_epoch(epoch)`, or its
            sampler's, is called where there is one.

    Attributes:
        per_rank: Saved for each rank, even where all are at the same place: theirs are places in different data.
    """

    per_rank = True

    def __init__(self, data: Iterable[Any]) -> None:
        self.data = data
        self.epoch = 0
        self.batches = 0
        self._iterator: Iterator[Any] | None = None
        # A DataLoader's own generator is a stream too, and torchdata doesn't save all that it draws from it.
        own = data.generator if isinstance(data, DataLoader) else None
        self._own = {} if own is None else {"data": own}
        self._rng = RngState(self._own)
        self._rng_at_iter: dict[str, Any] | None = None

    def take(self, count: int) -> list[Any]:
        """The next `count` batches.

        Raises:
            OrlopError: The data yields no batch in a whole epoch.
        """
        return [self._next() for _ in range(count)]

    def state_dict(self) -> dict[str, Any]:
        """The position: epoch, batches into it, and what the data itself says. Draws nothing."""
        started = self._iterator is not None
        inner: Any = self.data.state_dict() if started and _keeps_position(self.data) else None  # type: ignore[attr-defined]
        own = RngState(self._own).state_dict()["generators"]
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "rng": self._rng_at_iter,
            "own_generator": own,
            "inner": inner,
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> str:
        """Why a saved position doesn't fit this data, as far as that can be told without reading it; changes nothing.

        Returns:
            What was expected and found; empty where it fits.
        """
        try:
            self._position(state)
        except CheckpointMismatch as error:
            return f"expected {error.expected}, found {error.found}"
        return ""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to the saved position; the next batch is the one that followed it.

        Raises:
            CheckpointMismatch: `state` isn't a position, or not one of data like this.
        """
        epoch, batches, rng, own, inner = self._position(state)
        if rng is None:
            self.epoch, self.batches, self._iterator, self._rng_at_iter = epoch, batches, None, None
            return
        before = self._rng.state_dict()
        after = {**before, "generators": own}
        self._rng.load_state_dict(rng)
        try:
            self._go_to(epoch, batches, inner)
        except BaseException:
            self._rng.load_state_dict(before)
            raise
        self._rng.load_state_dict(after)
        self._rng_at_iter = dict(rng)

    def _position(self, state: Mapping[str, Any]) -> tuple[int, int, Any, Any, Any]:
        try:
            epoch, batches = int(state["epoch"]), int(state["batches"])
            rng, own, inner = state["rng"], state["own_generator"], state["inner"]
        except (LookupError, TypeError, ValueError) as error:
            raise _mismatch("an epoch, batches into it, random streams, own state", repr(error)) from error
        if rng is not None:
            if (inner is not None) != _keeps_position(self.data):
                words = ["data with a state_dict of its own", "data without one"]
                raise _mismatch(*(words if _keeps_position(self.data) else words[::-1]))
            # What it was made under, and what its own generator holds: both are to be restored.
            for streams in (rng, {**self._rng.state_dict(), "generators": own}):
                if misfit := self._rng.check_state_dict(streams):
                    raise _mismatch("random streams of this data", misfit)
            if inner is None and (length := self._length(epoch, batches)) is not None and length < batches:
                raise _mismatch(_at_least(batches, epoch), str(length))
        return epoch, batches, rng, own, inner

    def _length(self, epoch: int, batches: int) -> int | None:
        """How many batches an epoch has; None where that can't be told without reading it."""
        if isinstance(getattr(self.data, "dataset", None), IterableDataset):
            return None  # its length is a guess
        try:
            length = len(self.data)  # type: ignore[arg-type]
            if length >= batches:
                return length
            # A sampler's length may follow the epoch.
            self._tell_epoch(epoch)
            try:
                return len(self.data)  # type: ignore[arg-type]
            finally:
                self._tell_epoch(self.epoch)
        except (TypeError, NotImplementedError):
            return None

    def _go_to(self, epoch: int, batches: int, inner: Any) -> None:
        self._tell_epoch(epoch)
        if inner is not None:
            self.data.load_state_dict(inner)  # type: ignore[attr-defined]
        self._iterator = iter(self.data)
        self.epoch, self.batches = epoch, batches
        if inner is None and batches:
            _log.info("the data keeps no position: reading %d batches of epoch %d again", batches, epoch)
            for done in range(batches):
                if next(self._iterator, self) is self:
                    raise _mismatch(_at_least(batches, epoch), str(done))

    def _next(self) -> Any:
        if self._iterator is None:
            self._begin_epoch(self.epoch)
        assert self._iterator is not None
        batch = next(self._iterator, self)
        if batch is self:
            self._begin_epoch(self.epoch + 1)
            batch = next(self._iterator, self)
        if batch is self:
            raise OrlopError(
                "The data yields no batches",
                where=f"{type(self.data).__name__}, epoch {self.epoch}",
                expected="at least one batch per epoch on every rank",
                found="none",
                todo="give data that can be iterated once per epoch (a one-time iterator can't)",
            )
        self.batches += 1
        return batch

    def _begin_epoch(self, epoch: int) -> None:
        self._tell_epoch(epoch)
        self._rng_at_iter = self._rng.state_dict()
        self._iterator = iter(self.data)
        self.epoch, self.batches = epoch, 0

    def _tell_epoch(self, epoch: int) -> None:
        for told in (self.data, getattr(self.data, "sampler", None)):
            set_epoch = getattr(told, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
                return


def _keeps_position(data: object) -> bool:
    return hasattr(data, "state_dict") and hasattr(data, "load_state_dict")


def _at_least(batches: int, epoch: int) -> str:
    return f"at least {counted(batches, 'batch', 'batches')} in epoch {epoch}"


def _mismatch(expected: str, found: str) -> CheckpointMismatch:
    return CheckpointMismatch(
        "The saved data position doesn't fit this data",
        where="data",
        expected=expected,
        found=found,
        todo="give the data and batch size of the run that saved it; to start the data over: "
        "LoadPolicy(skip_parts={'data'})",
    )
