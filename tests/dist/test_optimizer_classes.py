"""Optimizer state that can't be foreseen, on DTensors: saved by two ranks, loaded by two and by one."""

import re

import pytest
import torch
import torch.distributed as dist
from tests.rewriting import drop, rewrite
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from orlop import swap
from orlop.engine import TrainEngine
from orlop.errors import CheckpointMismatch, OptimizerRefused
from orlop.testing import run_ranks

pytestmark = pytest.mark.dist


class Unforeseen(torch.optim.Optimizer):
    """Reads a value before it makes its state, and makes a second slot at the second step."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(group, param, self.state[param])

    def _update(self, group, param, state):
        _local(param.grad).sum().item()
        if not state:
            state["step"], state["m"] = torch.tensor(0.0), torch.zeros_like(param)
        else:
            state["prev"] = state["m"].clone()
        state["step"] += 1
        state["m"].mul_(0.9).add_(param.grad)
        param.sub_(group["lr"] * (state["m"] + state["prev"] if "prev" in state else state["m"]))


def _local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(value):
    return value.full_tensor().clone() if isinstance(value, DTensor) else value.clone()


def _make(kind, seed=0):
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Module()
    model.w = nn.Parameter(distribute_tensor(torch.randn(5, 3), mesh, [Shard(0)]))
    model.b = nn.Parameter(distribute_tensor(torch.randn(3), mesh, [Replicate()]))
    model.unused = nn.Parameter(torch.randn(2))
    optimizer_class = swap(Unforeseen) if kind == "swapped" else Unforeseen
    return TrainEngine(model, optimizer_class(model.parameters()))


def _train(engine, *steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in (engine.model.w, engine.model.b):
            grad = torch.randn(param.shape, generator=generator)
            param.grad = distribute_tensor(grad, param.device_mesh, param.placements)
        engine.optimizers["optimizer"].step()
    return engine


def _snapshot(engine):
    """The model and all state, whole, by name; and which of it is sharded like its parameter."""
    (optimizer,) = engine.optimizers.values()
    values, sharded = {name: _whole(value) for name, value in engine.model.state_dict().items()}, []
    for name, param in engine.model.named_parameters():
        for key, value in optimizer.state.get(param, {}).items():
            values[f"{name}.{key}"] = _whole(value)
            if isinstance(value, DTensor):
                assert value.placements == param.placements
                sharded.append(f"{name}.{key}")
    return values, sorted(sharded)


CASES = [(kind, at) for kind in ("stock", "swapped") for at in (1, 3)]


def _save(rank, folder):
    results = []
    for kind, at in CASES:
        first = _train(_make(kind), *range(at))
        first.save_dcp(f"{folder}/{kind}-{at}")
        results.append([_snapshot(first), _snapshot(_train(first, *range(at, 5)))])
    return results


def _load(rank, folder):
    results = []
    for kind, at in CASES:
        # One fresh run, and one whose state has every slot already.
        for engine in (_make(kind, seed=9), _train(_make(kind, seed=9), *range(4))):
            engine.load_dcp(f"{folder}/{kind}-{at}")
            results.append([_snapshot(engine), _snapshot(_train(engine, *range(at, 5)))])
    return results


def test_unforeseen_state_is_sharded_as_its_parameter_and_goes_on_bit_for_bit(tmp_path):
    saved, _ = run_ranks(_save, 2, str(tmp_path))
    for (_, at), ((_, sharded), _) in zip(CASES, saved):
        assert sharded == sorted(["b.m", "w.m", *(["b.prev", "w.prev"] if at > 1 else [])])
    for world_size in (2, 1):
        for loaded in run_ranks(_load, world_size, str(tmp_path)):
            for (now, later), (was, went) in zip(loaded, [each for each in saved for _ in range(2)]):
                for (values, sharded), (expected, like) in ((now, was), (later, went)):
                    assert sharded == like
                    assert values.keys() == expected.keys()
                    for name, value in values.items():
                        assert torch.equal(value, expected[name]), name


def _load_without(rank, folder, slot):
    """What a load says when one slot is in no file any more, by each kind of engine."""
    texts = []
    for engine in (_make("stock", seed=9), _make("swapped", seed=9)):
        before = _snapshot(engine)[0]
        with pytest.raises(CheckpointMismatch) as caught:
            engine.load_dcp(folder)
        texts.append(str(caught.value))
        after = _snapshot(engine)[0]
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
    return texts


@pytest.mark.parametrize("slot", ["w.prev", "b.m", "w.step"])
def test_a_slot_that_was_saved_and_is_gone_is_an_error_on_every_rank(tmp_path, slot):
    run_ranks(_save, 2, str(tmp_path))
    damaged = tmp_path / "stock-3"
    rewrite(damaged, drop(re.escape(f"optimizer.state.{slot}")))
    for world_size in (2, 1):
        told = run_ranks(_load_without, world_size, str(damaged), slot)
        assert all(texts == told[0] for texts in told)
        assert all(f"partial: optimizer.state.{slot} (only " in text for text in told[0])


class Factored(Unforeseen):
    """Keeps the mean of each row (Adafactor): a DTensor of another shape than the parameter's."""

    def _update(self, group, param, state):
        state["rows"] = param.grad.square().mean(-1, keepdim=True)
        param.sub_(group["lr"] * param.grad)


def _save_factored(rank, folder):
    engine = _make("stock")
    optimizer = Factored(engine.model.parameters())
    engine = _train(TrainEngine(engine.model, optimizer), 0)
    with pytest.raises(OptimizerRefused) as caught:
        engine.save_dcp(f"{folder}/x")
    return str(caught.value)


def test_a_sharded_slot_of_another_shape_is_refused_when_saving(tmp_path):
    one, other = run_ranks(_save_factored, 2, str(tmp_path))
    assert one == other
    assert "optimizer.state.w.rows" in one
    assert "(5, 1)" in one
    assert "Shard(0)" in one
    assert not list(tmp_path.iterdir())
