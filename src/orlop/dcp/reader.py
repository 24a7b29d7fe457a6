"""`Reader`: DCP's storage reader that fetches only the bytes it needs, checks them, and runs nothing.

Owns the conversation with DCP. The deciding is in `contents` and `source`, the moving in `transfer`, what torch itself
must read in `safe`. Must not know engines, optimizers or policies.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from orlop.dcp import safe
from orlop.dcp.boxes import Box, overlap, tiling_fault
from orlop.dcp.collector import without_collection
from orlop.dcp.contents import Contents
from orlop.dcp.cpus import available_cpus
from orlop.dcp.records import Records
from orlop.dcp.source import Source
from orlop.dcp.standard import to_torch
from orlop.dcp.transfer import MOST_THREADS, Fetch, ReadReport, run_fetches
from orlop.errors import CheckpointIncomplete
from orlop.store.directory import Directory
from orlop.store.manifest import Manifest
from orlop.store.objects import directory_at

__all__ = ["ReadReport", "Reader"]


class Reader(StorageReader):
    """Reads a DCP checkpoint, orlop's or plain torch's: `dcp.load(state, storage_reader=Reader(path))`.

    Tensors on the host are filled straight from the file, others through a bounded buffer (64 MiB in all). What orlop
    wrote is checked down to the last byte, against a CRC-32 per 64 KiB; a foreign record against its own CRC-32 where
    it is read whole. No byte of a checkpoint is executed, whatever planner is used.

    Args:
        path: The checkpoint's directory.
        num_threads: How many threads read; by default as many as this process has CPUs, 8 at most.
        allow_gaps: Whether leaves are read although a region of them is in no file; for a caller who has proven that it
            needs none of that region. By default such a leaf is refused.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Directory,
        *,
        num_threads: int | None = None,
        allow_gaps: bool = False,
    ) -> None:
        super().__init__()
        self._allow_gaps = allow_gaps
        self._threads = num_threads or min(8, available_cpus())
        if not 1 <= self._threads <= MOST_THREADS:
            raise ValueError(f"num_threads is {num_threads}; it must be 1 to {MOST_THREADS}")
        self._open(path)

    def _open(self, path: str | os.PathLike[str] | Directory) -> None:
        self._directory = directory_at(path) if isinstance(path, (str, os.PathLike)) else path
        self._contents = Contents(self._directory)
        self._records = Records(self._contents, None)
        self.report = ReadReport()

    @property
    def checkpoint_id(self) -> str:
        """What is read."""
        return str(self._directory)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this reader could read that: anything that is a path."""
        return isinstance(checkpoint_id, (str, os.PathLike))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start a new load, of another checkpoint if one is given."""
        self._open(checkpoint_id if checkpoint_id else self._directory)

    @property
    def manifest(self) -> Manifest | None:
        """What orlop noted of the whole checkpoint, if it was saved by a `CheckpointStore` or a `TrainEngine`."""
        return self._contents.manifest

    @without_collection()
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's metadata, validated.

        Raises:
            CheckpointNotFound: There is no such directory.
            CheckpointIncomplete: It has no metadata.
            CheckpointUnsafe: The metadata names something outside the allow-list; nothing ran.
            CheckpointCorrupt: It is damaged, or breaks a rule of the format.
        """
        return to_torch(self._contents.catalog(kwargs.get("rank")))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take the metadata that the plans are made from."""
        if self._records.metadata is not metadata:
            self._records = Records(self._contents, metadata)

    @without_collection()
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Refuse what can be refused before a target changes.

        Raises:
            CheckpointIncomplete: A wanted leaf has a region that no file holds, or a file is missing.
            CheckpointCorrupt: A file is shorter than the metadata says.
        """
        if not self._allow_gaps:
            # A leaf of which nothing at all is stored has no item in any rank's plan, wanted or not.
            bare = (leaf for leaf, entry in self._records.leaves.items() if _holds_nothing(entry))
            self._require_whole([*(item.storage_index.fqn for item in plan.items), *bare])
        self._records.require_files(item.storage_index for item in plan.items)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to change."""
        return plans

    def _require_whole(self, leaves: Iterable[str]) -> None:
        known = self._records.leaves
        for leaf in dict.fromkeys(leaves):
            entry = known.get(leaf)
            if isinstance(entry, TensorStorageMetadata):
                boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
                fault = tiling_fault(entry.size, boxes)
                if fault is not None:
                    where = f"{leaf} in {self._directory}"
                    raise CheckpointIncomplete(
                        "a part of a tensor is in no file", where=where, found=fault.text
                    )

    def require_present(self, metadata: Metadata, wanted: Mapping[str, Box]) -> None:
        """Raise when a file that holds a part of these regions is missing or too short; nothing is read.

        Args:
            metadata: From `read_metadata`.
            wanted: For each leaf, its region that is wanted here.

        Raises:
            CheckpointIncomplete: A file is missing.
            CheckpointCorrupt: It is too short, or not of the size that was written.
        """
        self.set_up_storage_reader(metadata, False)
        self._records.require_files(
            MetadataIndex(leaf, chunk.offsets)
            for leaf, box in wanted.items()
            for chunk in getattr(metadata.state_dict_metadata.get(leaf), "chunks", ())
            if overlap(box, Box(tuple(chunk.offsets), tuple(chunk.sizes))) is not None
        )

    @without_collection()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the plan's targets; returns when all are filled and checked.

        Raises:
            CheckpointCorrupt: A checksum differs, or a record can't be read.
            CheckpointIncomplete: A file or record is missing.
            CheckpointUnsafe: A byte leaf holds more than plain data; nothing of it ran.
        """
        fetches: list[tuple[ReadItem, Fetch]] = []
        with self._records.opened() as records:
            for item in sorted(plan.items, key=lambda item: records.order(item.storage_index)):
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, safe.repacked(*records.whole(item.storage_index, self.report)))
                    continue
                target = planner.resolve_tensor(item).detach()
                box = Box(tuple(item.storage_offsets), tuple(item.lengths))
                source = records.source(item.storage_index)
                if isinstance(source, Source):
                    fetches.append((item, Fetch(source=source, box=box, target=target)))
                    continue
                _fill(target, box, records.loaded(item.storage_index, source, self.report))
                planner.commit_tensor(item, target)
        run_fetches([fetch for _, fetch in fetches], self._records.open_file, self._threads, self.report)
        for item, fetch in fetches:
            planner.commit_tensor(item, fetch.target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _holds_nothing(entry: object) -> bool:
    if not isinstance(entry, TensorStorageMetadata) or not entry.size.numel():
        return False
    return not any(chunk.sizes.numel() for chunk in entry.chunks)


def _fill(target: Tensor, box: Box, stored: Tensor) -> None:
    for axis, (offset, size) in enumerate(zip(box.offsets, box.sizes)):
        stored = stored.narrow(axis, offset, size)
    target.copy_(stored)
