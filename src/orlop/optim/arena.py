"""The host memory that owns all optimizer state of one optimizer on one rank.

Owns: exact-size blocks that are never moved, and the leaves carved from them. Must not know: optimizers,
parameters' names, devices other than "the host, page-locked or not".

A block is one anonymous mapping. Each leaf is a storage of its own at offset 0 over its part of the block, so
saving, pickling or copying one leaf never drags the block along; the block lives as long as one of its leaves
does."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orlop import compat
from orlop.errors import HostMemoryError
from orlop.optim.host import (
    HostMemory,
    local_world_size,
    locked_memory_limit,
    read_host_memory,
    require_host_memory,
    warn_of_locked_memory,
)
from orlop.optim.probe import LeafSpec

# Leaves of a page or more start on a cache line; smaller ones only on a multiple of their element, or padding
# would cost more than the state. A page and 63 bytes of padding are 1.5 %: the bound of 2 % holds for any
# mix.
_LINE_BYTES = 64
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """Where each leaf starts in a block.

    Attributes:
        offsets: In bytes, one per leaf, in the order in which the leaves were given.
        nbytes: The block's size.
    """

    offsets: tuple[int, ...]
    nbytes: int


def plan_block(specs: Sequence[LeafSpec]) -> BlockPlan:
    """Place leaves without overlap: large ones on cache lines first, then small ones by falling alignment.

    Pure. By falling alignment every small leaf starts where the one before it ends.
    """
    offsets = [0] * len(specs)
    cursor = 0
    for index in sorted(range(len(specs)), key=lambda i: (-_alignment(specs[i]), i)):
        alignment = _alignment(specs[index])
        cursor = -(-cursor // alignment) * alignment
        offsets[index] = cursor
        cursor += specs[index].nbytes
    return BlockPlan(offsets=tuple(offsets), nbytes=cursor)


def _alignment(spec: LeafSpec) -> int:
    return _LINE_BYTES if spec.nbytes >= _PAGE_BYTES else max(1, spec.dtype.itemsize)


class Arena:
    """A list of blocks; grows by whole blocks, never moves one.

    Args:
        pinned: Page-lock the blocks for an accelerator. Needs one; without it torch can't page-lock.
    """

    def __init__(self, *, pinned: bool) -> None:
        self.pinned = pinned
        self._blocks: list[_Block] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in self._living())

    @property
    def num_blocks(self) -> int:
        """How many blocks there are: one from construction, one more for each later growth."""
        return len(self._living())

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor's memory lies in the arena (its local part's, for a DTensor); true for an empty
        one."""
        local = compat.local_tensor(tensor)
        if local.numel() == 0:
            return True
        start, end = local.data_ptr(), local.data_ptr() + local.untyped_storage().nbytes()
        return any(b.address <= start and end <= b.address + b.nbytes for b in self._living())

    def grow(self, specs: Sequence[LeafSpec], memory: HostMemory | None = None) -> list[Tensor]:
        """Allocate one block of the exact size for `specs` and carve it.

        Args:
            specs: The leaves' shapes, strides and dtypes.
            memory: What the host has left; read now where it is None.

        Returns:
            One zeroed tensor per spec, each a storage of its own.

        Raises:
            HostMemoryError: The host can't give the block, counting all ranks of this host. Nothing was
                allocated.
        """
        plan = plan_block(specs)
        if plan.nbytes == 0:
            return [_empty(spec) for spec in specs]
        require_host_memory(plan.nbytes, local_world_size(), memory or read_host_memory())
        if self.pinned:
            warn_of_locked_memory(plan.nbytes * local_world_size())
        buffer, nbytes = _map(plan.nbytes, pinned=self.pinned)
        address = ctypes.addressof(buffer)
        self._blocks.append(_Block(owner=weakref.ref(buffer), address=address, nbytes=nbytes))
        return [_carve(buffer, spec, offset) for spec, offset in zip(specs, plan.offsets)]

    def _living(self) -> list[_Block]:
        """The blocks of which a leaf is left."""
        self._blocks = [block for block in self._blocks if block.owner() is not None]
        return self._blocks


def _carve(buffer: Any, spec: LeafSpec, offset: int) -> Tensor:
    count = spec.shape.numel()
    if count == 0:
        return _empty(spec)
    flat = torch.frombuffer(buffer, dtype=spec.dtype, count=count, offset=offset)
    # Not a view of `flat`: in-place kernels run measurably slower on views.
    return torch.empty(0, dtype=spec.dtype).set_(flat.untyped_storage(), 0, spec.shape, spec.stride)


def _empty(spec: LeafSpec) -> Tensor:
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Where a block lies. Its leaves own it: `owner` dies with the last of them."""

    owner: weakref.ref[Any]
    address: int
    nbytes: int


def _map(nbytes: int, *, pinned: bool) -> tuple[Any, int]:
    """One mapping of exact size, zeroed by the kernel and page-locked where asked for, and the bytes that it
    takes."""
    mapping = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE") and nbytes >= 4 << 20:
        with contextlib.suppress(OSError):  # A kernel that was built without: pages are then small, no more.
            mapping.madvise(mmap.MADV_HUGEPAGE)
    buffer = (ctypes.c_char * nbytes).from_buffer(mapping)
    if pinned:
        undo = compat.register_pinned(ctypes.addressof(buffer), nbytes)
        if undo is None:
            return _allocate_pinned(nbytes)
        # The finalizer runs before the buffer lets go of the mapping: pages are unlocked while still mapped.
        weakref.finalize(buffer, undo)
    return buffer, nbytes


def _allocate_pinned(nbytes: int) -> tuple[Any, int]:
    """Torch's own pinned allocation, where torch offers no way to page-lock a mapping; it rounds up."""
    try:
        pinned = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        # Not refused beforehand by the memlock limit: drivers that lock pages themselves are not bound by it.
        raise HostMemoryError(
            "the host can't page-lock the memory for the optimizer state",
            expected=f"{nbytes:,} bytes of page-locked host memory",
            found=f"{error}; limit for locked memory of this process: {locked_memory_limit()}",
            todo="raise the limit (ulimit -l, or the container's), or shard over more hosts",
        ) from error
    buffer = (ctypes.c_char * nbytes).from_address(pinned.data_ptr())
    weakref.finalize(buffer, _let_go, pinned)
    return buffer, 1 << (nbytes - 1).bit_length()  # torch's host allocator rounds up to a power of two


def _let_go(owner: Tensor) -> None:
    """Holding `owner` in a finalizer's arguments is what keeps its memory until then."""
