"""Ranks that hold different parameters (pipeline stages): one checkpoint, one norm, groups matched over all ranks."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

from orlop.engine import TrainEngine
from orlop.testing import run_ranks

pytestmark = pytest.mark.dist


def _stage(rank, seed=0, lr=0.1):
    torch.manual_seed(seed + rank)
    model = nn.ModuleDict({f"layer{rank}": nn.Linear(3, 3 + rank), "shared": nn.Linear(3, 2, bias=False)})
    with torch.no_grad():
        model["shared"].weight.fill_(0.5)
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    weights = [p for n, p in model.named_parameters() if n.endswith("weight")]
    groups = [{"params": weights, "lr": lr}, {"params": biases, "lr": lr / 2, "weight_decay": 0.0}]
    return TrainEngine(model, torch.optim.AdamW(groups), max_grad_norm=1.0)


def _step(engine):
    for param in engine.model.parameters():
        param.grad = torch.full_like(param, 0.5)
    norm = engine.clip_grad_norm()
    assert engine.step_optimizer(norm)
    return norm.item()


def _save_and_load(rank, folder):
    engine = _stage(rank)
    norm = _step(engine)
    engine.save_dcp(f"{folder}/x")
    other = _stage(rank, seed=7, lr=0.9)
    other.load_dcp(f"{folder}/x")
    for a, b in zip(engine.model.parameters(), other.model.parameters()):
        assert torch.equal(a, b)
        for key, value in engine.optimizers["optimizer"].state[a].items():
            assert torch.equal(value, other.optimizers["optimizer"].state[b][key])
    assert [group["lr"] for group in other.optimizers["optimizer"].param_groups] == [0.1, 0.05]
    return norm


def test_stages_save_one_checkpoint_and_find_their_own_again(tmp_path):
    norms = run_ranks(_save_and_load, 2, str(tmp_path))
    # 9 + 3 elements on rank 0, 12 + 4 on rank 1, and the shared 6 once.
    assert norms == [pytest.approx(0.5 * (12 + 16 + 6) ** 0.5, rel=1e-6)] * 2
    keys = FileSystemReader(tmp_path / "x").read_metadata().state_dict_metadata
    assert {"model.layer0.weight", "model.layer1.weight", "model.shared.weight"} <= keys.keys()


def _groups_differ(rank):
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    engine = TrainEngine(model, torch.optim.SGD(groups if rank else model.parameters(), lr=0.1))
    try:
        engine.save_dcp("unused/never")
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def test_ranks_with_other_numbers_of_groups_are_refused_alike():
    first, second = run_ranks(_groups_differ, 2)
    assert first == second
    assert first[0] == "CheckpointMismatch"
    assert "different numbers of param groups" in first[1]
