"""What can be seen of a host-resident optimizer: how much memory its state takes, and how its last step went.

Owns the figures and their words. Must not know: how a step is run, how state is kept or loaded.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from orlop.optim.link import NUM_SLOTS, Link
from orlop.optim.pipeline import load_of
from orlop.optim.proof import Method
from orlop.optim.roster import Roster
from orlop.optim.stepper import Stepper
from orlop.optim.timeline import Span, busy_seconds, chrome_trace, link_share, wall_seconds
from orlop.wording import counted


class Figures:
    """The part of a host-resident optimizer that changes nothing."""

    window_bytes: int
    _stepper: Stepper
    _roster: Roster

    @property
    def device_bytes(self) -> int:
        """The most device memory that state takes in a step, all slots together.

        `window_bytes` for a class that may be cut; more for one that may not, where its largest parameter, or
        all of them, need more."""
        if self._roster.proof.method is Method.SLICED:
            return self.window_bytes
        loads = [load_of(resident, self._roster.proof.method).nbytes for resident in self._roster.residents]
        if self._roster.proof.method is Method.WHOLE:
            return sum(loads)
        return max(self.window_bytes, NUM_SLOTS * max(loads, default=0))

    def timeline(self) -> list[Span]:
        """When each window of the last step travelled and was stepped; waits for its state to be home.

        Empty for a step that needed no windows: the device is the host.
        """
        return self._stepper.spans()

    def describe(self) -> str:
        """Print a few lines, and return them: the arena, the windows and their cap, and how near the last
        step came to the link's measured limit."""
        spans = self.timeline()
        buffers = sum(link.buffer_bytes for link in self.links.values())
        lines = [
            f"{type(self).__name__}: {counted(len(self._roster.residents), 'parameter')}, run {self.method}",
            f"arena: {self.arena_bytes:,} bytes for {self.state_bytes:,} bytes of state",
            f"device cap: {self.device_bytes:,} bytes; device buffers now: {buffers:,} bytes",
        ]
        if spans:
            wall = wall_seconds(spans)
            busy = ", ".join(f"{lane} {seconds / wall:.0%}" for lane, seconds in busy_seconds(spans).items())
            windows = 1 + max(span.window for span in spans)
            lines.append(f"last step: {counted(windows, 'window')} in {wall * 1000:.1f} ms; busy: {busy}")
            share = link_share(spans)
            if share is not None:
                lines.append(f"link: {share:.0%} of its measured limit")
        else:
            lines.append("last step: in place, no windows")
        text = "\n".join(lines)
        print(text)
        return text

    @property
    def links(self) -> dict[torch.device, Link]:
        """The link of each device of parameters; one that is put here before the first step is used."""
        return self._stepper.links

    @property
    def arena_bytes(self) -> int:
        """Bytes of host memory that the arena takes."""
        return self._roster.residents.arena.nbytes

    @property
    def state_bytes(self) -> int:
        """Bytes of state in it."""
        return self._roster.residents.state_bytes

    @property
    def method(self) -> str:
        """How the class was proven to run: ``sliced``, ``windowed`` or ``whole``."""
        return self._roster.proof.method.value

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory lies in the arena."""
        return self._roster.residents.arena.holds(tensor)


def trace(path: str | os.PathLike[str], optimizer: Figures | None = None) -> None:
    """Write a step's timeline as a Chrome trace, which chrome://tracing and Perfetto open.

    Args:
        path: The JSON file to write.
        optimizer: Whose last step; by default that of the host-resident optimizer that stepped last in this
            process.

    Raises:
        ValueError: None has stepped yet.
    """
    chosen = optimizer if optimizer is not None else _stepped_last()
    if chosen is None:
        raise ValueError("no host-resident optimizer has stepped yet: there is nothing to trace")
    Path(path).write_text(chrome_trace(chosen.timeline()))


def _nobody() -> Figures | None:
    return None


_stepped_last: Callable[[], Figures | None] = _nobody  # a weak reference, once there is one


def note_step(optimizer: Figures) -> None:
    """This one stepped last."""
    global _stepped_last
    _stepped_last = weakref.ref(optimizer)
