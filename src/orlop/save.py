"""The save story, top to bottom.

    collect -> agree -> partial directory -> write -> manifest -> publish

Nothing live changes. A failure on any rank is the same typed error on every rank; the partial directory is removed
and nothing is published. Must not know what a checkpoint directory is called or when old ones expire.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.storage import StorageWriter
from torch.optim import Optimizer

from orlop import compat
from orlop.dcp.planner import FlatSavePlanner
from orlop.phases import phase
from orlop.ranks import Ranks
from orlop.state.agreement import Collected, agree
from orlop.state.fingerprint import Fingerprint, fingerprint_leaves
from orlop.state.parts import Live, collect
from orlop.store import files, publish
from orlop.store.manifest import MANIFEST_NAME, Manifest, write_manifest

__all__ = ["save_checkpoint"]

_log = logging.getLogger("orlop")


def save_checkpoint(
    engine: Live,
    path: str | os.PathLike[str],
    *,
    save_optimizer: bool = True,
    include_frozen: bool = True,
    step: int | None = None,
    storage_writer: StorageWriter | None = None,
    key_prefix: str = "",
    fingerprint: bool = False,
    on_partial: Callable[[Path], None] | None = None,
) -> None:
    """Save the engine's parts as one DCP checkpoint; collective.

    Args:
        engine: Whose parts.
        path: The checkpoint's directory. It appears whole or not at all. Unused with `storage_writer`.
        save_optimizer: Whether optimizer state and groups are saved.
        include_frozen: Whether parameters that don't train are saved.
        step: The training step, for the manifest.
        storage_writer: Writes the checkpoint instead; then there is no manifest and no renaming.
        key_prefix: Put before every key.
        fingerprint: Whether the manifest holds a digest of every leaf.
        on_partial: Called on every rank with the partial directory, before the first byte is written.

    Raises:
        CheckpointExists: `path` holds something already.
        StateNotReady: A load failed half-way and none has succeeded since.
        OrlopError: On every rank, when any rank failed.
    """
    ranks = engine.ranks
    with phase("collect"):
        with ranks.together("collect the parts"):
            engine.require_ready()
            local = collect(engine, save_optimizer=save_optimizer, include_frozen=include_frozen)
        collected = agree(local, ranks, key_prefix)
        digests = fingerprint_leaves(collected, ranks) if fingerprint else None
    with phase("save"):
        if storage_writer is not None:
            _write(collected, storage_writer, ranks)
            return
        manifest = _describe(engine, collected, step, digests)
        _write_and_publish(collected, Path(path), manifest, ranks, on_partial)


def _write_and_publish(
    collected: Collected,
    final: Path,
    manifest: Manifest,
    ranks: Ranks,
    on_partial: Callable[[Path], None] | None,
) -> None:
    partial = ranks.on_coordinator("begin a checkpoint", lambda: publish.begin_partial(final))
    try:
        if on_partial is not None:
            with ranks.together("announce the partial directory"):
                on_partial(partial)
        _write(collected, FileSystemWriter(partial, thread_count=1), ranks)

        def finish() -> None:
            sizes = {name: size for name, size in files.file_sizes(partial).items() if name != MANIFEST_NAME}
            write_manifest(partial, manifest.model_copy(update={"files": sizes}))
            publish.publish(partial, final)

        ranks.on_coordinator("publish the checkpoint", finish)
    except BaseException:
        # Every rank is here: `together` raised on all of them.
        if ranks.is_coordinator:
            _discard(partial)
        raise


def _discard(partial: Path) -> None:
    try:
        if partial.exists():
            publish.discard(partial)
    except OSError as error:
        # The save's own failure is what the caller must hear of; a later save sweeps what a dead one left.
        _log.warning("could not remove %s: %s", partial, error)


def _write(collected: Collected, writer: StorageWriter, ranks: Ranks) -> None:
    with ranks.together("write the checkpoint"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(
            collected.leaves,
            storage_writer=writer,
            planner=FlatSavePlanner(collected.paths),
            process_group=ranks.group,
        )


def _describe(engine: Live, collected: Collected, step: int | None, digests: Fingerprint | None) -> Manifest:
    values: dict[str, Any] = {
        "step": step,
        "torch_version": compat.torch_version(),
        "world_size": engine.ranks.world_size,
        "optimizer_classes": {label: type(opt).__qualname__ for label, opt in _saved(engine, collected)},
        "absent": collected.absent,
        "parts": collected.kinds,
        "fingerprint": None if digests is None else dict(digests.leaves),
    }
    return Manifest(**values)


def _saved(engine: Live, collected: Collected) -> list[tuple[str, Optimizer]]:
    return [(label, opt) for label, opt in engine.optimizers.items() if label in collected.absent]
