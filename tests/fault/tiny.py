"""A run so small that it can be saved and resumed hundreds of times, and whose every step is known."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import orlop


class Counter:
    """A plain part."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Tiny:
    """A model, its engine and a counter; `train` takes steps that depend on nothing else."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 4)
        self.counter = Counter()
        optimizer = orlop.SwapAdamW(self.model.parameters(), lr=0.1)
        self.engine = orlop.TrainEngine(self.model, optimizer, parts={"counter": self.counter})

    def train(self, to: int) -> Tiny:
        while self.counter.count < to:
            inputs = torch.ones(2, 4) * (self.counter.count + 1)
            self.engine.train_step([inputs], lambda model, batch: model(batch).square().mean())
            self.engine.step_optimizer(self.engine.clip_grad_norm())
            self.counter.count += 1
        return self

    def state(self) -> dict[str, Tensor]:
        """Everything that a checkpoint holds, as clones."""
        optimizer = self.engine.optimizers["optimizer"]
        found = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        for name, param in self.model.named_parameters():
            for key, value in optimizer.state[param].items():
                found[f"{name}.{key}"] = torch.as_tensor(value).clone()
        found["count"] = torch.tensor(self.counter.count)
        return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def expected_states(last: int) -> dict[int, dict[str, Tensor]]:
    """The state after each step up to `last`."""
    tiny = Tiny()
    return {step: tiny.train(step).state() for step in range(1, last + 1)}
