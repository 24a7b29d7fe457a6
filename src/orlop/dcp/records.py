"""The records of one checkpoint: which file holds them, where their tensors' bytes stand, and their whole content.

Owns the way from DCP's metadata to a `Source`, and the reading of records that are read as a whole. Must not know plans
or targets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from orlop.dcp import safe
from orlop.dcp.archive import Unusual
from orlop.dcp.boxes import Box
from orlop.dcp.catalog import Extent, Rules
from orlop.dcp.checksums import BlockCrcs
from orlop.dcp.contents import Contents
from orlop.dcp.dtypes import ITEM_BYTES
from orlop.dcp.inflated import SLACK_BYTES, most_unfolded
from orlop.dcp.source import Source, find_record, from_index, from_record
from orlop.dcp.standard import dtype_name
from orlop.dcp.transfer import ReadReport
from orlop.errors import CheckpointCorrupt, CheckpointIncomplete
from orlop.store.directory import RangedData
from orlop.wording import counted

__all__ = ["Records"]

_SMALL_RECORD = 16 * 1024


class Records:
    """What stands where.

    Args:
        contents: The checkpoint's small files.
        metadata: DCP's metadata; it may have come from another rank.
    """

    def __init__(self, contents: Contents, metadata: Metadata | None) -> None:
        self.metadata = metadata
        self._contents = contents
        self._directory = contents.directory
        self.leaves: dict[str, Any] = {} if metadata is None else metadata.state_dict_metadata
        self._storage: dict[MetadataIndex, Any] = {} if metadata is None else metadata.storage_data
        self._rules = Rules(str(self._directory), budget=1 << 30)
        self._extents: dict[MetadataIndex, Extent] = {}
        self._file: RangedData | None = None
        self._file_name = ""

    @contextmanager
    def opened(self) -> Iterator[Records]:
        """Within the block one data file at a time stays open between calls."""
        try:
            yield self
        finally:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._file_name = None, ""

    # -- places ----------------------------------------------------------------------------------------------------

    def extent(self, index: MetadataIndex) -> Extent:
        """Where a record stands.

        Raises:
            CheckpointIncomplete: The metadata names none.
            CheckpointCorrupt: It can't be there.
        """
        known = self._extents.get(index)
        if known is not None:
            return known
        info = self._storage.get(index)
        if info is None:
            raise CheckpointIncomplete(
                "the metadata names no file for a part of a leaf: its save failed half-way",
                where=f"{index.fqn} in {self._directory}",
                found=f"nothing at {tuple(index.offset or ())}",
            )
        transforms = getattr(info, "transform_descriptors", None) or ()
        extent = self._rules.extent(info.relative_path, info.offset, info.length, transforms)
        self._extents[index] = extent
        return extent

    def order(self, index: MetadataIndex) -> tuple[str, int]:
        """Sorts records by file and place."""
        extent = self.extent(index)
        return extent.path, extent.offset

    def require_files(self, indexes: Iterable[MetadataIndex]) -> None:
        """Raise when a file is not there, or too short for what should be in it.

        Raises:
            CheckpointIncomplete: It is missing.
            CheckpointCorrupt: It is too short, or not of the size that was written.
        """
        ends: dict[str, tuple[int, str]] = {}
        for index in indexes:
            extent = self.extent(index)
            ends[extent.path] = max(
                ends.get(extent.path, (0, "")), (extent.offset + extent.nbytes, index.fqn)
            )
        for path, (end, leaf) in ends.items():
            file = self.open_file(path)
            size = file.size
            file.close()
            if end > size:
                raise CheckpointCorrupt(
                    "a file is too short for what it should hold",
                    where=f"{leaf} in {self._directory.path_of(path)}",
                    expected="at least " + counted(end, "byte"),
                    found=counted(size, "byte"),
                )

    def open_file(self, path: str) -> RangedData:
        """Open a data file; the caller closes it.

        Raises:
            CheckpointIncomplete: It is missing.
            CheckpointCorrupt: It is not of the size that was written.
        """
        try:
            file = self._directory.open(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            where = self._directory.path_of(path)
            raise CheckpointIncomplete("a data file is missing", where=where) from error
        expected = self._contents.expected_size(path)
        if expected is not None and file.size != expected:
            size = file.size
            file.close()
            raise CheckpointCorrupt(
                "a data file has not the size that was written",
                where=self._directory.path_of(path),
                expected=counted(expected, "byte"),
                found=counted(size, "byte"),
            )
        return file

    @cached_property
    def _aliases(self) -> dict[Extent, tuple[str, ...]]:
        """The leaves that share a place, by that place: tied ones."""
        leaves: dict[tuple[str, int, int], list[str]] = {}
        for index, info in self._storage.items():
            leaves.setdefault((info.relative_path, info.offset, info.length), []).append(index.fqn)
        return {
            Extent(path=path, offset=offset, nbytes=nbytes): tuple(names)
            for (path, offset, nbytes), names in leaves.items()
            if len(names) > 1
        }

    def _where(self, leaf: str, extent: Extent) -> str:
        """Leaf and file, for messages."""
        return f"{leaf} in {self._directory}/{extent.path}"

    # -- contents --------------------------------------------------------------------------------------------------

    def source(self, index: MetadataIndex) -> Source | str:
        """Where a chunk's raw bytes stand; or the reason why torch's own loader has to read the record."""
        extent = self.extent(index)
        box, dtype = self._chunk(index)
        if extent.transforms:
            return f"its bytes were transformed: {', '.join(extent.transforms)}"
        file_index = self._contents.index(extent.path)
        where = self._where(index.fqn, extent)
        if file_index is not None:
            record = find_record(file_index, index.fqn, extent, self._aliases.get(extent, ()), where)
            return from_index(record, box, dtype, extent.path, where) or "it was written as torch writes it"
        read = partial(self._read_at, extent)
        if extent.nbytes <= _SMALL_RECORD:
            content = read(0, extent.nbytes)
            read = partial(_slice, content)
        try:
            return from_record(read, index.fqn, extent, box.sizes, dtype, where)
        except Unusual as reason:
            return str(reason)

    def _chunk(self, index: MetadataIndex) -> tuple[Box, str]:
        entry = self.leaves.get(index.fqn)
        offset = tuple(index.offset or ())
        if isinstance(entry, TensorStorageMetadata):
            hint = index.index
            chunks = entry.chunks
            if hint is None or not 0 <= hint < len(chunks) or tuple(chunks[hint].offsets) != offset:
                hint = next((at for at, chunk in enumerate(chunks) if tuple(chunk.offsets) == offset), None)
            if hint is not None:
                return Box(offset, tuple(chunks[hint].sizes)), dtype_name(entry.properties.dtype)
        raise CheckpointIncomplete(
            "the metadata names no such chunk", where=f"{index.fqn} in {self._directory}", found=str(offset)
        )

    def _read_at(self, extent: Extent, offset: int, nbytes: int) -> bytes:
        """Bytes of a record; never more than it has."""
        if self._file is None or self._file_name != extent.path:
            self._close()
            self._file, self._file_name = self.open_file(extent.path), extent.path
        return self._file.read(extent.offset + offset, max(0, min(nbytes, extent.nbytes - offset)))

    def whole(self, index: MetadataIndex, report: ReadReport) -> tuple[bytes, str]:
        """A record's bytes, transforms undone, checked where they can be, and the place for messages.

        Raises:
            CheckpointCorrupt: A checksum differs, the file ends early, or the transforms can't be undone.
        """
        extent = self.extent(index)
        where = self._where(index.fqn, extent)
        content = self._read_at(extent, 0, extent.nbytes)
        if len(content) != extent.nbytes:
            raise CheckpointCorrupt("a file ends early", where=where, expected=counted(extent.nbytes, "byte"))
        report.bytes_needed += len(content)
        report.bytes_read += len(content)
        unchecked: str | None = None
        file_index = self._contents.index(extent.path)
        if file_index is not None:
            record = find_record(file_index, index.fqn, extent, self._aliases.get(extent, ()), where)
            unchecked = None if record.data == record.record else "its index covers a part"
            start = record.data[0] - record.record[0]
            blocks = BlockCrcs()
            blocks.add(memoryview(content)[start : start + record.data[1]])
            if tuple(blocks.crcs()) != record.crcs():
                raise CheckpointCorrupt(
                    "a checksum differs: the file was damaged after it was written", where=where
                )
        if extent.transforms:
            content = safe.undone(content, extent.transforms, self._most_bytes(index), where)
        if file_index is None:
            unchecked = safe.check_members(partial(_slice, content), len(content), where)
        if unchecked is None:
            report.bytes_checked += extent.nbytes
        else:
            report.unchecked[index.fqn] = unchecked
        return content, where

    def loaded(self, index: MetadataIndex, reason: str, report: ReadReport) -> Tensor:
        """A whole chunk by torch's own safe loader, since its record is of unusual form.

        Raises:
            CheckpointUnsafe: It holds more than a tensor.
            CheckpointCorrupt: It can't be read, or is not what the metadata says.
        """
        report.fallbacks[index.fqn] = reason
        content, where = self.whole(index, report)
        box, dtype = self._chunk(index)
        return safe.load_tensor(content, box.sizes, dtype, where)

    def _most_bytes(self, index: MetadataIndex) -> int:
        """How long a record may get when its transforms are undone."""
        if not isinstance(self.leaves.get(index.fqn), TensorStorageMetadata):
            return most_unfolded(self.extent(index).nbytes)
        box, dtype = self._chunk(index)
        return 2 * box.volume * ITEM_BYTES.get(dtype, 16) + SLACK_BYTES


def _slice(content: bytes, offset: int, nbytes: int) -> bytes:
    return content[offset : offset + nbytes]
