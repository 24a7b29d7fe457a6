"""Trainer and its parts on two real ranks: resumed equals uninterrupted, each rank keeps its own streams."""

from __future__ import annotations

import json
import os
import random
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader

from orlop.checkpoints import CheckpointStore
from orlop.engine import TrainEngine
from orlop.optim.swap import SwapAdamW
from orlop.state.data import DataStream
from orlop.state.plain import digest
from orlop.state.rng import RngState
from orlop.testing import run_ranks
from orlop.trainer import Trainer

pytestmark = pytest.mark.dist

WORLD, TOTAL = 2, 8


class Stop(Exception):
    pass


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Dropout(0.3))
        self.out = nn.Linear(6, 3)
        self.late = nn.Linear(3, 3)

    def forward(self, x: Tensor, late: bool) -> Tensor:
        y = self.out(self.inner(x))
        return (self.late(y) + y if late else y).square().mean() + 0.01 * random.random()


def _seed(seed: int) -> None:
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)


def _trainer(rank: int, root: Path, *, seed: int = 0, lr: float = 0.05, **options: Any) -> Trainer:
    _seed(seed)
    model = Net()
    mesh = init_device_mesh("cpu", (WORLD,))
    fully_shard(model.inner, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _seed(seed + 1 + rank)
    optimizer = SwapAdamW(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    engine = TrainEngine(model, optimizer, scheduler, max_grad_norm=1.0)
    x = torch.arange(80.0).view(20, 4)[rank::WORLD] / 80
    data = StatefulDataLoader(x, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(rank))

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch, late=trainer.progress.step >= 5)

    trainer = Trainer(
        engine, CheckpointStore(root), data, total_steps=TOTAL, save_every=3, loss_fn=loss_fn, **options
    )
    return trainer


def _outcome(trainer: Trainer) -> dict[str, Any]:
    (optimizer,) = trainer.engine.optimizers.values()
    parameters = list(trainer.engine.model.parameters())
    state = [value for p in parameters for value in optimizer.slots(p).values()]
    return {
        "tensors": [getattr(each, "_local_tensor", each).detach().tolist() for each in (*parameters, *state)],
        "stepped": [optimizer.stepped(p) for p in parameters],
        "progress": trainer.progress.state_dict(),
        "rng": RngState().state_dict(),
        "data": digest(trainer.data.state_dict()),
    }


def _train(rank: int, root: Path, stop_at: int | None, seed: int, lr: float) -> tuple[list, dict[str, Any]]:
    records: list[tuple[Any, ...]] = []

    def note(trainer: Trainer, record: Any) -> None:
        records.append((record.step, record.loss.hex(), record.grad_norm.hex(), record.lr, record.tokens))
        if record.step == stop_at:
            raise Stop

    trainer = _trainer(rank, root, seed=seed, lr=lr, hooks=[note])
    with suppress(Stop):
        assert trainer.run()
    return records, _outcome(trainer)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list, dict[str, Any]]]:
    """The uninterrupted run, per rank."""
    return run_ranks(_train, WORLD, tmp_path_factory.mktemp("whole"), None, 0, 0.05)


@pytest.mark.fsdp
def test_resumed_equals_uninterrupted(whole: list, tmp_path: Path) -> None:
    first = run_ranks(_train, WORLD, tmp_path, 4, 0, 0.05)  # saved at 3, `late` still absent
    second = run_ranks(_train, WORLD, tmp_path, 7, 55, 9.0)  # saved at 6, `late` one step behind the others
    third = run_ranks(_train, WORLD, tmp_path, None, 77, 9.0)
    for rank in range(WORLD):
        assert first[rank][0][:3] + second[rank][0][:3] + third[rank][0] == whole[rank][0]
        assert third[rank][1] == whole[rank][1]
    assert whole[0][0] == whole[1][0]  # all ranks have the same records
    assert whole[0][1]["rng"] != whole[1][1]["rng"]
    assert [json.loads(line)["step"] for line in _lines(tmp_path)] == list(range(1, TOTAL + 1))


def _lines(root: Path) -> list[str]:
    return (root / "metrics.jsonl").read_text().splitlines()


# ---- F08, F09: each rank's random streams, each rank's place in its data ----


def _parts(rank: int) -> tuple[TrainEngine, DataStream]:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    stream = DataStream(
        StatefulDataLoader(
            range(100), batch_size=None, shuffle=True, generator=torch.Generator().manual_seed(40 + rank)
        )
    )
    optimizer = SwapAdamW(model.parameters())
    return TrainEngine(model, optimizer, parts={"rng": RngState(), "data": stream}), stream


def _draws() -> list[Any]:
    return [[random.random() for _ in range(5)], np.random.rand(5).tolist(), torch.rand(5).tolist()]


def _save_parts(rank: int, root: Path, taken: list[int]) -> tuple[list[Any], list[int]]:
    engine, stream = _parts(rank)
    _seed(3)
    for _ in range(10 + 7 * rank):
        _draws()
    stream.take(taken[rank])
    CheckpointStore(root).save(engine, 1)
    return _draws(), stream.take(120)


def _resume_parts(rank: int, root: Path) -> tuple[list[Any], list[int]]:
    engine, stream = _parts(rank)
    _seed(1234)
    assert CheckpointStore(root).resume(engine) is not None
    return _draws(), stream.take(120)


def test_f08_f09_each_rank_gets_its_own_streams_and_place_back(tmp_path: Path) -> None:
    expected = run_ranks(_save_parts, WORLD, tmp_path, [37, 21])
    assert expected[0][0] != expected[1][0]
    assert expected[0][1] != expected[1][1]
    assert run_ranks(_resume_parts, WORLD, tmp_path) == expected


# ---- SIGTERM on one rank ----


def _train_until_told(rank: int, root: Path) -> tuple[bool, int, list[int]]:
    def terminate(trainer: Trainer, record: Any) -> None:
        if rank == 1 and record.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = _trainer(rank, root, hooks=[terminate])
    return trainer.run(), trainer.progress.step, trainer.store.steps()


@pytest.mark.fsdp
def test_sigterm_on_rank_1_ends_all_ranks_at_the_same_step(whole: list, tmp_path: Path) -> None:
    assert run_ranks(_train_until_told, WORLD, tmp_path) == [(False, 5, [3, 5])] * WORLD
    assert len(_lines(tmp_path)) == 5
    resumed = run_ranks(_train, WORLD, tmp_path, None, 5, 9.0)
    assert [each[0] for each in resumed] == [each[0][5:] for each in whole]
    assert [each[1] for each in resumed] == [each[1] for each in whole]
