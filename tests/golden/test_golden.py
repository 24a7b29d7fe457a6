"""What plain torch of other versions wrote is read by the torch at hand, bit for bit (see `write.py`)."""

import json
import tarfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import orlop
from orlop.errors import CheckpointError, CheckpointUnsafe
from orlop.testing import run_ranks

HERE = Path(__file__).parent
VERSIONS = ("2.6.0", "2.9.1", "2.10.0", "2.13.0", "2.15.0")
LAYOUTS = ("nested", "flattened")


def _unpack(version, folder):
    with tarfile.open(HERE / f"torch-{version}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def _truth(version):
    return json.loads((HERE / f"torch-{version}.json").read_text())


def _engine(swapped, placed=lambda tensor: tensor):
    model = nn.Module()
    for name, shape in (("matrix", (5, 3)), ("single", (1,)), ("unused", (2, 2))):
        model.register_parameter(name, nn.Parameter(placed(torch.full(shape, 9.0))))
    # Other values, and the groups in another order, than in the run that was saved.
    groups = [{"params": [model.single], "lr": 0.7}, {"params": [model.unused, model.matrix], "lr": 0.9}]
    kind = orlop.SwapAdamW if swapped else torch.optim.AdamW
    return orlop.TrainEngine(model, kind(groups, amsgrad=True))


def _raw(tensor):
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    whole = whole.detach().contiguous()
    return {
        "dtype": str(whole.dtype).removeprefix("torch."),
        "shape": list(whole.shape),
        "hex": bytes(whole.reshape(-1).view(torch.uint8).tolist()).hex(),
    }


def _require_equal(engine, report, truth):
    names = {param: name for name, param in engine.model.named_parameters()}
    optimizer = engine.optimizers["optimizer"]
    assert {name: _raw(param) for param, name in names.items()} == truth["model"]
    for param, name in names.items():
        if name == "unused":
            # Host-resident optimizers have room for it, with a fresh optimizer's values.
            assert not any(value.any() for value in optimizer.state.get(param, {}).values())
            continue
        state = {key: _raw(value) for key, value in optimizer.state[param].items()}
        assert state == truth["state"][name], name
    for group in optimizer.param_groups:
        mine = {names[param] for param in group["params"]}
        (saved,) = [each for each in truth["groups"] if set(each["params"]) == mine]
        for key, value in saved.items():
            if key not in ("params", "foreach", "fused", "capturable", "differentiable"):
                assert (list(group[key]) if key == "betas" else group[key]) == value, key
        # Where the writer's torch had no such option, AdamW's own maths.
        assert group.get("decoupled_weight_decay", True) is True
    assert [finding.leaf for finding in report.of("absent")] == ["optimizer.state.unused"]


def _require_goes_on(engine):
    """The next gradient is the unused parameter's first and the others' fourth."""
    _require_steps(engine, matrix=3, single=3)


def _require_steps(engine, before=0, **more):
    """One step; then each parameter's count is one more than it was."""
    for param in engine.model.parameters():
        param.grad = torch.ones_like(param)
    assert engine.step_optimizer(1.0)
    state = engine.optimizers["optimizer"].state
    for name, param in engine.model.named_parameters():
        assert state[param]["step"].item() == more.get(name, before) + 1, name


def _load_all(folder, placed):
    for version in VERSIONS:
        for layout in LAYOUTS:
            for swapped in (False, True):
                engine = _engine(swapped, placed)
                report = engine.load_dcp(Path(folder, version, layout))
                _require_equal(engine, report, _truth(version))
                _require_goes_on(engine)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("swapped", [False, True], ids=["stock", "swapped"])
def test_one_process_reads_what_two_ranks_wrote(tmp_path, version, layout, swapped):
    engine = _engine(swapped)
    report = engine.load_dcp(_unpack(version, tmp_path) / layout)
    _require_equal(engine, report, _truth(version))
    _require_goes_on(engine)


def _on_ranks(rank, folder, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    _load_all(folder, lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)]))


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_read_what_two_ranks_wrote(tmp_path, world_size):
    for version in VERSIONS:
        _unpack(version, tmp_path / version)
    run_ranks(_on_ranks, world_size, str(tmp_path), world_size)


class _OneBlobPerList(DefaultSavePlanner):
    """Torch up to 2.3 did not flatten lists: all param groups are one byte leaf."""

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        self.state_dict, self.is_coordinator = state_dict, is_coordinator
        self.mappings = {key: (key,) for key in state_dict}


def test_e01_groups_in_one_blob_as_torch_23_wrote_them(tmp_path):
    first, second = _engine(swapped=False), _engine(swapped=False)
    _require_steps(first)
    names = {param: name for name, param in first.model.named_parameters()}
    optimizer = first.optimizers["optimizer"]
    leaves = {f"model.{name}": param.detach() for param, name in names.items()}
    for param, state in optimizer.state.items():
        leaves.update({f"optimizer.state.{names[param]}.{key}": value for key, value in state.items()})
    leaves["optimizer.param_groups"] = [
        {**group, "lr": 0.125, "params": [names[param] for param in group["params"]]}
        for group in optimizer.param_groups
    ]
    dcp.save(leaves, checkpoint_id=tmp_path / "x", planner=_OneBlobPerList())
    second.load_dcp(tmp_path / "x")
    assert [group["lr"] for group in second.optimizers["optimizer"].param_groups] == [0.125, 0.125]
    _require_steps(second, before=1)


def test_e03_a_checkpoint_of_a_newer_orlop_is_refused_by_its_version(tmp_path):
    engine = _engine(swapped=True)
    engine.save_dcp(tmp_path / "x")
    note = tmp_path / "x" / "orlop.json"
    content = json.loads(note.read_text())
    note.write_text(
        json.dumps({**content, "schema_version": 1 + content["schema_version"], "orlop_version": "9.1"})
    )
    before = _raw(engine.model.matrix)
    with pytest.raises(CheckpointError, match="written by a newer orlop") as caught:
        engine.load_dcp(tmp_path / "x")
    assert "schema_version 2, written by orlop 9.1" in caught.value.found
    assert "orlop.json" in caught.value.where
    assert _raw(engine.model.matrix) == before


def test_e03_metadata_that_names_a_class_of_a_newer_torch_is_refused_by_that_name(tmp_path):
    with tarfile.open(HERE / "torch-2.15.0.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    metadata = tmp_path / "nested" / ".metadata"
    metadata.write_bytes(metadata.read_bytes().replace(b"TensorStorageMetadata", b"TensorStorageMetadat9"))
    engine = _engine(swapped=True)
    before = _raw(engine.model.matrix)
    with pytest.raises(CheckpointUnsafe, match="TensorStorageMetadat9") as caught:
        engine.load_dcp(tmp_path / "nested")
    assert "a newer torch" in caught.value.todo
    assert _raw(engine.model.matrix) == before


def test_all_of_them_stay_small():
    assert sum(path.stat().st_size for path in HERE.iterdir() if path.is_file()) <= 300 * 1024
    for version in VERSIONS:
        assert _truth(version)["torch"].partition("+")[0] == version
