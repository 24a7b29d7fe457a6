"""The path between host and device.

Owns: copies, the device buffers that hold a window, and the order between copies and compute. Must not know:
optimizers, what the tensors mean, which window comes next.

One contract, three links. For each window the step says `bring_up(hosts)`, waits for `Cargo.wait_arrived`,
computes on `Cargo.lent`, then says `take_home(cargo, pairs)` and, when it needs the host side again,
`finish()`. Each call starts work and returns; today's step waits at once (serial), and three windows at a
time fit the same calls."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class Cargo:
    """One window's state on the device.

    Attributes:
        lent: Device tensors, in the order of the hosts that they hold the values of.
        buffer: The device memory that they are carved from.
        arrival: Done when the values are there.
    """

    lent: tuple[Tensor, ...]
    buffer: Tensor | None
    arrival: Future[None] | None = None

    def wait_arrived(self) -> None:
        """Block (or order the current stream) until the values are there."""
        if self.arrival is not None:
            self.arrival.result()


class Link(Protocol):
    """What a step needs of the path between host and device."""

    copies: bool

    def bring_up(self, hosts: Sequence[Tensor]) -> Cargo:
        """Start copying host tensors into device memory."""

    def take_home(self, cargo: Cargo, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Start copying each pair's device tensor into its host tensor, then release the cargo's buffer."""

    def finish(self) -> None:
        """Wait until everything is home."""


class NoLink:
    """The device is the host: what is lent is the host tensor itself."""

    copies = False

    def bring_up(self, hosts: Sequence[Tensor]) -> Cargo:
        """The hosts themselves."""
        return Cargo(tuple(hosts), None)

    def take_home(self, cargo: Cargo, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy only what the class replaced by a tensor of its own."""
        for device, host in pairs:
            if device is not host:
                host.copy_(device)

    def finish(self) -> None:
        """Nothing is ever on its way."""


class AcceleratorLink:
    """An accelerator, serially: copies are queued on the current stream, where the compute is queued too.

    Page-locked host memory makes the copies asynchronous to the host. `finish` waits for the current stream
    only.

    Args:
        device: The accelerator.
    """

    copies = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffer: Tensor | None = None
        self._busy = False

    def bring_up(self, hosts: Sequence[Tensor]) -> Cargo:
        """Queue the copies on the current stream; what is queued there later sees the values."""
        self._buffer = _buffer_for(hosts, self._buffer, self.device)
        lent = _carve(hosts, self._buffer)
        for device, host in zip(lent, hosts):
            device.copy_(host, non_blocking=True)
        self._busy = True
        return Cargo(tuple(lent), self._buffer)

    def take_home(self, cargo: Cargo, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Queue the copies on the current stream, after the compute."""
        for device, host in pairs:
            host.copy_(device, non_blocking=True)

    def finish(self) -> None:
        """Wait for the current stream: the copies home were queued there last."""
        if self._busy:
            torch.accelerator.current_stream(self.device).synchronize()
            self._busy = False


class ThreadLink:
    """Real copies by a worker thread into a separate host buffer: a device that any machine has.

    For tests and measurements of everything that an accelerator does to the step. A buffer is filled with NaN
    bytes when it is released, so a use after release can't go unseen."""

    copies = True

    def __init__(self) -> None:
        self._worker: ThreadPoolExecutor | None = None
        self._buffer: Tensor | None = None
        self._pending: list[Future[None]] = []
        self.bytes_up = 0
        self.bytes_down = 0

    def bring_up(self, hosts: Sequence[Tensor]) -> Cargo:
        """Let the worker copy the hosts into the buffer."""
        self.finish()
        self._buffer = _buffer_for(hosts, self._buffer, torch.device("cpu"))
        self._poison(self._buffer)
        lent = _carve(hosts, self._buffer)
        self.bytes_up += sum(host.nbytes for host in hosts)
        return Cargo(tuple(lent), self._buffer, self._submit(list(zip(lent, hosts))))

    def take_home(self, cargo: Cargo, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Let the worker copy home, then poison the buffer."""
        self.bytes_down += sum(host.nbytes for _, host in pairs)
        moves = [(host, device) for device, host in pairs]
        self._pending.append(self._submit(moves, release=cargo.buffer))

    def finish(self) -> None:
        """Wait for the worker; its first error is raised here."""
        while self._pending:
            self._pending.pop(0).result()

    def _submit(self, moves: list[tuple[Tensor, Tensor]], release: Tensor | None = None) -> Future[None]:
        if self._worker is None:
            self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="orlop-link")
        return self._worker.submit(self._move, moves, release)

    def _move(self, moves: list[tuple[Tensor, Tensor]], release: Tensor | None) -> None:
        with torch.no_grad():
            for target, source in moves:
                target.copy_(source)
            if release is not None:
                self._poison(release)

    @staticmethod
    def _poison(buffer: Tensor) -> None:
        buffer.fill_(0xFF)


def link_for(device: torch.device) -> Link:
    """The link between the host and the device on which parameters live."""
    return NoLink() if device.type == "cpu" else AcceleratorLink(device)


def _buffer_for(hosts: Sequence[Tensor], buffer: Tensor | None, device: torch.device) -> Tensor:
    """The buffer at hand if it is large enough, else a new one of exactly the size that is needed."""
    needed = sum(_padded(host.nbytes) for host in hosts)
    if buffer is None or buffer.numel() < needed:
        return torch.empty(needed, dtype=torch.uint8, device=device)
    return buffer


def _carve(hosts: Sequence[Tensor], buffer: Tensor) -> list[Tensor]:
    """A device tensor for each host tensor, with its shape, strides and dtype, on cache lines of the
    buffer."""
    lent: list[Tensor] = []
    cursor = 0
    for host in hosts:
        flat = buffer[cursor : cursor + host.nbytes].view(host.dtype)
        lent.append(flat.as_strided(host.shape, host.stride(), flat.storage_offset()))
        cursor += _padded(host.nbytes)
    return lent


def _padded(nbytes: int) -> int:
    return -(-nbytes // _LINE_BYTES) * _LINE_BYTES
