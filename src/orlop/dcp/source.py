"""Where the bytes of one stored chunk stand, and what is known to check them by.

Owns the two ways of finding them: orlop's index, or (a checkpoint from elsewhere) the record's own zip directory. Pure:
bytes come through a callable. Must not know torch or files.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection
from dataclasses import dataclass

from orlop.dcp.archive import locate_tensor
from orlop.dcp.boxes import Box
from orlop.dcp.catalog import Extent
from orlop.dcp.index import FileIndex, IndexRecord
from orlop.errors import CheckpointCorrupt
from orlop.wording import counted

__all__ = ["Source", "find_record", "from_index", "from_record"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The raw bytes of one stored chunk, row-major.

    Attributes:
        leaf: Whose chunk.
        path: The file, relative to the checkpoint's directory.
        where: Leaf and file, for messages.
        at: The first byte in the file.
        nbytes: How many there are.
        dtype: Torch's name for the stored dtype.
        sizes: The chunk's shape.
        block_crcs: CRC-32 of each block; None without an index.
        crc: CRC-32 of all of them, where the record carries one; 0 without.
    """

    leaf: str
    path: str
    where: str
    at: int
    nbytes: int
    dtype: str
    sizes: tuple[int, ...]
    block_crcs: array[int] | None = None
    crc: int = 0


def find_record(
    index: FileIndex, leaf: str, extent: Extent, aliases: Collection[str], where: str
) -> IndexRecord:
    """The index's record of one chunk, which stands where the metadata says.

    Args:
        index: Of the chunk's file.
        leaf: Whose chunk.
        extent: Where the metadata has it.
        aliases: The other leaves that the metadata has in the same place.
        where: Leaf and file, for messages.

    Raises:
        CheckpointCorrupt: Index and metadata contradict each other.
    """
    record = index.by_start.get(extent.offset)
    if (
        record is None
        or record.record[1] != extent.nbytes
        or (record.leaf != leaf and record.leaf not in aliases)
    ):
        raise CheckpointCorrupt(
            "index and metadata contradict each other",
            where=where,
            expected=f"{counted(extent.nbytes, 'byte')} at {extent.offset}",
            found="no such record"
            if record is None
            else f"{counted(record.record[1], 'byte')} of {record.leaf}",
            todo="if another program has rewritten this checkpoint, remove its *.index.json and metadata.json",
        )
    return record


def from_index(record: IndexRecord, box: Box, dtype: str, path: str, where: str) -> Source | None:
    """The source that an index names; None when the record has to be read as a whole.

    Raises:
        CheckpointCorrupt: Index and metadata contradict each other.
    """
    if record.dtype is None:
        return None
    if record.box != box or record.dtype != dtype:
        raise CheckpointCorrupt(
            "index and metadata contradict each other",
            where=where,
            expected=f"{dtype} {box}",
            found=f"{record.dtype} {record.box}",
        )
    return Source(
        leaf=record.leaf,
        path=path,
        where=where,
        at=record.data[0],
        nbytes=record.data[1],
        dtype=record.dtype,
        sizes=box.sizes,
        block_crcs=record.compact_crcs(),
    )


def from_record(
    read: Callable[[int, int], bytes],
    leaf: str,
    extent: Extent,
    sizes: tuple[int, ...],
    dtype: str,
    where: str,
) -> Source:
    """The source inside a record that plain torch wrote.

    Args:
        read: Gives bytes of the record: (offset, count).
        leaf: Whose chunk.
        extent: Where the record stands.
        sizes: The chunk's shape, by the metadata.
        dtype: Its dtype, by the metadata.
        where: Leaf and file, for messages.

    Raises:
        Unusual: It is left to torch's own loader.
        CheckpointCorrupt: It is damaged, or not what the metadata says.
    """
    found = locate_tensor(read, extent.nbytes, where)
    if (found.sizes, found.dtype) != (sizes, dtype):
        raise CheckpointCorrupt(
            "a record is not what the metadata says",
            where=where,
            expected=f"{dtype} {sizes}",
            found=f"{found.dtype} {found.sizes}",
        )
    return Source(
        leaf=leaf,
        path=extent.path,
        where=where,
        at=extent.offset + found.data_at,
        nbytes=found.nbytes,
        dtype=dtype,
        sizes=sizes,
        crc=found.crc,
    )
