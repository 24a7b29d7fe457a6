"""The path between host and device.

Owns: copies, the device buffers (slots) that hold windows, and the order between copies and compute. Must not
know: optimizers, what the tensors mean, which window comes next.

One contract, four links (`orlop.testing` has its conformance suite). In a step, for each window: `bring_up`
into a slot, `computing(cargo)` around the update, `take_home`. Each only starts work: up, compute and down of
different slots overlap. A slot is filled again only after its own window has gone home; up never waits for
the down of another slot. `finish` waits until everything is home; `spans` then says when each happened."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from orlop.optim.timeline import Lane, Span

LINE_BYTES = 64
# One window travels up, one is stepped, one travels down. A fourth slot, of the same cap, keeps all three at
# work when one of them is late: with three, each delay is passed on (1.04 instead of 1.12 to 1.17 times the
# slowest lane, benchmarks/pipeline.py).
NUM_SLOTS = 4


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


class Clock:
    """Spans of a step, measured on the host."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.found: list[Span] = []

    def mark(self, lane: Lane, window: int, begin: float, nbytes: int) -> None:
        """A span from `begin` (of `time.perf_counter`) until now."""
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
        self._clock = Clock()

    def begin(self) -> None:
        """Start the clock."""
        self._clock = Clock()

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
class Slot:
    """A buffer and what must be over before it is filled again."""

    buffer: Tensor | None = None
    free: Any = None


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
