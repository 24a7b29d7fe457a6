"""The only module that knows torch's versions and torch's private names.

Owns: one small function for each thing that orlop needs of torch and that torch does not offer in public, or
offers differently between 2.6 and 2.15. Must not know: anything of orlop but its errors. Where a function
rests on a private name, its docstring says which."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

F = TypeVar("F", bound=Callable[..., Any])


def torch_version() -> str:
    """Torch's own version string, for example ``2.13.0+cpu``."""
    return str(torch.__version__)


def torch_release() -> tuple[int, int]:
    """Torch's major and minor version, to compare with: the text "2.10" sorts before "2.9"."""
    major, minor = torch_version().split(".")[:2]
    return int(major), int(minor)


# -- optimizers ------------------------------------------------------------------------------------------------------


def raw_step(optimizer_class: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """The class's ``step``, one level below torch's profiling wrapper, so that step hooks do not fire in it.

    ``Optimizer._patch_step_function`` wraps ``step`` at the first construction and marks the wrapper
    ``hooked``."""
    step: Any = optimizer_class.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


def without_dynamo(function: F) -> F:
    """``torch.compile`` runs `function` eagerly, whatever calls it (``torch._disable_dynamo``)."""
    return cast(F, torch._disable_dynamo(function))


LOAD_PRE_HOOKS = "_optimizer_load_state_dict_pre_hooks"
LOAD_POST_HOOKS = "_optimizer_load_state_dict_post_hooks"


def load_pre_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """What ``register_load_state_dict_pre_hook`` registered, in order."""
    return list(getattr(optimizer, LOAD_PRE_HOOKS).values())


def load_post_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """What ``register_load_state_dict_post_hook`` registered, in order."""
    return list(getattr(optimizer, LOAD_POST_HOOKS).values())


def is_fsdp1_parameter(param: torch.Tensor) -> bool:
    """Whether FSDP1 owns the parameter: a flat parameter, or a view into one (``use_orig_params=True``)."""
    return bool(getattr(param, "_is_flat_param", False) or getattr(param, "_fsdp_flattened", False))


# -- DTensor ---------------------------------------------------------------------------------------------------------


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, or the tensor itself; no copy, no autograd, collectives in flight waited
    for.

    ``DTensor._local_tensor`` is the stable object; ``to_local()`` of a Parameter makes a new one each time
    from 2.13."""
    if not isinstance(tensor, DTensor):
        return tensor
    local: Any = tensor._local_tensor
    wait = getattr(local, "wait", None)  # AsyncCollectiveTensor
    return wait() if wait is not None else local  # type: ignore[no-any-return]


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Whether the tensor is torch's own kind (Tensor, Parameter, Buffer or DTensor), not some wrapper
    subclass."""
    return type(tensor) in (torch.Tensor, Parameter, DTensor) or isinstance(
        tensor, (torch.nn.Buffer, torch.nn.Parameter)
    )


def dtensor_like(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """`local` as this rank's part of a DTensor with the mesh, placements and global shape of `param`.

    The local tensor keeps its device, storage and dtype: ``DTensor.from_local`` would move it to the mesh's
    device, so the constructor is called with a copy of ``param._spec``. For a plain `param` the answer is
    `local` itself."""
    if not isinstance(param, DTensor):
        return local
    spec = copy.copy(param._spec)
    if spec.tensor_meta is not None and spec.tensor_meta.dtype != local.dtype:
        spec.tensor_meta = spec.tensor_meta._replace(dtype=local.dtype)
    return DTensor(local, spec, requires_grad=False)


def empty_state_like(param: torch.Tensor, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """An empty tensor with the shape, strides and (for a DTensor) mesh and placements of `param`; local on
    `device`."""
    local = local_tensor(param)
    empty = torch.empty_strided(local.shape, local.stride(), dtype=dtype, device=device)
    return dtensor_like(param, empty)


def shard_like(param: DTensor, whole: torch.Tensor) -> DTensor:
    """`whole`, which is equal on all ranks, as a DTensor with the mesh and placements of `param`.

    Without communication where torch can (``src_data_rank=None``, after 2.6); a scatter from rank 0 gives the same.
    """
    from torch.distributed.tensor import distribute_tensor

    takes_source = "src_data_rank" in inspect.signature(distribute_tensor).parameters
    options = {"src_data_rank": None} if takes_source else {}
    return distribute_tensor(whole, param.device_mesh, param.placements, **options)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a DTensor, on every rank (a collective); a plain tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placements(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The placements of a DTensor; ``()`` for a plain tensor."""
    return tuple(tensor._spec.placements) if isinstance(tensor, DTensor) else ()


def is_in_mesh(tensor: torch.Tensor) -> bool:
    """Whether this rank holds a part of the tensor; always so for a plain one."""
    return not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is not None


def gradient_like(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """A gradient of `param` with the parameter's own placements (redistributed where they differ)."""
    if isinstance(grad, DTensor) and isinstance(param, DTensor) and placements(grad) != placements(param):
        return grad.redistribute(placements=placements(param))
    return grad


# -- accelerators ----------------------------------------------------------------------------------------------------


def accelerator() -> torch.device | None:
    """The accelerator that torch sees and can use on this machine, or None."""
    if not torch.accelerator.is_available():
        return None
    return torch.accelerator.current_accelerator()


def register_pinned(address: int, nbytes: int) -> Callable[[], None] | None:
    """Page-lock existing host memory at its exact size; returns what undoes it, or None where torch offers no
    way.

    Uses the CUDA runtime's ``cudaHostRegister`` (also HIP's, under the same name in torch).
    """
    if not torch.cuda.is_available():
        return None
    runtime: Any = torch.cuda.cudart()
    torch.cuda.init()
    status = runtime.cudaHostRegister(address, nbytes, 0)
    if int(status) != 0:
        return None

    def undo() -> None:
        runtime.cudaHostUnregister(address)

    return undo


# -- checkpoints -----------------------------------------------------------------------------------------------------


def flatten_state_dict(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """Torch's own flattening of a nested state dict: the flat dict, and the path of each flat key.

    ``torch.distributed.checkpoint._nested_dict.flatten_state_dict``; it decides how DCP names leaves.
    """
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict as flatten

    flat, paths = flatten(dict(state_dict))
    return dict(flat), dict(paths)


def replace(instance: Any, **changes: Any) -> Any:
    """``dataclasses.replace`` for torch's own dataclasses."""
    return dataclasses.replace(instance, **changes)


def unflatten_state_dict(flat: Mapping[str, Any], paths: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """The reverse of `flatten_state_dict`: torch's own rebuilding of nested dicts and lists from their paths.

    ``torch.distributed.checkpoint._nested_dict.unflatten_state_dict``.
    """
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict as unflatten

    return dict(unflatten(dict(flat), dict(paths)))


# -- modules ---------------------------------------------------------------------------------------------------------


def own_loading(module: torch.nn.Module) -> str | None:
    """Why this module's values must go through its own ``load_state_dict``; None if filling them in place is
    the same.

    Looks at ``_load_state_dict_pre_hooks`` and ``_load_from_state_dict``; torch's own hooks (FSDP2's, the
    checkpoint wrapper's) only reshard or rename, and don't count."""
    for hook in module._load_state_dict_pre_hooks.values():
        function = getattr(hook, "hook", hook)
        if not _is_torchs(function):
            return (
                f"load_state_dict pre-hook {getattr(function, '__qualname__', type(function).__qualname__)}"
            )
    for name in ("_load_from_state_dict", "load_state_dict"):
        if not _is_torchs(getattr(type(module), name)):
            return f"{type(module).__qualname__}.{name}"
    return None


def _is_torchs(function: Any) -> bool:
    home = getattr(function, "__module__", None) or type(function).__module__
    return home == "torch" or home.startswith("torch.")


def fire_load_post_hooks(module: torch.nn.Module) -> None:
    """Run what ``register_load_state_dict_post_hook`` registered, children first, as ``load_state_dict``
    does.

    ``_load_state_dict_post_hooks``; nothing is missing or unexpected. FSDP2's own hook, which looks for
    tensors that were replaced, is left out: none was, and up to 2.9 it would move uneven shards to new
    memory.
    """
    from torch.nn.modules.module import _IncompatibleKeys

    for child in module._modules.values():
        if child is not None:
            fire_load_post_hooks(child)
    for hook in module._load_state_dict_post_hooks.values():
        if not getattr(hook, "__module__", "").startswith("torch.distributed.fsdp."):
            hook(module, _IncompatibleKeys([], []))


def local_box(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where this rank's part of a DTensor lies in the global tensor: (offsets, sizes); all of a plain tensor.

    Torch's own ``compute_local_shape_and_global_offset`` is wrong in 2.6 where one axis is sharded twice, in
    2.9 for uneven strided shards, and gave an empty part the offset of a real one. Here an empty part stands
    at the end of its axis. For axes in `strided_axes` no box is right, and it must not be used."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return (0,) * tensor.ndim, (0,) * tensor.ndim
    offsets, sizes = [0] * tensor.ndim, list(tensor.shape)
    cuts, _ = _cuts(tensor)
    for mesh_dim, axis in cuts:
        # As `torch.chunk`: equal parts, the last ones shorter or empty.
        part = -(-sizes[axis] // tensor.device_mesh.size(mesh_dim))
        first = min(part * coordinate[mesh_dim], sizes[axis])
        offsets[axis] += first
        sizes[axis] = min(part, sizes[axis] - first)
    ends = zip(offsets, sizes, tensor.shape)
    return tuple(offset if size else extent for offset, size, extent in ends), tuple(sizes)


def _cuts(tensor: DTensor) -> tuple[list[tuple[int, int]], set[int]]:
    """Which mesh dimension cuts which axis, in order; and the axes that end up interleaved.

    ``_StridedShard`` is how FSDP over tensor parallelism cuts what the later mesh dimensions have left: then
    its ``split_factor`` is their number of parts. With another factor a rank holds several pieces."""
    order: list[tuple[int, int]] = []
    interleaved: set[int] = set()
    parts: dict[int, int] = {}
    for mesh_dim, placement in reversed(list(enumerate(tensor.placements))):
        axis = getattr(placement, "dim", None)
        if axis is None:
            continue
        factor, later = getattr(placement, "split_factor", None), parts.get(axis, 1)
        if factor is None:
            order.insert(0, (mesh_dim, axis))
        else:
            order.append((mesh_dim, axis))
            if factor != later:
                interleaved.add(axis)
        parts[axis] = later * tensor.device_mesh.size(mesh_dim)
    return order, interleaved


def write_item_at(item: Any, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
    """A DCP ``WriteItem`` of a DTensor's part, with the box that it really is (see `local_box`)."""
    data = item.tensor_data
    chunk = dataclasses.replace(data.chunk, offsets=torch.Size(offsets), sizes=torch.Size(sizes))
    return dataclasses.replace(
        item,
        index=dataclasses.replace(item.index, offset=torch.Size(offsets)),
        tensor_data=dataclasses.replace(data, chunk=chunk),
    )


def read_items_at(key: str, stored: Any, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> list[Any]:
    """DCP's ``ReadItem`` list that fills a DTensor's part, which is that box (``planner_helpers``)."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
    return list(create_read_items_for_chunk_list(key, stored, [chunk]))


def storage_info(path: str, offset: int, nbytes: int, transforms: tuple[str, ...] = ()) -> Any:
    """DCP's note of where a record stands (``torch.distributed.checkpoint.filesystem._StorageInfo``)."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    # Left out where there are none, as torch does: older readers don't know the field.
    more = {"transform_descriptors": list(transforms)} if transforms else {}
    return _StorageInfo(path, offset, nbytes, **more)


def storage_prefix(prefix: str) -> Any:
    """What tells a rank how to name its files
    (``torch.distributed.checkpoint.filesystem._StoragePrefix``)."""
    from torch.distributed.checkpoint.filesystem import _StoragePrefix

    return _StoragePrefix(prefix)


def dcp_metadata(version: str | None, **fields: Any) -> Any:
    """DCP's ``Metadata``; `version` only where this torch has that field."""
    from torch.distributed.checkpoint.metadata import Metadata

    if "version" in {field.name for field in dataclasses.fields(Metadata)}:
        fields["version"] = version
    return Metadata(**fields)


def decoded_stream(stream: Any, transforms: tuple[str, ...]) -> Any:
    """A record's bytes with its transforms undone (``torch.distributed.checkpoint._extension``, from 2.7)."""
    from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension

    for extension in ExtensionRegistry().from_descriptor_list(transforms):
        if isinstance(extension, StreamTransformExtension):
            stream = extension.transform_from(stream)
    return stream


def strided_axes(tensor: DTensor) -> dict[int, torch.Tensor]:
    """For each axis that is interleaved: the global indices of this rank's elements along it, in their order.

    Found by cutting a list of indices as torch cuts the tensor: ``_split_tensor`` of each placement, in mesh
    order."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return {}
    _, interleaved = _cuts(tensor)
    found: dict[int, torch.Tensor] = {}
    for axis in interleaved:
        indices = torch.arange(tensor.shape[axis])
        for mesh_dim, placement in enumerate(tensor.placements):
            if getattr(placement, "dim", None) == axis:
                cut: Any = type(placement)
                on_one_axis = cut(0, **_split_factor(placement))
                parts, _ = on_one_axis._split_tensor(
                    indices, tensor.device_mesh.size(mesh_dim), with_padding=False, contiguous=False
                )
                indices = parts[coordinate[mesh_dim]]
        found[axis] = indices
    return found


def _split_factor(placement: Any) -> dict[str, int]:
    return {"split_factor": placement.split_factor} if hasattr(placement, "split_factor") else {}


def has_default_order(tensor: DTensor) -> bool:
    """Whether the parts were cut in the order that `local_box` takes; from 2.10 on a spec says its
    ``shard_order``."""
    order = getattr(tensor._spec, "shard_order", None) or ()
    cuts, _ = _cuts(tensor)
    return all(
        tuple(entry.mesh_dims) == tuple(mesh_dim for mesh_dim, axis in cuts if axis == entry.tensor_dim)
        for entry in order
    )


# -- versions of optimizers ------------------------------------------------------------------------------------------


ADDED_OPTIONS = frozenset({"maximize", "decoupled_weight_decay"})


def values_before_options(optimizer: Optimizer) -> dict[str, Any]:
    """Options that torch's classes got over time, each with the value by which the class does what it did
    before."""
    by_class = {"decoupled_weight_decay": isinstance(optimizer, torch.optim.AdamW)}
    return {option: by_class.get(option, False) for option in ADDED_OPTIONS}


def rebuild_tensor(
    storage: Any, sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype | None
) -> tuple[Any, tuple[Any, ...]]:
    """What a pickle of `torch.save` says of a plain tensor: the function that loads it, and its arguments.

    Args:
        storage: What stands for its storage in the pickle.
        sizes: Its shape.
        strides: In elements.
        dtype: None where the storage's own class tells it.
    """
    if dtype is None:
        return torch._utils._rebuild_tensor_v2, (storage, 0, sizes, strides, False, OrderedDict())
    return torch._utils._rebuild_tensor_v3, (storage, 0, sizes, strides, False, OrderedDict(), dtype)
