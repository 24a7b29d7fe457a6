"""Save and load planners: flat leaves in, torch's own DCP format out.

Owns how orlop's flat dict of leaves meets `torch.distributed.checkpoint`: the save planner writes the paths by which
torch unflattens a checkpoint; the load planner reads byte leaves as data only. Must not know what a leaf means.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from orlop import compat
from orlop.dcp.boxes import Box
from orlop.dcp.collector import without_collection
from orlop.dcp.coverage import require_whole
from orlop.dcp.layout import local_box
from orlop.errors import CheckpointCorrupt, CheckpointUnsafe
from orlop.failures import told

__all__ = ["FlatLoadPlanner", "FlatSavePlanner"]

Path = tuple[Any, ...]


class FlatSavePlanner(DefaultSavePlanner):
    """Saves a flat dict of leaves as if torch had flattened a nested one.

    Args:
        paths: For each key of the dict, its path in the nested form; `dcp_to_torch_save` and its like rely on it.
        aliases: Keys of tied leaves, each with the key that is saved: both read the same bytes.
        require_space: Called on the coordinator, before a byte is written, with the bytes that all ranks are going to
            write (byte leaves, of unknown size, are not in it); it may refuse by raising.
    """

    def __init__(
        self,
        paths: Mapping[str, Path],
        aliases: Mapping[str, str] | None = None,
        require_space: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__()
        self._paths = dict(paths)
        self._aliases = dict(aliases or {})
        self._require_space = require_space

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Take the leaves as they are."""
        self.state_dict = state_dict
        self.mappings = self._paths
        self.is_coordinator = is_coordinator

    @told()
    def create_local_plan(self) -> SavePlan:
        """As torch's, once it is proven that each tensor's part is one box.

        Raises:
            CheckpointMismatch: A part is strided or interleaved; torch would write it as if it were not.
        """
        boxes = {key: local_box(key, value) for key, value in self.state_dict.items() if _is_sharded(value)}
        plan = super().create_local_plan()
        items = [
            item if (box := boxes.get(item.index.fqn)) is None else compat.write_item_at(item, *_bounds(box))
            for item in plan.items
        ]
        placed: SavePlan = compat.replace(plan, items=items)
        self.plan = placed
        return placed

    @told()
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """As torch's; here it is known what is written once and by which rank, so here space is asked for.

        Raises:
            CheckpointIncomplete: Some region of a tensor is on no rank, or on several with different bounds.
            CheckpointMismatch: Ranks disagree about a tensor's shape or dtype.
        """
        require_whole(all_plans)
        plans, metadata = super().create_global_plan(all_plans)
        for alias, key in self._aliases.items():
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[key]
            if metadata.planner_data is not None:
                metadata.planner_data[alias] = _path_of_alias(alias, key, metadata.planner_data[key])
        if self._require_space is not None:
            self._require_space(sum(_bytes(item) for plan in plans for item in plan.items))
        return plans, metadata


def _is_sharded(value: Any) -> bool:
    return isinstance(value, DTensor)


def _bounds(box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return box.offsets, box.sizes


def _path_of_alias(alias: str, key: str, path: Path) -> Path:
    # `model.<fqn>`: all but the last level is the same.
    above = key[: -len(str(path[-1]))]
    return (*path[:-1], alias[len(above) :])


def _bytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


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

    @told()
    @without_collection()
    def create_local_plan(self) -> LoadPlan:
        """What this rank reads: every leaf of the dict; of sharded ones the box that is proven to be this rank's."""
        assert self.metadata is not None
        stored, items, others = self.metadata.state_dict_metadata, [], {}
        for key, value in self.state_dict.items():
            if not _is_sharded(value) or not isinstance(stored.get(key), TensorStorageMetadata):
                others[key] = value
            elif compat.is_in_mesh(value):
                items += compat.read_items_at(key, stored[key], *_bounds(local_box(key, value)))
        plan: LoadPlan = create_default_local_load_plan(others, self.metadata, True)
        return LoadPlan([*items, *plan.items])

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
