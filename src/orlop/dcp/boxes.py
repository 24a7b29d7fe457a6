"""Boxes: axis-aligned regions of a tensor, what they have in common, whether they tile it, where their bytes lie.

Pure arithmetic over tuples of ints. Must not know torch, files or checkpoints.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from orlop.wording import counted

__all__ = ["Box", "Piece", "TilingFault", "is_run", "overlap", "pieces", "row_major", "tiling_fault"]

# A tensor that is cut along more axes than this is none that any training framework shards.
_MOST_CUT_AXES = 12


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned region.

    Attributes:
        offsets: Its first index along each axis.
        sizes: Its extent along each axis.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        """How many elements it holds."""
        return math.prod(self.sizes)


def overlap(a: Box, b: Box) -> Box | None:
    """What two boxes of one tensor have in common; None when that is nothing."""
    offsets = tuple(map(max, a.offsets, b.offsets))
    ends = (min(p + s, q + t) for p, s, q, t in zip(a.offsets, a.sizes, b.offsets, b.sizes))
    sizes = tuple(end - start for start, end in zip(offsets, ends))
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


@dataclass(frozen=True, slots=True)
class TilingFault:
    """Why boxes do not cover a tensor exactly once.

    Attributes:
        kind: A box lies outside; some element is in no box; or some element is in two.
        text: Where and how.
    """

    kind: Literal["outside", "gap", "overlap"]
    text: str


def tiling_fault(shape: Sequence[int], boxes: Sequence[Box]) -> TilingFault | None:
    """Why `boxes` do not cover a tensor of `shape` exactly once; None when they do. Empty boxes count for nothing.

    Linear in the number of boxes, whatever they are. The proof: give each corner of a box a sign, + or - by its parity.
    Boxes cover the whole exactly once if and only if the signs at all their corners sum up to those of the whole's own
    corners (the mixed difference of a sum of indicator functions determines the sum).
    """
    shape = tuple(shape)
    if len(boxes) == 1 and boxes[0].sizes == shape and not any(boxes[0].offsets):
        return None
    for box in boxes:
        if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
            return TilingFault(
                "outside", f"a chunk has {counted(len(box.sizes), 'axis', 'axes')}, the tensor {len(shape)}"
            )
        for offset, size, extent in zip(box.offsets, box.sizes, shape):
            if offset < 0 or size < 0 or offset + size > extent:
                return TilingFault("outside", f"the chunk at {box.offsets} of {box.sizes} leaves {shape}")
    filled = [box for box in boxes if box.volume]
    total, held = math.prod(shape), sum(box.volume for box in filled)
    if held < total:
        return TilingFault("gap", f"files hold {held:,} of its {counted(total, 'element')}")
    if not total or (len(filled) == 1 and held == total):
        return None
    cut = [axis for axis, extent in enumerate(shape) if any(box.sizes[axis] != extent for box in filled)]
    if len(cut) > _MOST_CUT_AXES:
        return TilingFault(
            "overlap", f"it is cut along {len(cut)} axes; at most {_MOST_CUT_AXES} are supported"
        )
    return _corner_fault(shape, filled, cut)


def _corner_fault(shape: tuple[int, ...], boxes: list[Box], cut: list[int]) -> TilingFault | None:
    signs: defaultdict[tuple[int, ...], int] = defaultdict(int)
    whole = Box((0,) * len(shape), shape)
    for box, weight in [*((box, 1) for box in boxes), (whole, -1)]:
        corners: list[tuple[tuple[int, ...], int]] = [((), weight)]
        for axis in cut:
            start = box.offsets[axis]
            end = start + box.sizes[axis]
            corners = [
                corner for at, sign in corners for corner in (((*at, start), sign), ((*at, end), -sign))
            ]
        for at, sign in corners:
            signs[at] += sign
    wrong = next((at for at, sign in signs.items() if sign), None)
    if wrong is None:
        return None
    place = ", ".join(f"axis {axis} at {index}" for axis, index in zip(cut, wrong))
    return TilingFault("overlap", f"chunks overlap near {place or 'its start'}")


def row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a contiguous tensor."""
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_run(sizes: Sequence[int], box: Box) -> bool:
    """Whether a box of a row-major tensor of `sizes` lies in one unbroken run."""
    return _span(row_major(sizes), box.sizes) == box.volume


def _span(strides: Sequence[int], sizes: Sequence[int]) -> int:
    """Elements from the first to the last of a box, both counted."""
    return sum((size - 1) * stride for size, stride in zip(sizes, strides)) + 1


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a box that one read fetches.

    Attributes:
        start: First byte, from the start of the stored tensor.
        stop: One past the last byte.
        box: The part, in the stored tensor's indices.
    """

    start: int
    stop: int
    box: Box


def pieces(
    sizes: Sequence[int], box: Box, item_bytes: int, most_bytes: int, gap_bytes: int
) -> Iterator[Piece]:
    """Cut a box of a row-major tensor into parts to read, in the order of their bytes.

    Between the rows of a column shard there are bytes that nobody needs. A part bridges gaps of up to `gap_bytes`
    (reading them is cheaper than another read) and spans at most `most_bytes`, or is a single element.

    Args:
        sizes: Of the stored tensor.
        box: The wanted region; inside it.
        item_bytes: Bytes of one element.
        most_bytes: How much one part may span.
        gap_bytes: How large a gap is read over.
    """
    if not box.volume:
        return
    strides = row_major(sizes)
    pending = [box]
    while pending:
        part = pending.pop()
        span = _span(strides, part.sizes) * item_bytes
        axis = next((axis for axis, size in enumerate(part.sizes) if size > 1), None)
        if axis is None:
            count = 1
        else:
            pitch = strides[axis] * item_bytes
            inner = _span(strides[axis + 1 :], part.sizes[axis + 1 :]) * item_bytes
            # The outermost axis has the widest gaps.
            fits = max(1, (most_bytes - inner) // pitch + 1) if pitch - inner <= gap_bytes else 1
            count = min(part.sizes[axis], fits)
        if axis is None or count == part.sizes[axis]:
            start = sum(offset * stride for offset, stride in zip(part.offsets, strides)) * item_bytes
            yield Piece(start, start + span, part)
            continue
        pending += reversed(list(_split(part, axis, count)))


def _split(box: Box, axis: int, count: int) -> Iterator[Box]:
    first, size = box.offsets[axis], box.sizes[axis]
    for start in range(0, size, count):
        yield Box(
            (*box.offsets[:axis], first + start, *box.offsets[axis + 1 :]),
            (*box.sizes[:axis], min(count, size - start), *box.sizes[axis + 1 :]),
        )
