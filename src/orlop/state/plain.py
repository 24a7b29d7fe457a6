"""Plain data: what a byte leaf may hold, so that reading it back never runs code.

Owns the list of allowed types, the copy into them, and a digest that says whether two ranks hold the same. Must not
know what the data means, nor files.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from orlop import compat
from orlop.errors import CheckpointUnsafe

__all__ = ["digest", "placed", "plain", "registered_classes", "require_dense", "require_storable"]

_SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def plain(value: Any, where: str) -> Any:
    """A copy of `value` in plain types that `torch.load(weights_only=True)` reads; tensors on the host, uncopied there.

    Args:
        value: Nested dicts, lists, tuples and sets of numbers, strings, bytes, None and tensors.
        where: The name of the leaf, for the message.

    Raises:
        CheckpointUnsafe: Something in it is of another type; the message names the place and the type.
    """
    if type(value) in _SCALARS:
        return value
    if isinstance(value, DTensor):
        raise CheckpointUnsafe(
            "a part's state holds a DTensor, and one leaf of plain data can't be sharded",
            where=where,
            found=f"DTensor of shape {tuple(value.shape)}",
            todo="keep sharded tensors in the model or in an optimizer, or give `value.full_tensor()`",
        )
    if isinstance(value, Tensor):
        return _tensor(require_storable(value, where))
    if type(value) in registered_classes():
        return value
    if isinstance(value, Mapping):
        kind: Callable[[dict[Any, Any]], Any] = type(value) if type(value) in (OrderedDict, Counter) else dict
        return kind({plain(key, where): plain(item, f"{where}[{key!r}]") for key, item in value.items()})
    if type(value) in (list, tuple, set):
        items = [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return type(value)(items)
    return _scalar(value, where)


def placed(value: Any, device: torch.device) -> Any:
    """A copy of plain data that was read, with its tensors on `device`."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, dict):
        return type(value)({key: placed(item, device) for key, item in value.items()})
    if type(value) in (list, tuple, set):
        return type(value)(placed(item, device) for item in value)
    return value


def registered_classes() -> frozenset[type]:
    """The classes that the user allowed by `torch.serialization.add_safe_globals`: they are data, too."""
    entries = (
        entry[0] if isinstance(entry, tuple) else entry for entry in torch.serialization.get_safe_globals()
    )
    return frozenset(entry for entry in entries if isinstance(entry, type))


def require_storable(value: Tensor, where: str) -> Tensor:
    """The tensor itself, if it can be read back as it is, without running code.

    Raises:
        CheckpointUnsafe: It is of another class, or its form is none that a record holds; the message names it.
    """
    require_dense(value, where)
    if compat.is_plain_tensor(value) or type(value) in registered_classes():
        return value
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise CheckpointUnsafe(
        "a tensor of a class that torch does not load as data could not be read back",
        where=where,
        expected="a torch.Tensor, or a class that was registered",
        found=kind,
        todo=f"torch.serialization.add_safe_globals([{type(value).__qualname__}]), when saving and when loading",
    )


def require_dense(value: Tensor, where: str, *, is_live: bool = False) -> None:
    """Refuse a tensor that a record can't hold as it is.

    Args:
        value: The tensor.
        where: The name of the leaf, for the message.
        is_live: It will be filled in place: its elements must not share memory either.

    Raises:
        CheckpointUnsafe: Names the leaf and what is unusual.
    """
    is_strided = value.layout == torch.strided and not value.is_nested
    forms = (
        ("a nested tensor", value.is_nested),
        (f"layout {value.layout}", not is_strided),
        ("a quantized tensor", value.is_quantized),
        ("a partial placement", any(placement.is_partial() for placement in compat.placements(value))),
        ("elements that share memory (an expanded tensor)", is_live and is_strided and _overlaps(value)),
    )
    if found := [form for form, is_so in forms if is_so]:
        raise CheckpointUnsafe(
            "a tensor of this form can't be saved and read back into place",
            where=where,
            expected="a dense tensor with memory of its own",
            found=f"{found[0]}, {type(value).__name__}",
            todo="make it dense: `.contiguous()`, `.to_dense()`, `.dequantize()` or `.redistribute(...)`",
        )


def _overlaps(value: Tensor) -> bool:
    return value.numel() > 0 and any(
        step == 0 and size > 1 for step, size in zip(value.stride(), value.shape)
    )


def _tensor(value: Tensor) -> Tensor:
    host = value.detach().resolve_conj().resolve_neg().cpu()
    # Saving a view would write the whole storage behind it.
    if host.is_contiguous() and host.untyped_storage().nbytes() == host.numel() * host.element_size():
        return host
    return host.contiguous().clone()


def _scalar(value: Any, where: str) -> Any:
    # Subclasses (IntEnum, numpy.float64) and numpy's scalars hold a plain value.
    kinds: tuple[Callable[[Any], Any], ...] = (bool, int, float, complex, str, bytes)
    for kind in kinds:
        if isinstance(value, kind):  # type: ignore[arg-type]
            return kind(value)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return plain(value.item(), where)
    kind_name = f"{type(value).__module__}.{type(value).__qualname__}"
    raise CheckpointUnsafe(
        "a part's state is not plain data, so it could only be read back by running code",
        where=where,
        expected="numbers, strings, bytes, None, tensors, and dicts, lists, tuples and sets of them",
        found=kind_name,
        todo="let `state_dict` give plain data (`torch.from_numpy` for arrays)",
    )


def digest(value: Any) -> str:
    """A hex digest of plain data: equal for equal types and values, whatever the order of dicts and sets."""
    hasher = hashlib.blake2b(digest_size=16)
    _feed(hasher.update, value)
    return hasher.hexdigest()


def _feed(feed: Callable[[bytes], None], value: Any) -> None:
    feed(f"{type(value).__name__}:".encode())
    if isinstance(value, Tensor):
        feed(f"{value.dtype}{tuple(value.shape)}".encode())
        if value.numel():
            feed(
                value.resolve_conj()
                .resolve_neg()
                .contiguous()
                .reshape(-1)
                .view(torch.uint8)
                .numpy()
                .tobytes()
            )
    elif isinstance(value, Mapping):
        feed(b"".join(sorted(digest(key).encode() + digest(item).encode() for key, item in value.items())))
    elif isinstance(value, set):
        feed(b"".join(sorted(digest(item).encode() for item in value)))
    elif isinstance(value, (list, tuple)):
        feed(str(len(value)).encode())
        for item in value:
            _feed(feed, item)
    elif isinstance(value, float):
        feed(struct.pack("<d", value))
    elif isinstance(value, bytes):
        feed(value)
    else:
        feed(f"{value!r};".encode())
