"""The link to an accelerator: its own streams and events.

Owns: what is queued on which stream, and which event orders it. Must not know: what the tensors mean.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from orlop.optim.link import NUM_SLOTS, Cargo, Link, NoLink, Pairs, SerialLink, Slot, buffer_for, carve
from orlop.optim.timeline import Lane, Span

logger = logging.getLogger("orlop")


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
        num_slots: From 3 on everything overlaps; 1 is serial.
    """

    copies = True

    def __init__(self, device: torch.device, num_slots: int = NUM_SLOTS) -> None:
        self.num_slots = num_slots
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._up, self._down = self._module.Stream(device=device), self._module.Stream(device=device)
        self._slots = [Slot() for _ in range(num_slots)]
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
