"""What is done with batches where the user does not say: call the model, count tokens, tell one from several.

Owns the defaults, and is the one place that looks into a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from orlop.arguments import refuse, require_kind


def micro_batches_of(batches: Any) -> list[Any]:
    """The micro-batches of one step.

    Raises:
        TypeError: It is one batch rather than a list of them, as far as that can be told.
        ValueError: There are none.
    """
    meant, write = "a list of micro-batches", "train_step([batch], loss_fn)"
    if isinstance(batches, (torch.Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        raise refuse("batches", meant, batches, write)
    found = list(batches)
    if not found:
        raise ValueError("a training step needs at least one batch")
    # Micro-batches are alike; inputs and their labels are not, or stand in a tuple.
    tensors = [each for each in found if isinstance(each, torch.Tensor)]
    differ = isinstance(batches, tuple) or len({(each.dtype, each.ndim) for each in tensors}) > 1
    if len(tensors) == len(found) and differ:
        held = ", ".join(f"{each.dtype} {tuple(each.shape)}" for each in tensors[:3])
        raise TypeError(f"batches must be {meant}; it is one batch, of tensors ({held}): write {write}")
    return found


def require_loss(loss: Any) -> None:
    """Raise TypeError for what no backward can start from."""
    meant = "a tensor of one number"
    require_kind("the loss that loss_fn returns", loss, torch.Tensor, meant)
    if loss.numel() != 1:
        shape = tuple(loss.shape)
        raise TypeError(
            f"the loss that loss_fn returns must be {meant}; its shape is {shape}: return its mean"
        )


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
