"""Parameters given another dtype or shape after their optimizer was built: as stock classes do, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch

import orlop
from orlop.testing import ThreadLink

CLASSES = [
    (torch.optim.AdamW, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adafactor, {}),
    (torch.optim.Adagrad, {}),
]
BACKWARD = {"step_in_backward": True}


def make_model(first=torch.nn.Linear):
    torch.manual_seed(0)
    given = (6, 5) if first is torch.nn.Linear else (5,)
    return torch.nn.Sequential(first(*given), torch.nn.Tanh(), torch.nn.Linear(5, 3))


def train(model, optimizer, dtype, steps=3):
    for number in range(steps):
        generator = torch.Generator().manual_seed(number)
        model(torch.randn(4, 6, generator=generator).to(dtype)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same(model, optimizer, stock_model, stock):
    if isinstance(optimizer, orlop.optim.swapped.Swapped):
        optimizer.synchronize()
    for param, theirs in zip(model.parameters(), stock_model.parameters(), strict=True):
        assert param.dtype == theirs.dtype
        assert torch.equal(param, theirs)
        assert optimizer.state[param].keys() == stock.state[theirs].keys()
        for key, value in stock.state[theirs].items():
            mine = optimizer.state[param][key]
            assert torch.as_tensor(mine).dtype == torch.as_tensor(value).dtype, key
            assert torch.equal(torch.as_tensor(mine), torch.as_tensor(value)), key


@pytest.mark.parametrize("options", [{}, BACKWARD], ids=["step", "in_backward"])
@pytest.mark.parametrize("cls, kwargs", CLASSES, ids=[cls.__name__ for cls, _ in CLASSES])
def test_a_model_cast_before_its_first_step(cls, kwargs, options):
    model, stock_model = make_model(), make_model()
    try:
        optimizer = orlop.swap(cls)(model.parameters(), lr=1e-2, **kwargs, **options)
    except orlop.OptimizerRefused:
        pytest.skip("can't step during backward")
    stock = cls(stock_model.parameters(), lr=1e-2, **kwargs)
    for each, stepper in ((model, optimizer), (stock_model, stock)):
        each.to(torch.bfloat16)
        train(each, stepper, torch.bfloat16)
    assert_same(model, optimizer, stock_model, stock)


def test_the_memory_of_the_former_state_goes_back_to_the_host():
    model = make_model()
    optimizer = orlop.SwapAdamW(model.parameters())
    before = optimizer.arena_bytes
    model.to(torch.float64)
    train(model, optimizer, torch.float64, steps=1)
    count = sum(param.numel() for param in model.parameters())
    assert before < optimizer.arena_bytes < 2 * count * 8 + 64
    assert all(optimizer.holds(leaf) for state in optimizer.state.values() for leaf in state.values())


def test_state_that_took_part_in_a_step_is_kept_as_it_is():
    model, stock_model = make_model(), make_model()
    optimizer = orlop.swap(torch.optim.SGD)(model.parameters(), lr=1e-2, momentum=0.9)
    stock = torch.optim.SGD(stock_model.parameters(), lr=1e-2, momentum=0.9)
    for each, stepper in ((model, optimizer), (stock_model, stock)):
        train(each, stepper, torch.float32)
        each.to(torch.bfloat16)
        train(each, stepper, torch.bfloat16)
    assert_same(model, optimizer, stock_model, stock)
    assert {state["momentum_buffer"].dtype for state in optimizer.state.values()} == {torch.float32}


def test_a_load_before_the_first_step_fills_state_of_the_new_form():
    trained = make_model().to(torch.bfloat16)
    stock = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    train(trained, stock, torch.bfloat16)
    model = make_model()
    optimizer = orlop.SwapAdamW(model.parameters(), lr=1e-2)
    model.to(torch.bfloat16).load_state_dict(trained.state_dict())
    optimizer.load_state_dict(copy.deepcopy(stock.state_dict()))
    for each, stepper in ((model, optimizer), (trained, stock)):
        train(each, stepper, torch.bfloat16)
    assert_same(model, optimizer, trained, stock)


def test_a_checkpoint_loads_into_a_model_cast_after_its_optimizer_was_built(tmp_path):
    trained = make_model().to(torch.bfloat16)
    stock = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    train(trained, stock, torch.bfloat16)
    orlop.TrainEngine(trained, stock).save_dcp(tmp_path / "c")
    model = make_model()
    optimizer = orlop.SwapAdamW(model.parameters(), lr=1e-2)
    model.to(torch.bfloat16)
    orlop.TrainEngine(model, optimizer).load_dcp(tmp_path / "c")
    for each, stepper in ((model, optimizer), (trained, stock)):
        train(each, stepper, torch.bfloat16)
    assert_same(model, optimizer, trained, stock)


@pytest.mark.parametrize("link", [None, ThreadLink], ids=["in_place", "windows"])
def test_a_lazy_module_gets_its_state_with_its_first_gradient(link):
    model, stock_model = make_model(torch.nn.LazyLinear), make_model(torch.nn.LazyLinear)
    optimizer = orlop.SwapAdamW(model.parameters(), lr=1e-2)
    if link is not None:
        optimizer.links[torch.device("cpu")] = link()
    assert optimizer.state.keys() == set(model[2].parameters())
    stock = torch.optim.AdamW(stock_model.parameters(), lr=1e-2)
    for each, stepper in ((model, optimizer), (stock_model, stock)):
        torch.manual_seed(1)
        train(each, stepper, torch.float32)
    assert_same(model, optimizer, stock_model, stock)


def test_prefetched_windows_know_the_new_form():
    model, stock_model = make_model(), make_model()
    optimizer = orlop.SwapAdamW(model.parameters(), lr=1e-2)
    optimizer.links[torch.device("cpu")] = ThreadLink()
    stock = torch.optim.AdamW(stock_model.parameters(), lr=1e-2)
    model.to(torch.bfloat16)
    stock_model.to(torch.bfloat16)
    optimizer.prefetch()
    train(model, optimizer, torch.bfloat16)
    train(stock_model, stock, torch.bfloat16)
    assert_same(model, optimizer, stock_model, stock)
