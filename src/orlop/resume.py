"""The resume story, top to bottom.

    look -> read the small leaves -> decide, all ranks alike -> fill in place -> install

Nothing live changes before all ranks have agreed that everything fits; but a model with load hooks has to be tried to
know that, and is put back if it does not. If reading fails after that, the engine and its optimizers refuse to step
and to save until a load succeeds. Must not know which checkpoint is the right one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.storage import StorageReader

from orlop import compat
from orlop.arguments import require_kind, require_path
from orlop.dcp.collector import without_collection
from orlop.origin import Origin, open_origin
from orlop.phases import phase
from orlop.ranks import Ranks
from orlop.state.announcement import warn_of
from orlop.state.expectation import Expectation, expect, merge_claims
from orlop.state.facts import compare_facts
from orlop.state.parts import Live
from orlop.state.plain import digest
from orlop.state.policy import LoadPolicy, Options, require_options
from orlop.state.report import Finding, LoadReport, name_ranks, require_no_faults
from orlop.state.shared_groups import union_groups

__all__ = ["LoadPolicy", "LoadReport", "resume_checkpoint"]


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
            origin = open_origin(path, storage_reader)
            expected = expect(engine, origin.stored, origin.manifest, options)
        place = origin.require_one(ranks)
        if load_args:
            _share_group_names(expected, ranks)
        small = origin.read(expected.small_leaves(), ranks, "read the checkpoint's plain data")
        if load_states and not load_args:
            small |= origin.read_if_possible(expected.optional_leaves(), ranks)
        with ranks.together("compare the checkpoint with the live objects"):
            expected.decide(small, origin.metadata.planner_data)
        needed = sum(_bytes(tensor) for tensor in expected.fills.values())
        told = ranks.gather((expected.model.is_through, expected.model.is_readable))
        if any(is_through for is_through, _ in told) and all(is_readable for _, is_readable in told):
            findings = _try_model(engine, origin, expected, place)
        else:
            findings = _agree(expected, ranks, place)
        warn_of(findings, expected.strangers, ranks)
        _fill_and_install(engine, origin, expected, small)
    read = origin.report
    return LoadReport(
        findings=tuple(findings),
        differences=tuple(expected.differences),
        seconds=measured.seconds,
        bytes_needed=needed,
        bytes_read=origin.reader.bytes_read if read is None else read.bytes_read,
        unchecked={} if read is None else dict(read.unchecked),
        fallbacks={} if read is None else dict(read.fallbacks),
        facts=compare_facts(engine, origin.manifest),
        scheduled_rates=expected.rates,
    )


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


def _try_model(engine: Live, origin: Origin, expected: Expectation, place: str) -> list[Finding]:
    """A model with load hooks is loaded first, as only that tells what fits; on all ranks, or put back on all."""
    model, ranks = expected.model, engine.ranks
    with ranks.together("look at the checkpoint's files"):
        origin.require_files(expected.fills)
    origin.read(dict(model.fills) if model.is_through else {}, ranks, "read the model's tensors")
    reason = f"loading {origin.place} failed, and the model could not be put back"
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
    engine.invalidate(_half_way(origin))
    expected.settle_model()
    return findings


def _half_way(origin: Origin) -> str:
    return f"loading {origin.place} failed half-way"


def _fill_and_install(engine: Live, origin: Origin, expected: Expectation, small: Mapping[str, Any]) -> None:
    with engine.ranks.together("look at the checkpoint's files"):
        origin.require_files(expected.fills)
    reason = _half_way(origin)
    engine.invalidate(reason)
    origin.read(dict(expected.fills), engine.ranks, "read the checkpoint's tensors")
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
