"""A file for `torch.load`, written as a stream: tensors one after the other, none of them in memory as a whole.

Owns that file's form: torch's zip archive with `data.pkl` and one member for each tensor. Must not know checkpoints.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from orlop import compat
from orlop.dcp.boxes import row_major
from orlop.dcp.dtypes import ITEM_BYTES, LEGACY_STORAGES
from orlop.dcp.memory import memory_of

__all__ = ["Stream", "StreamedTensor", "write_torch_file"]

_ALIGNMENT = 64
_ZIP64_EXTRA_BYTES = 20
_ROOT = "archive"


class Stream(Protocol):
    """Where the file goes."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Adds all of `data`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedTensor:
    """A tensor that is fetched when its bytes are written.

    Attributes:
        dtype: Torch's name.
        sizes: Its shape.
        parts: Gives its values, row-major, part by part.
    """

    dtype: str
    sizes: tuple[int, ...]
    parts: Callable[[], Iterable[Tensor]]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.sizes) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    tensor: StreamedTensor


class _Pickler(pickle.Pickler):
    """Writes streamed tensors as `torch.save` writes tensors, and keeps them in the order of their keys."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.tensors: list[StreamedTensor] = []

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            host = value.detach().cpu().contiguous()
            name = str(host.dtype).removeprefix("torch.")
            value = StreamedTensor(dtype=name, sizes=tuple(host.shape), parts=lambda: (host,))
        if not isinstance(value, StreamedTensor):
            return NotImplemented
        storage = _Storage(str(len(self.tensors)), value)
        self.tensors.append(value)
        dtype = None if value.dtype in LEGACY_STORAGES else getattr(torch, value.dtype)
        return compat.rebuild_tensor(storage, value.sizes, row_major(value.sizes), dtype)

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        tensor = value.tensor
        name = LEGACY_STORAGES.get(tensor.dtype)
        kind = torch.UntypedStorage if name is None else getattr(torch, name)
        count = tensor.nbytes if name is None else math.prod(tensor.sizes)
        return "storage", kind, value.key, "cpu", count


class _Counted(io.RawIOBase):
    """A stream that knows how far it is; zipfile needs no more."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream
        self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._stream.write(view)
        self.size += len(view)
        return len(view)


def write_torch_file(stream: Stream, value: Any) -> None:
    """Write `value`, in which tensors may be `StreamedTensor`s.

    Args:
        stream: Where to.
        value: Nested containers of plain data and tensors.
    """
    description = io.BytesIO()
    pickler = _Pickler(description)
    pickler.dump(value)
    counted = _Counted(stream)
    with zipfile.ZipFile(counted, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        _add(archive, counted, "data.pkl", description.getvalue())
        _add(archive, counted, "byteorder", b"little")
        for key, tensor in enumerate(pickler.tensors):
            info = _padded(f"data/{key}", counted.size, wide=True)
            with archive.open(info, "w", force_zip64=True) as member:
                written = 0
                for part in tensor.parts():
                    written += member.write(memory_of(part.contiguous()))
            assert written == tensor.nbytes
        _add(archive, counted, "version", b"3\n")


def _add(archive: zipfile.ZipFile, counted: _Counted, name: str, content: bytes) -> None:
    archive.writestr(_padded(name, counted.size, wide=False), content)


def _padded(name: str, at: int, *, wide: bool) -> zipfile.ZipInfo:
    """A member whose bytes start at a multiple of 64, as torch lays them, so that `mmap=True` gives aligned tensors."""
    info = zipfile.ZipInfo(f"{_ROOT}/{name}")
    start = at + 30 + len(info.filename) + 4 + (_ZIP64_EXTRA_BYTES if wide else 0)
    padding = -start % _ALIGNMENT
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    return info
