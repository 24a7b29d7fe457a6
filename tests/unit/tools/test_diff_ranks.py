"""`diff` over numbers of ranks and kinds of sharding: the same training is the same, one other element is found."""

import random
from itertools import combinations

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.unit.tools.test_check import faults
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import orlop
from orlop import compat
from orlop.testing import run_ranks
from orlop.tools.diff import diff_checkpoints

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(compat.torch_release() < (2, 9), reason="FSDP2 does not run on the CPU there"),
]
BY = ("orlop", "plain")


class Net(nn.Module):
    """Rows that no number of ranks divides, and a parameter that never gets a gradient."""

    def __init__(self):
        super().__init__()
        for name, shape in (("matrix", (7, 3)), ("single", (1,)), ("unused", (2, 2))):
            self.register_parameter(
                name, nn.Parameter(torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape))
            )


def trained(world_size, steps, kind):
    """AdamW works element by element, so that the outcome is the same however the elements are spread."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model = Net()
    if world_size > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = kind(model.parameters(), lr=0.1)
    for step in range(steps):
        for name in ("matrix", "single"):
            param = getattr(model, name)
            whole = torch.arange(param.numel(), dtype=torch.float32).view(param.shape).add(step).sin()
            is_sharded = isinstance(param, DTensor)
            param.grad = (
                distribute_tensor(whole, param.device_mesh, param.placements) if is_sharded else whole
            )
        optimizer.step()
    return model, optimizer


def save(rank, folder, world_size):
    for steps in (1, 2):
        engine = orlop.TrainEngine(
            *trained(world_size, steps, orlop.SwapAdamW), parts={"rng": orlop.RngState()}
        )
        engine.save_dcp(f"{folder}/orlop-{world_size}-{steps}")
        model, optimizer = trained(world_size, steps, torch.optim.AdamW)
        state = {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
        }
        dcp.save(state, checkpoint_id=f"{folder}/plain-{world_size}-{steps}")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    save(0, folder, 1)
    for world_size in (2, 3):
        run_ranks(save, world_size, str(folder), world_size)
    return folder


KINDS = [f"{by}-{world_size}" for by in BY for world_size in (1, 2, 3)]


@pytest.mark.parametrize("one, two", list(combinations(KINDS, 2)))
def test_the_same_training_is_the_same_on_any_number_of_ranks_by_any_writer(saved, one, two):
    result = diff_checkpoints(saved / f"{one}-1", saved / f"{two}-1", exact=one[:5] == two[:5])
    # Random streams are kept per rank: what only one side has is noted. Plain DCP's have none at all.
    assert {finding.where.partition(".")[0] for finding in result.findings} <= {"rng"}
    assert result.is_same == (one[:5] == two[:5])
    assert result.values == []
    assert result.num_identical == result.num_compared >= 9


def test_two_writers_differ_bit_for_bit_in_implementation_flags_alone(saved):
    found = orlop.diff(saved / "orlop-2-2", saved / "plain-3-2", exact=True)
    assert {finding.where.partition(".")[0] for finding in found if finding.kind != "hyperparameter"} == {
        "rng"
    }
    assert {finding.where.rpartition(" ")[2] for finding in found if finding.kind == "hyperparameter"} <= {
        "foreach",
        "fused",
    }


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("ranks", [(1, 1), (1, 3), (3, 2)])
def test_two_steps_differ_in_the_same_numbers_on_any_number_of_ranks(saved, by, ranks):
    def differences(one, two):
        return diff_checkpoints(saved / f"{by}-{one}-1", saved / f"{by}-{two}-2").values

    values = differences(*ranks)
    assert values == differences(1, 1)
    by_leaf = {difference.leaf: difference for difference in values}
    assert by_leaf["optimizer.state.matrix.step"].first_values == (1.0, 2.0)
    assert by_leaf["model.matrix"].num_elements == 21
    assert not any("unused" in leaf for leaf in by_leaf)


def test_one_element_of_another_ranks_shard_is_found_at_its_global_place(saved, tmp_path):
    shapes = {"matrix": (7, 3), "single": (1,), "unused": (2, 2)}
    whole = {"model": {name: torch.empty(shape) for name, shape in shapes.items()}}
    dcp.load(whole, checkpoint_id=saved / "plain-3-1")
    whole["model"]["matrix"][6, 1] += 1
    dcp.save(whole, checkpoint_id=tmp_path / "x")
    (value,) = diff_checkpoints(saved / "plain-3-1", tmp_path / "x").values
    assert (value.leaf, value.first_index, value.num_different) == ("model.matrix", (6, 1), 1)


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_of_them_are_sound(saved, by, world_size):
    assert faults(saved / f"{by}-{world_size}-1") == []
