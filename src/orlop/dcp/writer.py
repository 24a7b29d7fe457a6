"""`Writer`: DCP's storage writer that streams, sums what it writes, and fails when a write fails.

Owns the conversation with DCP and the threads, one data file for each. The form of a record is `record`'s, that of an
index `index`'s. Must not know engines or stores.
"""

from __future__ import annotations

import json
import os
import pickle
import uuid
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from threading import Event
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from orlop import compat
from orlop.dcp.boxes import Box
from orlop.dcp.catalog import to_json
from orlop.dcp.collector import without_collection
from orlop.dcp.contents import CATALOG_FORMAT, CATALOG_NAME, METADATA_NAME
from orlop.dcp.coverage import require_whole
from orlop.dcp.cpus import available_cpus
from orlop.dcp.datafile import DataFile
from orlop.dcp.index import FORMAT_VERSION, index_name, render_index
from orlop.dcp.standard import from_torch
from orlop.errors import CheckpointExists
from orlop.store.directory import Directory
from orlop.store.objects import directory_at
from orlop.store.sealed import digest, seal
from orlop.version import __version__

__all__ = ["Writer"]

_DCP_VERSION = "1.0.0"
# A file, its index and a thread for less would cost more than they save. A record of less is Python's work, and threads
# would only wait for each other.
_WORTH_A_FILE = 8 << 20
_WORTH_A_THREAD = 64 << 10


@dataclass(frozen=True)
class FileResult(WriteResult):
    """What DCP gathers of each record; that of a file's first record also brings the digest of the file's index."""

    index_file: str = ""
    index_digest: str = ""


class Writer(StorageWriter):
    """Writes a DCP checkpoint that plain torch reads: `dcp.save(state, storage_writer=Writer(path))`.

    Every tensor is summed and written in one pass, without a copy of it; beside each data file stands its index. An
    error in any thread fails the save on all ranks. A directory that holds a checkpoint is not written over.

    Args:
        path: The checkpoint's directory; it is created where it is missing.
        num_threads: How many threads write, each one data file of 8 MiB or more (small tensors not counted); by default
            as many as this process has CPUs, 4 at most.
        manifest: Whether the caller adds a manifest (`orlop.json`) when all is written; a reader then misses it where
            it is gone.

    Attributes:
        digests: SHA-256 of each small file that orlop added, by name; complete on the coordinator after the save.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Directory,
        *,
        num_threads: int | None = None,
        manifest: bool = False,
    ) -> None:
        super().__init__()
        self._threads = num_threads or min(4, available_cpus())
        if self._threads < 1:
            raise ValueError(f"num_threads is {num_threads}; it must be at least 1")
        self._has_manifest = manifest
        self._open(path)
        self._rank: int | None = None

    def _open(self, path: str | os.PathLike[str] | Directory) -> None:
        self._directory = directory_at(path) if isinstance(path, (str, os.PathLike)) else path
        self.digests: dict[str, str] = {}

    @property
    def checkpoint_id(self) -> str:
        """Where it is written."""
        return str(self._directory)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this writer could write there: anything that is a path."""
        return isinstance(checkpoint_id, (str, os.PathLike))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start a new save, elsewhere if a path is given."""
        self._open(checkpoint_id if checkpoint_id else self._directory)

    def storage_meta(self) -> StorageMeta | None:
        """What identifies this save."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=str(uuid.uuid4()))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn whether every rank writes metadata of its own (DCP without collectives)."""
        self._rank = None if kwargs.get("use_collectives", True) else kwargs.get("rank")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the directory.

        Raises:
            CheckpointExists: It holds a checkpoint.
        """
        if self._directory.exists(self._metadata_name):
            raise CheckpointExists(
                "A checkpoint stands there already; orlop never writes over one.",
                where=str(self._directory),
                todo="save under another name, or remove it first",
            )
        self._directory.make()
        if self._rank is None:
            return plan
        return replace(plan, storage_data=compat.storage_prefix(f"__{self._rank}_"))

    @without_collection()
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Prove that every tensor will be covered exactly once, and name each rank's files.

        Raises:
            CheckpointIncomplete: A tensor would not be.
            CheckpointMismatch: Ranks disagree about a tensor.
        """
        require_whole(plans)
        return [
            plan
            if plan.storage_data is not None
            else replace(plan, storage_data=compat.storage_prefix(f"__{rank}_"))
            for rank, plan in enumerate(plans)
        ]

    @without_collection()
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's records; returns when they are durable.

        Raises:
            OSError: A write failed, in whatever thread.
        """
        buckets = share_out(plan.items, self._threads)
        names = [f"{plan.storage_data.prefix}{number}.distcp" for number in range(len(buckets))]
        stop = Event()
        with ThreadPoolExecutor(max(1, len(buckets)), thread_name_prefix="orlop-write") as pool:
            tasks = [
                pool.submit(self._write_file, name, bucket, planner, stop)
                for name, bucket in zip(names, buckets)
            ]
            try:
                wait(tasks, return_when=FIRST_EXCEPTION)
            finally:
                stop.set()
        failed = [error for task in tasks if (error := task.exception()) is not None]
        if failed:
            # A thread that only stopped because another failed says so; the first real cause counts.
            raise next((error for error in failed if not isinstance(error, _Stopped)), failed[0])
        done: Future[list[WriteResult]] = Future()
        done.set_result([result for task in tasks for result in task.result()])
        return done

    def _write_file(
        self, name: str, items: list[WriteItem], planner: SavePlanner, stop: Event
    ) -> list[WriteResult]:
        results: list[WriteResult] = []
        with self._directory.create(name) as file:
            data = DataFile(file, pinned=compat.accelerator() is not None)
            for item in items:
                if stop.is_set():
                    raise _Stopped
                results.append(_write_item(data, name, item, planner.resolve_data(item)))
            data.finish()
        index = render_index(name, data.size, data.records, manifest=self._has_manifest)
        with self._directory.create(index_name(name)) as file:
            file.write(index)
            file.fsync()
        first = results[0]
        results[0] = FileResult(
            first.index, first.size_in_bytes, first.storage_data, index_name(name), digest(index)
        )
        return results

    @without_collection()
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata, last: from now on there is a checkpoint."""
        if hasattr(metadata, "version"):
            metadata.version = _DCP_VERSION
        written = [result for ranks in results for result in ranks]
        metadata.storage_data = {result.index: result.storage_data for result in written}
        metadata.storage_meta = self.storage_meta()
        content = pickle.dumps(metadata)
        self.digests = {
            result.index_file: result.index_digest for result in written if isinstance(result, FileResult)
        }
        if self._rank is None:
            twin = _render_catalog(metadata, content, self._has_manifest)
            self._directory.replace(CATALOG_NAME, twin)
            self.digests[CATALOG_NAME] = digest(twin)
        self._directory.replace(self._metadata_name, content)

    @property
    def _metadata_name(self) -> str:
        return METADATA_NAME if self._rank is None else f"__{self._rank}{METADATA_NAME}"


class _Stopped(Exception):
    """Another thread has failed."""


def _render_catalog(metadata: Metadata, content: bytes, has_manifest: bool) -> bytes:
    """The metadata's sealed twin: the same as JSON, the digest of the original, whether a manifest is to follow."""
    head = {
        "format": CATALOG_FORMAT,
        "version": FORMAT_VERSION,
        "orlop_version": __version__,
        "metadata_digest": digest(content),
        **({"manifest": True} if has_manifest else {}),
    }
    return seal(json.dumps({**head, **to_json(from_torch(metadata))}))


def _write_item(data: DataFile, name: str, item: WriteItem, value: Any) -> WriteResult:
    leaf = item.index.fqn
    if item.type == WriteItemType.BYTE_IO:
        record = data.add_bytes(leaf, value.getbuffer())
    else:
        assert isinstance(value, Tensor)
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        record = data.add_tensor(leaf, box, compat.local_tensor(value.detach()))
    start, nbytes = record.record
    return WriteResult(
        index=item.index, size_in_bytes=nbytes, storage_data=compat.storage_info(name, start, nbytes)
    )


def share_out(items: Sequence[WriteItem], most: int) -> list[list[WriteItem]]:
    """Deal the items out to at most so many files of about the same size; their order is kept within one."""
    sizes = [_nbytes(item) for item in items]
    shared = sum(size for size in sizes if size >= _WORTH_A_THREAD)
    buckets = min(most, max(1, shared // _WORTH_A_FILE), len(items))
    filled = [0] * buckets
    dealt: list[list[int]] = [[] for _ in range(buckets)]
    for number in sorted(range(len(items)), key=lambda number: -sizes[number]):
        least = filled.index(min(filled))
        filled[least] += sizes[number]
        dealt[least].append(number)
    return [[items[number] for number in sorted(numbers)] for numbers in dealt]


def _nbytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 4096
    # An empty or tiny record still costs its frame.
    return 1024 + item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
