"""The norm and the fingerprint count every element once, on any mesh."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from orlop.engine import TrainEngine
from orlop.ranks import Ranks
from orlop.state.agreement import Collected
from orlop.state.fingerprint import fingerprint_leaves
from orlop.testing import run_ranks

pytestmark = pytest.mark.dist

SHAPES = {
    "hybrid": (5, 3),
    "inner": (3, 7),
    "outer": (1, 2),
    "plain": (4,),
    "pending": (2, 6),
    "whole": (6, 6),
}


def _values():
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _placed():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    full = _values()
    placed = {
        "hybrid": distribute_tensor(full["hybrid"], mesh, [Replicate(), Shard(0)]),
        "inner": distribute_tensor(full["inner"], mesh["inner"], [Shard(1)]),
        "outer": distribute_tensor(full["outer"], mesh["outer"], [Shard(0)]),
        "plain": full["plain"],
        "whole": distribute_tensor(full["whole"], mesh, [Shard(0), Shard(1)]),
    }
    quarter = DTensor.from_local(full["pending"] / 4, mesh, [Partial(), Partial()], run_check=False)
    return placed, quarter


def _norm(rank):
    placed, quarter = _placed()
    model = nn.Module()
    for name, value in placed.items():
        model.register_parameter(name, nn.Parameter(torch.zeros_like(value)))
    mesh = quarter.device_mesh
    zeros = distribute_tensor(torch.zeros(SHAPES["pending"]), mesh, [Replicate(), Replicate()])
    model.register_parameter("pending", nn.Parameter(zeros))
    engine = TrainEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=0.5)
    for name, value in placed.items():
        getattr(model, name).grad = value.clone()
    model.pending.grad = quarter
    norms = engine.clip_grad_norm().item(), engine.clip_grad_norm().item()
    return norms, model.whole.grad.full_tensor().clone()


def test_the_norm_counts_every_element_once_on_mixed_meshes():
    full = _values()
    expected = torch.cat([value.reshape(-1) for value in full.values()]).double().norm().item()
    results = run_ranks(_norm, 4)
    assert all(norms == results[0][0] for norms, _ in results)
    assert results[0][0][0] == pytest.approx(expected, rel=1e-6)
    assert results[0][0][1] == pytest.approx(0.5, rel=1e-4)
    torch.testing.assert_close(results[3][1], full["whole"] * (0.5 / expected))


def _fingerprints(rank):
    placed, _ = _placed()
    ranks = Ranks.create()
    full = {name: value for name, value in _values().items() if name != "pending"}
    whole = fingerprint_leaves(Collected(leaves=full), ranks)
    spread = fingerprint_leaves(Collected(leaves=placed), ranks)
    torn = dict(placed)
    if dist.get_rank() == 3:  # one replica of one shard differs
        torn["hybrid"] = DTensor.from_local(
            placed["hybrid"].to_local() + 1, placed["hybrid"].device_mesh, [Replicate(), Shard(0)],
            run_check=False, shape=placed["hybrid"].shape, stride=placed["hybrid"].stride(),
        )  # fmt: skip
    differs = fingerprint_leaves(Collected(leaves=torn), ranks)
    return whole, spread, {name for name in full if differs.leaves[name] != whole.leaves[name]}


def test_the_fingerprint_is_the_same_on_any_mesh_and_shows_torn_replicas():
    for whole, spread, torn in run_ranks(_fingerprints, 4):
        assert whole == spread
        assert torn == {"hybrid"}
