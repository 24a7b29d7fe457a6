"""`prune`: the checkpoints of a run that may go, by the same rule as a store's own retention.

Owns nothing of that rule (`store.catalog`), but that the newest sound checkpoint stays, which is read for that. So do
incomplete ones and those that are being read. Needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from orlop.store import catalog
from orlop.store.listing import Checkpoint
from orlop.store.objects import locate
from orlop.store.roots import root_at
from orlop.tools.check import check_checkpoint
from orlop.tools.opened import find_checkpoints

__all__ = ["Pruned", "prune"]


@dataclass(slots=True, kw_only=True)
class Pruned:
    """What became of a run's checkpoints.

    Attributes:
        removed: Steps that went (or would go), ascending.
        kept: Complete ones that stay.
        busy: Those that would have gone, and are being read.
        passed_over: Incomplete ones, which are never touched.
        damaged: Complete ones that were read and are damaged: newer than the newest sound one. They stay, and so does
            that one, whatever the rule says.
        freed_bytes: Of the removed ones.
    """

    removed: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    busy: list[int] = field(default_factory=list)
    passed_over: list[int] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)
    freed_bytes: int = 0


def prune(
    run: str | os.PathLike[str], *, keep_last: int, keep_every: int | None = None, dry_run: bool = False
) -> Pruned:
    """Remove the checkpoints that have expired.

    Args:
        run: The run's directory.
        keep_last: How many of the newest complete ones stay; at least one.
        keep_every: Multiples of this step stay.
        dry_run: Only say which would go.

    Raises:
        CheckpointNotFound: There is no run with checkpoints.
        ValueError: A number is less than one.
    """
    for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1; it is {value}")
    found = find_checkpoints(run)
    root = root_at(locate(run))
    whole = {checkpoint.step: checkpoint for checkpoint in found if checkpoint.fault is None}
    pruned = Pruned(passed_over=[checkpoint.step for checkpoint in found if checkpoint.fault is not None])
    if not whole:
        return pruned
    expired = catalog.expired(whole.keys(), published=max(whole), keep_last=keep_last, keep_every=keep_every)
    sound = _newest_sound(whole, pruned) if expired else None
    expired = [step for step in expired if step != sound and step not in pruned.damaged]
    pruned.kept = sorted(whole.keys() - set(expired))
    busy = root.being_read()
    for step in expired:
        if whole[step].name in busy:
            pruned.busy.append(step)
            continue
        if not dry_run:
            root.retire(whole[step])
        _count(pruned, whole[step])
    return pruned


def _newest_sound(whole: Mapping[int, Checkpoint], pruned: Pruned) -> int | None:
    """The newest checkpoint that is undamaged; those above it are noted. None where all are damaged."""
    for step in sorted(whole, reverse=True):
        if check_checkpoint(whole[step].path).is_sound:
            return step
        pruned.damaged.append(step)
    return None


def _count(pruned: Pruned, checkpoint: Checkpoint) -> None:
    pruned.removed.append(checkpoint.step)
    pruned.freed_bytes += checkpoint.size
