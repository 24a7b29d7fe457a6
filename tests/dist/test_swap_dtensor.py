"""Sharded parameters: the state is a DTensor of the same mesh, placements and global shape, on the host."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import orlop
from orlop.errors import OptimizerRefused
from orlop.testing import ThreadLink, run_ranks

# Uneven over two ranks, fewer rows than ranks (an empty shard), one element, and a column shard.
SHAPES = [((5, 6), Shard(0)), ((1, 7), Shard(0)), ((1,), Shard(0)), ((6, 5), Shard(1)), ((4, 4), Replicate())]


def make_sharded(mesh, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return [
        torch.nn.Parameter(
            distribute_tensor(torch.randn(shape, generator=generator).to(dtype), mesh, [placement])
        )
        for shape, placement in SHAPES
    ]


def give_gradients(params, number):
    generator = torch.Generator().manual_seed(50 + number)
    for param in params:
        whole = torch.randn(param.shape, generator=generator).to(param.dtype)
        param.grad = distribute_tensor(whole, param.device_mesh, param.placements)


def step_both(rank, name, kwargs, dtype, window_bytes):
    mesh = init_device_mesh("cpu", (2,))
    params, others = make_sharded(mesh, dtype), make_sharded(mesh, dtype)
    swapped = orlop.swap(getattr(torch.optim, name))(params, **kwargs)
    stock = getattr(torch.optim, name)(others, **kwargs)
    if window_bytes:
        swapped.links[torch.device("cpu")] = ThreadLink()
        swapped.window_bytes = window_bytes
    for number in range(4):
        for optimizer, mine in ((swapped, params), (stock, others)):
            give_gradients(mine, number)
            optimizer.step()
    swapped.synchronize()
    for param, other in zip(params, others):
        assert torch.equal(param.to_local(), other.to_local())
        for key, value in stock.state[other].items():
            found = swapped.state[param][key]
            assert type(found) is type(value), key
            assert swapped.holds(found)
            if isinstance(value, DTensor):
                assert (found.shape, found.placements, found.dtype) == (
                    value.shape,
                    value.placements,
                    value.dtype,
                )
                assert found.device_mesh == param.device_mesh
                found, value = found.to_local(), value.to_local()
            assert torch.equal(found, value), key


@pytest.mark.dist
@pytest.mark.parametrize("window_bytes", [0, 100], ids=["in_place", "thread_link"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name, kwargs",
    [
        ("AdamW", {"amsgrad": True}),
        ("SGD", {"momentum": 0.9, "dampening": 0.2, "lr": 0.1}),
        ("AdamW", {"foreach": True}),
    ],
)
def test_local_steps_give_the_bits_of_steps_on_dtensors(name, kwargs, dtype, window_bytes):
    run_ranks(step_both, 2, name, kwargs, dtype, window_bytes)


def muon_and_adafactor(rank):
    mesh = init_device_mesh("cpu", (2,))

    def sharded():
        return [
            torch.nn.Parameter(distribute_tensor(torch.arange(24.0).reshape(6, 4).sin(), mesh, [Shard(0)]))
        ]

    with pytest.raises(OptimizerRefused, match="Adafactor"):
        orlop.swap(torch.optim.Adafactor)(sharded())
    params, others = sharded(), sharded()
    swapped, stock = orlop.swap(torch.optim.Muon)(params), torch.optim.Muon(others)
    assert swapped.method == "windowed"
    for number in range(3):
        for optimizer, mine in ((swapped, params), (stock, others)):
            give_gradients(mine, number)
            optimizer.step()
    assert torch.equal(params[0].to_local(), others[0].to_local())
    momentum = swapped.state[params[0]]["momentum_buffer"]
    assert isinstance(momentum, DTensor)
    assert momentum.placements == (Shard(0),)
    assert torch.equal(momentum.to_local(), stock.state[others[0]]["momentum_buffer"].to_local())
    assert swapped.holds(momentum)


@pytest.mark.dist
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_classes_that_need_the_matrix_step_on_dtensors_or_are_refused():
    run_ranks(muon_and_adafactor, 2)


def meta_fsdp(rank):
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    fully_shard(model)
    optimizer = orlop.SwapAdamW(model.parameters(), lr=0.1)
    moments = {name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()}
    assert all(not m.to_local().any() and m.device.type == "cpu" for m in moments.values())
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for param in model.parameters():
        torch.nn.init.normal_(param)
    for _ in range(2):
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, param in model.named_parameters():
        assert optimizer.state[param]["exp_avg"] is moments[name]
        assert optimizer.state[param]["step"] == 2
        assert optimizer.holds(moments[name])


@pytest.mark.dist
@pytest.mark.fsdp
def test_an_fsdp2_model_on_the_meta_device_gets_its_arena_at_construction():
    run_ranks(meta_fsdp, 2)


def step_in_backward_fsdp(rank):
    from torch.distributed.fsdp import fully_shard

    sides = []
    for make, kwargs in (
        (orlop.SwapAdamW, {"step_in_backward": 2, "window_bytes": 600}),
        (torch.optim.AdamW, {}),
    ):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = make(model.parameters(), lr=0.1, **kwargs)
        if kwargs:
            optimizer.links[torch.device("cpu")] = ThreadLink()
        losses = []
        for number in range(6):
            batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(2 * number + rank))
            loss = model(batch).square().mean()
            loss.backward()
            losses.append(loss.item())
            if number % 2 == 1:
                if kwargs:
                    assert all(param.grad is None for param in model.parameters())
                optimizer.step()
                optimizer.zero_grad()
        sides.append((losses, [param.to_local().clone() for param in model.parameters()]))
    assert sides[0][0] == sides[1][0]
    assert all(map(torch.equal, sides[0][1], sides[1][1]))


@pytest.mark.dist
@pytest.mark.skipif(torch.__version__ < "2.9", reason="fully_shard runs on the CPU from 2.9 on")
def test_fsdp2_steps_in_backward_bit_equal():
    run_ranks(step_in_backward_fsdp, 2)


def refuse_fsdp1(rank):
    from torch.distributed.fsdp import FullyShardedDataParallel

    for use_orig_params in (True, False):
        model = FullyShardedDataParallel(
            torch.nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=use_orig_params
        )
        with pytest.raises(OptimizerRefused, match="FSDP1"):
            orlop.SwapAdamW(model.parameters())


@pytest.mark.dist
def test_fsdp1_is_refused():
    run_ranks(refuse_fsdp1, 2)


def skip_everywhere(rank, flags):
    mesh = init_device_mesh("cpu", (2,))
    params, others = make_sharded(mesh), make_sharded(mesh)
    optimizers = orlop.SwapAdamW(params, **flags), torch.optim.AdamW(others, **flags)
    scalers = [torch.amp.GradScaler("cpu", init_scale=16.0) for _ in optimizers]
    for number in range(3):
        for optimizer, mine, scaler in zip(optimizers, (params, others), scalers):
            scaler.scale(torch.zeros(()))
            give_gradients(mine, number)
            if number == 1 and rank == 1:
                mine[0].grad.to_local()[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
    assert scalers[0].state_dict() == scalers[1].state_dict()
    assert scalers[0].get_scale() == 8.0
    for param, other in zip(params, others):
        assert optimizers[0].state[param]["step"] == 2
        assert torch.equal(param.to_local(), other.to_local())


@pytest.mark.dist
def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all():
    """B13."""
    run_ranks(skip_everywhere, 2, {})
