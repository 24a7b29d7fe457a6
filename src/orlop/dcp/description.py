"""The description of a tensor in a stored record: its `data.pkl`, read as data.

Owns which descriptions are read here: one row-major tensor over all of one storage. Pure. Must not know torch, nor
where a record's bytes stand.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from orlop.dcp.dtypes import ITEM_BYTES, STORAGE_DTYPES
from orlop.dcp.pickled import Data, Global, read_pickle
from orlop.errors import CheckpointCorrupt

__all__ = ["Unusual", "described"]


class Unusual(Exception):
    """The record is of a form that is left to torch's own safe loader; the message says which."""


def described(description: bytes, where: str) -> tuple[str, str, tuple[int, ...]]:
    """Storage key, dtype and sizes of the tensor that a record's `data.pkl` describes, row-major.

    Raises:
        Unusual: It is left to torch's own loader.
        CheckpointCorrupt: It can't be read.
    """
    try:
        return _parse_description(description)
    except CheckpointCorrupt as error:
        raise CheckpointCorrupt(
            "a record's description can't be read", where=where, found=error.found
        ) from error


@lru_cache(maxsize=1024)  # many leaves of a checkpoint have one shape and dtype, and so one description
def _parse_description(description: bytes) -> tuple[str, str, tuple[int, ...]]:
    """Storage key, dtype and sizes of a row-major tensor.

    Raises:
        Unusual: It is something else.
    """
    match read_pickle(description, None, "data.pkl"):
        case Data(
            name="torch._utils._rebuild_tensor_v2" | "torch._utils._rebuild_tensor_v3",
            args=(
                Data(name="persistent", args=(pid,)),
                0,
                tuple(sizes),
                tuple(strides),
                bool(),
                Data(),
                *rest,
            ),
        ):
            return _parse_parts(pid, sizes, strides, rest)
        case Data(name=name):
            raise Unusual(f"it holds a {name}, or a view")
    raise Unusual("it holds no tensor")


def _parse_parts(pid: Any, sizes: Any, strides: Any, rest: list[Any]) -> tuple[str, str, tuple[int, ...]]:
    match pid, rest:
        case ("storage", Global(name="torch.storage.UntypedStorage"), str(key), str(), int()), [
            Global(name=dtype)
        ]:
            dtype = dtype.removeprefix("torch.")
        case ("storage", Global(name=storage), str(key), str(), int()), []:
            dtype = STORAGE_DTYPES.get(storage, storage)
        case _:
            raise Unusual("its storage is of an unknown kind")
    if dtype not in ITEM_BYTES:
        raise Unusual(f"its dtype is {dtype}")
    if len(sizes) != len(strides) or not all(
        type(number) is int and number >= 0 for number in (*sizes, *strides)
    ):
        raise Unusual("its shape is of an unknown form")
    if not _is_row_major(sizes, strides):
        raise Unusual(f"it has strides {strides} for sizes {sizes}")
    return key, dtype, sizes


def _is_row_major(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    if 0 in sizes:
        return True
    step = 1
    for size, stride in zip(reversed(sizes), reversed(strides)):
        # The stride of an axis of one element means nothing.
        if size != 1 and stride != step:
            return False
        step *= size
    return True
