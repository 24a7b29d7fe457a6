"""Storage readers and writers around another's: metadata that is read once, tied leaves that are stored once.

Owns what they add; all else is as in the wrapped one. Must not know how bytes are stored, nor what a leaf means.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from orlop import compat
from orlop.errors import CheckpointCorrupt, CheckpointIncomplete

__all__ = ["AliasingWriter", "ReadMetadataOnce"]


class AliasingWriter(StorageWriter):
    """A writer that stores tied leaves once: the other names get the same place in the checkpoint's metadata."""

    def __init__(self, writer: StorageWriter, aliases: Mapping[str, str]) -> None:
        self._writer = writer
        self._names: dict[str, list[str]] = {}
        for alias, key in aliases.items():
            self._names.setdefault(key, []).append(alias)

    def reset(self, checkpoint_id: Any = None) -> None:
        """As the wrapped writer."""
        self._writer.reset(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """As the wrapped writer; older writers take no further arguments."""
        takes_more = "kwargs" in inspect.signature(self._writer.set_up_storage_writer).parameters
        self._writer.set_up_storage_writer(is_coordinator, *args, **(kwargs if takes_more else {}))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As the wrapped writer."""
        return self._writer.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As the wrapped writer."""
        return self._writer.prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """As the wrapped writer."""
        return self._writer.write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """As the wrapped writer, with one more result for each chunk of a tied leaf."""
        tied = [
            compat.replace(result, index=compat.replace(result.index, fqn=alias))
            for theirs in results
            for result in theirs
            for alias in self._names.get(result.index.fqn, ())
        ]
        self._writer.finish(metadata, [*results, tied])

    def storage_meta(self) -> Any:
        """As the wrapped writer."""
        return self._writer.storage_meta()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whatever the wrapped writer took."""
        return True


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error)


class ReadMetadataOnce(StorageReader):
    """A reader whose metadata is known: decision and loading see the same, and it is read only once.

    Attributes:
        wrapped: The reader itself.
        bytes_read: Bytes of the records that were asked for so far.
    """

    def __init__(self, reader: StorageReader, metadata: Metadata) -> None:
        self._reader = self.wrapped = reader
        self._metadata = metadata
        self.bytes_read = 0

    @property
    def checkpoint_id(self) -> Any:
        """What the wrapped reader reads."""
        return getattr(self._reader, "checkpoint_id", None)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing: the metadata at hand belongs to what was opened."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata at hand."""
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """As the wrapped reader; older readers take no further arguments."""
        takes_more = "kwargs" in inspect.signature(self._reader.set_up_storage_reader).parameters
        self._reader.set_up_storage_reader(metadata, is_coordinator, *args, **(kwargs if takes_more else {}))

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As the wrapped reader."""
        return self._reader.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As the wrapped reader."""
        return self._reader.prepare_global_plan(plans)

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
            return self._reader.read_data(plan, planner)
        except (FileNotFoundError, KeyError) as error:
            raise CheckpointIncomplete(
                "a file or record is missing", where=self._place, found=str(error)
            ) from error
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            if _is_out_of_memory(error):
                raise
            raise CheckpointCorrupt("a record can't be read", where=self._place, found=str(error)) from error

    @property
    def _place(self) -> str | None:
        return None if self.checkpoint_id is None else str(self.checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whatever the wrapped reader took."""
        return True
