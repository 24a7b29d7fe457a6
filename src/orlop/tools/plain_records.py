"""The plain data in a byte leaf's record, read without torch, and the globals that the record names.

Owns which globals `torch.load(weights_only=True)` takes for data. Must not know files or torch; executes nothing.
"""

from __future__ import annotations

import struct
from typing import Any

from orlop.dcp.archive import Unusual, raw_at, read_directory
from orlop.dcp.dtypes import ITEM_BYTES, LEGACY_STORAGES, OTHER_DTYPES
from orlop.dcp.inflated import inflated
from orlop.dcp.pickled import Data, Global, read_pickle
from orlop.errors import CheckpointCorrupt, CheckpointUnsafe

__all__ = ["Described", "read_plain", "scalar", "unsafe_names"]

_DATA_NAMES = (
    {"collections.OrderedDict", "collections.Counter", "_codecs.encode", "builtins.bytearray", "builtins.set"}
    | {"builtins.complex", "builtins.getattr", "torch.Size", "torch.device", "torch.Tensor", "torch.layout"}
    | {f"torch._utils._rebuild_{kind}" for kind in ("tensor", "tensor_v2", "tensor_v3", "parameter")}
    | {"torch.nn.parameter.Parameter", "torch._tensor._rebuild_from_type_v2"}
    | {"torch.serialization._get_layout", "torch.storage.UntypedStorage", "torch.storage.TypedStorage"}
    | {f"torch.{name}" for name in (*ITEM_BYTES, *OTHER_DTYPES, *LEGACY_STORAGES.values())}
    | {"torch.UntypedStorage", "torch.distributed.tensor.DTensor"}
)
_SCALARS = {
    "float32": "<f",
    "float64": "<d",
    "float16": "<e",
    "int64": "<q",
    "int32": "<i",
    "int16": "<h",
    "int8": "<b",
    "uint8": "<B",
    "bool": "<?",
}


class Described(str):
    """The description of a value that is not shown itself (a tensor, an object)."""

    __slots__ = ()


class _Names:
    """Lets any global pass, as a name, and keeps it; by its name of today, where pickle writes that of Python 2."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __contains__(self, name: object) -> bool:
        self.seen.add(str(name).replace("__builtin__.", "builtins."))
        return True


def read_plain(record: bytes, where: str) -> Any:
    """The value in a byte leaf's record: plain Python data, with a `Described` text for what is none.

    Raises:
        CheckpointUnsafe: It names a global that is no data.
        CheckpointCorrupt: It can't be read.
    """
    description = _description(record, where)
    if description is None:
        return Described("in a form that only torch reads")
    names = _Names()
    value = read_pickle(description, names, where)
    foreign = sorted(names.seen - _DATA_NAMES)
    if foreign:
        raise CheckpointUnsafe(
            "a record holds more than plain data; nothing of it was executed",
            where=where,
            found=", ".join(foreign),
            todo="load it only where you trust its writer, with torch.serialization.add_safe_globals",
        )
    return _plain(value)


def unsafe_names(record: bytes, where: str) -> list[str]:
    """The globals in a record that are no data; raises CheckpointCorrupt when it can't be read."""
    description = _description(record, where)
    if description is None:
        return []
    names = _Names()
    read_pickle(description, names, where)
    return sorted(names.seen - _DATA_NAMES)


def scalar(dtype: str, data: bytes) -> float | int | bool | Described:
    """The value of a tensor of one element, from its bytes."""
    if dtype == "bfloat16":
        return float(struct.unpack("<f", b"\0\0" + data)[0])
    if dtype not in _SCALARS:
        return Described(f"one {dtype}")
    value: float | int | bool = struct.unpack(_SCALARS[dtype], data)[0]
    return value


def _description(record: bytes, where: str) -> bytes | None:
    """The pickle inside; None in torch's legacy form."""

    def read(offset: int, nbytes: int) -> bytes:
        return record[offset : offset + nbytes]

    try:
        for name, member in read_directory(read, len(record), where).items():
            if name.endswith("/data.pkl"):
                at = raw_at(read, member, name, len(record), where)
                content = read(at, member.stored_bytes)
                return content if member.is_stored else inflated(content, member, len(record))
    except Unusual:
        return None
    raise CheckpointCorrupt("a record has no description of its content", where=where)


def _plain(value: Any) -> Any:
    match value:
        case Data(name="collections.OrderedDict" | "collections.Counter", items=items):
            return {_plain(key): _plain(item) for key, item in items}
        case Data(name="torch.Size" | "__builtin__.set" | "builtins.set", args=(tuple() | list() as items,)):
            return tuple(map(_plain, items))
        case Data(name="__builtin__.complex", args=(float(real), float(imaginary))):
            return complex(real, imaginary)
        case Data(name="_codecs.encode", args=(str(text), "latin1")):
            return text.encode("latin1")
        case Data(name=name, args=args) if name.startswith("torch._utils._rebuild_tensor"):
            sizes = args[2] if isinstance(args, tuple) and len(args) > 2 else "?"
            return Described(f"tensor of {sizes}")
        case Data(name=name) | Global(name=name):
            return Described(name)
        case dict():
            return {_key(key): _plain(item) for key, item in value.items()}
        case list():
            return list(map(_plain, value))
        case tuple():
            return tuple(map(_plain, value))
    return value


def _key(key: Any) -> Any:
    return str(key) if isinstance(key, (Data, Global)) else key
