"""A real training loop that can be broken in one way: what a drill says of it is tested.

    broken_training.py RUN FAULT

The faults are the usual causes of a resume that is not exact; they show after a resume alone.
"""

import random
import sys

import numpy as np
import torch
from torch import nn

import orlop

RUN, FAULT = sys.argv[1:3]
STEPS, SAVE_EVERY, COUNT = 12, 4, 8


class Sampler:
    """Goes through the samples in an order that each epoch shuffles anew."""

    def __init__(self):
        self.position = 0

    def next(self):
        epoch, at = divmod(self.position, COUNT)
        self.position += 1
        # An order that depends on when the process started, not on what was saved.
        seed = epoch + 100 * (resumed is not None) if FAULT == "order" else epoch
        return random.Random(seed).sample(range(COUNT), COUNT)[at]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"] - (FAULT == "sampler")


def seed_all():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def break_state(engine):
    """What a broken script does after a resume."""
    optimizer, scheduler = engine.optimizers["optimizer"], engine.scheduler
    if FAULT == "seeds again":
        seed_all()
    if FAULT == "schedule":
        scheduler.step()
    if FAULT == "moments":
        optimizer.synchronize()
        for state in optimizer.state.values():
            state["exp_avg"].copy_(state["exp_avg"].bfloat16())


seed_all()
resumed = None
model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.Linear(16, 1))
optimizer = orlop.SwapAdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)
sampler = Sampler()
parts = {"rng": orlop.RngState()} | ({} if FAULT == "no sampler" else {"data": sampler})
engine = orlop.TrainEngine(model, optimizer, scheduler, parts=parts, max_grad_norm=10.0)
samples = torch.linspace(-1, 1, COUNT * 4).view(COUNT, 4)


def loss_fn(model, batch):
    return (model(batch) - batch.sum()).square().mean()


store = orlop.CheckpointStore(RUN)
resumed = store.resume(engine)
if resumed is not None:
    break_state(engine)
for step in range(1 if resumed is None else resumed.step + 1, STEPS + 1):
    loss = engine.train_step([samples[sampler.next()]], loss_fn)
    engine.step_optimizer(engine.clip_grad_norm())
    scheduler.step()
    orlop.record(step, engine, loss=loss, lr=scheduler.get_last_lr()[0])
    if step % SAVE_EVERY == 0:
        store.save(engine, step)
