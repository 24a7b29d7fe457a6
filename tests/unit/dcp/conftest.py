import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from orlop.dcp import Writer


def sample_state():
    """Leaves of every kind that a record can hold."""
    torch.manual_seed(0)
    return {
        "matrix": torch.randn(30, 70),
        "half": torch.randn(3, 5).bfloat16(),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 3),
        "view": torch.randn(100)[3:50],
        "complex": torch.randn(3, dtype=torch.complex64),
        "bools": torch.tensor([True, False]),
        "ints": torch.arange(9),
        "large": torch.randn(300, 700),  # several checksum blocks, of which the last is short
        "plain": {"lr": 0.1, "betas": (0.9, 0.99), "name": "x"},
    }


def blank(state):
    return {
        k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else dict.fromkeys(v) for k, v in state.items()
    }


def assert_equal(a, b):
    for key, value in b.items():
        assert torch.equal(a[key], value) if isinstance(value, torch.Tensor) else a[key] == value, key


@pytest.fixture
def state():
    return sample_state()


@pytest.fixture(params=["orlop", "torch"])
def saved(request, tmp_path, state):
    """A checkpoint, and who wrote it."""
    path = tmp_path / "saved"
    writer = Writer(path) if request.param == "orlop" else FileSystemWriter(path)
    dcp.save(state, storage_writer=writer)
    return path, request.param
