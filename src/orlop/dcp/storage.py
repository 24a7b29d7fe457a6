"""Storage readers and writers around another's: metadata that is read once, tied leaves that are stored once.

Owns what they add; all else is as in the wrapped one, except that whatever it raises, every rank can be told: between
DCP's own collectives an exception that can't be pickled would leave the other ranks waiting. For the same reason they
wait for the wrapped one's futures themselves. Must not know how bytes are stored, nor what a leaf means.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from orlop import compat
from orlop.errors import CheckpointCorrupt, CheckpointIncomplete
from orlop.failures import told

__all__ = ["WrappedReader", "WrappedWriter", "with_aliases"]

T = TypeVar("T")


def with_aliases(results: Sequence[list[WriteResult]], aliases: Mapping[str, str]) -> list[list[WriteResult]]:
    """What was written, with one more result for each chunk of a tied leaf.

    Args:
        results: What each rank wrote.
        aliases: Other names of leaves, each with the name that was written: they get the same place in the metadata.
    """
    names: dict[str, list[str]] = {}
    for alias, key in aliases.items():
        names.setdefault(key, []).append(alias)
    tied = [
        compat.replace(result, index=compat.replace(result.index, fqn=alias))
        for theirs in results
        for result in theirs
        for alias in names.get(result.index.fqn, ())
    ]
    return [*results, tied] if tied else list(results)


def _ended(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future


class WrappedWriter(StorageWriter):
    """A writer that stores tied leaves once (see `with_aliases`)."""

    def __init__(self, writer: StorageWriter, aliases: Mapping[str, str]) -> None:
        self._writer = writer
        self._aliases = aliases

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing: the writer at hand knows where it writes."""

    @told()
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """As the wrapped writer; older writers take no further arguments."""
        takes_more = "kwargs" in inspect.signature(self._writer.set_up_storage_writer).parameters
        self._writer.set_up_storage_writer(is_coordinator, *args, **(kwargs if takes_more else {}))

    @told()
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As the wrapped writer."""
        return self._writer.prepare_local_plan(plan)

    @told()
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As the wrapped writer."""
        return self._writer.prepare_global_plan(plans)

    @told()
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """As the wrapped writer."""
        future = self._writer.write_data(plan, planner)
        future.wait()
        return _ended(future.value())

    @told()
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """As the wrapped writer, with the results of tied leaves."""
        self._writer.finish(metadata, with_aliases(results, self._aliases))

    @told()
    def storage_meta(self) -> Any:
        """As the wrapped writer."""
        return self._writer.storage_meta()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whatever the wrapped writer took."""
        return True


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error)


class WrappedReader(StorageReader):
    """A reader whose metadata is known: decision and loading see the same, and it is read only once.

    Attributes:
        wrapped: The reader itself.
        checkpoint_id: What it reads.
        bytes_read: Bytes of the records that were asked for so far.
    """

    def __init__(self, reader: StorageReader, metadata: Metadata) -> None:
        self._reader = self.wrapped = reader
        self._metadata = metadata
        self.checkpoint_id = getattr(reader, "checkpoint_id", None)
        self.bytes_read = 0

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing: the metadata at hand belongs to what was opened."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata at hand."""
        return self._metadata

    @told()
    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """As the wrapped reader; older readers take no further arguments."""
        takes_more = "kwargs" in inspect.signature(self._reader.set_up_storage_reader).parameters
        self._reader.set_up_storage_reader(metadata, is_coordinator, *args, **(kwargs if takes_more else {}))

    @told()
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As the wrapped reader."""
        return self._reader.prepare_local_plan(plan)

    @told()
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As the wrapped reader."""
        return self._reader.prepare_global_plan(plans)

    @told()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """As the wrapped reader.

        Raises:
            CheckpointIncomplete: A file, or a record that the metadata promises, is not there.
            CheckpointCorrupt: A record can't be read.
        """
        # Torch's own reader fetches a whole record for each item; one of ours counts for itself.
        stored: Mapping[Any, Any] = self._metadata.storage_data or {}
        places = (stored.get(item.storage_index) for item in plan.items)
        self.bytes_read += sum(int(getattr(place, "length", 0)) for place in places)
        try:
            self._reader.read_data(plan, planner).wait()
        except (FileNotFoundError, KeyError) as error:
            raise CheckpointIncomplete(
                "a file or record is missing", where=self._place, found=str(error)
            ) from error
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            if _is_out_of_memory(error):
                raise
            raise CheckpointCorrupt("a record can't be read", where=self._place, found=str(error)) from error
        return _ended(None)

    @property
    def _place(self) -> str | None:
        return None if self.checkpoint_id is None else str(self.checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whatever the wrapped reader took."""
        return True
