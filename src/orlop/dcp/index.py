"""The index beside each data file: every record with its leaf, dtype, box, place, and a CRC-32 per 64 KiB of its data.

Owns the index's form and its rules (`docs/format.md`, rules I1 to I6). Pure. Must not know torch, nor open files.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from orlop.dcp.boxes import Box
from orlop.dcp.checksums import BLOCK_BYTES, unpack
from orlop.dcp.dtypes import ITEM_BYTES
from orlop.errors import CheckpointCorrupt, CheckpointError
from orlop.store.sealed import seal, unseal
from orlop.version import __version__
from orlop.wording import counted

__all__ = ["FileIndex", "IndexRecord", "index_name", "parse_index", "render_index", "unseal_as"]

_SUFFIX = ".distcp"
_FORMAT = "orlop-index"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRecord:
    """One record of a data file.

    Attributes:
        leaf: Its key.
        dtype: Torch's name; None when the record's bytes are taken as they are (byte leaves, unusual tensors).
        box: The part of the leaf that it holds; None for byte leaves.
        record: The record's first byte in the file, and its length.
        data: The first byte that the checksums cover, and how many they cover: a tensor's raw bytes, row-major, or the
            whole record.
        checksums: CRC-32 of each block, packed.
    """

    leaf: str
    dtype: str | None
    box: Box | None
    record: tuple[int, int]
    data: tuple[int, int]
    checksums: str

    def crcs(self) -> tuple[int, ...]:
        """As `compact_crcs`, as a tuple."""
        return tuple(self.compact_crcs())

    def compact_crcs(self) -> array[int]:
        """The CRC-32 of each block of `BLOCK_BYTES`, the last one possibly shorter; four bytes of memory for each.

        Raises:
            CheckpointCorrupt: The packed ones can't be read.
        """
        try:
            return unpack(self.checksums)
        except ValueError as error:
            raise CheckpointCorrupt(
                "an index's checksums can't be read", where=self.leaf, found=str(error)
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class FileIndex:
    """The index of one data file.

    Attributes:
        file: The data file's name.
        nbytes: Its size.
        records: In the order of their bytes.
        manifest: Whether a manifest belongs to the checkpoint.
        by_start: The same, by their first byte.
    """

    file: str
    nbytes: int
    records: tuple[IndexRecord, ...]
    manifest: bool = False
    by_start: dict[int, IndexRecord] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_start", {record.record[0]: record for record in self.records})


def index_name(file: str) -> str:
    """The name of a data file's index: `__0_0.distcp` has `__0_0.index.json`."""
    return f"{file.removesuffix(_SUFFIX)}.index.json"


def render_index(file: str, nbytes: int, records: Iterable[IndexRecord], *, manifest: bool = False) -> bytes:
    """An index's content, sealed.

    Args:
        file: The data file.
        nbytes: Its size.
        records: In the order of their bytes.
        manifest: Whether a manifest is to follow.
    """
    lines = [
        {
            "leaf": record.leaf,
            "dtype": record.dtype,
            "box": None if record.box is None else [record.box.offsets, record.box.sizes],
            "record": record.record,
            "data": record.data,
            "crc": record.checksums,
        }
        for record in records
    ]
    head = {"format": _FORMAT, "version": FORMAT_VERSION, "orlop_version": __version__, "file": file}
    head |= {"manifest": True} if manifest else {}
    return seal(json.dumps({**head, "nbytes": nbytes, "block_bytes": BLOCK_BYTES, "records": lines}))


def unseal_as(kind: str, data: bytes, where: str) -> dict[str, Any]:
    """The content of one of orlop's sealed files, of a version that this orlop reads.

    Raises:
        CheckpointCorrupt: It is damaged or of another kind.
        CheckpointError: A newer orlop wrote it.
    """
    try:
        content = unseal(data)
    except ValueError as error:
        raise CheckpointCorrupt(
            "a file of the checkpoint is damaged", where=where, found=str(error)
        ) from error
    version = content.get("version")
    if content.get("format") != kind or type(version) is not int:
        raise CheckpointCorrupt("a file is not what its name says", where=where, expected=kind)
    if version > FORMAT_VERSION:
        raise CheckpointError(
            "this checkpoint was written by a newer orlop",
            where=where,
            expected=f"{kind} of version up to {FORMAT_VERSION}",
            found=f"version {version}, written by orlop {content.get('orlop_version', 'unknown')}",
            todo="update orlop, or choose an older checkpoint by its step",
        )
    return content


def parse_index(data: bytes, file: str, where: str) -> FileIndex:
    """Read and validate an index.

    Args:
        data: Its bytes.
        file: The data file that it should be of.
        where: Its path, for messages.

    Raises:
        CheckpointCorrupt: It is damaged, or breaks a rule.
        CheckpointError: A newer orlop wrote it.
    """
    content = unseal_as(_FORMAT, data, where)
    try:
        nbytes, block_bytes = _count(content["nbytes"]), content["block_bytes"]
        if content["file"] != file or block_bytes != BLOCK_BYTES:
            raise ValueError(f"it is of {content['file']!r} with blocks of {block_bytes!r} bytes")
        records = tuple(_record(line, nbytes) for line in content["records"])
        if any(a.record[0] + a.record[1] > b.record[0] for a, b in pairwise(records)):
            raise ValueError("records overlap")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointCorrupt(
            "an index can't be right", where=where, found=f"{type(error).__name__}: {error}"[:500]
        ) from error
    manifest = content.get("manifest") is True
    return FileIndex(file=file, nbytes=nbytes, records=records, manifest=manifest)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is no size")
    return value


def _span(value: Any, low: int, high: int) -> tuple[int, int]:
    start, nbytes = (_count(number) for number in value)
    if start < low or start + nbytes > high:
        raise ValueError(f"{value!r} lies outside {low} to {high}")
    return start, nbytes


def _record(line: dict[str, Any], file_bytes: int) -> IndexRecord:
    leaf, dtype, box, checksums = line["leaf"], line["dtype"], line["box"], line["crc"]
    if type(leaf) is not str or type(checksums) is not str:
        raise ValueError("a record without leaf or checksums")
    record = _span(line["record"], 0, file_bytes)
    data = _span(line["data"], record[0], sum(record))
    region = None
    if box is not None:
        offsets, sizes = (tuple(_count(number) for number in numbers) for numbers in box)
        region = Box(offsets, sizes)
    if dtype is not None and (region is None or data[1] != region.volume * ITEM_BYTES[dtype]):
        raise ValueError(f"{leaf!r} of {dtype!r} in {box!r} has {counted(data[1], 'byte')}")
    # Base64 writes 4 characters for each 3 bytes.
    blocks = math.ceil(data[1] / BLOCK_BYTES)
    if len(checksums) != 4 * math.ceil(4 * blocks / 3):
        raise ValueError(f"{leaf!r} has checksums for another size")
    return IndexRecord(leaf=leaf, dtype=dtype, box=region, record=record, data=data, checksums=checksums)
