"""Which leaves of a checkpoint are converted, and to which dtype. Pure; needs torch for what a dtype is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from orlop.dcp.catalog import TensorEntry
from orlop.errors import CheckpointMismatch
from orlop.tools.leaf_names import split_state

__all__ = ["Selection", "dtype_named"]

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which leaves are converted, and how.

    Attributes:
        only: Parts (`model`, `optimizer`, ...) that are taken; all when it is empty.
        dtype: Torch's name of the dtype that floating-point tensors of the model get; None leaves them as they are.
        cast_moments: Whether optimizer state is cast as well.
    """

    only: tuple[str, ...] = ()
    dtype: str | None = None
    cast_moments: bool = False

    def takes(self, leaf: str) -> bool:
        """Whether the leaf belongs to a chosen part."""
        return not self.only or any(leaf == part or leaf.startswith(f"{part}.") for part in self.only)

    def dtype_of(self, leaf: str, entry: TensorEntry, optimizers: set[str]) -> str:
        """The dtype that a tensor is written in."""
        if self.dtype is None or not getattr(torch, entry.dtype).is_floating_point:
            return entry.dtype
        # A step counter or a learning rate is no moment: in 8 mantissa bits it would be another number.
        state = split_state(leaf, optimizers)
        is_moment = state is not None and state[2] != "step"
        if leaf.startswith("model.") or (self.cast_moments and is_moment):
            return self.dtype
        return entry.dtype


def dtype_named(name: str | None) -> str | None:
    """Torch's name of a floating-point dtype, of which the short name may be given; None of None.

    Raises:
        CheckpointMismatch: There is none.
    """
    if name is None:
        return None
    name = _SHORT.get(name, name)
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        todo = "bf16, fp16, fp32, or torch's name of a floating-point dtype"
        raise CheckpointMismatch(
            "there is no such floating-point dtype", where="--dtype", found=name, todo=todo
        )
    return name
