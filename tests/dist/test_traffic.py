"""What ranks send each other for a save and a load: plans and names, never state."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import orlop
from orlop.testing import run_ranks

pytestmark = pytest.mark.dist


def engine(rows: int, world_size: int) -> orlop.TrainEngine:
    torch.manual_seed(0)
    model = nn.Linear(64, rows, bias=False)
    mesh = init_device_mesh("cpu", (world_size,))
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    model.weight.grad = torch.ones_like(model.weight)
    optimizer = orlop.SwapAdamW(model.parameters(), lr=0.1)
    optimizer.step()
    return orlop.TrainEngine(model, optimizer)


class Traffic(TorchDispatchMode):
    """Sums the bytes of the tensors of all collectives; objects travel as tensors, too."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            self.sent += sum(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
        return func(*args, **(kwargs or {}))


def traffic(rank: int, root: Path, rows: int, world_size: int) -> tuple[int, int]:
    """Bytes in a save's and in a load's collectives on this rank."""
    run = engine(rows, world_size)
    with Traffic() as save:
        run.save_dcp(root / "x")
    with Traffic() as load:
        run.load_dcp(root / "x")
    return save.sent, load.sent


@pytest.mark.parametrize("world_size", [2, 4])
def test_f13_traffic_does_not_grow_with_the_state(tmp_path: Path, world_size: int) -> None:
    small = run_ranks(traffic, world_size, tmp_path / "small", 64, world_size)
    large = run_ranks(traffic, world_size, tmp_path / "large", 64 * 256, world_size)  # 12 MiB of state
    for before, after in zip(small, large):
        for less, more in zip(before, after):
            assert 0 < less < 256 << 10
            assert more < 1.1 * less
