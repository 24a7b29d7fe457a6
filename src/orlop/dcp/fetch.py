"""One wanted box of a stored chunk, cut into jobs, and how a job's bytes reach their target.

Owns how bytes travel: straight into the target where it is plain contiguous host memory, else through a bounded scratch
buffer; and that every byte which has a checksum is checked on the way. Must not know threads, plans or metadata.

A range is widened to whole checksum blocks: the extra bytes at its ends go to scratch, the middle into the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from orlop.dcp.boxes import Box, Piece, is_run, pieces, row_major
from orlop.dcp.checksums import BLOCK_BYTES, BlockCrcs, combine, crc32
from orlop.dcp.dtypes import ITEM_BYTES
from orlop.dcp.memory import is_plain, memory_of
from orlop.dcp.source import Source
from orlop.errors import CheckpointCorrupt
from orlop.store.directory import RangedData
from orlop.wording import counted

__all__ = ["Fetch", "Job", "Scratch", "Tally", "check_whole", "jobs_of", "run_job"]

# Small enough to stay in the cache between reading and checking, large enough that calls don't count.
_STEP_BYTES = 2 << 20
# A thread's scratch: with the most threads (`transfer`) less than 64 MiB.
_SLAB_BYTES = 4 << 20
# Reading over a gap of this size costs about as much as another call.
_GAP_BYTES = BLOCK_BYTES


@dataclass(slots=True, kw_only=True)
class Tally:
    """What one thread has fetched, in bytes."""

    read: int = 0
    checked: int = 0


@dataclass(slots=True, kw_only=True)
class Fetch:
    """One box of a stored chunk, and where it is to go.

    Attributes:
        source: The stored chunk.
        box: The wanted region, in the chunk's indices.
        target: What to fill: a tensor of the box's sizes, on any device, of any dtype that `copy_` can convert to.
        parts: For a whole record with a checksum of its own: (first byte, length, CRC-32) of each part read.
    """

    source: Source
    box: Box
    target: Tensor
    parts: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Stored bytes that are wanted."""
        return self.box.volume * ITEM_BYTES[self.source.dtype]

    @property
    def is_whole(self) -> bool:
        """Whether the box is all of the chunk."""
        return self.box.sizes == self.source.sizes

    @property
    def unchecked(self) -> str | None:
        """Why its bytes can't be checked; None when they are."""
        if self.source.block_crcs is not None or not self.nbytes:
            return None
        if not self.source.crc:
            return "its record carries no checksum"
        return None if self.is_whole else "only a part of a record with one checksum for all was read"


class Scratch:
    """One thread's buffers, allocated when they are first needed."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._slab: Tensor | None = None
        self._edges = memoryview(bytearray(2 * BLOCK_BYTES))

    @property
    def slab(self) -> Tensor:
        """Room for one part that can't go straight to its target."""
        if self._slab is None:
            size = _SLAB_BYTES + 2 * BLOCK_BYTES
            self._slab = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        return self._slab

    def edges(self, head: int, tail: int) -> tuple[memoryview, memoryview]:
        """Room for the rest of the blocks at both ends of a range, each less than a block."""
        return self._edges[:head], self._edges[BLOCK_BYTES : BLOCK_BYTES + tail]


@dataclass(frozen=True, slots=True)
class Job:
    """Bytes `piece.start` to `piece.stop` of a source; straight into `memory`, or by scratch when that is None."""

    fetch: Fetch
    piece: Piece
    memory: memoryview | None


def _takes_bytes(target: Tensor, dtype: str) -> bool:
    return (
        target.device.type == "cpu"
        and target.dtype == getattr(torch, dtype)
        and target.is_contiguous()
        and is_plain(target)
    )


def jobs_of(fetch: Fetch) -> Iterator[Job]:
    """The jobs of one fetch, in the order of their bytes."""
    source, item_bytes = fetch.source, ITEM_BYTES[fetch.source.dtype]
    if not fetch.nbytes:
        return
    if not (_takes_bytes(fetch.target, source.dtype) and is_run(source.sizes, fetch.box)):
        for piece in pieces(source.sizes, fetch.box, item_bytes, _SLAB_BYTES, _GAP_BYTES):
            yield Job(fetch, piece, None)
        return
    memory = memory_of(fetch.target)
    first = sum(map(int.__mul__, fetch.box.offsets, row_major(source.sizes))) * item_bytes
    start, stop = first, first + fetch.nbytes
    while start < stop:
        # Steps end at block boundaries, so that only a run's own ends are widened.
        end = min(stop, (start // BLOCK_BYTES) * BLOCK_BYTES + _STEP_BYTES)
        yield Job(fetch, Piece(start, end, fetch.box), memory[start - first : end - first])
        start = end


# -- one job -----------------------------------------------------------------------------------------------------------


def run_job(job: Job, file: RangedData, scratch: Scratch, tally: Tally) -> None:
    """Read and check a job's bytes, and put them where they belong.

    Raises:
        CheckpointCorrupt: A checksum differs or the file ends early.
    """
    source, piece = job.fetch.source, job.piece
    start, stop = _widened(source, piece)
    if job.memory is None:
        slab = scratch.slab
        content = memory_of(slab)[: stop - start]
        buffers = [content]
    else:
        head, tail = scratch.edges(piece.start - start, stop - piece.stop)
        buffers = [head, job.memory, tail]
    if file.read_into(source.at + start, buffers) != stop - start:
        raise CheckpointCorrupt(
            "a file ends early",
            where=source.where,
            expected="at least " + counted(source.at + stop, "byte"),
            found=counted(file.size, "byte"),
        )
    tally.read += stop - start
    if source.block_crcs is not None:
        _check_blocks(source, start, buffers)
        wanted_bytes = piece.box.volume * ITEM_BYTES[source.dtype]
        tally.checked += wanted_bytes if job.memory is None else len(job.memory)
    elif job.fetch.unchecked is None:
        wanted = buffers[0][piece.start - start : piece.stop - start] if job.memory is None else job.memory
        job.fetch.parts.append((piece.start, len(wanted), crc32(wanted)))
        tally.checked += len(wanted)
    if job.memory is None:
        _place(job, slab[piece.start - start : piece.stop - start])


def _widened(source: Source, piece: Piece) -> tuple[int, int]:
    if source.block_crcs is None:
        return piece.start, piece.stop
    stop = -(-piece.stop // BLOCK_BYTES) * BLOCK_BYTES
    return piece.start // BLOCK_BYTES * BLOCK_BYTES, min(stop, source.nbytes)


def _check_blocks(source: Source, start: int, buffers: list[memoryview]) -> None:
    """Compare the blocks from byte `start` on, which lie in the buffers one after the other."""
    assert source.block_crcs is not None
    blocks = BlockCrcs()
    for buffer in buffers:
        blocks.add(buffer)
    found = blocks.crcs()
    first = start // BLOCK_BYTES
    expected = source.block_crcs[first : first + len(found)].tolist()
    if found != expected:
        block = next(at for at, pair in enumerate(zip(found, expected)) if pair[0] != pair[1])
        at = source.at + start + block * BLOCK_BYTES
        raise CheckpointCorrupt(
            "a checksum differs: the file was damaged after it was written",
            where=f"{source.where}, bytes {at:,} to {at + BLOCK_BYTES:,}",
            expected=f"CRC-32 {expected[block]:08x}",
            found=f"{found[block]:08x}",
            todo="resume from an older checkpoint, or copy this one again from where it came",
        )


def _place(job: Job, content: Tensor) -> None:
    source, box = job.fetch.source, job.piece.box
    stored = content.view(getattr(torch, source.dtype)).as_strided(box.sizes, row_major(source.sizes), None)
    target = job.fetch.target
    for axis, (offset, base, size) in enumerate(zip(box.offsets, job.fetch.box.offsets, box.sizes)):
        if size != target.shape[axis]:
            target = target.narrow(axis, offset - base, size)
    target.copy_(stored)


def check_whole(fetch: Fetch) -> None:
    """Compare the checksum of a whole record with those of its parts."""
    if not fetch.parts:
        return
    total = 0
    for _, nbytes, crc in sorted(fetch.parts):
        total = combine(total, crc, nbytes)
    if total != fetch.source.crc:
        raise CheckpointCorrupt(
            "a checksum differs: the file was damaged after it was written",
            where=fetch.source.where,
            expected=f"CRC-32 {fetch.source.crc:08x}",
            found=f"{total:08x}",
            todo="load an older checkpoint, or copy this one again from where it came",
        )
