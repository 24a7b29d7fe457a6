"""The values of a checkpoint's leaves, read one region at a time, on this machine alone.

Owns the way from a leaf and a box to a tensor on the host. Checks what it reads, as a load does, and executes nothing.
Must not know live objects.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from orlop.dcp import safe
from orlop.dcp.boxes import Box, overlap, pieces
from orlop.dcp.catalog import TensorEntry
from orlop.dcp.dtypes import ITEM_BYTES
from orlop.dcp.records import Records
from orlop.dcp.source import Source
from orlop.dcp.standard import to_torch
from orlop.dcp.transfer import Fetch, ReadReport, run_fetches
from orlop.errors import CheckpointIncomplete, CheckpointNotFound, CheckpointUnsafe
from orlop.tools.opened import Opened

__all__ = ["Opaque", "StoredValues", "regions"]

REGION_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Opaque:
    """A record that holds more than plain data, so that only its bytes can be compared.

    Attributes:
        names: The globals that it names.
        digest: Of its bytes.
    """

    names: str
    digest: str

    def __repr__(self) -> str:
        return f"more than plain data ({self.names}), SHA-256 {self.digest}"


class StoredValues:
    """What the leaves of a checkpoint hold.

    Args:
        opened: The checkpoint.

    Attributes:
        report: What was read.
    """

    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        self.catalog = opened.catalog
        self.report = ReadReport()
        self._records = Records(opened.contents, to_torch(self.catalog))
        self._threads = min(4, len(os.sched_getaffinity(0)))

    def entry(self, leaf: str) -> TensorEntry:
        """The tensor that a leaf is.

        Raises:
            CheckpointNotFound: It is none.
        """
        entry = self.catalog.leaves.get(leaf)
        if entry is None:
            raise CheckpointNotFound("there is no such tensor in the checkpoint", where=leaf)
        return entry

    def tensor(self, leaf: str, box: Box | None = None) -> Tensor:
        """A region of a tensor; the whole without `box`.

        Raises:
            CheckpointIncomplete: A part of the tensor is in no file.
            CheckpointCorrupt: A checksum differs, or a record can't be read.
        """
        entry = self.entry(leaf)
        if entry.gap:
            raise CheckpointIncomplete("a part of a tensor is in no file", where=leaf, found=entry.gap)
        box = box or Box((0,) * len(entry.sizes), entry.sizes)
        target = torch.empty(box.sizes, dtype=getattr(torch, entry.dtype))
        fetches: list[Fetch] = []
        with self._records.opened() as records:
            for chunk in entry.chunks:
                common = overlap(box, chunk) if box.sizes else box
                if common is None:
                    continue
                part = _narrowed(target, common, box.offsets)
                inside = Box(tuple(a - b for a, b in zip(common.offsets, chunk.offsets)), common.sizes)
                index = MetadataIndex(leaf, torch.Size(chunk.offsets))
                source = records.source(index)
                if isinstance(source, Source):
                    fetches.append(Fetch(source=source, box=inside, target=part))
                else:
                    whole = records.loaded(index, source, self.report)
                    part.copy_(_narrowed(whole, inside, (0,) * len(inside.sizes)))
        run_fetches(fetches, self._records.open_file, self._threads, self.report)
        return target

    def value(self, leaf: str) -> Any:
        """The plain data of a byte leaf.

        Raises:
            CheckpointUnsafe: It holds more than plain data.
            CheckpointCorrupt: It can't be read.
        """
        return safe.load(*self._record(leaf))

    def plain(self, leaf: str) -> Any:
        """As `value`, with an `Opaque` in place of more than plain data."""
        try:
            return self.value(leaf)
        except CheckpointUnsafe as error:
            digest = hashlib.sha256(self._record(leaf)[0]).hexdigest()
            return Opaque(error.found or "", digest[:16])

    def _record(self, leaf: str) -> tuple[bytes, str]:
        with self._records.opened() as records:
            return records.whole(MetadataIndex(leaf), self.report)


def _narrowed(tensor: Tensor, box: Box, origin: tuple[int, ...]) -> Tensor:
    for axis, (offset, size) in enumerate(zip(box.offsets, box.sizes)):
        tensor = tensor.narrow(axis, offset - origin[axis], size)
    return tensor


def regions(entry: TensorEntry, most_bytes: int = REGION_BYTES) -> Iterator[Box]:
    """Cut a tensor into regions of bounded size, in row-major order; nothing of an empty one."""
    whole = Box((0,) * len(entry.sizes), entry.sizes)
    if math.prod(entry.sizes):
        item_bytes = ITEM_BYTES.get(entry.dtype, 16)
        for piece in pieces(entry.sizes, whole, item_bytes, most_bytes, 0):
            yield piece.box
