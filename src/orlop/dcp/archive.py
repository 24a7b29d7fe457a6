"""Where a tensor's raw bytes and their CRC-32 stand inside a stored record (the zip that `torch.save` writes).

Owns the reading side of that format: the zip's directory, its local headers, and the description in `data.pkl`. Every
offset and size is validated before it is used. Pure: bytes come through a callable. Must not know torch.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass

from orlop.dcp.checksums import crc32
from orlop.dcp.description import Unusual, described
from orlop.dcp.dtypes import ITEM_BYTES
from orlop.errors import CheckpointCorrupt
from orlop.wording import counted

__all__ = [
    "LOCAL",
    "WIDE",
    "Member",
    "TensorRecord",
    "Unusual",
    "content_at",
    "locate_tensor",
    "raw_at",
    "read_directory",
]

ReadAt = Callable[[int, int], bytes]

_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")
_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
LOCAL = struct.Struct("<4sHHHHHIIIHH")
WIDE = 0xFFFFFFFF
_FLAGS, _DEFLATE_FLAGS = 0x0808, 0x0006
_IS_FOLDER = 0x10
_TAIL_BYTES = 4096
_USUAL_PADDING = 96
_MOST_DIRECTORY_BYTES = 1 << 20
_MOST_DESCRIPTION_BYTES = 1 << 20
_LEGACY_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One file inside the zip.

    Attributes:
        header_at: Where its local header starts in the record.
        nbytes: Of its content.
        stored_bytes: Of its content as it stands there; the same unless it is compressed.
        crc: CRC-32 of its content; 0 when the writer did not compute one.
        method: Of compression; 0 for none.
        flags: The zip's.
        modified: Time and date, as the zip has them.
    """

    header_at: int
    nbytes: int
    stored_bytes: int
    crc: int
    method: int
    flags: int
    modified: tuple[int, int]

    @property
    def is_stored(self) -> bool:
        """Whether the content stands there as it is."""
        return self.method == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """One row-major tensor in a record.

    Attributes:
        data_at: Where its raw bytes start in the record.
        nbytes: How many they are.
        crc: Their CRC-32; 0 when the writer did not compute one.
        dtype: Torch's name for its dtype.
        sizes: Its shape.
    """

    data_at: int
    nbytes: int
    crc: int
    dtype: str
    sizes: tuple[int, ...]


def locate_tensor(read: ReadAt, nbytes: int, where: str) -> TensorRecord:
    """Find the raw bytes of the one tensor that a record holds.

    Args:
        read: Gives bytes of the record: (offset, count).
        nbytes: Of the whole record.
        where: Leaf and file, for messages.

    Raises:
        Unusual: It is compressed, has several storages, strides, or another form that torch's loader has to read.
        CheckpointCorrupt: It is damaged.
    """
    members = read_directory(read, nbytes, where)
    root = next((name[: -len("data.pkl")] for name in members if name.endswith("/data.pkl")), None)
    if root is None:
        raise CheckpointCorrupt("a record has no description of its tensor", where=where)
    storages = [name for name in members if name.startswith(f"{root}data/")]
    if len(storages) != 1:
        raise Unusual(f"it holds {len(storages)} storages")
    if f"{root}byteorder" in members:
        _require_little_endian(_content(read, members[f"{root}byteorder"], f"{root}byteorder", nbytes, where))
    description = _content(read, members[f"{root}data.pkl"], f"{root}data.pkl", nbytes, where)
    key, dtype, sizes = described(description, where)
    storage = members[storages[0]]
    if storages[0] != f"{root}data/{key}":
        raise CheckpointCorrupt("a record describes a storage that it does not hold", where=where, found=key)
    expected = math.prod(sizes) * ITEM_BYTES[dtype]
    if storage.nbytes != expected:
        raise Unusual(f"its storage has {counted(storage.nbytes, 'byte')}, the tensor {expected}")
    data_at = content_at(read, storage, storages[0], nbytes, where)
    return TensorRecord(data_at=data_at, nbytes=expected, crc=storage.crc, dtype=dtype, sizes=sizes)


def _require_little_endian(order: bytes) -> None:
    if order != b"little":
        raise Unusual(f"its byte order is {order[:16]!r}")


def read_directory(read: ReadAt, nbytes: int, where: str) -> dict[str, Member]:
    """The files inside a record.

    Raises:
        Unusual: It is a legacy record, no zip.
        CheckpointCorrupt: It is damaged, or of several disks, or encrypted.
    """
    tail_at = max(0, nbytes - _TAIL_BYTES)
    tail = read(tail_at, nbytes - tail_at)
    if (
        len(tail) != nbytes - tail_at
        or len(tail) < _END.size
        or not tail[-_END.size :].startswith(b"PK\x05\x06")
    ):
        if read(0, len(_LEGACY_MAGIC)) == _LEGACY_MAGIC:
            raise Unusual("it is in torch's legacy form")
        raise CheckpointCorrupt("a record has no zip directory: it is truncated or damaged", where=where)
    at, size, count = _directory_span(tail, tail_at, nbytes, where)
    directory = tail[at - tail_at : at - tail_at + size] if at >= tail_at else read(at, size)
    members: dict[str, Member] = {}
    place = 0
    for _ in range(count):
        name, member, place = _entry(directory, place, at, where)
        if name in members:
            raise CheckpointCorrupt("a record holds one name twice", where=where, found=name)
        members[name] = member
    if place != size:
        raise CheckpointCorrupt("a record's zip directory has the wrong length", where=where)
    return members


def _directory_span(tail: bytes, tail_at: int, nbytes: int, where: str) -> tuple[int, int, int]:
    """Where the directory starts in the record, its length, and how many files it lists."""
    *fields, comment = _END.unpack(tail[-_END.size :])[1:]
    end = nbytes - _END.size
    locator = tail[-_END.size - _LOCATOR.size : -_END.size]
    if len(locator) == _LOCATOR.size and locator.startswith(b"PK\x06\x07"):
        end, fields = _end64(tail, tail_at, nbytes, fields, where)
    disk, start_disk, here, count, size, at = fields
    if disk or start_disk or here != count or comment:
        raise CheckpointCorrupt("a record's zip directory is damaged", where=where)
    if size > _MOST_DIRECTORY_BYTES or at + size != end or count * _ENTRY.size > size:
        raise CheckpointCorrupt(
            "a record's zip directory lies outside it",
            where=where,
            found=f"{counted(size, 'byte')} at {at} of {nbytes}",
        )
    return at, size, count


def _end64(tail: bytes, tail_at: int, nbytes: int, narrow: list[int], where: str) -> tuple[int, list[int]]:
    """Where the directory's 64-bit end stands, and its fields; the old end says the same, as far as it can."""
    locator_at = nbytes - _END.size - _LOCATOR.size
    _, disk, end64, disks = _LOCATOR.unpack_from(tail, locator_at - tail_at)
    if not tail_at <= end64 <= locator_at - _END64.size:
        raise CheckpointCorrupt("a record's zip directory lies outside it", where=where)
    signature, length, _, _, *fields = _END64.unpack_from(tail, end64 - tail_at)
    unknown = (0xFFFF,) * 4 + (WIDE,) * 2
    is_same = all(old in (new, most) for old, new, most in zip(narrow, fields, unknown))
    is_whole = signature == b"PK\x06\x06" and end64 + 12 + length == locator_at
    if not is_same or not is_whole or disk or disks != 1:
        raise CheckpointCorrupt("a record's zip directory is damaged", where=where)
    return end64, fields


def _entry(directory: bytes, place: int, limit: int, where: str) -> tuple[str, Member, int]:
    if place + _ENTRY.size > len(directory):
        raise CheckpointCorrupt("a record's zip directory ends early", where=where)
    fields = _ENTRY.unpack_from(directory, place)
    signature, flags, method, crc = fields[0], fields[3], fields[4], fields[7]
    stored, size, name_bytes, extra_bytes, comment_bytes = fields[8:13]
    header_at = fields[16]
    name_at = place + _ENTRY.size
    extra_at = name_at + name_bytes
    after = extra_at + extra_bytes + comment_bytes
    if signature != b"PK\x01\x02" or after > len(directory) or comment_bytes or fields[13]:
        raise CheckpointCorrupt("a record's zip directory is damaged", where=where)
    # Torch writes no others, and what has others it can't read.
    if flags & ~(_FLAGS | (_DEFLATE_FLAGS if method else 0)):
        raise CheckpointCorrupt(
            "a record's zip directory is damaged", where=where, found=f"flags 0x{flags:04x}"
        )
    name = directory[name_at:extra_at].decode("utf-8", "replace")
    extra = directory[extra_at : extra_at + extra_bytes]
    size, stored, header_at = _wide(extra, size, stored, header_at, where)
    if header_at + LOCAL.size + stored > limit or (method == 0 and size != stored):
        raise CheckpointCorrupt("a file in a record lies outside it", where=f"{where}: {name}")
    # Torch gives a folder's content as nothing, and leaves the tensor as it was.
    if fields[15] & _IS_FOLDER and (size or not name.endswith("/")):
        raise CheckpointCorrupt("a record's zip directory calls a file a folder", where=f"{where}: {name}")
    member = Member(
        header_at=header_at,
        nbytes=size,
        stored_bytes=stored,
        crc=crc,
        method=method,
        flags=flags,
        modified=fields[5:7],
    )
    return name, member, after


def _wide(extra: bytes, size: int, stored: int, header_at: int, where: str) -> tuple[int, int, int]:
    """Sizes and offset, from the zip64 field where they don't fit into 32 bits."""
    wanted = [value == WIDE for value in (size, stored, header_at)]
    if not any(wanted):
        return size, stored, header_at
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1 and length >= 8 * sum(wanted) and at + 4 + length <= len(extra):
            wide = iter(struct.unpack_from(f"<{sum(wanted)}Q", extra, at + 4))
            values = [
                next(wide) if is_wide else value for is_wide, value in zip(wanted, (size, stored, header_at))
            ]
            return values[0], values[1], values[2]
        at += 4 + length
    raise CheckpointCorrupt("a file in a record has no size", where=where)


def content_at(read: ReadAt, member: Member, name: str, nbytes: int, where: str) -> int:
    """Where a stored file's bytes start in the record.

    Raises:
        Unusual: It is compressed.
        CheckpointCorrupt: Its header is damaged.
    """
    if not member.is_stored:
        raise Unusual("it is compressed")
    return raw_at(read, member, name, nbytes, where)


def raw_at(read: ReadAt, member: Member, name: str, nbytes: int, where: str) -> int:
    """Where a file's bytes start in the record, compressed or not.

    Raises:
        CheckpointCorrupt: Its header is damaged.
    """
    encoded = name.encode()
    extra_at = LOCAL.size + len(encoded)
    header = read(member.header_at, extra_at + _USUAL_PADDING)
    if len(header) < extra_at:
        raise CheckpointCorrupt("a record ends early", where=where)
    fields = LOCAL.unpack_from(header)
    extra_bytes = fields[10]
    if extra_bytes > _USUAL_PADDING:
        header = read(member.header_at, extra_at + extra_bytes)
    is_sound = (
        fields[0] == b"PK\x03\x04" and fields[9] == len(encoded) and header[LOCAL.size : extra_at] == encoded
    )
    # A damaged length of the extra field would move the data: its own inner lengths must add up to it.
    if not is_sound or not _adds_up(header[extra_at : extra_at + extra_bytes], extra_bytes):
        raise CheckpointCorrupt("a file in a record has a damaged header", where=f"{where}: {name}")
    at = int(member.header_at + extra_at + extra_bytes)
    if at + member.stored_bytes > nbytes:
        raise CheckpointCorrupt("a file in a record lies outside it", where=f"{where}: {name}")
    return at


def _adds_up(extra: bytes, nbytes: int) -> bool:
    at = 0
    while at + 4 <= len(extra):
        at += 4 + int(struct.unpack_from("<H", extra, at + 2)[0])
    return at == len(extra) == nbytes


def _content(read: ReadAt, member: Member, name: str, nbytes: int, where: str) -> bytes:
    """A small file's bytes, checked."""
    if member.nbytes > _MOST_DESCRIPTION_BYTES:
        raise Unusual(f"its {name} has {counted(member.nbytes, 'byte')}")
    content = read(content_at(read, member, name, nbytes, where), member.nbytes)
    if len(content) != member.nbytes or (member.crc and crc32(content) != member.crc):
        raise CheckpointCorrupt("the checksum of a record's description differs", where=f"{where}: {name}")
    return content
