"""The save story, top to bottom.

    collect -> agree -> partial directory -> write -> manifest -> publish

Nothing live changes. A failure on any rank is the same typed error on every rank; the partial directory is removed
and nothing is published. Must not know what a checkpoint directory is called or when old ones expire.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.storage import StorageWriter
from torch.optim import Optimizer

from orlop import compat
from orlop.arguments import require_flags, require_kind, require_path
from orlop.dcp.collector import without_collection
from orlop.dcp.layout import describe_meshes
from orlop.dcp.planner import FlatSavePlanner
from orlop.dcp.storage import WrappedWriter
from orlop.dcp.writer import Writer
from orlop.errors import CheckpointMismatch
from orlop.phases import phase
from orlop.ranks import Ranks
from orlop.state.agreement import Collected, Layout, SaveOptions, agree
from orlop.state.fingerprint import Fingerprint, fingerprint_leaves
from orlop.state.parts import Live, collect
from orlop.state.stock import class_name
from orlop.store.manifest import Manifest
from orlop.store.objects import Url, locate
from orlop.store.pending import Pending, begin, pending_at
from orlop.wording import counted

__all__ = ["save_checkpoint"]

_log = logging.getLogger("orlop")
_SHOWN = 5


@without_collection()
def save_checkpoint(
    engine: Live,
    path: str | os.PathLike[str],
    *,
    save_optimizer: bool = True,
    include_frozen: bool = True,
    optimizer_layout: Layout = "nested",
    materialize_absent: bool = False,
    step: int | None = None,
    storage_writer: StorageWriter | None = None,
    key_prefix: str = "",
    fingerprint: bool = False,
    on_partial: Callable[[Path | Url], None] | None = None,
) -> None:
    """Save the engine's parts as one DCP checkpoint; collective.

    Args:
        engine: Whose parts.
        path: The checkpoint's directory, or its address in an object store (`s3://...`). It appears whole or not at
            all. Unused with `storage_writer`.
        save_optimizer: Whether optimizer state and groups are saved.
        include_frozen: Whether parameters that don't train are saved.
        optimizer_layout: How torch nests the optimizer's values: `nested` in groups, or `flattened` by parameter, as
            torchtitan does. Both are read back alike.
        materialize_absent: Whether parameters that never stepped get initial state in the file, for readers whose
            template expects some. orlop still resumes them as never stepped.
        step: The training step, for the manifest.
        storage_writer: Writes the checkpoint instead; then there is no manifest and no renaming.
        key_prefix: Put before every key.
        fingerprint: Whether the manifest holds a digest of every leaf. Replicas whose contents differ by rank (plain
            tensors count as replicas; one rank's is saved) are then warned of, by name; modules' extra state always is.
        on_partial: Called on every rank with the partial directory, before the first byte is written.

    Raises:
        CheckpointExists: `path` holds something already.
        CheckpointIncomplete: The ranks together do not hold all of a tensor.
        CheckpointMismatch: Ranks were asked for different things or disagree about a tensor or a param group, a part
            of a tensor is not one box, or state that differs by rank can't be recorded.
        RootNotShared: A rank doesn't see the directory that the coordinator made for the checkpoint.
        StorageFull: There is not enough space for it; nothing was written.
        StateNotReady: A load failed half-way and none has succeeded since.
        OrlopError: On every rank, when any rank failed.
    """
    ranks = engine.ranks
    options = SaveOptions(
        key_prefix=key_prefix, layout=optimizer_layout, materialize_absent=materialize_absent
    )
    with ranks.asked("save"):
        require_flags(save_optimizer=save_optimizer, include_frozen=include_frozen, fingerprint=fingerprint)
        _require_options(options)
        final = None if storage_writer is not None else _locate(path)
        place = None if final is None else os.fspath(path)
    asked = {"path": place, "step": step, "save_optimizer": save_optimizer, "include_frozen": include_frozen}
    with phase("collect"):
        ranks.require_alike("save", {**asked, **asdict(options), "fingerprint": fingerprint})
        with ranks.together("collect the parts"):
            engine.require_ready()
            local = collect(engine, save_optimizer=save_optimizer, include_frozen=include_frozen)
        collected = agree(local, ranks, options, engine.optimizers)
        digests = fingerprint_leaves(collected, ranks) if fingerprint else None
        _warn_of_torn({**collected.torn, **(digests.torn if digests is not None else {})}, ranks)
    with phase("save"):
        if storage_writer is not None:
            _require_even(collected)
            _write(collected, storage_writer, ranks)
            return
        assert final is not None
        manifest = _describe(engine, collected, step, digests, key_prefix)
        _write_and_publish(collected, final, manifest, ranks, on_partial)


def _require_options(options: SaveOptions) -> None:
    require_flags(materialize_absent=options.materialize_absent)
    require_kind("key_prefix", options.key_prefix, str, "a string")
    if options.layout not in get_args(Layout):
        raise ValueError(f"optimizer_layout is one of {get_args(Layout)}, not {options.layout!r}")


def _locate(path: str | os.PathLike[str]) -> Path | Url:
    require_path("weights_dir", path)
    return locate(path)


def _warn_of_torn(torn: Mapping[str, tuple[tuple[int, ...], ...]], ranks: Ranks) -> None:
    """One warning for all ranks. Not an error: running statistics may differ on purpose."""
    if torn and ranks.is_coordinator:
        shown = [
            f"{key} ({' differs from '.join(f'rank {_listed(group)}' for group in groups)})"
            for key, groups in list(torn.items())[:_SHOWN]
        ]
        more = ", …" if len(torn) > _SHOWN else ""
        _log.warning(
            "replica content differs: %s not the same on all ranks that hold them, and only one rank's is "
            "saved: %s%s; what belongs to one rank alone needs a DTensor, or a name of its own",
            counted(len(torn), "leaf is", "leaves are"),
            ", ".join(shown),
            more,
        )


def _listed(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))


def _require_even(collected: Collected) -> None:
    """Without a manifest there is no place for what differs by rank. Alike on every rank."""
    if collected.uneven:
        names = [f"{label}.state.{fqn}" for label, fqns in collected.uneven.items() for fqn in fqns]
        raise CheckpointMismatch(
            f"{counted(len(names), 'parameter has', 'parameters have')} state on some ranks only, or other "
            "scalars on each; only the manifest records that, and a storage writer of one's own makes no manifest",
            where=", ".join(names[:_SHOWN]),
            todo="save to a directory, or step the optimizer on all ranks alike",
        )


def _write_and_publish(
    collected: Collected,
    final: Path | Url,
    manifest: Manifest,
    ranks: Ranks,
    on_partial: Callable[[Path | Url], None] | None,
) -> None:
    signature = ranks.on_coordinator("begin a checkpoint", lambda: begin(final))
    pending = pending_at(final, signature)
    try:
        with ranks.together("see the checkpoint's directory"):
            pending.require_visible()
        if on_partial is not None:
            with ranks.together("announce the partial directory"):
                on_partial(pending.path)
        writer = Writer(pending.directory, manifest=True)
        _write(collected, writer, ranks, pending.require_space)

        def finish() -> None:
            pending.publish(manifest.model_copy(update={"digests": writer.digests}))

        ranks.on_coordinator("publish the checkpoint", finish)
    except BaseException:
        # Every rank is here: `together` raised on all of them.
        if ranks.is_coordinator:
            _discard(pending)
        raise


def _discard(pending: Pending) -> None:
    try:
        pending.discard()
    except Exception as error:
        # The save's own failure is what the caller must hear of; a later save sweeps what a dead one left.
        _log.warning("could not remove %s: %s", pending.path, error)


def _write(
    collected: Collected,
    writer: StorageWriter,
    ranks: Ranks,
    require_space: Callable[[int], None] | None = None,
) -> None:
    with ranks.together("write the checkpoint"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is .*single process")
        dcp.save(
            collected.leaves,
            storage_writer=WrappedWriter(writer, collected.aliases),
            planner=FlatSavePlanner(collected.paths, collected.aliases, require_space),
            process_group=ranks.group,
        )


def _describe(
    engine: Live, collected: Collected, step: int | None, digests: Fingerprint | None, key_prefix: str
) -> Manifest:
    cut = len(key_prefix) + len("model.")
    values: dict[str, Any] = {
        "step": step,
        "torch_version": compat.torch_version(),
        "world_size": engine.ranks.world_size,
        "meshes": describe_meshes(engine.model.parameters()),
        "optimizer_classes": {label: class_name(opt) for label, opt in _saved(engine, collected)},
        "absent": collected.absent,
        "state_keys": collected.state_keys,
        "uneven": collected.uneven,
        "left_out": collected.left_out,
        "group_firsts": collected.group_firsts,
        "group_keys": collected.group_keys,
        "aliases": {alias[cut:]: key[cut:] for alias, key in collected.aliases.items()},
        "parts": collected.kinds,
        "fingerprint": None if digests is None else dict(digests.leaves),
    }
    return Manifest(**values)


def _saved(engine: Live, collected: Collected) -> list[tuple[str, Optimizer]]:
    return [(label, opt) for label, opt in engine.optimizers.items() if label in collected.absent]
