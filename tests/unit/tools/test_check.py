"""`verify`: sound ones are sound, every kind of damage is found and named, nothing is executed."""

import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.unit.tools.samples import VERSIONS, data_file, engine, flip, golden, save_large, save_run, train

import orlop
from orlop.errors import CheckpointIncomplete, CheckpointNotFound
from orlop.store.manifest import read_manifest, write_manifest
from orlop.tools.check import check_checkpoint
from orlop.tools.convert import convert
from orlop.tools.deep import check_deep


def faults(path):
    return [finding for finding in orlop.verify(path) if finding.is_fault]


@pytest.fixture(params=["plain", "orlop"])
def large(request, tmp_path):
    return save_large(tmp_path / "large", by_orlop=request.param == "orlop")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("layout", ["nested", "flattened"])
def test_plain_checkpoints_are_sound_and_wholly_checked(tmp_path, version, layout):
    result = check_checkpoint(golden(version, tmp_path, layout))
    assert result.findings == []
    assert result.bytes_read == result.bytes_checked > 4000
    assert result.num_leaves > 30


def test_an_orlop_checkpoint_is_sound(tmp_path):
    result = check_checkpoint(save_run(tmp_path, (10,)) / "step-00000010")
    assert [finding for finding in result.findings if finding.is_fault] == []
    assert result.bytes_checked == result.bytes_read > 0


def test_nothing_there(tmp_path):
    with pytest.raises(CheckpointNotFound, match="nowhere"):
        orlop.verify(tmp_path / "nowhere")


@pytest.mark.parametrize("at", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_c10_one_flipped_bit_is_found_and_its_leaf_and_file_are_named(large, at):
    flip(data_file(large), at)
    (found,) = faults(large)
    assert found.kind == "corrupt"
    assert "model." in found.where
    assert data_file(large).name in found.where


def test_c10_every_flip_is_found_not_the_first(large):
    flip(data_file(large), 0.2)
    flip(data_file(large), 0.8)
    assert len(faults(large)) == 2


@pytest.mark.parametrize("part", [0.0, 0.5, 0.999])
def test_c10_a_truncated_data_file_is_found(large, part):
    path = data_file(large)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    assert any(
        found.kind in ("corrupt", "incomplete") and path.name in found.where for found in faults(large)
    )


def test_c10_a_hole_of_zeros_is_found(large):
    content = bytearray(data_file(large).read_bytes())
    content[300_000 : 300_000 + 65536] = bytes(65536)
    data_file(large).write_bytes(content)
    assert [found.kind for found in faults(large)] == ["corrupt"]


def test_c10_a_missing_data_file_is_found(large):
    name = data_file(large).name
    data_file(large).unlink()
    assert any(name in found.where and found.kind == "incomplete" for found in faults(large))


@pytest.mark.parametrize("content", [b"", b"\x80\x04", None])
def test_c10_damaged_metadata_is_found(large, content):
    path = large / ".metadata"
    path.write_bytes(path.read_bytes()[:-40] if content is None else content)
    found = faults(large)
    assert any(".metadata" in each.where and each.kind == "corrupt" for each in found)


def test_damaged_data_is_found_even_where_the_metadata_is_lost(tmp_path):
    path = save_large(tmp_path / "x", by_orlop=True)
    (path / ".metadata").unlink()
    flip(data_file(path), 0.5)
    kinds = {(found.kind, "model." in found.where) for found in faults(path)}
    assert kinds == {("incomplete", False), ("corrupt", True)}


def test_a_damaged_index_is_found_and_the_data_is_checked_without_it(tmp_path):
    path = save_large(tmp_path / "x", by_orlop=True)
    (index,) = path.glob("*.index.json")
    flip(index, 0.5)
    flip(data_file(path), 0.5)
    wheres = [found.where for found in faults(path)]
    assert any(index.name in where for where in wheres)
    assert any(where.startswith("model.") for where in wheres)


class Trap:
    """Makes a directory when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def test_f04_hostile_metadata_is_named_and_not_executed(tmp_path):
    path = save_large(tmp_path / "x", by_orlop=False)
    (path / ".metadata").write_bytes(pickle.dumps(Trap(str(tmp_path / "marker"))))
    (found,) = faults(path)
    assert found.kind == "unsafe"
    assert "mkdir" in found.found
    assert not (tmp_path / "marker").exists()


def test_f04_a_hostile_byte_leaf_is_named_and_not_executed(tmp_path):
    path = tmp_path / "x"
    dcp.save({"trap": Trap(str(tmp_path / "marker"))}, checkpoint_id=path)
    (found,) = faults(path)
    assert (found.kind, found.where.split(" in ")[0]) == ("unsafe", "trap")
    assert "mkdir" in found.found
    assert not (tmp_path / "marker").exists()


def test_state_that_is_there_in_part_is_found(tmp_path):
    state = {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2), "step": torch.tensor(1.0)}
    broken = {"exp_avg": torch.ones(2)}
    saved = {
        "model": {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)},
        "optimizer": {
            "state": {"a": state, "b": broken},
            "param_groups": [{"lr": 0.1, "params": ["a", "b", "c"]}],
        },
    }
    dcp.save(saved, checkpoint_id=tmp_path / "x")
    (found,) = faults(tmp_path / "x")
    assert (found.kind, found.where) == ("partial", "optimizer.state.b")
    assert found.expected == "exp_avg, exp_avg_sq, step"


def test_a_leaf_that_the_metadata_forgot_is_found_in_the_index(tmp_path):
    path = tmp_path / "x"
    dcp.save({"a": torch.ones(2), "b": torch.ones(3), "c": [1]}, storage_writer=orlop.dcp.Writer(path))
    assert not faults(path)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for leaf in ("b", "c"):
        del metadata.state_dict_metadata[leaf]
    metadata.storage_data = {i: info for i, info in metadata.storage_data.items() if i.fqn == "a"}
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    (path / "metadata.json").unlink()
    assert [(found.kind, found.where.split(" in ")[0]) for found in faults(path)] == [
        ("lost", "b"),
        ("lost", "c"),
    ]


def test_other_state_in_another_group_is_no_fault(tmp_path):
    plain = {"exp_avg": torch.ones(2)}
    saved = {
        "model": {"a": torch.ones(2), "b": torch.ones(2)},
        "optimizer": {
            "state": {"a": plain, "b": {**plain, "max_exp_avg_sq": torch.ones(2)}},
            "param_groups": [{"amsgrad": False, "params": ["a"]}, {"amsgrad": True, "params": ["b"]}],
        },
    }
    dcp.save(saved, checkpoint_id=tmp_path / "x")
    assert faults(tmp_path / "x") == []


def test_state_of_other_names_is_found(tmp_path):
    saved = {
        "model": {"a": torch.ones(2)},
        "optimizer": {
            "state": {"module.a": {"exp_avg": torch.ones(2)}},
            "param_groups": [{"params": ["module.a"]}],
        },
    }
    dcp.save(saved, checkpoint_id=tmp_path / "x")
    assert [found.kind for found in faults(tmp_path / "x")] == ["names"]


def test_a_file_that_the_manifest_promises_is_missed(tmp_path):
    path = save_run(tmp_path, (10,)) / "step-00000010"
    data_file(path).unlink()
    found = faults(path)
    assert {each.kind for each in found} == {"incomplete"}
    assert len([each for each in found if each.where.endswith(".distcp")]) == 1


def test_deep_compares_the_fingerprint(tmp_path):
    path = save_run(tmp_path, (10,), fingerprint=True) / "step-00000010"
    assert check_deep(path) == []
    manifest = read_manifest(path)
    changed = {**manifest.fingerprint, "model.second.bias": "00"}
    write_manifest(path, manifest.model_copy(update={"fingerprint": changed}))
    (found,) = check_deep(path)
    assert (found.kind, found.where, found.expected) == ("fingerprint", "model.second.bias", "00")


def test_the_fingerprint_of_a_checkpoint_is_its_engines(tmp_path):
    trained = engine()
    train(trained, 2)
    orlop.CheckpointStore(tmp_path).save(trained, 1)
    assert orlop.fingerprint(tmp_path / "step-00000001") == orlop.fingerprint(trained)


def edit_metadata(path, edit):
    """Change a plain checkpoint's metadata, as a save that failed half-way would have left it."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    edit(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def test_a_region_that_no_chunk_covers_is_found_and_not_converted(tmp_path):
    path = golden("2.13.0", tmp_path)
    edit_metadata(path, lambda metadata: metadata.state_dict_metadata["model.matrix"].chunks.pop())
    gap, stray = faults(path)
    assert (gap.kind, gap.where) == ("incomplete", "model.matrix")
    assert "of its 15 elements" in gap.found
    assert (stray.kind, stray.where) == ("corrupt", "model.matrix")
    with pytest.raises(CheckpointIncomplete, match=r"model\.matrix"):
        convert(path, tmp_path / "out", to="dcp")
    assert not (tmp_path / "out").exists()


def test_a_chunk_that_stands_in_no_file_is_found(tmp_path):
    path = golden("2.13.0", tmp_path)

    def forget(metadata):
        for index in [index for index in metadata.storage_data if index.fqn == "model.matrix"][1:]:
            del metadata.storage_data[index]

    edit_metadata(path, forget)
    (found,) = faults(path)
    assert (found.kind, found.where) == ("incomplete", "model.matrix")
    assert "no file" in found.what


def test_a_record_of_another_shape_than_the_metadata_says_is_found(tmp_path):
    path = golden("2.13.0", tmp_path)

    def swap(metadata):
        places = metadata.storage_data
        one, two = (
            next(index for index in places if index.fqn == f"model.{name}") for name in ("matrix", "unused")
        )
        places[one], places[two] = places[two], places[one]

    edit_metadata(path, swap)
    found = faults(path)
    assert {each.where.split(" in ")[0] for each in found} == {"model.matrix", "model.unused"}
    assert {each.kind for each in found} == {"corrupt"}
    assert {each.what for each in found} == {"a record is not what the metadata says"}


def test_an_optimizer_whose_name_ends_as_anothers_is_judged_by_its_own_record(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizers = {
        "opt": torch.optim.AdamW(model[0].parameters()),
        "my_opt": torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9),
    }
    for key_prefix in ("", "run."):
        path = tmp_path / f"x{key_prefix}"
        orlop.TrainEngine(model, optimizers).save_dcp(path, key_prefix=key_prefix)
        assert faults(path) == []
