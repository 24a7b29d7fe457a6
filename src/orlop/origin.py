"""The checkpoint that a load takes its values from: opened once, its metadata read once, the same on every rank.

Owns opening and reading it, and what is said where there is none. Must not know live objects, nor what is decided about
its leaves.
"""

from __future__ import annotations

import logging
import os
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import StorageReader

from orlop.dcp.layout import local_box
from orlop.dcp.places import holds_checkpoint, no_checkpoint, nothing_there
from orlop.dcp.planner import FlatLoadPlanner
from orlop.dcp.reader import Reader, ReadReport
from orlop.dcp.storage import WrappedReader
from orlop.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointIncomplete,
    CheckpointMismatch,
    CheckpointNotFound,
)
from orlop.ranks import Ranks
from orlop.state.absence import Stored, stored_leaves
from orlop.state.plain import digest
from orlop.store.manifest import Manifest
from orlop.store.objects import directory_at, locate

__all__ = ["Origin", "open_origin"]

_log = logging.getLogger("orlop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """An opened checkpoint.

    Attributes:
        place: Where this rank found it.
        reader: What reads it.
        metadata: What DCP says of it.
        stored: Its leaves.
        manifest: What orlop noted at the save; None for a checkpoint from elsewhere.
        report: How orlop's own reader fares; None for another one.
    """

    place: str
    reader: WrappedReader
    metadata: Metadata
    stored: Mapping[str, Stored]
    manifest: Manifest | None
    report: ReadReport | None

    def _identity(self) -> tuple[str, str, str]:
        """Where it is, and what tells it from another one of the same model: for people, and for comparing."""
        note = self.manifest
        text = "no manifest" if note is None else f"step {note.step}, of {note.created.isoformat()}"
        content = None if note is None else note.model_dump_json()
        save_id = getattr(self.metadata.storage_meta, "save_id", None)
        return self.place, text, digest([content, save_id, len(self.stored)])

    def require_one(self, ranks: Ranks) -> str:
        """Every rank opened the same checkpoint: nodes with disks of their own may have another step under one path.

        Returns:
            Where the coordinator found it, for messages that are every rank's: paths may differ from node to node.

        Raises:
            CheckpointMismatch: On every rank.
        """
        everyone = ranks.gather(self._identity())
        place, text, content = everyone[0]
        for rank, (its_place, its_text, its_content) in enumerate(everyone):
            if its_content != content:
                raise CheckpointMismatch(
                    "ranks see different checkpoints; nothing was changed",
                    where=f"rank {rank}: {its_place}",
                    expected=f"as on rank 0: {text}, in {place}",
                    found=its_text,
                    todo="give every node the same checkpoint, whole, or a file system that they share",
                )
        return place

    def require_files(self, fills: Mapping[str, Tensor]) -> None:
        """Raise, before anything live changes, when a file that the fills need is not there, or too short."""
        reader = self.reader.wrapped
        if isinstance(reader, Reader):
            reader.require_present(self.metadata, {key: local_box(key, fill) for key, fill in fills.items()})

    def read(self, leaves: dict[str, Any], ranks: Ranks, what: str) -> dict[str, Any]:
        """Fill tensors in place and replace other values by what the checkpoint holds; collective.

        Args:
            leaves: By key.
            ranks: Who reads together.
            what: What this is, for messages.

        Returns:
            The same dict.
        """
        with ranks.together(what), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is .*single process")
            dcp.load(
                leaves,
                storage_reader=self.reader,
                planner=FlatLoadPlanner(),
                process_group=ranks.group,
            )
        return leaves

    def read_if_possible(self, leaves: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
        """Leaves that only the report needs; what can't be read is no fault. Alike on every rank."""
        try:
            return self.read(leaves, ranks, "read what the report compares")
        except CheckpointError as error:
            _log.info("the report does not compare hyperparameters: %s", error.what)
            return {}


def open_origin(path: str | os.PathLike[str], storage_reader: StorageReader | None) -> Origin:
    """Open a checkpoint; not collective.

    Args:
        path: Its directory, or its address in an object store.
        storage_reader: What reads it instead of orlop's own reader.

    Raises:
        CheckpointNotFound: There is none.
        CheckpointIncomplete: Its save was never finished.
        CheckpointCorrupt: Its metadata can't be read.
    """
    place = str(path)
    reader = storage_reader if storage_reader is not None else Reader(directory_at(path), allow_gaps=True)
    try:
        metadata = reader.read_metadata()
    except (CheckpointNotFound, CheckpointIncomplete):
        location = locate(path)
        if storage_reader is not None or holds_checkpoint(location):
            raise
        if isinstance(location, Path) and not location.exists():
            raise nothing_there(location) from None
        raise no_checkpoint(location) from None
    except FileNotFoundError as error:
        raise CheckpointNotFound("there is no checkpoint", where=place, found=str(error)) from error
    except (pickle.UnpicklingError, EOFError) as error:
        raise CheckpointCorrupt("its .metadata can't be read", where=place, found=str(error)) from error
    return Origin(
        place=place,
        reader=WrappedReader(reader, metadata),
        metadata=metadata,
        stored=stored_leaves(metadata),
        manifest=reader.manifest if isinstance(reader, Reader) else None,
        report=reader.report if isinstance(reader, Reader) else None,
    )
