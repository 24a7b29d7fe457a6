"""One tensor's record as `torch.save` would write it: what stands before its raw bytes, and what stands after.

Owns the writing side of the format that `archive` reads. Pure. Must not know torch or files.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from orlop.dcp.boxes import row_major
from orlop.dcp.checksums import crc32
from orlop.dcp.dtypes import ITEM_BYTES, LEGACY_STORAGES

__all__ = ["Frame", "frame_tensor"]

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
_UTF8 = 0x0800
_CRC_FOLLOWS = 0x0008
_MANY = 0xFFFFFFFF
# Small tensors stand on cache lines, as torch lays them; large ones on pages.
_LINE, _PAGE = 64, 4096
_LARGE = 64 * 1024
RECORD_ALIGNMENT = _LINE


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What stands around a tensor's raw bytes.

    Attributes:
        head: Everything before them.
        nbytes: How many raw bytes there are.
        directory: The zip directory's entries for the files in `head`.
        storage_header_at: Where the raw bytes' own local header starts.
    """

    head: bytes
    nbytes: int
    directory: bytes
    storage_header_at: int

    def tail(self, crc: int) -> bytes:
        """Everything after the raw bytes, whose CRC-32 is known by now."""
        wide = self.nbytes >= _MANY
        size = _MANY if wide else self.nbytes
        descriptor = struct.pack(
            "<4sI" + ("QQ" if wide else "II"), b"PK\x07\x08", crc, self.nbytes, self.nbytes
        )
        extra = struct.pack("<HHQQ", 1, 16, self.nbytes, self.nbytes) if wide else b""
        entry = _entry("archive/data/0", crc, size, self.storage_header_at, _UTF8 | _CRC_FOLLOWS, extra)
        directory = self.directory + entry
        at = len(self.head) + self.nbytes + len(descriptor)
        return descriptor + directory + _end(at, len(directory), count=4)


def frame_tensor(dtype: str, sizes: Sequence[int], at: int) -> Frame:
    """The frame of a row-major tensor.

    Args:
        dtype: Torch's name of its dtype; one of `ITEM_BYTES`.
        sizes: Its shape.
        at: Where the record starts in its file: a multiple of `RECORD_ALIGNMENT`.
    """
    nbytes = math.prod(sizes) * ITEM_BYTES[dtype]
    head, directory = b"", b""
    # PyTorchStreamReader wants data.pkl and version; byteorder saves torch from guessing.
    for name, content in (
        ("archive/data.pkl", _describe(dtype, sizes)),
        ("archive/byteorder", b"little"),
        ("archive/version", b"3\n"),
    ):
        crc = crc32(content)
        directory += _entry(name, crc, len(content), len(head), _UTF8)
        head += _LOCAL.pack(b"PK\x03\x04", 0, _UTF8, 0, 0, 0, crc, len(content), len(content), len(name), 0)
        head += name.encode() + content
    storage_header_at = len(head)
    head += _storage_header(at + len(head), nbytes)
    return Frame(head=head, nbytes=nbytes, directory=directory, storage_header_at=storage_header_at)


def _storage_header(at: int, nbytes: int) -> bytes:
    """The local header of the raw bytes, padded so that these are aligned in the file."""
    name = b"archive/data/0"
    alignment = _PAGE if nbytes >= _LARGE else _LINE
    start = at + _LOCAL.size + len(name) + 4
    padding = -start % alignment
    # Sizes and CRC follow the data, as the flag says: it is written in one pass.
    header = _LOCAL.pack(b"PK\x03\x04", 0, _UTF8 | _CRC_FOLLOWS, 0, 0, 0, 0, 0, 0, len(name), 4 + padding)
    return header + name + struct.pack("<2sH", b"FB", padding) + b"Z" * padding


def _entry(name: str, crc: int, size: int, header_at: int, flags: int, extra: bytes = b"") -> bytes:
    fields = (
        b"PK\x01\x02",
        0,
        0,
        flags,
        0,
        0,
        0,
        crc,
        size,
        size,
        len(name),
        len(extra),
        0,
        0,
        0,
        0,
        header_at,
    )
    return _ENTRY.pack(*fields) + name.encode() + extra


def _end(at: int, size: int, count: int) -> bytes:
    """The end of the directory, in its 64-bit form and in the old one, as torch writes both."""
    end64 = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 0, 45, 0, 0, count, count, size, at)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, at + size, 1)
    end = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, count, count, size, min(at, _MANY), 0)
    return end64 + locator + end


# -- data.pkl ----------------------------------------------------------------------------------------------------------


def _describe(dtype: str, sizes: Sequence[int]) -> bytes:
    """The pickle (protocol 2) of `_rebuild_tensor_v2(storage, 0, sizes, strides, False, OrderedDict())`."""
    legacy = LEGACY_STORAGES.get(dtype)
    count = math.prod(sizes) * (1 if legacy else ITEM_BYTES[dtype])
    rebuild = "_rebuild_tensor_v2" if legacy else "_rebuild_tensor_v3"
    storage = _global("torch", legacy) if legacy else _global("torch.storage", "UntypedStorage")
    persistent = b"(" + _text("storage") + storage + _text("0") + _text("cpu") + _int(count) + b"tQ"
    hooks = _global("collections", "OrderedDict") + b")R"
    parts = [persistent, _int(0), _tuple(sizes), _tuple(row_major(sizes)), b"\x89", hooks]
    if not legacy:
        parts.append(_global("torch", dtype))
    return b"\x80\x02" + _global("torch._utils", rebuild) + b"(" + b"".join(parts) + b"tR."


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _int(value: int) -> bytes:
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x09" + value.to_bytes(9, "little")


def _tuple(values: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(_int, values)) + b"t"
