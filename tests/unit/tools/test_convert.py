"""`convert`: bit-exact, streaming, whole or not at all, whatever wrote the checkpoint."""

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from tests.unit.tools.samples import VERSIONS, data_file, engine, flip, golden, save_large, save_run, train

import orlop
from orlop.errors import CheckpointCorrupt, CheckpointExists, CheckpointMismatch, CheckpointNotFound
from orlop.tools.convert import convert
from orlop.tools.reindex import index_in_place


def truth(version):
    from tests.unit.tools.samples import GOLDEN

    return json.loads((GOLDEN / f"torch-{version}.json").read_text())


def raw(tensor):
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()).hex()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_plain_checkpoint_as_safetensors(tmp_path, version):
    source = golden(version, tmp_path)
    result = convert(source, tmp_path / "out", to="safetensors")
    assert (result.files, result.num_leaves) == (["model.safetensors"], 3)
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: raw(tensor) for name, tensor in loaded.items()} == {
        name: entry["hex"] for name, entry in truth(version)["model"].items()
    }
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_sharded_safetensors_have_the_index_of_hugging_face(tmp_path):
    source = save_large(tmp_path / "x", by_orlop=True)
    result = convert(source, tmp_path / "out", to="safetensors", shard_bytes=2**20)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert result.files == [*names, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {"total_size": 2**21}, "weight_map": {"a": names[0], "b": names[1]}}
    assert torch.equal(load_file(tmp_path / "out" / names[0])["a"], torch.arange(2**18, dtype=torch.float32))


def test_tied_entries_are_written_once(tmp_path):
    source = save_run(tmp_path / "run", (10,)) / "step-00000010"
    result = convert(source, tmp_path / "out", to="safetensors")
    assert len({"first.weight", "tied.weight"} & set(load_file(tmp_path / "out" / "model.safetensors"))) == 1
    assert len(result.left_out) == 1


def test_only_the_model_is_cast_unless_asked(tmp_path):
    source = golden("2.13.0", tmp_path)
    convert(source, tmp_path / "a", to="dcp", dtype="bf16")
    convert(source, tmp_path / "b", to="dcp", dtype="bf16", cast_moments=True)
    for name, moments in (("a", "float32"), ("b", "bfloat16")):
        dtypes = {
            leaf: entry.dtype
            for leaf, entry in orlop_catalog(tmp_path / name).leaves.items()
            if entry is not None
        }
        assert dtypes["model.matrix"] == "bfloat16"
        assert dtypes["optimizer.state.matrix.exp_avg"] == moments
        assert dtypes["optimizer.state.matrix.step"] == "float32"


def orlop_catalog(path):
    from orlop.tools.opened import Opened

    return Opened(path).catalog


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("layout", ["nested", "flattened"])
def test_to_dcp_is_the_same_and_plain_torch_reads_it(tmp_path, version, layout):
    source = golden(version, tmp_path, layout)
    convert(source, tmp_path / "out", to="dcp")
    assert orlop.diff(source, tmp_path / "out", exact=True) == []
    assert orlop.verify(tmp_path / "out") == []
    state = {"model": {"matrix": torch.zeros(5, 3)}}
    dcp.load(state, checkpoint_id=tmp_path / "out")
    assert raw(state["model"]["matrix"]) == truth(version)["model"]["matrix"]["hex"]


def test_to_dcp_of_orlops_own_resumes_as_before(tmp_path):
    trained = engine()
    train(trained, 2)
    orlop.CheckpointStore(tmp_path / "run").save(trained, 2, fingerprint=True)
    convert(tmp_path / "run" / "step-00000002", tmp_path / "new" / "step-00000002", to="dcp")
    resumed = engine(seed=1)
    found = orlop.CheckpointStore(tmp_path / "new").resume(resumed)
    assert found is not None
    assert [each.leaf for each in found.report.of("absent")] == ["optimizer.state.unused"]
    assert orlop.fingerprint(resumed) == orlop.fingerprint(trained)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_torch_file_is_what_torchs_own_converter_makes(tmp_path, version):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    source = golden(version, tmp_path)
    convert(source, tmp_path / "ours.pt", to="torch")
    dcp_to_torch_save(source, tmp_path / "torchs.pt")
    ours = torch.load(tmp_path / "ours.pt", weights_only=True)
    theirs = torch.load(tmp_path / "torchs.pt", weights_only=True)
    require_same(ours, theirs)
    assert type(ours["optimizer"]["param_groups"]) is list
    mapped = torch.load(tmp_path / "ours.pt", weights_only=True, mmap=True)
    require_same(mapped, theirs)
    assert mapped["model"]["matrix"].data_ptr() % 64 == 0


def require_same(one, two):
    assert type(one) is type(two)
    if isinstance(one, dict):
        assert list(one) == list(two) or set(one) == set(two)
        for key in one:
            require_same(one[key], two[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(two)
        for mine, other in zip(one, two):
            require_same(mine, other)
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, raw(one)) == (two.dtype, two.shape, raw(two))
    else:
        assert one == two


def test_containers_key_types_and_dtypes_survive(tmp_path):
    plain = {1: "int key", "t": (1, [2.5, None]), b"b": {"n": torch.arange(3)}}
    tensors = {
        str(dtype): torch.ones(2, 3).to(dtype)
        for dtype in (
            torch.bool,
            torch.uint8,
            torch.bfloat16,
            torch.float8_e4m3fn,
            torch.complex64,
            torch.int64,
        )
    }
    saved = {"tensors": tensors, "empty": torch.ones(0, 3), "scalar": torch.tensor(2.0), "part": [plain]}
    dcp.save(saved, checkpoint_id=tmp_path / "x")
    convert(tmp_path / "x", tmp_path / "y", to="dcp")
    convert(tmp_path / "y", tmp_path / "z.pt", to="torch")
    loaded = torch.load(tmp_path / "z.pt", weights_only=True)
    require_same(loaded["tensors"], tensors)
    require_same(loaded["empty"], saved["empty"])
    require_same(loaded["scalar"], saved["scalar"])


@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp"])
def test_a_damaged_checkpoint_leaves_nothing_behind(tmp_path, to):
    source = save_large(tmp_path / "x", by_orlop=True)
    flip(data_file(source), 0.4)
    room = tmp_path / "room"
    room.mkdir()
    with pytest.raises(CheckpointCorrupt, match="model"):
        convert(source, room / "out", to=to)
    assert list(room.iterdir()) == []


@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp"])
def test_what_stands_there_is_kept(tmp_path, to):
    source = golden("2.6.0", tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(CheckpointExists, match="out"):
        convert(source, tmp_path / "out", to=to)
    assert (tmp_path / "out" / "mine").read_text() == "x"


def test_refusals_name_what_is_wrong(tmp_path):
    source = golden("2.6.0", tmp_path)
    with pytest.raises(CheckpointMismatch, match="float3"):
        convert(source, tmp_path / "out", to="torch", dtype="float3")
    with pytest.raises(CheckpointNotFound, match="modle"):
        convert(source, tmp_path / "out", to="torch", only=["modle"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("version", VERSIONS)
def test_indexes_in_place_change_nothing_else(tmp_path, version):
    source = golden(version, tmp_path)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    added = index_in_place(source)
    assert added == ["__0_0.index.json", "__1_0.index.json"]
    assert {name: (source / name).read_bytes() for name in before} == before
    assert orlop.verify(source) == []
    assert index_in_place(source) == []
    flip(source / "__1_0.distcp", 0.3)
    assert any(found.kind == "corrupt" for found in orlop.verify(source))


def test_damage_is_not_indexed(tmp_path):
    source = save_large(tmp_path / "x", by_orlop=False)
    flip(data_file(source), 0.4)
    with pytest.raises(CheckpointMismatch, match="found 1 fault,"):
        index_in_place(source)
    assert list(source.glob("*.json")) == []


PEAK = """
import resource, sys, torch
from orlop.tools.convert import convert
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert(sys.argv[1], sys.argv[2] + "/out", to=sys.argv[3])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp"])
def test_memory_is_bounded_by_the_largest_tensor(tmp_path, to):
    mib = 2**20
    state = {"model": {str(number): torch.ones(24 * mib // 4) for number in range(8)}}
    dcp.save(state, checkpoint_id=tmp_path / "x")
    command = [sys.executable, "-c", PEAK, str(tmp_path / "x"), str(tmp_path), to]
    grown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert int(grown) * 1024 <= (24 + 64) * mib
