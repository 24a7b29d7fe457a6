"""The path between host and device.

Owns: copies, the device buffers (slots) that hold windows, and the order between copies and compute. Must not
know: optimizers, what the tensors mean, which window comes next.

One contract, four links (`orlop.testing` has its conformance suite). In a step, for each window: `bring_up`
into a slot, `computing(cargo)` around the update, `take_home`. Each only starts work: up, compute and down of
different slots overlap. A slot is filled again only after its own window has gone home; up never waits for
the down of another slot. `finish` waits until everything is home; `spans` then says when each happened."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from orlop.optim.timeline import Lane, Span

logger = logging.getLogger("orlop")

LINE_BYTES = 64
_POISON = 0xFF  # a NaN in every floating dtype, -1 in every signed integer


@dataclass(frozen=True, slots=True, kw_only=True)
class Cargo:
    """One window's state on the device.

    Attributes:
        window: Its number in the step.
        slot: The buffer that it is in.
        lent: Device tensors, in the order of the hosts whose values they hold.
        nbytes: Bytes that travelled up.
        arrival: What to wait for before the values are there; each link has its own kind.
    """

    window: int
    slot: int
    lent: tuple[Tensor, ...]
    nbytes: int
    arrival: Any = None


Pairs = Sequence[tuple[Tensor, Tensor]]


class Link(Protocol):
    """What a step needs of the path between host and device."""

    copies: bool
    num_slots: int

    def begin(self) -> None:
        """A step begins: its spans are counted from now."""

    def bring_up(self, window: int, slot: int, hosts: Sequence[Tensor]) -> Cargo:
        """Start copying host tensors into the slot, once the slot's last window is home."""

    def computing(self, cargo: Cargo) -> Any:
        """A context manager: the values have arrived when its block begins."""

    def take_home(self, cargo: Cargo, pairs: Pairs) -> None:
        """Start copying each pair's device tensor into its host tensor, after the compute; then free the
        slot."""

    def release(self, cargo: Cargo) -> None:
        """Free the slot without taking anything home."""

    def join(self) -> None:
        """Order the caller's current stream behind all computes: they may have run on other streams."""

    def finish(self) -> None:
        """Wait until everything is home; raises the first error of a copy."""

    def spans(self) -> list[Span]:
        """What the last step did and when, after `finish`."""

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all slots' buffers."""


class _Clock:
    """Spans of a step, measured on the host."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.found: list[Span] = []

    def mark(self, lane: Lane, window: int, begin: float, nbytes: int) -> None:
        end = time.perf_counter()
        span = Span(
            lane=lane,
            window=window,
            begin_seconds=begin - self.start,
            end_seconds=end - self.start,
            nbytes=nbytes,
        )
        self.found.append(span)


class NoLink:
    """The device is the host: what is lent is the host tensor itself."""

    copies = False
    num_slots = 1
    buffer_bytes = 0

    def __init__(self) -> None:
        self._clock = _Clock()

    def begin(self) -> None:
        """Start the clock."""
        self._clock = _Clock()

    def bring_up(self, window: int, slot: int, hosts: Sequence[Tensor]) -> Cargo:
        """The hosts themselves."""
        return Cargo(window=window, slot=slot, lent=tuple(hosts), nbytes=0)

    @contextmanager
    def computing(self, cargo: Cargo) -> Iterator[None]:
        """Nothing to wait for."""
        begin = time.perf_counter()
        yield
        self._clock.mark("compute", cargo.window, begin, 0)

    def take_home(self, cargo: Cargo, pairs: Pairs) -> None:
        """Copy what the class replaced by a tensor of its own."""
        with torch.no_grad():
            for device, host in pairs:
                host.copy_(device)

    def release(self, cargo: Cargo) -> None:
        """Nothing to free."""

    def join(self) -> None:
        """Everything is in order as it is."""

    def finish(self) -> None:
        """Nothing is ever on its way."""

    def spans(self) -> list[Span]:
        """The computes of the last step that went window by window."""
        return list(self._clock.found)


class SerialLink(NoLink):
    """A device without streams: copy up, wait, compute, wait, copy home.

    Args:
        device: Where windows go.
    """

    copies = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._buffer: Tensor | None = None

    @property
    def buffer_bytes(self) -> int:  # type: ignore[override]
        """Bytes of the one buffer."""
        return 0 if self._buffer is None else self._buffer.numel()

    def bring_up(self, window: int, slot: int, hosts: Sequence[Tensor]) -> Cargo:
        """Copy now."""
        begin = time.perf_counter()
        self._buffer = buffer_for(hosts, self._buffer, self._device)
        lent = carve(hosts, self._buffer)
        for device, host in zip(lent, hosts):
            device.copy_(host)
        nbytes = sum(host.nbytes for host in hosts)
        self._clock.mark("up", window, begin, nbytes)
        return Cargo(window=window, slot=slot, lent=tuple(lent), nbytes=nbytes)

    def take_home(self, cargo: Cargo, pairs: Pairs) -> None:
        """Copy now."""
        begin = time.perf_counter()
        super().take_home(cargo, pairs)
        self._clock.mark("down", cargo.window, begin, sum(host.nbytes for _, host in pairs))


@dataclass(slots=True)
class _Slot:
    """A buffer and what must be over before it is filled again."""

    buffer: Tensor | None = None
    free: Any = None


@dataclass(slots=True)
class _Events:
    """A span whose ends are events on a stream."""

    lane: Lane
    window: int
    nbytes: int
    begin: Any
    end: Any = field(default=None)


class AcceleratorLink:
    """An accelerator: one stream up, one down, compute on the stream that is current at the step.

    Works by the device's own module (`torch.cuda`, `torch.xpu`, ...): streams and events. Page-locked host
    memory makes the copies asynchronous to the host; nothing here waits for the whole device.

    Args:
        device: The accelerator.
        num_slots: 3 overlaps everything; 1 is serial.
    """

    copies = True

    def __init__(self, device: torch.device, num_slots: int = 3) -> None:
        self.num_slots = num_slots
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._up, self._down = self._module.Stream(device=device), self._module.Stream(device=device)
        self._slots = [_Slot() for _ in range(num_slots)]
        self._start: Any = None
        self._found: list[_Events] = []
        self._computed: dict[int, Any] = {}

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all slots' buffers."""
        return sum(slot.buffer.numel() for slot in self._slots if slot.buffer is not None)

    def begin(self) -> None:
        """Count spans from the current point of the current stream."""
        self._start, self._found = self._event(self._current()), []

    def bring_up(self, window: int, slot: int, hosts: Sequence[Tensor]) -> Cargo:
        """Queue the copies on the up stream, behind the slot's last way home."""
        place = self._slots[slot]
        fresh = buffer_for(hosts, place.buffer, self._device)
        if fresh is not place.buffer:
            if place.free is not None:
                place.free.synchronize()  # the old buffer may still be read on the down stream
            place.buffer = fresh
            self._up.wait_stream(self._current())  # its memory may have been another tensor's on that stream
        lent = carve(hosts, place.buffer)
        with self._module.stream(self._up):
            if place.free is not None:
                self._up.wait_event(place.free)
            begin = self._event(self._up)
            for device, host in zip(lent, hosts):
                device.copy_(host, non_blocking=True)
            arrival = self._event(self._up)
        nbytes = sum(host.nbytes for host in hosts)
        self._found.append(_Events("up", window, nbytes, begin, arrival))
        return Cargo(window=window, slot=slot, lent=tuple(lent), nbytes=nbytes, arrival=arrival)

    @contextmanager
    def computing(self, cargo: Cargo) -> Iterator[None]:
        """Order the current stream behind the arrival."""
        stream = self._current()
        stream.wait_event(cargo.arrival)
        span = _Events("compute", cargo.window, cargo.nbytes, self._event(stream))
        yield
        span.end = self._computed[cargo.slot] = self._event(stream)
        self._found.append(span)

    def take_home(self, cargo: Cargo, pairs: Pairs) -> None:
        """Queue the copies on the down stream, behind the compute."""
        computed = self._event(self._current())
        with self._module.stream(self._down):
            self._down.wait_event(computed)
            begin = self._event(self._down)
            for device, host in pairs:
                host.copy_(device, non_blocking=True)
                if device.device.type != "cpu":
                    device.record_stream(self._down)
            home = self._event(self._down)
        self._slots[cargo.slot].free = home
        self._found.append(_Events("down", cargo.window, sum(h.nbytes for _, h in pairs), begin, home))

    def release(self, cargo: Cargo) -> None:
        """The slot is free once its values have arrived."""
        self._slots[cargo.slot].free = cargo.arrival

    def join(self) -> None:
        """The current stream waits for the last compute of each slot."""
        for event in self._computed.values():
            self._current().wait_event(event)

    def finish(self) -> None:
        """Wait, on the host, for what is on its way home."""
        for slot in self._slots:
            if slot.free is not None:
                slot.free.synchronize()

    def spans(self) -> list[Span]:
        """The spans' times, from their events."""
        self.finish()
        found = []
        for each in self._found:
            each.end.synchronize()
            begin, end = (self._start.elapsed_time(event) / 1000 for event in (each.begin, each.end))
            found.append(
                Span(
                    lane=each.lane,
                    window=each.window,
                    begin_seconds=begin,
                    end_seconds=end,
                    nbytes=each.nbytes,
                )
            )
        return found

    def _current(self) -> Any:
        return self._module.current_stream(self._device)

    def _event(self, stream: Any) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(stream)
        return event


class ThreadLink:
    """Real copies by two worker threads into separate host buffers: a device that any machine has.

    For tests and measurements of everything that an accelerator does to the step. A buffer is filled with NaN
    bytes before it is filled and after it is released, so a use before arrival or after release can't go
    unseen.

    Args:
        num_slots: 3 overlaps everything; 1 is serial.
        up_bytes_per_second: Copies up take at least this long; None: as fast as they go.
        down_bytes_per_second: The same for copies home.
        half_duplex: Up and down share one lane, in the order in which they were asked for.
        before_copy: Called in the worker before each window's copies with (lane, window): to delay, or to
            fail.
    """

    copies = True

    def __init__(
        self,
        *,
        num_slots: int = 3,
        up_bytes_per_second: float | None = None,
        down_bytes_per_second: float | None = None,
        half_duplex: bool = False,
        before_copy: Callable[[Lane, int], None] | None = None,
    ) -> None:
        self.num_slots = num_slots
        self._rates: dict[Lane, float | None] = {"up": up_bytes_per_second, "down": down_bytes_per_second}
        self._half_duplex = half_duplex
        self._before_copy = before_copy
        self._workers: dict[Lane, ThreadPoolExecutor] = {}
        self._slots = [_Slot() for _ in range(num_slots)]
        self._pending: list[Future[None]] = []
        self._clock = _Clock()
        self.bytes_up = 0
        self.bytes_down = 0

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all slots' buffers."""
        return sum(slot.buffer.numel() for slot in self._slots if slot.buffer is not None)

    def begin(self) -> None:
        """Start the clock."""
        self._clock = _Clock()

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

    def _settle(self, place: _Slot) -> None:
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
        clock: _Clock,
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
        if poison is not None:
            _poison(poison)


_warned = threading.Event()


def link_for(device: torch.device) -> Link:
    """The link between the host and the device on which parameters live."""
    if device.type == "cpu":
        return NoLink()
    try:
        return AcceleratorLink(device)
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        if not _warned.is_set():
            _warned.set()
            logger.warning("%s offers no streams (%s): copies and compute do not overlap", device, error)
        return SerialLink(device)


def buffer_for(hosts: Sequence[Tensor], buffer: Tensor | None, device: torch.device) -> Tensor:
    """The buffer at hand if it is large enough, else a new one of exactly the size that is needed."""
    needed = sum(padded(host.nbytes) for host in hosts)
    if buffer is None or buffer.numel() < needed:
        return torch.empty(needed, dtype=torch.uint8, device=device)
    return buffer


def carve(hosts: Sequence[Tensor], buffer: Tensor) -> list[Tensor]:
    """A device tensor for each host tensor, with its shape, strides and dtype, on cache lines of the
    buffer."""
    lent: list[Tensor] = []
    cursor = 0
    for host in hosts:
        flat = buffer[cursor : cursor + host.nbytes].view(host.dtype)
        lent.append(flat.as_strided(host.shape, host.stride(), flat.storage_offset()))
        cursor += padded(host.nbytes)
    return lent


def padded(nbytes: int) -> int:
    """Rounded up to whole cache lines."""
    return -(-nbytes // LINE_BYTES) * LINE_BYTES


def _poison(buffer: Tensor) -> None:
    buffer.fill_(_POISON)
