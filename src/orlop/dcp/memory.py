"""Tensors as bytes.

Owns how the memory of a tensor is looked at. Must not know files or checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from orlop import compat
from orlop.dcp.boxes import Box, pieces

__all__ = ["is_plain", "memory_of", "slabs"]


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor is nothing but strided numbers in memory: no wrapper, no lazy conjugation or negation."""
    return (
        compat.is_plain_tensor(tensor)
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not (tensor.is_conj() or tensor.is_neg())
    )


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous host tensor; what is written there is in the tensor."""
    # Not reshape: a contiguous tensor may have any stride along an axis of one element.
    memory: Any = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return memoryview(memory)


def slabs(tensor: Tensor, scratch: Tensor) -> Iterator[memoryview]:
    """The row-major bytes of a plain tensor, part by part; no copy is made of a contiguous one on the host.

    Args:
        tensor: On any device, of any strides.
        scratch: Host bytes that the others pass through; each part is valid until the next is asked for.
    """
    most = scratch.numel()
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        memory = memory_of(tensor)
        for start in range(0, len(memory), most):
            yield memory[start : start + most]
        return
    whole = Box((0,) * tensor.ndim, tuple(tensor.shape))
    for piece in pieces(whole.sizes, whole, tensor.element_size(), most, 0):
        part = tensor
        for axis, (offset, size) in enumerate(zip(piece.box.offsets, piece.box.sizes)):
            part = part.narrow(axis, offset, size)
        room = scratch[: piece.stop - piece.start]
        room.view(tensor.dtype).view(piece.box.sizes).copy_(part)
        yield memory_of(room)
