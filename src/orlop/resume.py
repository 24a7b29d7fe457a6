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
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import StorageReader

from orlop import compat
from orlop.arguments import require_kind, require_path
from orlop.dcp.collector import without_collection
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
from orlop.phases import phase
from orlop.ranks import Ranks
from orlop.state.absence import Stored, stored_leaves
from orlop.state.expectation import Expectation, expect, merge_claims
from orlop.state.facts import compare_facts
from orlop.state.parts import Live
from orlop.state.plain import digest
from orlop.state.policy import LoadPolicy, Options, require_options
from orlop.state.report import Finding, LoadReport, Verdict, name_ranks, require_no_faults
from orlop.state.shared_groups import union_groups
from orlop.store.manifest import Manifest
from orlop.store.objects import directory_at, locate
from orlop.wording import counted

__all__ = ["LoadPolicy", "LoadReport", "resume_checkpoint"]

_log = logging.getLogger("orlop")
_SHOWN = 5
# What a warning says of one leaf, of several, and of both.
_NOTABLE: tuple[tuple[Verdict, str, str, str], ...] = (
    ("absent", "parameter has", "parameters have", "no state in the checkpoint, so a fresh optimizer's"),
    ("fresh", "optimizer is", "optimizers are", "not there: the checkpoint holds weights only; fresh state"),
    ("kept", "leaf is", "leaves are", "not in the checkpoint, so live values stay"),
    ("reset", "parameter had", "parameters had", "damaged state, reset to a fresh optimizer's"),
    ("afresh", "part was", "parts were", "saved by another number of ranks: begun afresh, by the policy"),
    ("skipped", "part is", "parts are", "skipped, as the policy says: what is here stays"),
    ("merged", "parameter had", "parameters had", "other scalars on each rank: now the largest of them"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """An opened checkpoint: its reader, and what its metadata says."""

    place: str
    reader: WrappedReader
    metadata: Metadata
    stored: Mapping[str, Stored]
    manifest: Manifest | None
    report: ReadReport | None  # of orlop's own reader

    @property
    def identity(self) -> tuple[str, str, str]:
        """Where it is, and what tells it from another one of the same model: for people, and for comparing."""
        note = self.manifest
        text = "no manifest" if note is None else f"step {note.step}, of {note.created.isoformat()}"
        content = None if note is None else note.model_dump_json()
        return (
            self.place,
            text,
            digest([content, getattr(self.metadata.storage_meta, "save_id", None), len(self.stored)]),
        )

    def require_files(self, fills: Mapping[str, Tensor]) -> None:
        """Raise, before anything live changes, when a file that the fills need is not there, or too short."""
        reader = self.reader.wrapped
        if isinstance(reader, Reader):
            reader.require_present(self.metadata, {key: local_box(key, fill) for key, fill in fills.items()})


@without_collection()
def resume_checkpoint(
    engine: Live,
    path: str | os.PathLike[str],
    *,
    load_states: bool = True,
    load_args: bool = True,
    policy: LoadPolicy | None = None,
    storage_reader: StorageReader | None = None,
    key_prefix: str = "",
    is_auto: bool = False,
) -> LoadReport:
    """Load a DCP checkpoint into the engine's live objects, in place; collective.

    Args:
        engine: Whose objects.
        path: The checkpoint's directory. Unused with `storage_reader`.
        load_states: False gives every parameter a fresh optimizer's state; saved state is not read.
        load_args: False keeps the live hyperparameters; what differs is only listed.
        policy: What may differ; by default nothing.
        storage_reader: Reads the checkpoint instead of torch's file system reader.
        key_prefix: What was put before every key at the save.
        is_auto: Nobody chose this checkpoint: a run goes on by itself, and not from weights only.

    Returns:
        What was found and done on this rank.

    Raises:
        CheckpointNotFound: There is no checkpoint.
        CheckpointIncomplete: Files, or regions of a tensor, are missing.
        CheckpointMismatch: It does not fit; on every rank alike, and nothing was changed.
        OrlopError: On every rank, when any rank failed.
    """
    ranks = engine.ranks
    with ranks.asked("load"):
        if storage_reader is None:
            require_path("weights_dir", path)
        require_options(policy=policy, load_states=load_states, load_args=load_args)
        require_kind("key_prefix", key_prefix, str, "a string")
        options = Options(
            load_states=load_states,
            load_args=load_args,
            policy=policy or LoadPolicy(),
            key_prefix=key_prefix,
            is_auto=is_auto,
        )
    with phase("load") as measured:
        ranks.require_alike("load", options.plain())
        with ranks.together("look at the checkpoint"):
            source = _open(path, storage_reader)
            expected = expect(engine, source.stored, source.manifest, options)
        place = _require_one_checkpoint(source, ranks)
        if load_args:
            _share_group_names(expected, ranks)
        small = _read(source, expected.small_leaves(), ranks, "read the checkpoint's plain data")
        if load_states and not load_args:
            small |= _read_if_possible(source, expected.optional_leaves(), ranks)
        with ranks.together("compare the checkpoint with the live objects"):
            expected.decide(small, source.metadata.planner_data)
        needed = sum(_bytes(tensor) for tensor in expected.fills.values())
        told = ranks.gather((expected.model.is_through, expected.model.is_readable))
        if any(is_through for is_through, _ in told) and all(is_readable for _, is_readable in told):
            findings = _try_model(engine, source, expected, place)
        else:
            findings = _agree(expected, ranks, place)
        _announce(findings, expected.strangers, ranks)
        _fill_and_install(engine, source, expected, small)
    read = source.report
    return LoadReport(
        findings=tuple(findings),
        differences=tuple(expected.differences),
        seconds=measured.seconds,
        bytes_needed=needed,
        bytes_read=source.reader.bytes_read if read is None else read.bytes_read,
        unchecked={} if read is None else dict(read.unchecked),
        fallbacks={} if read is None else dict(read.fallbacks),
        facts=compare_facts(engine, source.manifest),
        scheduled_rates=expected.rates,
    )


def _open(path: str | os.PathLike[str], storage_reader: StorageReader | None) -> _Source:
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
    return _Source(
        place=place,
        reader=WrappedReader(reader, metadata),
        metadata=metadata,
        stored=stored_leaves(metadata),
        manifest=reader.manifest if isinstance(reader, Reader) else None,
        report=reader.report if isinstance(reader, Reader) else None,
    )


def _require_one_checkpoint(source: _Source, ranks: Ranks) -> str:
    """Every rank opened the same checkpoint: nodes with disks of their own may have another step under one path.

    Returns:
        Where the coordinator found it, for messages that are every rank's: paths may differ from node to node.
    """
    everyone = ranks.gather(source.identity)
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


def _read(source: _Source, leaves: dict[str, Any], ranks: Ranks, what: str) -> dict[str, Any]:
    """Fill tensors in place and replace other values by what the checkpoint holds; returns the same dict."""
    with ranks.together(what), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is .*single process")
        dcp.load(
            leaves,
            storage_reader=source.reader,
            planner=FlatLoadPlanner(),
            process_group=ranks.group,
        )
    return leaves


def _read_if_possible(source: _Source, leaves: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Leaves that only the report needs; what can't be read is no fault. Alike on every rank."""
    try:
        return _read(source, leaves, ranks, "read what the report compares")
    except CheckpointError as error:
        _log.info("the report does not compare hyperparameters: %s", error.what)
        return {}


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
    require_no_faults([*name_ranks([faults for faults, _ in everyone]), *stray], place)
    return [*expected.findings, *stray]


def _announce(findings: list[Finding], strangers: list[str], ranks: Ranks) -> None:
    """One warning for all ranks together, with counts and a few names."""
    notable = {verdict: [f.leaf for f in findings if f.verdict == verdict] for verdict, *_ in _NOTABLE}
    if not ranks.equal(digest(notable)):
        # Pipeline stages have different parameters.
        everyone = ranks.gather(notable)
        notable = {
            verdict: list(dict.fromkeys(leaf for theirs in everyone for leaf in theirs[verdict]))
            for verdict in notable
        }
    texts = [
        f"{counted(len(leaves), one, many)} {text}: {', '.join(leaves[:_SHOWN])}"
        + (", …" if len(leaves) > _SHOWN else "")
        for verdict, one, many, text in _NOTABLE
        if (leaves := notable[verdict])
    ]
    if strangers:
        # The same on every rank.
        texts.append(
            f"parts of the checkpoint that nothing here takes stay there: {', '.join(strangers)} "
            "(give them to the engine, or leave them by LoadPolicy(skip_parts=...))"
        )
    if texts and ranks.is_coordinator:
        _log.warning("%s", "; ".join(texts))


def _try_model(engine: Live, source: _Source, expected: Expectation, place: str) -> list[Finding]:
    """A model with load hooks is loaded first, as only that tells what fits; on all ranks, or put back on all."""
    model, ranks = expected.model, engine.ranks
    with ranks.together("look at the checkpoint's files"):
        source.require_files(expected.fills)
    _read(source, dict(model.fills) if model.is_through else {}, ranks, "read the model's tensors")
    reason = f"loading {source.place} failed, and the model could not be put back"
    try:
        with ranks.together("load the model by its own load_state_dict"):
            expected.try_model(engine.model)
        findings = _agree(expected, ranks, place)
    except BaseException:
        try:
            model.undo()
        except BaseException:
            engine.invalidate(reason)
            raise
        raise
    engine.invalidate(_half_way(source))
    expected.settle_model()
    return findings


def _half_way(source: _Source) -> str:
    return f"loading {source.place} failed half-way"


def _fill_and_install(engine: Live, source: _Source, expected: Expectation, small: Mapping[str, Any]) -> None:
    with engine.ranks.together("look at the checkpoint's files"):
        source.require_files(expected.fills)
    reason = _half_way(source)
    engine.invalidate(reason)
    _read(source, dict(expected.fills), engine.ranks, "read the checkpoint's tensors")
    try:
        with engine.ranks.together("install what was loaded"):
            expected.install(engine, small)
    except BaseException:
        # On this rank all may be in place, and the optimizers ready: the run as a whole is not.
        engine.invalidate(reason)
        raise
    engine.mark_ready()


def _bytes(tensor: Tensor) -> int:
    local = compat.local_tensor(tensor)
    return local.numel() * local.element_size()
