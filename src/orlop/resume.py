"""The resume story, top to bottom.

    look -> read the small leaves -> decide, all ranks alike -> fill in place -> install

Nothing live changes before all ranks have agreed that everything fits. If reading fails after that, the engine and
its optimizers refuse to step and to save until a load succeeds. Must not know which checkpoint is the right one.
"""

from __future__ import annotations

import logging
import os
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import StorageReader

from orlop import compat
from orlop.dcp.planner import FlatLoadPlanner, ReadMetadataOnce
from orlop.errors import CheckpointCorrupt, CheckpointIncomplete, CheckpointNotFound
from orlop.phases import phase
from orlop.ranks import Ranks
from orlop.state.absence import LoadPolicy, Stored, stored_leaves
from orlop.state.agreement import union_groups
from orlop.state.expectation import Expectation, Options, expect, merge_claims
from orlop.state.parts import Live
from orlop.state.plain import digest
from orlop.state.report import Finding, LoadReport, require_no_faults

__all__ = ["LoadPolicy", "LoadReport", "resume_checkpoint"]

_log = logging.getLogger("orlop")
_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """An opened checkpoint: its reader, and what its metadata says."""

    place: str
    reader: StorageReader
    metadata: Metadata
    stored: Mapping[str, Stored]


def resume_checkpoint(
    engine: Live,
    path: str | os.PathLike[str],
    *,
    load_states: bool = True,
    load_args: bool = True,
    policy: LoadPolicy | None = None,
    storage_reader: StorageReader | None = None,
    key_prefix: str = "",
) -> LoadReport:
    """Load a DCP checkpoint into the engine's live objects, in place; collective.

    Args:
        engine: Whose objects.
        path: The checkpoint's directory. Unused with `storage_reader`.
        load_states: False gives every parameter a fresh optimizer's state; saved state is not read.
        load_args: False keeps the live hyperparameters; saved groups are not read.
        policy: What may differ; by default nothing.
        storage_reader: Reads the checkpoint instead of torch's file system reader.
        key_prefix: What was put before every key at the save.

    Returns:
        What was found and done on this rank.

    Raises:
        CheckpointNotFound: There is no checkpoint.
        CheckpointIncomplete: Files, or regions of a tensor, are missing.
        CheckpointMismatch: It does not fit; on every rank alike, and nothing was changed.
        OrlopError: On every rank, when any rank failed.
    """
    ranks = engine.ranks
    options = Options(
        load_states=load_states, load_args=load_args, policy=policy or LoadPolicy(), key_prefix=key_prefix
    )
    with phase("load") as measured:
        with ranks.together("look at the checkpoint"):
            source = _open(path, storage_reader)
            expected = expect(engine, source.stored, options)
        if load_args:
            _share_group_names(expected, ranks)
        small = _read(source, expected.small_leaves(), ranks, "read the checkpoint's plain data")
        with ranks.together("compare the checkpoint with the live objects"):
            expected.decide(small, source.metadata.planner_data)
        findings = _agree(expected, ranks, source.place)
        _announce(findings, ranks)
        _fill_and_install(engine, source, expected, small)
    return LoadReport(
        findings=tuple(findings),
        differences=tuple(expected.differences),
        seconds=measured.seconds,
        bytes_needed=sum(_bytes(tensor) for tensor in expected.fills.values()),
    )


def _open(path: str | os.PathLike[str], storage_reader: StorageReader | None) -> _Source:
    place = os.fspath(path)
    reader = storage_reader if storage_reader is not None else FileSystemReader(path)
    try:
        metadata = reader.read_metadata()
    except FileNotFoundError as error:
        if storage_reader is None and os.path.isdir(path):
            raise CheckpointIncomplete("its .metadata is missing", where=place, found=str(error)) from error
        raise CheckpointNotFound("there is no checkpoint", where=place, found=str(error)) from error
    except (pickle.UnpicklingError, EOFError) as error:
        raise CheckpointCorrupt("its .metadata can't be read", where=place, found=str(error)) from error
    return _Source(place=place, reader=reader, metadata=metadata, stored=stored_leaves(metadata))


def _read(source: _Source, leaves: dict[str, Any], ranks: Ranks, what: str) -> dict[str, Any]:
    """Fill tensors in place and replace other values by what the checkpoint holds; returns the same dict."""
    with ranks.together(what), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(
            leaves,
            storage_reader=ReadMetadataOnce(source.reader, source.metadata),
            planner=FlatLoadPlanner(),
            process_group=ranks.group,
        )
    return leaves


def _share_group_names(expected: Expectation, ranks: Ranks) -> None:
    """Groups are matched by all ranks' names: pipeline stages each hold some of a group's parameters."""
    names = {label: load.group_names for label, load in expected.optimizers.items()}
    if not ranks.equal(digest(names)):
        union = union_groups(ranks.gather(names))
        for label, load in expected.optimizers.items():
            load.group_names = union[label]


def _agree(expected: Expectation, ranks: Ranks, place: str) -> list[Finding]:
    """All ranks' faults are every rank's; what no rank takes is unexpected; returns this rank's findings."""
    everyone = ranks.gather((expected.faults(), expected.claims()))
    stray = expected.check_unclaimed(merge_claims(claims for _, claims in everyone))
    require_no_faults([*(fault for faults, _ in everyone for fault in faults), *stray], place)
    return [*expected.findings, *stray]


def _announce(findings: list[Finding], ranks: Ranks) -> None:
    if not ranks.is_coordinator:
        return
    for verdict, text in (
        ("absent", "parameters have no state in the checkpoint and start with a fresh optimizer's state"),
        ("kept", "leaves are not in the checkpoint and keep their live values"),
        ("reset", "parameters' damaged state was reset to a fresh optimizer's"),
    ):
        leaves = [finding.leaf for finding in findings if finding.verdict == verdict]
        if leaves:
            more = ", …" if len(leaves) > _SHOWN else ""
            _log.warning("%d %s: %s%s", len(leaves), text, ", ".join(leaves[:_SHOWN]), more)


def _fill_and_install(engine: Live, source: _Source, expected: Expectation, small: Mapping[str, Any]) -> None:
    reason = f"loading {source.place} failed half-way"
    engine.invalidate(reason)
    _read(source, dict(expected.fills), engine.ranks, "read the checkpoint's tensors")
    with engine.ranks.together("install what was loaded"):
        expected.install(engine, small)
        engine.mark_ready()


def _bytes(tensor: Tensor) -> int:
    local = compat.local_tensor(tensor)
    return local.numel() * local.element_size()
