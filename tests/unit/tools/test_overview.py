"""What a checkpoint holds is shown without torch: leaves, totals, groups, files, absent state."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.unit.tools.samples import VERSIONS, golden, save_run
from tests.unit.tools.test_check import Trap

from orlop.errors import CheckpointUnsafe
from orlop.tools import overview, param_groups
from orlop.tools.opened import Opened
from orlop.tools.plain_records import Described, scalar


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("layout", ["nested", "flattened"])
def test_groups_and_absent_state_of_plain_checkpoints(tmp_path, version, layout):
    opened = Opened(golden(version, tmp_path, layout))
    one, two = param_groups.groups(opened)
    assert (sorted(one.params), two.params) == (["matrix", "unused"], ["single"])
    assert (one.options["lr"], two.options["lr"]) == (0.01, 0.03)
    assert [tuple(group.options["betas"]) for group in (one, two)] == [(0.9, 0.999), (0.8, 0.99)]
    assert param_groups.absent(opened) == {"optimizer": ["unused"]}


def test_an_orlop_checkpoint(tmp_path):
    opened = Opened(save_run(tmp_path, (10,)) / "step-00000010")
    assert param_groups.absent(opened) == {"optimizer": ["unused"]}
    (group,) = param_groups.groups(opened)
    assert group.options["lr"] == 0.01
    parts = {part.part: part for part in overview.parts(overview.leaves(opened.catalog), {"optimizer"})}
    assert parts["optimizer.state.*.step"].num_leaves == parts["optimizer.state.*.exp_avg"].num_leaves
    assert parts["rng"].num_elements == 0
    assert all(row.is_indexed for row in overview.files(opened) if row.name.endswith(".distcp"))


def test_patterns(tmp_path):
    catalog = Opened(golden("2.6.0", tmp_path)).catalog
    assert [row.leaf for row in overview.leaves(catalog, "model.*")] == [
        "model.matrix",
        "model.single",
        "model.unused",
    ]
    assert len(overview.leaves(catalog, "exp_avg")) == 6
    assert overview.leaves(catalog, "nothing") == []
    (row,) = overview.leaves(catalog, "model.matrix")
    assert (row.dtype, row.shape, row.num_chunks, row.nbytes) == ("float32", (5, 3), 2, 60)


def test_tensor_hyperparameters_show_their_value(tmp_path):
    groups = [{"lr": torch.tensor(0.5), "params": ["a"]}]
    dcp.save(
        {"optimizer": {"param_groups": groups}, "m": torch.ones(1)},
        checkpoint_id=tmp_path / "x",
    )
    (group,) = param_groups.groups(Opened(tmp_path / "x"))
    assert group.options["lr"] == 0.5


def test_f04_a_hostile_group_is_refused_and_not_executed(tmp_path):
    trap = Trap(str(tmp_path / "marker"))
    saved = {"optimizer": {"param_groups": [{"lr": trap, "params": ["a"]}]}, "m": torch.ones(1)}
    dcp.save(saved, checkpoint_id=tmp_path / "x")
    with pytest.raises(CheckpointUnsafe, match="mkdir"):
        param_groups.groups(Opened(tmp_path / "x"))
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool]
)
def test_scalars(dtype):
    tensor = torch.tensor(1, dtype=dtype)
    assert scalar(str(dtype).removeprefix("torch."), bytes(tensor.reshape(1).view(torch.uint8).tolist())) == 1


def test_a_scalar_of_another_dtype_is_described():
    assert isinstance(scalar("float8_e5m2", b"\0"), Described)
