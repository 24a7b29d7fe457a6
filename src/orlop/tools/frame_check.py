"""What stands around the bytes of a record's files: the zip headers, compared with what they have to be.

Owns the comparison byte for byte where orlop wrote the record, and field by field where another writer did. Pure: bytes
come through a callable. Must not know torch, files, nor checksums of content.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from orlop.dcp.archive import LOCAL, WIDE, Member
from orlop.dcp.index import IndexRecord
from orlop.dcp.record import Frame, frame_tensor
from orlop.errors import CheckpointCorrupt

__all__ = ["is_frame_as_written", "own_frame", "require_header"]

_FIELD_BYTES = 4
_SUMS_FOLLOW = 0x0008
_SIGNATURE = b"PK\x07\x08"
_NARROW, _WIDE = struct.Struct("<4sIII"), struct.Struct("<4sIQQ")

ReadAt = Callable[[int, int], bytes]


def own_frame(record: IndexRecord | None) -> Frame | None:
    """The frame that orlop's writer gave a record; None where another writer made it."""
    if record is None or record.dtype is None or record.box is None:
        return None
    try:
        frame = frame_tensor(record.dtype, record.box.sizes, record.record[0])
    except OverflowError:
        return None  # a hostile index: the strides of an empty tensor may be anything
    nbytes = len(frame.head) + frame.nbytes + len(frame.tail(0))
    is_own = record.data == (record.record[0] + len(frame.head), frame.nbytes) and record.record[1] == nbytes
    return frame if is_own else None


def is_frame_as_written(read: ReadAt, frame: Frame, crc: int) -> bool:
    """Whether every byte around the tensor's is the one that the writer wrote.

    Args:
        read: Gives bytes of the record: (offset, count).
        frame: As the writer makes it.
        crc: CRC-32 of the tensor's bytes.
    """
    tail = frame.tail(crc)
    return read(0, len(frame.head)) == frame.head and read(len(frame.head) + frame.nbytes, len(tail)) == tail


def require_header(read: ReadAt, member: Member, name: str, at: int, where: str) -> None:
    """A file's own header, its padding, and the sums behind it say what the directory says.

    Raises:
        CheckpointCorrupt: They don't: plain torch may go by either.
    """
    header = read(member.header_at, at - member.header_at)
    fields = LOCAL.unpack_from(header)
    sums, found = (member.crc, member.stored_bytes, member.nbytes), fields[6:9]
    is_same = fields[2:6] == (member.flags, member.method, *member.modified)
    if member.flags & _SUMS_FOLLOW:
        is_same &= all(one in (there, 0, WIDE) for one, there in zip(found, sums))
        is_same &= _is_descriptor(read(at + member.stored_bytes, 24), sums)
    else:
        is_same &= found == sums or (found[0] == sums[0] and found[1:] == (WIDE, WIDE))
    if not is_same:
        raise CheckpointCorrupt(
            "a file's header contradicts its record's directory", where=f"{where}: {name}"
        )
    _require_padding(header[LOCAL.size + fields[9] :], f"{where}: {name}")


def _is_descriptor(found: bytes, sums: tuple[int, int, int]) -> bool:
    """What follows a file is its sums; a signature is the writer's choice, as is the width."""
    if max(sums) <= WIDE and found.startswith(
        (_NARROW.pack(_SIGNATURE, *sums), _NARROW.pack(b"", *sums)[4:])
    ):
        return True
    return found.startswith((_WIDE.pack(_SIGNATURE, *sums), _WIDE.pack(b"", *sums)[4:]))


def _require_padding(extra: bytes, where: str) -> None:
    """Writers align a file by a header field of one byte repeated; damage there harms nothing, and is damage."""
    if extra[:2] != b"FB" or len(extra) < _FIELD_BYTES:
        return
    padding = extra[_FIELD_BYTES : _FIELD_BYTES + int.from_bytes(extra[2:4], "little")]
    if len(set(padding)) > 1:
        raise CheckpointCorrupt("the padding of a record was damaged after it was written", where=where)
