"""Models with load hooks on several ranks: sharded leaves under old names, and one rank's refusal is every rank's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.modules import Remembers
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import orlop
from orlop import compat
from orlop.errors import CheckpointMismatch
from orlop.testing import run_ranks

pytestmark = pytest.mark.dist

# Before, FSDP2 itself moves uneven shards when a state dict is loaded.
STAYS = compat.torch_release() >= (2, 10)


class Net(nn.Module):
    """Knows `a` by its old name `old`, too."""

    def __init__(self, name: str = "a") -> None:
        super().__init__()
        self.add_module(name, nn.Linear(3, 5))
        self.b = nn.Linear(5, 2)
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
        if hasattr(module, "a"):
            for key in [key for key in state if key.startswith(f"{prefix}old.")]:
                state[key.replace("old.", "a.", 1)] = state.pop(key)


def sharded(seed: int, name: str = "a") -> orlop.TrainEngine:
    torch.manual_seed(seed)
    model = Net(name)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(model, mesh=mesh)
    return orlop.TrainEngine(model, torch.optim.SGD(model.parameters(), lr=0.1))


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def contents(engine: orlop.TrainEngine) -> dict[str, torch.Tensor]:
    return {name: local(value).clone() for name, value in engine.model.state_dict().items()}


def places(engine: orlop.TrainEngine) -> list[tuple[int, int]]:
    return [(id(param), local(param).data_ptr()) for param in engine.model.parameters()]


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def load_old_names(rank: int, root: Path) -> None:
    sharded(0, "old").save_dcp(root / "old", save_optimizer=False)
    first, second = sharded(0), sharded(3)
    where = places(second)
    report = second.load_dcp(root / "old")
    assert_same(contents(first), contents(second))
    assert not STAYS or places(second) == where
    assert {f.leaf for f in report.of("loaded")} == {f"model.{name}" for name in contents(second)}


@pytest.mark.fsdp
def test_sharded_leaves_are_found_under_old_names(tmp_path: Path) -> None:
    run_ranks(load_old_names, 2, tmp_path)


def refuse_on_one_rank(rank: int, root: Path) -> str:
    sharded(0).save_dcp(root / "x")
    engine = sharded(3)
    if rank == 1:
        engine.model.register_buffer("more", torch.ones(1))
    before, where = contents(engine), places(engine)
    with pytest.raises(CheckpointMismatch) as caught:
        engine.load_dcp(root / "x")
    assert_same(before, contents(engine))
    assert not STAYS or places(engine) == where
    engine.require_ready()
    return str(caught.value)


@pytest.mark.fsdp
def test_f03_what_one_rank_lacks_is_refused_on_all_and_changes_nothing(tmp_path: Path) -> None:
    one, two = run_ranks(refuse_on_one_rank, 2, tmp_path)
    assert one == two
    assert "missing: model.more (on rank 1)" in one


class Hooked(nn.Linear):
    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)


def load_stages(rank: int, root: Path) -> str:
    def stage(seed: int, more: bool = False) -> orlop.TrainEngine:
        """Only rank 1's stage has load hooks."""
        torch.manual_seed(seed + rank)
        layers = {f"layer{rank}": (Hooked if rank else nn.Linear)(3, 3)}
        model = nn.ModuleDict(layers | ({"more": nn.Linear(2, 2)} if more else {}))
        return orlop.TrainEngine(model, torch.optim.SGD(model.parameters(), lr=0.1))

    first, second = stage(0), stage(5)
    first.save_dcp(root / "x")
    second.load_dcp(root / "x")
    assert_same(contents(first), contents(second))
    stage(0, more=True).save_dcp(root / "more", save_optimizer=False)
    before = contents(third := stage(7))
    with pytest.raises(CheckpointMismatch) as caught:
        third.load_dcp(root / "more")
    assert_same(before, contents(third))
    third.require_ready()
    return str(caught.value)


def test_stages_of_which_one_has_hooks_take_each_its_own(tmp_path: Path) -> None:
    one, two = run_ranks(load_stages, 2, tmp_path)
    assert one == two
    assert "2 unexpected" in one
    assert "unexpected: model.more.weight" in one


def save_extra(rank: int, root: Path) -> object:
    mine, same = {"of": rank, f"only {rank}": torch.ones(rank + 1)}, {"t": torch.ones(2), "n": 7}
    model = nn.Sequential(Remembers(mine), Remembers(same), nn.Linear(2, 2))
    engine = orlop.TrainEngine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    engine.save_dcp(root / "x")
    model[0].value, model[1].value = None, None
    engine.load_dcp(root / "x")
    assert model[1].value["n"] == 7
    assert torch.equal(model[1].value["t"], torch.ones(2))
    return sorted(model[0].value)


def test_extra_state_that_differs_by_rank_is_saved_whole_of_one(tmp_path: Path) -> None:
    assert run_ranks(save_extra, 2, tmp_path) == [["of", "only 0"]] * 2
    keys = FileSystemReader(tmp_path / "x").read_metadata().state_dict_metadata
    extra = {key for key in keys if "_extra_state" in key}
    assert extra == {"model.0._extra_state", "model.1._extra_state.t", "model.1._extra_state.n"}
