"""One data file being written: records one after the other, each noted for the file's index.

Owns how a record reaches the file: its raw bytes pass by once, summed and written, and are not kept. Must not know
plans, threads or other files.
"""

from __future__ import annotations

import io

import torch
from torch import Tensor

from orlop.dcp.boxes import Box
from orlop.dcp.checksums import BLOCK_BYTES, BlockCrcs, pack
from orlop.dcp.dtypes import ITEM_BYTES
from orlop.dcp.index import IndexRecord
from orlop.dcp.memory import is_plain, slabs
from orlop.dcp.record import RECORD_ALIGNMENT, frame_tensor
from orlop.dcp.standard import dtype_name
from orlop.store.directory import NewData

__all__ = ["DataFile"]

# Small enough to stay in the cache between summing and writing; whole blocks.
_STEP_BYTES = 2 << 20
_SMALL = 64 * 1024


class DataFile:
    """Writes records.

    Args:
        file: Where to.
        pinned: Whether accelerators' tensors are to come, which copy faster to pinned memory.

    Attributes:
        size: Bytes so far.
        records: Those written so far.
    """

    def __init__(self, file: NewData, *, pinned: bool) -> None:
        self.size = 0
        self.records: list[IndexRecord] = []
        self._file = file
        self._pending = bytearray()
        self._scratch = torch.empty(_STEP_BYTES, dtype=torch.uint8, pin_memory=pinned)

    def add_tensor(self, leaf: str, box: Box, tensor: Tensor) -> IndexRecord:
        """Write one tensor, row-major whatever its strides; torch's own form for what is no plain tensor."""
        dtype = dtype_name(tensor.dtype)
        if dtype not in ITEM_BYTES or not is_plain(tensor):
            content = io.BytesIO()
            torch.save(tensor.cpu(), content)
            return self._add_content(leaf, box, content.getbuffer())
        self._align()
        start = self.size
        frame = frame_tensor(dtype, tuple(tensor.shape), start)
        self._write(frame.head)
        data_at = self.size
        blocks = BlockCrcs()
        for slab in slabs(tensor, self._scratch):
            blocks.add(slab)
            self._write(slab)
        assert self.size == data_at + frame.nbytes
        self._write(frame.tail(blocks.total()))
        return self._note(leaf, dtype, box, start, (data_at, frame.nbytes), blocks)

    def add_bytes(self, leaf: str, content: memoryview) -> IndexRecord:
        """Write one byte leaf as it is."""
        return self._add_content(leaf, None, content)

    def _add_content(self, leaf: str, box: Box | None, content: memoryview) -> IndexRecord:
        self._align()
        start = self.size
        blocks = BlockCrcs()
        blocks.add(content)
        self._write(content)
        return self._note(leaf, None, box, start, (start, len(content)), blocks)

    def _note(
        self,
        leaf: str,
        dtype: str | None,
        box: Box | None,
        start: int,
        data: tuple[int, int],
        blocks: BlockCrcs,
    ) -> IndexRecord:
        record = IndexRecord(
            leaf=leaf,
            dtype=dtype,
            box=box,
            record=(start, self.size - start),
            data=data,
            checksums=pack(blocks.crcs()),
        )
        self.records.append(record)
        return record

    def _align(self) -> None:
        self._write(bytes(-self.size % RECORD_ALIGNMENT))

    def _write(self, data: bytes | memoryview) -> None:
        self.size += len(data)
        if len(data) < _SMALL:
            self._pending += data
            if len(self._pending) < _STEP_BYTES:
                return
            data = b""
        if self._pending:
            self._file.write(self._pending)
            self._pending = bytearray()
        if data:
            self._file.write(data)

    def finish(self) -> None:
        """Hand over what is pending and make all of it durable."""
        if self._pending:
            self._file.write(self._pending)
            self._pending = bytearray()
        self._file.fsync()


assert _STEP_BYTES % BLOCK_BYTES == 0
