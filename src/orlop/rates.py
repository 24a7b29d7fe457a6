"""The hyperparameters that a scheduler moves from step to step: which these are, taken out of the groups and put back.

Must not know engines or checkpoints.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["learning_rates", "put_rates", "put_schedule_back", "schedule_of", "scheduled_keys"]

Optimizers = Mapping[str, Optimizer]

_SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr")


def _groups(optimizers: Optimizers) -> list[dict[str, Any]]:
    """All param groups, optimizer after optimizer; asked anew each time, as a stock optimizer replaces them."""
    return [group for optimizer in optimizers.values() for group in optimizer.param_groups]


def learning_rates(optimizers: Optimizers) -> list[float]:
    """What each group steps with."""
    return [float(group["lr"]) for group in _groups(optimizers) if "lr" in group]


def put_rates(optimizer: Optimizer, rates: Sequence[float | None]) -> None:
    """Write learning rates into the groups, where one is given; a tensor stays the tensor that it is."""
    for group, rate in zip(optimizer.param_groups, rates):
        if rate is not None and isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        elif rate is not None:
            group["lr"] = rate


def scheduled_keys(optimizers: Optimizers) -> set[str]:
    """The hyperparameters that are the scheduler's to change, rather than whoever wrote the script."""
    keys = {key for group in _groups(optimizers) for key in group}
    moved = {"lr"} if "initial_lr" in keys else set()
    return moved | ({"momentum", "betas"} if "max_momentum" in keys else set())


def schedule_of(optimizers: Optimizers) -> list[dict[str, Any]]:
    """What the scheduler has written into each group."""
    return [
        {key: copy.deepcopy(group[key]) for key in _SCHEDULED if key in group}
        for group in _groups(optimizers)
    ]


def put_schedule_back(optimizers: Optimizers, schedule: list[dict[str, Any]]) -> None:
    """Write what `schedule_of` gave into the groups; a tensor stays the tensor that it is."""
    for group, values in zip(_groups(optimizers), schedule, strict=True):
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and isinstance(group[key], torch.Tensor):
                group[key].copy_(value)
            else:
                group[key] = value
