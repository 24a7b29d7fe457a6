"""Where a live tensor lies in its global tensor: one box per rank, proven, or refused by name.

Owns that proof, the text that says how a tensor is laid out, and what of a box the chunks of a checkpoint do not hold.
Must not know what a leaf means, nor files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from orlop import compat
from orlop.dcp.boxes import Box, overlap
from orlop.errors import CheckpointMismatch

__all__ = ["describe_layout", "describe_meshes", "local_box", "uncovered"]


def local_box(key: str, tensor: Tensor) -> Box:
    """The box of the global tensor that this rank's part is; the whole for a plain tensor, an empty one off the mesh.

    Args:
        key: The leaf's name, for the message.
        tensor: Plain or DTensor.

    Raises:
        CheckpointMismatch: The part is not one box (strided or interleaved shards), or has another size than its
            placements say; a checkpoint would hold its values in the wrong places.
    """
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.ndim, tuple(tensor.shape))
    if not compat.is_in_mesh(tensor):
        return Box((0,) * tensor.ndim, (0,) * tensor.ndim)
    box = Box(*compat.local_box(tensor))
    local = tuple(compat.local_tensor(tensor).shape)
    if not compat.has_default_order(tensor):
        raise _refused(key, tensor, "its placements were applied in another order than the mesh's")
    for axis, indices in compat.strided_axes(tensor).items():
        start = box.offsets[axis] if box.sizes[axis] else 0
        count = indices.numel()
        if count != box.sizes[axis] or not torch.equal(indices, torch.arange(start, start + count)):
            found = f"rows {indices[:6].tolist()}{'…' if count > 6 else ''} of axis {axis}"
            raise _refused(key, tensor, found)
    if local != box.sizes:
        raise _refused(key, tensor, f"a local tensor of {local} where the placements say {box.sizes}")
    return box


def _refused(key: str, tensor: DTensor, found: str) -> CheckpointMismatch:
    return CheckpointMismatch(
        "this rank's part of a tensor is not one box of it, so a checkpoint can't hold it in its place",
        where=f"{key}: {describe_layout(tensor)}",
        expected="one box per rank",
        found=found,
        todo="redistribute the parameter to plain Shard or Replicate placements before the optimizer is built",
    )


def describe_layout(tensor: Tensor) -> str:
    """Mesh and placements as text; `""` for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return ""
    return f"{_describe_mesh(tensor)}: {', '.join(map(_describe_placement, tensor.placements))}"


def _describe_placement(placement: Placement) -> str:
    # Torch's own texts change with its versions.
    axis, factor = getattr(placement, "dim", None), getattr(placement, "split_factor", None)
    if factor is not None:
        return f"StridedShard({axis}, {factor})"
    return (
        "Replicate" if placement.is_replicate() else f"Shard({axis})" if axis is not None else str(placement)
    )


def describe_meshes(tensors: Iterable[Tensor]) -> list[str]:
    """Every mesh that some tensor is spread over, as text, sorted."""
    return sorted({_describe_mesh(tensor) for tensor in tensors if isinstance(tensor, DTensor)})


def _describe_mesh(tensor: DTensor) -> str:
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(f"dim{index}" for index in range(mesh.ndim))
    return " x ".join(f"{name}={mesh.size(index)}" for index, name in enumerate(names))


def uncovered(box: Box, chunks: Sequence[Box]) -> list[Box]:
    """The parts of `box` that no chunk holds, as disjoint boxes."""
    left = [box] if box.volume else []
    for chunk in chunks:
        left = [rest for part in left for rest in _without(part, chunk)]
        if not left:
            break
    return left


def _without(box: Box, chunk: Box) -> list[Box]:
    common = overlap(box, chunk)
    if common is None:
        return [box]
    rest: list[Box] = []
    offsets, sizes = list(box.offsets), list(box.sizes)
    for axis in range(len(sizes)):
        start, end = offsets[axis], offsets[axis] + sizes[axis]
        first, last = common.offsets[axis], common.offsets[axis] + common.sizes[axis]
        for low, high in ((start, first), (last, end)):
            if high > low:
                rest.append(
                    Box(
                        (*offsets[:axis], low, *offsets[axis + 1 :]),
                        (*sizes[:axis], high - low, *sizes[axis + 1 :]),
                    )
                )
        offsets[axis], sizes[axis] = first, last - first
    return rest
