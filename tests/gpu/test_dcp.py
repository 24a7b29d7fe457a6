"""Reading into, and writing from, an accelerator's memory."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from orlop import compat
from orlop.dcp import Reader, Writer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(compat.accelerator() is None, reason="no accelerator"),
]


def make(fill):
    device = compat.accelerator()
    return {
        "large": fill(3000, 3001, device=device),
        "turned": fill(300, 70, device=device).t(),
        "half": fill(77, device=device).bfloat16(),
        "scalar": fill(1, device=device)[0],
        "host": fill(500),
    }


@pytest.mark.parametrize("writer", [Writer, FileSystemWriter])
@pytest.mark.parametrize("reader", [Reader, FileSystemReader])
def test_tensors_on_the_device_go_both_ways(tmp_path, writer, reader):
    state, target = make(torch.randn), make(torch.zeros)
    dcp.save(state, storage_writer=writer(tmp_path / "x"))
    places = {key: tensor.data_ptr() for key, tensor in target.items()}
    dcp.load(target, storage_reader=reader(tmp_path / "x"))
    for key, tensor in state.items():
        assert torch.equal(target[key], tensor), key
        assert target[key].data_ptr() == places[key]


def test_device_memory_does_not_rise(tmp_path):
    state, target = make(torch.randn), make(torch.zeros)
    module = torch.get_device_module(compat.accelerator())
    module.reset_peak_memory_stats()
    before = module.max_memory_allocated()
    dcp.save(state, storage_writer=Writer(tmp_path / "x"))
    dcp.load(target, storage_reader=Reader(tmp_path / "x"))
    assert module.max_memory_allocated() - before <= 8 << 20
