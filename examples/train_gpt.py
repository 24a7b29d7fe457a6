"""Trains a small GPT on the source text of Python's standard library, and can be killed at any time.

    torchrun --standalone --nproc-per-node 2 -- examples/train_gpt.py --run runs/first

(Without the `--`, torchrun takes `--run` for an option of its own.)

Start it again with the same command after a kill: it goes on from its last checkpoint, bit for bit. The
optimizer's state lives in host memory (`orlop.SwapAdamW`), the parameters are sharded over the ranks (FSDP2).

What a resume must get right is in here on purpose: dropout with a random stream of its own on every rank, a
shuffling sampler, warm-up and cosine decay, gradient accumulation and clipping, a tied weight, a frozen
parameter, two param groups, and a branch whose parameters have no gradient, and so no state, for the first
steps.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import os
import random
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import orlop

BYTES = 256  # the vocabulary: every byte is a token
WIDTH, HEADS, LAYERS, CONTEXT = 256, 8, 8, 64
DROPOUT = 0.1
MICRO_BATCH, ACCUMULATE = 4, 2
WARM_UP_STEPS = 5
REFINE_AFTER_STEP = 12
CORPUS_BYTES = 4_000_000


# ---- the text ----


def standard_library() -> Tensor:
    """The first 4 MB of the running Python's own source, files in sorted order, as a uint8 tensor."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if "site-packages" not in path.parts:
            text += path.read_bytes()
        if len(text) >= CORPUS_BYTES:
            break
    return torch.frombuffer(text[:CORPUS_BYTES], dtype=torch.uint8)


class ShuffledWindows:
    """This rank's batches of text windows, shuffled anew every epoch by a generator of its own.

    All ranks draw the same permutation and take every n-th window of it. The position is saved as the
    generator's state from before the permutation, and the number of batches taken out of it.
    """

    def __init__(self, text: Tensor, rank: int, world_size: int, seed: int) -> None:
        self.windows = text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT)
        self.rank, self.world_size = rank, world_size
        self.generator = torch.Generator().manual_seed(seed)
        self.before_shuffle = self.generator.get_state()
        self.taken = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.before_shuffle = self.generator.get_state()
        order = torch.randperm(len(self.windows), generator=self.generator)
        # Equal shares: a rank that ran out of batches first would leave the others waiting.
        share = order[self.rank :: self.world_size][: len(order) // self.world_size]
        batches = share[: len(share) // MICRO_BATCH * MICRO_BATCH].view(-1, MICRO_BATCH)
        while self.taken < len(batches):
            rows = self.windows[batches[self.taken]].long()
            self.taken += 1
            yield rows[:, :-1], rows[:, 1:]
        self.taken = 0

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.before_shuffle.numpy().tobytes(), "taken": self.taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.generator.set_state(torch.frombuffer(bytearray(state["generator"]), dtype=torch.uint8))
        self.before_shuffle = self.generator.get_state()
        self.taken = state["taken"]


# ---- the model ----


class Block(nn.Module):
    """Attention and a feed-forward part, both residual."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.feed_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, length, WIDTH)
        x = x + F.dropout(self.out(mixed), DROPOUT, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.feed_norm(x)))), DROPOUT, self.training)


class GPT(nn.Module):
    """A byte-level GPT of 6.4 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, WIDTH)
        self.positions = nn.Parameter(waves(CONTEXT, WIDTH), requires_grad=False)  # frozen
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.refine = nn.Linear(WIDTH, WIDTH)  # the branch that is unused at first
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, BYTES, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight  # tied

    def forward(self, tokens: Tensor, refine: bool) -> Tensor:
        x = F.dropout(self.embedding(tokens) + self.positions[: tokens.shape[1]], DROPOUT, self.training)
        for block in self.blocks:
            x = block(x)
        if refine:
            x = x + self.refine(x)
        return self.head(self.norm(x))


def waves(length: int, width: int) -> Tensor:
    """Sines and cosines of falling frequency, one row per position, small beside the embedding."""
    angles = torch.arange(length)[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(1e4) / width))
    return 0.02 * torch.cat([angles.sin(), angles.cos()], dim=1)


# ---- the run ----


def seed_everything(seed: int) -> None:
    """Seeds all streams that a checkpoint holds, so that two runs can be compared to the last one."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Builds everything alike on every rank, and trains."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    seed_everything(args.seed)  # the same initial weights on all ranks
    model = GPT().to(device)
    mesh = init_device_mesh(device.type, (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    seed_everything(args.seed + 1 + rank)  # from here on, random streams of its own on each rank

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = orlop.SwapAdamW(
        [
            {"params": [p for p in trained if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=1e-3,
    )

    def warm_up_then_cosine(step: int) -> float:
        if step < WARM_UP_STEPS:
            return (step + 1) / WARM_UP_STEPS
        done = (step - WARM_UP_STEPS) / max(1, args.steps - WARM_UP_STEPS)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_then_cosine)
    engine = orlop.TrainEngine(model, optimizer, scheduler, max_grad_norm=1.0)

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = (each.to(device) for each in batch)
        logits = model(inputs, refine=trainer.progress.step >= REFINE_AFTER_STEP)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    trainer = orlop.Trainer(
        engine,
        orlop.CheckpointStore(args.run),
        ShuffledWindows(standard_library(), rank, world_size, args.seed),
        total_steps=args.steps,
        save_every=args.save_every,
        loss_fn=loss_fn,
        accumulate=ACCUMULATE,
    )
    trainer.run()


def main() -> None:
    """Joins the process group, trains, and leaves it in the order that torch needs for a clean exit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, required=True, help="the run's directory; resumed when it exists")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    device = torch.device("cpu")
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        device = torch.accelerator.current_accelerator() or device
    dist.init_process_group()
    logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.WARNING, format="%(message)s")
    train(args, device)
    # The model and its mesh are gone with `train`; what still refers to them in circles goes here. A mesh
    # that outlives its process group can abort the interpreter while it exits.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
