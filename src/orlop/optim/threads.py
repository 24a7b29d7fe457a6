"""The link that any machine has: worker threads that copy into separate host buffers.

Owns: the workers, their order, the throttle and the poison. Must not know: what the tensors mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from orlop.optim.link import NUM_SLOTS, Cargo, Clock, Pairs, Slot, buffer_for, carve
from orlop.optim.timeline import Lane, Span

_POISON = 0xFF  # a NaN in every floating dtype, -1 in every signed integer


class ThreadLink:
    """Real copies by two worker threads into separate host buffers: a device that any machine has.

    For tests and measurements of everything that an accelerator does to the step. A buffer is filled with NaN
    bytes before it is filled and after it is released, so a use before arrival or after release can't go
    unseen.

    Args:
        num_slots: From 3 on everything overlaps; 1 is serial.
        up_bytes_per_second: Copies up take at least this long; None: as fast as they go.
        down_bytes_per_second: The same for copies home.
        half_duplex: Up and down share one lane, in the order in which they were asked for.
        poison: Fill buffers with NaN bytes when they are released; off for measurements, since it takes the
            lane's time.
        before_copy: Called in the worker before each window's copies with (lane, window): to delay, or to
            fail.
    """

    copies = True

    def __init__(
        self,
        *,
        num_slots: int = NUM_SLOTS,
        up_bytes_per_second: float | None = None,
        down_bytes_per_second: float | None = None,
        half_duplex: bool = False,
        poison: bool = True,
        before_copy: Callable[[Lane, int], None] | None = None,
    ) -> None:
        self.num_slots = num_slots
        self._rates: dict[Lane, float | None] = {"up": up_bytes_per_second, "down": down_bytes_per_second}
        self._half_duplex = half_duplex
        self._poison = poison
        self._before_copy = before_copy
        self._workers: dict[Lane, ThreadPoolExecutor] = {}
        self._slots = [Slot() for _ in range(num_slots)]
        self._pending: list[Future[None]] = []
        self._clock = Clock()
        self.bytes_up = 0
        self.bytes_down = 0

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all slots' buffers."""
        return sum(slot.buffer.numel() for slot in self._slots if slot.buffer is not None)

    def begin(self) -> None:
        """Start the clock."""
        self._clock = Clock()

    def bring_up(self, window: int, slot: int, hosts: Sequence[Tensor]) -> Cargo:
        """Let the up worker copy the hosts into the slot, once the slot is free."""
        place = self._slots[slot]
        fresh = buffer_for(hosts, place.buffer, torch.device("cpu"))
        if fresh is not place.buffer:
            self._settle(place)
            _poison(fresh)
            place.buffer = fresh
        lent = carve(hosts, place.buffer)
        nbytes = sum(host.nbytes for host in hosts)
        self.bytes_up += nbytes
        arrival = self._submit("up", window, list(zip(lent, hosts)), place.free, None)
        return Cargo(window=window, slot=slot, lent=tuple(lent), nbytes=nbytes, arrival=arrival)

    @contextmanager
    def computing(self, cargo: Cargo) -> Iterator[None]:
        """Wait for the up worker."""
        cargo.arrival.result()
        begin = time.perf_counter()
        yield
        self._clock.mark("compute", cargo.window, begin, cargo.nbytes)

    def take_home(self, cargo: Cargo, pairs: Pairs) -> None:
        """Let the down worker copy home and poison the slot."""
        self.bytes_down += sum(host.nbytes for _, host in pairs)
        place = self._slots[cargo.slot]
        moves = [(host, device) for device, host in pairs]
        place.free = self._submit("down", cargo.window, moves, None, place.buffer)
        self._pending.append(place.free)

    def release(self, cargo: Cargo) -> None:
        """Poison the slot, once its values have arrived."""
        place = self._slots[cargo.slot]
        place.free = self._submit("down", cargo.window, [], cargo.arrival, place.buffer)

    def join(self) -> None:
        """Computes run where they are called: nothing to wait for."""

    def finish(self) -> None:
        """Wait for the down worker; its first error is raised here."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.exception()  # all of them are over before one is raised
        for future in pending:
            future.result()

    def spans(self) -> list[Span]:
        """As the workers measured them."""
        self.finish()
        return list(self._clock.found)

    def _settle(self, place: Slot) -> None:
        if place.free is not None:
            place.free.exception()

    def _submit(
        self,
        lane: Lane,
        window: int,
        moves: list[tuple[Tensor, Tensor]],
        after: Future[None] | None,
        poison: Tensor | None,
    ) -> Future[None]:
        worker: Lane = "up" if self._half_duplex else lane
        if worker not in self._workers:
            self._workers[worker] = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"orlop-{worker}")
        return self._workers[worker].submit(self._move, self._clock, lane, window, moves, after, poison)

    def _move(
        self,
        clock: Clock,
        lane: Lane,
        window: int,
        moves: list[tuple[Tensor, Tensor]],
        after: Future[None] | None,
        poison: Tensor | None,
    ) -> None:
        if after is not None:
            after.exception()
        if self._before_copy is not None:
            self._before_copy(lane, window)
        begin = time.perf_counter()
        nbytes = sum(target.nbytes for target, _ in moves)
        with torch.no_grad():
            for target, source in moves:
                target.copy_(source)
        rate = self._rates[lane]
        if rate is not None:
            time.sleep(max(0.0, nbytes / rate - (time.perf_counter() - begin)))
        if moves:
            clock.mark(lane, window, begin, nbytes)
        if poison is not None and self._poison:
            _poison(poison)


def _poison(buffer: Tensor) -> None:
    buffer.fill_(_POISON)
