"""Every class in torch's own list of optimizers, with every keyword case: the same bits as the stock class."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.testing._internal.common_optimizers import optim_db

import orlop
from orlop.errors import OptimizerRefused
from orlop.testing import ThreadLink

REFUSED = ("LBFGS", "SparseAdam")


def cases():
    for info in optim_db:
        for given in info.optim_inputs_func(device="cpu"):
            flags = [{}]
            if "foreach" in info.supported_impls:
                flags.append({"foreach": True})
            if "cpu" in info.supports_fused_on:
                flags.append({"fused": True})
            for flag in flags:
                kwargs = {**given.kwargs, **flag}
                if kwargs.get("differentiable"):
                    continue
                if isinstance(kwargs.get("lr"), torch.Tensor) and kwargs.get("foreach"):
                    continue  # torch refuses it
                label = f"{info.optim_cls.__name__}-{given.desc}-{'-'.join(flag) or 'plain'}"
                yield pytest.param(info.optim_cls, kwargs, info.supports_complex, id=label)


def make_params(optimizer_class, *, dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    shapes = [(9, 31), (), (1,), (700,), (0, 3), (4, 3, 5)]
    if optimizer_class.__name__ == "Muon":
        shapes = [(9, 31), (64, 5)]
    if optimizer_class.__name__ == "Adafactor":
        shapes.remove((0, 3))
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def late_parameters(optimizer_class, kwargs, params):
    """The last parameter gets its first gradient late, and must then step as if it were new."""
    # Torch's own fused SGD can't take a parameter that joins late, and its Adafactor no empty one.
    return set() if kwargs.get("fused") and optimizer_class.__name__ == "SGD" else {len(params) - 1}


def step(optimizer, params, number, late=()):
    generator = torch.Generator().manual_seed(100 + number)
    for index, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        param.grad = None if index in late and number < 2 else grad
    optimizer.step()


def assert_same(stock, swapped):
    swapped.synchronize()  # the last windows may still be on their way home
    assert len(stock.param_groups) == len(swapped.param_groups)
    for ours, theirs in zip(swapped.param_groups, stock.param_groups):
        for param, other in zip(ours["params"], theirs["params"]):
            assert torch.equal(param, other)
            expected = stock.state.get(other, {})
            found = swapped.state.get(param, {})
            if swapped.stepped(param):
                assert set(found) == set(expected)
                for key, value in expected.items():
                    assert found[key].dtype == value.dtype
                    assert torch.equal(found[key], value), key
            for value in found.values():
                assert swapped.holds(value)


def thread_link(optimizer, window_bytes, rate=None):
    optimizer.links[torch.device("cpu")] = ThreadLink(up_bytes_per_second=rate, down_bytes_per_second=rate)
    optimizer.window_bytes = window_bytes


WINDOWS = {
    "in_place": (None, None),
    "many_windows_throttled": (700, 20e6),  # and the larger parameters cut
    "two_windows": (15_000, None),
    "one_window": (2**20, None),
}
RUNS = [(dtype, way) for dtype in (torch.float32, torch.bfloat16) for way in WINDOWS]


@pytest.mark.parametrize("optimizer_class, kwargs, _", list(cases()))
@pytest.mark.parametrize("dtype, way", RUNS, ids=lambda value: str(value).removeprefix("torch."))
def test_same_bits_as_the_stock_class(optimizer_class, kwargs, _, dtype, way):
    window_bytes, rate = WINDOWS[way]
    if optimizer_class.__name__ in REFUSED:
        with pytest.raises(OptimizerRefused, match=optimizer_class.__name__):
            orlop.swap(optimizer_class)(make_params(optimizer_class), **kwargs)
        return
    params, others = (make_params(optimizer_class, dtype=dtype) for _ in range(2))
    stock = optimizer_class(others, **kwargs)
    if (
        optimizer_class is torch.optim.SGD
        and kwargs.get("fused")
        and kwargs.get("momentum")
        and dtype.itemsize == 2
    ):
        pytest.skip("torch's own kernel reads memory that it has not written: two stock runs differ")
    late = late_parameters(optimizer_class, kwargs, params)
    swapped = orlop.swap(optimizer_class)(params, **kwargs)
    if window_bytes is not None:
        thread_link(swapped, window_bytes, rate)
    for number in range(5):
        step(stock, others, number, late)
        step(swapped, params, number, late)
    assert_same(stock, swapped)
    if window_bytes is not None:
        moved = any(swapped.state[p] for p in params if p in swapped.state)
        assert (swapped.links[torch.device("cpu")].bytes_down > 0) == moved


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "RMSprop", "Adagrad"])
def test_complex_parameters(name):
    optimizer_class = getattr(torch.optim, name)
    params, others = (make_params(optimizer_class, dtype=torch.complex64) for _ in range(2))
    stock, swapped = optimizer_class(others, lr=0.1), orlop.swap(optimizer_class)(params, lr=0.1)
    thread_link(swapped, 700)
    for number, (optimizer, mine) in itertools.product(range(4), [(stock, others), (swapped, params)]):
        step(optimizer, mine, number)
    assert_same(stock, swapped)
