"""What the trainer does with a batch where the user does not say: call the model with it, count its tokens.

Owns the defaults, and is the one place that looks into a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def call_model(model: Any, batch: Any) -> torch.Tensor:
    """The loss of a model that computes it itself: the result, or the result's `.loss`.

    Args:
        model: Called with a mapping's entries as keywords, a list's or tuple's as arguments, anything else
            as it is.
        batch: One micro-batch.

    Returns:
        A 0-dim tensor.
    """
    if isinstance(batch, Mapping):
        result = model(**batch)
    elif isinstance(batch, list | tuple):
        result = model(*batch)
    else:
        result = model(batch)
    loss: Any = result if isinstance(result, torch.Tensor) else result.loss
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"the model's loss is a {type(loss).__name__}, not a tensor; give the trainer a loss_fn"
        )
    return loss


def count_tokens_of(batch: Any) -> int:
    """The elements of the batch's first tensor of integers; else the length of its first tensor."""
    tensors = list(_tensors(batch))
    for tensor in tensors:
        if not tensor.is_floating_point() and not tensor.is_complex():
            return tensor.numel()
    return tensors[0].shape[0] if tensors and tensors[0].dim() else len(tensors)


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for each in batch.values():
            yield from _tensors(each)
    elif isinstance(batch, list | tuple):
        for each in batch:
            yield from _tensors(each)
