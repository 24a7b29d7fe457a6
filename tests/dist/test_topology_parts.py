"""Parts that each rank has its own of, on another number of ranks: refused, or skipped and reported; never swapped.

And torch's own ways of handing a whole state to sharded optimizers.
"""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import orlop
from orlop.errors import CheckpointMismatch
from orlop.state.data import DataStream
from orlop.state.rng import RngState
from orlop.testing import run_ranks

pytestmark = pytest.mark.dist
OWN = ("rng", "data")


class Stream:
    """A sampler that remembers its place."""

    def __init__(self, rank):
        self.numbers = range(1000 * rank, 1000 * rank + 100)
        self.at = 0

    def __iter__(self):
        while self.at < len(self.numbers):
            self.at += 1
            yield self.numbers[self.at - 1]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Shared:
    """A part that is the same for all ranks: any number of them can go on from it."""

    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def _engine(rank, seed=0):
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Module()
    value = distribute_tensor(torch.arange(20.0).view(5, 4) + seed, mesh, [Shard(0)])
    model.register_parameter("weight", nn.Parameter(value))
    parts = {"rng": RngState(), "data": DataStream(Stream(rank)), "shared": Shared()}
    return orlop.TrainEngine(model, orlop.SwapAdamW(model.parameters(), lr=0.1 + seed), parts=parts)


def _draws():
    return random.random(), np.random.rand(), torch.rand(()).item()


def _save(rank, folder):
    # All ranks' streams and places are equal at this moment; they are each rank's own all the same.
    engine = _engine(rank)
    engine.parts["data"].take(7)
    engine.parts["shared"].step = 5
    engine.model.weight.grad = torch.ones_like(engine.model.weight)
    assert engine.step_optimizer(1.0)
    engine.save_dcp(f"{folder}/saved")
    expected = _draws(), engine.parts["data"].take(3)
    again = _engine(rank, seed=9)
    # On the same number of ranks the policy changes nothing.
    again.load_dcp(f"{folder}/saved", policy=orlop.LoadPolicy(allow_other_ranks=True))
    assert (_draws(), again.parts["data"].take(3)) == expected


def _load(rank, folder):
    engine = _engine(rank, seed=9)
    before = engine.model.weight.full_tensor().clone()
    stream = torch.get_rng_state()
    with pytest.raises(CheckpointMismatch) as caught:
        engine.load_dcp(f"{folder}/saved")
    assert torch.equal(engine.model.weight.full_tensor(), before)
    assert torch.equal(torch.get_rng_state(), stream)
    assert engine.parts["shared"].step == 0
    found = {}
    for verdict, policy in (
        ("skipped", orlop.LoadPolicy(skip_parts=frozenset(OWN))),
        ("afresh", orlop.LoadPolicy(allow_other_ranks=True)),
    ):
        engine = _engine(rank, seed=9)
        report = engine.load_dcp(f"{folder}/saved", policy=policy)
        assert engine.parts["shared"].step == 5
        assert torch.equal(torch.get_rng_state(), stream)
        assert engine.parts["data"].take(3) == [1000 * rank, 1000 * rank + 1, 1000 * rank + 2]
        found[verdict] = {finding.leaf: str(finding) for finding in report.of(verdict)}
        assert verdict in str(report)
    return str(caught.value), found


@pytest.mark.parametrize("saved, now", [(2, 3), (1, 2), (2, 1)])
def test_another_number_of_ranks_gets_no_other_ranks_stream_in_silence(tmp_path, saved, now):
    """D05, F08, F09."""
    run_ranks(_save, saved, str(tmp_path))
    for error, found in run_ranks(_load, now, str(tmp_path)):
        are = "is 1 rank" if now == 1 else f"are {now} ranks"
        was = "it was saved for each of " + ("1 rank" if saved == 1 else f"{saved} ranks")
        for name in OWN:
            assert f"other ranks: {name} ({was}, and there {are} now)" in error
        assert "LoadPolicy(allow_other_ranks=True)" in error
        for named in found.values():
            assert set(named) == set(OWN)
            assert all(was in text for text in named.values())


def _broadcast(rank):
    """A13: rank 0 has the whole state, the others nothing."""

    def build(lrs):
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Linear(6, 4)
        for name, param in list(model.named_parameters()):
            value = distribute_tensor(torch.full(param.shape, 1.0), mesh, [Shard(0)])
            setattr(model, name, nn.Parameter(value))
        groups = [
            {"params": [model.weight], "lr": lrs[0], "weight_decay": 0.1},
            {"params": [model.bias], "lr": lrs[1], "weight_decay": 0.0},
        ]
        return model, orlop.SwapAdamW(groups)

    model, optimizer = build((0.01, 0.03))
    for number, param in enumerate(model.parameters()):
        param.grad = torch.full_like(param, 0.5 + number)
    optimizer.step()
    whole = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    other_model, other = build((0.5, 0.6))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(other_model, other, whole if rank == 0 else {}, options=options)
    assert [group["lr"] for group in other.param_groups] == [0.01, 0.03]
    assert [group["weight_decay"] for group in other.param_groups] == [0.1, 0.0]
    for param, target in zip(model.parameters(), other_model.parameters()):
        state = other.state[target]
        assert type(state["step"]) is torch.Tensor
        assert (state["step"].shape, state["step"].dtype, state["step"].item()) == ((), torch.float32, 1.0)
        for key in ("exp_avg", "exp_avg_sq"):
            assert isinstance(state[key], DTensor)
            assert state[key].placements == target.placements
            assert torch.equal(state[key].to_local(), optimizer.state[param][key].to_local())
            assert other.holds(state[key])


def test_a_whole_state_from_rank_0_reaches_groups_and_arenas_on_all_ranks():
    run_ranks(_broadcast, 2)
