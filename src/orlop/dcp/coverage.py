"""The proof, before a byte is written, that all ranks' plans together hold every tensor exactly once.

Pure but for the error. Must not know how a plan is made or written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.checkpoint.planner import SavePlan

from orlop.dcp.boxes import Box, tiling_fault
from orlop.errors import CheckpointIncomplete, CheckpointMismatch

__all__ = ["require_whole"]


def require_whole(plans: Sequence[SavePlan]) -> None:
    """All ranks' plans together write every tensor whole, and no element of it in two different boxes.

    Torch checks this too, but not in every version, and not where a planner switches it off.

    Raises:
        CheckpointIncomplete: They do not.
        CheckpointMismatch: Ranks disagree about a tensor's shape or dtype.
    """
    first: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
    boxes: dict[str, dict[Box, None]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data = item.tensor_data
            if data is None:
                continue
            key, mine = item.index.fqn, (tuple(data.size), data.properties.dtype)
            known_rank, *known = first.setdefault(key, (rank, *mine))
            if tuple(known) != mine:
                raise CheckpointMismatch(
                    "ranks disagree about a tensor; a file could keep only one of them",
                    where=key,
                    expected=f"as on rank {known_rank}: shape {known[0]}, {known[1]}",
                    found=f"on rank {rank}: shape {mine[0]}, {mine[1]}",
                    todo="give tensors that belong to one rank alone a name of their own, or make them DTensors",
                )
            box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
            boxes.setdefault(key, {})[box] = None
    for key, held in boxes.items():
        fault = tiling_fault(first[key][1], list(held))
        if fault is not None:
            raise CheckpointIncomplete(
                "the ranks together do not hold a tensor exactly once; nothing was written",
                where=key,
                expected=f"all of {first[key][1]}, each element in one box",
                found=fault.text.replace("files hold", "ranks hold"),
            )
