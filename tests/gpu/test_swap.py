"""On a real accelerator: the bits of the stock class on the device, the state on the host, page-locked.

Skipped without one. Written for CUDA and anything else that torch calls an accelerator.
"""

from __future__ import annotations

import copy

import pytest
import torch

import orlop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]


def make_params(device):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(s, generator=generator).to(device)) for s in ((1000, 300), (70,), ())
    ]


@pytest.mark.parametrize("flags", [{}, {"foreach": False}, {"fused": True}, {"capturable": True}], ids=str)
@pytest.mark.parametrize("window_bytes", [10_000, 2**28])
def test_same_bits_as_the_stock_class_on_the_device(flags, window_bytes):
    device = torch.accelerator.current_accelerator()
    params, others = make_params(device), make_params(device)
    swapped = orlop.SwapAdamW(params, lr=0.1, window_bytes=window_bytes, **flags)
    stock = torch.optim.AdamW(others, lr=0.1, **flags)
    for number in range(5):
        generator = torch.Generator().manual_seed(number)
        for param, other in zip(params, others):
            param.grad = torch.randn(param.shape, generator=generator).to(device)
            other.grad = param.grad.clone()
        swapped.step()
        stock.step()
    swapped.synchronize()
    for param, other in zip(params, others):
        assert torch.equal(param, other)
        for key, value in stock.state[other].items():
            found = swapped.state[param][key]
            assert found.device.type == "cpu"
            assert found.is_pinned()
            assert swapped.holds(found)
            assert torch.equal(found, value.cpu())


def test_a_load_needs_no_device_memory():
    """B08."""
    device = torch.accelerator.current_accelerator()
    params = make_params(device)
    optimizer = orlop.SwapAdamW(params)
    saved = copy.deepcopy(optimizer.state_dict())
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    optimizer.load_state_dict(saved)
    assert torch.accelerator.max_memory_allocated() == before
    assert all(value.is_pinned() for entry in optimizer.state.values() for value in entry.values())
