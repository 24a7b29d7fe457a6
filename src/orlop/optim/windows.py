"""What travels together: parameters packed into windows under a byte cap. Pure.

Owns: the plan and its order. Must not know: tensors, streams, torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Cutting a tensor anywhere else changes results: vector kernels finish a tail element by element, with other
# rounding in low precision. At multiples of 64 elements no piece but the last has a tail, as in the whole
# tensor.
CUT_ELEMENTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one parameter's state weighs.

    Attributes:
        num_elements: Elements of this rank's part of the parameter.
        element_bytes: Bytes of state per element that travel (all moments together).
        fixed_bytes: Bytes that travel with every piece, whatever its size (scalars).
        divisible: It may be cut at multiples of `CUT_ELEMENTS`.
    """

    num_elements: int
    element_bytes: int
    fixed_bytes: int
    divisible: bool

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.num_elements * self.element_bytes + self.fixed_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A run of one parameter's elements.

    Attributes:
        index: Which of the loads.
        start: First element.
        stop: One past the last element.
        last: The parameter's last piece; its scalars are the ones to keep.
        whole: The only piece.
    """

    index: int
    start: int
    stop: int
    last: bool
    whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Pieces that are on the device together.

    Attributes:
        pieces: In the order of the loads.
        nbytes: What they weigh together.
    """

    pieces: tuple[Piece, ...]
    nbytes: int


def plan_windows(loads: Sequence[Load], cap_bytes: int | None) -> tuple[Window, ...]:
    """Pack loads, in their order, into windows of at most `cap_bytes`.

    A divisible load larger than the cap is cut; an indivisible one gets a window of its own, which is then
    larger than the cap. The plan depends on nothing but the arguments, so equal ranks make equal plans.

    Args:
        loads: One per parameter.
        cap_bytes: The largest window; None puts everything into one.

    Returns:
        Windows that hold every element of every load exactly once.
    """
    windows: list[Window] = []
    pending: list[Piece] = []
    pending_bytes = 0
    for index, load in enumerate(loads):
        for piece in _cut(index, load, cap_bytes):
            nbytes = (piece.stop - piece.start) * load.element_bytes + load.fixed_bytes
            if pending and cap_bytes is not None and pending_bytes + nbytes > cap_bytes:
                windows.append(Window(pieces=tuple(pending), nbytes=pending_bytes))
                pending, pending_bytes = [], 0
            pending.append(piece)
            pending_bytes += nbytes
    if pending:
        windows.append(Window(pieces=tuple(pending), nbytes=pending_bytes))
    return tuple(windows)


def _cut(index: int, load: Load, cap_bytes: int | None) -> list[Piece]:
    size = load.num_elements
    if cap_bytes is None or load.nbytes <= cap_bytes or not load.divisible or load.element_bytes * size == 0:
        return [Piece(index=index, start=0, stop=size, last=True, whole=True)]
    fitting = (cap_bytes - load.fixed_bytes) // load.element_bytes
    length = max(CUT_ELEMENTS, fitting // CUT_ELEMENTS * CUT_ELEMENTS)
    starts = range(0, size, length)
    return [
        Piece(
            index=index,
            start=start,
            stop=min(start + length, size),
            last=start + length >= size,
            whole=length >= size,
        )
        for start in starts
    ]
