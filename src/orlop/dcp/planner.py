"""Save and load planners: flat leaves in, torch's own DCP format out.

Owns how orlop's flat dict of leaves meets `torch.distributed.checkpoint`: the save planner writes the paths by which
torch unflattens a checkpoint; the load planner reads byte leaves as data only; `ReadMetadataOnce` hands DCP the
metadata that was read for the decision. Must not know what a leaf means.
"""

from __future__ import annotations

import inspect
import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from orlop.errors import CheckpointCorrupt, CheckpointIncomplete, CheckpointUnsafe

__all__ = ["FlatLoadPlanner", "FlatSavePlanner", "ReadMetadataOnce"]

Path = tuple[Any, ...]


class FlatSavePlanner(DefaultSavePlanner):
    """Saves a flat dict of leaves as if torch had flattened a nested one.

    Args:
        paths: For each key of the dict, its path in the nested form; `dcp_to_torch_save` and its like rely on it.
    """

    def __init__(self, paths: Mapping[str, Path]) -> None:
        super().__init__()
        self._paths = dict(paths)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Take the leaves as they are."""
        self.state_dict = state_dict
        self.mappings = self._paths
        self.is_coordinator = is_coordinator


class FlatLoadPlanner(DefaultLoadPlanner):
    """Loads leaves of a flat dict in place; byte leaves as plain data, never by running code."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the leaves as they are."""
        self.original_state_dict = state_dict
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """What this rank reads: every leaf of the dict."""
        assert self.metadata is not None
        return create_default_local_load_plan(self.state_dict, self.metadata, True)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take one byte leaf.

        Raises:
            CheckpointUnsafe: It holds something other than data.
            CheckpointCorrupt: It can't be read.
        """
        leaf = read_item.dest_index.fqn
        try:
            self.state_dict[leaf] = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointUnsafe(
                "a byte leaf holds more than plain data; nothing of it was executed",
                where=leaf,
                found=str(error).splitlines()[0],
                todo="load it with the code that wrote it, in a sandbox, and save it again as plain data",
            ) from error
        except (RuntimeError, EOFError, OSError) as error:
            raise CheckpointCorrupt("a byte leaf can't be read", where=leaf, found=str(error)) from error


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error)


class ReadMetadataOnce(StorageReader):
    """A reader whose metadata is known: decision and loading see the same, and it is read only once."""

    def __init__(self, reader: StorageReader, metadata: Metadata) -> None:
        self._reader = reader
        self._metadata = metadata

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
