"""Damage found at any depth, with the real save and resume: an older checkpoint is taken, bit for bit."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.fault.tiny import Tiny, expected_states, same

import orlop
from orlop import CheckpointStore
from orlop.errors import CheckpointCorrupt, CheckpointError, CheckpointIncomplete, StateNotReady, StorageFull
from orlop.resume import LoadPolicy
from orlop.store import files
from orlop.testing import FaultyFiles, observed, run_ranks
from orlop.tools.reindex import index_in_place

STATES = expected_states(4)


def saved(root: Path, last: int) -> CheckpointStore:
    tiny, store = Tiny(), CheckpointStore(root)
    for step in range(1, last + 1):
        store.save(tiny.train(step).engine, step)
    return store


def overwrite(path: Path) -> None:
    """Other bytes, the same size: only reading the content can tell."""
    path.write_bytes(b"\x5a" * path.stat().st_size)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_c05_content_that_is_damaged_makes_resume_go_on_to_the_next_older(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    store = saved(tmp_path, 3)
    overwrite(store.path(3) / name)
    tiny = Tiny().train(4)
    with caplog.at_level(logging.WARNING):
        resumed = store.resume(tiny.engine)
    assert resumed is not None
    assert resumed.step == 2
    assert same(tiny.state(), STATES[2])
    warned = [record.getMessage() for record in caplog.records if "passed over" in record.getMessage()]
    assert len(warned) == 1
    assert "step-00000003" in warned[0]
    # The engine is ready again: it trains on, and saves the damaged one's step anew.
    store.save(tiny.train(3).engine, 3)
    other = Tiny()
    again = CheckpointStore(tmp_path).resume(other.engine)
    assert again is not None
    assert again.step == 3
    assert same(other.state(), STATES[3])


@pytest.mark.parametrize("gone", [["orlop.json"], ["orlop.json", "metadata.json"]])
def test_c05_a_manifest_that_is_gone_is_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, gone: list[str]
) -> None:
    store = saved(tmp_path, 3)
    for name in gone:
        (store.path(3) / name).unlink()
    place = str(store.path(3) / "orlop.json")
    tiny = Tiny().train(1)
    for act in (lambda: store.resume(tiny.engine, step=3), lambda: tiny.engine.load_dcp(store.path(3))):
        with pytest.raises(CheckpointIncomplete, match=r"orlop\.json is missing") as caught:
            act()
        assert place in str(caught.value.where)
        assert same(tiny.state(), STATES[1])
    (finding,) = [finding for finding in orlop.verify(store.path(3)) if finding.is_fault][:1]
    assert (finding.kind, finding.where) == ("incomplete", place)
    with caplog.at_level(logging.WARNING):
        resumed = CheckpointStore(tmp_path).resume(tiny.engine)
    assert resumed is not None
    assert resumed.step == 2
    assert same(tiny.state(), STATES[2])
    (warned,) = [record.getMessage() for record in caplog.records if "passed over" in record.getMessage()]
    assert "orlop.json is missing" in warned


def test_what_never_had_a_manifest_does_not_miss_one(tmp_path: Path) -> None:
    tiny = Tiny().train(2)
    tiny.engine.save_dcp(tmp_path / "writer", storage_writer=orlop.dcp.Writer(tmp_path / "writer"))
    tiny.engine.save_dcp(tmp_path / "torch", storage_writer=dcp.FileSystemWriter(tmp_path / "torch"))
    assert index_in_place(tmp_path / "torch")
    for name in ("writer", "torch"):
        assert (tmp_path / name / "__0_0.index.json").exists()
        assert not (tmp_path / name / "orlop.json").exists()
        assert not [finding for finding in orlop.verify(tmp_path / name) if finding.is_fault]
        other = Tiny()
        other.engine.load_dcp(tmp_path / name)
        assert same(other.state(), STATES[2])


def test_verify_checks_the_data_of_a_checkpoint_whose_manifest_is_damaged(tmp_path: Path) -> None:
    store = saved(tmp_path, 1)
    overwrite(store.path(1) / "orlop.json")
    (fault,) = [finding for finding in orlop.verify(store.path(1)) if finding.is_fault]
    assert fault.where == str(store.path(1) / "orlop.json")
    content = bytearray((store.path(1) / "__0_0.distcp").read_bytes())
    content[content.index(b"archive/data/0") - 200] ^= 1
    (store.path(1) / "__0_0.distcp").write_bytes(content)
    assert len([finding for finding in orlop.verify(store.path(1)) if finding.is_fault]) == 2


def test_c10_an_explicit_step_that_is_damaged_raises_and_leaves_nothing_half_usable(tmp_path: Path) -> None:
    store = saved(tmp_path, 3)
    overwrite(store.path(3) / "__0_0.distcp")
    tiny = Tiny().train(1)
    with pytest.raises(CheckpointError) as caught:
        store.resume(tiny.engine, step=3)
    assert isinstance(caught.value, (CheckpointCorrupt, CheckpointIncomplete))
    assert "__0_0.distcp" in str(caught.value)
    assert "optimizer." in str(caught.value)
    try:
        tiny.engine.require_ready()
    except StateNotReady:
        with pytest.raises(StateNotReady):
            store.save(tiny.engine, 4)
    else:
        assert same(tiny.state(), STATES[1])
    resumed = store.resume(tiny.engine, step=2)
    assert resumed is not None
    assert same(tiny.state(), STATES[2])


def test_when_all_are_damaged_nothing_starts_afresh(tmp_path: Path) -> None:
    store = saved(tmp_path, 2)
    for step in (1, 2):
        overwrite(store.path(step) / "__0_0.distcp")
    with pytest.raises(CheckpointCorrupt, match=r"__0_0\.distcp"):
        store.resume(Tiny().engine)


def test_checksums_can_be_compared_before_the_first_live_value_changes(tmp_path: Path) -> None:
    store = saved(tmp_path, 2)
    path = store.path(2) / "__0_0.distcp"
    assert isinstance(path, Path)
    content = bytearray(path.read_bytes())
    # The last byte of a tensor's values: a load finds it only after others have been filled.
    index = json.loads((store.path(2) / "__0_0.index.json").read_text())
    last = max(record["data"] for record in index["records"] if record["dtype"] is not None)
    content[sum(last) - 1] ^= 1
    path.write_bytes(bytes(content))

    tiny = Tiny().train(3)
    with pytest.raises(CheckpointCorrupt, match=r"__0_0\.distcp"):
        store.resume(tiny.engine, step=2, policy=LoadPolicy(verify_first=True))
    tiny.engine.require_ready()
    assert same(tiny.state(), STATES[3])
    with pytest.raises(CheckpointCorrupt, match=r"__0_0\.distcp"):
        store.resume(tiny.engine, step=2)
    with pytest.raises(StateNotReady):
        tiny.engine.require_ready()
    resumed = store.resume(tiny.engine, policy=LoadPolicy(verify_first=True))
    assert resumed is not None
    assert resumed.step == 1
    assert same(tiny.state(), STATES[1])


def fall_back(rank: int, root: Path) -> bool:
    if rank == 0:
        overwrite(root / "step-00000003" / "__1_0.distcp")
    dist.barrier()
    tiny = Tiny()
    resumed = CheckpointStore(root).resume(tiny.engine)
    assert resumed is not None
    assert resumed.step == 2
    return same(tiny.state(), STATES[2])


def save_three(rank: int, root: Path) -> list[int]:
    return saved(root, 3).steps()


@pytest.mark.dist
def test_two_ranks_go_back_together(tmp_path: Path) -> None:
    assert run_ranks(save_three, 2, tmp_path) == [[1, 2, 3], [1, 2, 3]]
    assert run_ranks(fall_back, 2, tmp_path) == [True, True]


# -- C02, C23: what stands there -------------------------------------------------------------------------------


def test_c02_at_every_instant_there_is_a_complete_checkpoint(tmp_path: Path) -> None:
    tiny, store = Tiny(), CheckpointStore(tmp_path, keep_last=1)
    store.save(tiny.train(1).engine, 1)
    seen: list[list[int]] = []
    with observed(lambda operation: seen.append(store.steps())):
        store.save(tiny.train(2).engine, 2)
    assert all(seen)
    assert [1] in seen
    assert [1, 2] in seen
    assert store.steps() == [2]


def test_c23_a_checkpoint_is_self_contained(tmp_path: Path) -> None:
    saved(tmp_path / "run", 2)
    shutil.copytree(tmp_path / "run" / "step-00000001", tmp_path / "elsewhere" / "step-7")
    shutil.rmtree(tmp_path / "run")
    tiny = Tiny()
    resumed = CheckpointStore(tmp_path / "elsewhere").resume(tiny.engine)
    assert resumed is not None
    assert same(tiny.state(), STATES[1])


# -- space -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_cannot_fit_is_refused_before_anything_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    tiny = Tiny()
    store.save(tiny.train(1).engine, 1)
    before = files.file_sizes(tmp_path)
    monkeypatch.setattr(files, "free_bytes", lambda path: 2**20 + 100)
    with FaultyFiles() as disk, pytest.raises(StorageFull) as caught:
        store.save(tiny.train(2).engine, 2)
    # Weights, bias and two moments each, in float32; and two counters of steps.
    needed = 2**20 + 3 * 4 * (16 + 4) + 2 * 4
    assert caught.value.expected == f"{needed:,} bytes free"
    assert caught.value.found == f"{2**20 + 100:,} bytes free"
    assert str(tmp_path) in str(caught.value.where)
    assert not [operation for operation in disk.operations if operation.kind in ("open", "write", "rename")]
    assert files.file_sizes(tmp_path) == before
    monkeypatch.setattr(files, "free_bytes", lambda path: needed)
    store.save(tiny.engine, 2)
    assert store.steps() == [2]


def test_a_file_system_that_does_not_tell_its_space_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "free_bytes", lambda path: None)
    CheckpointStore(tmp_path).save(Tiny().train(1).engine, 1)
    assert CheckpointStore(tmp_path).steps() == [1]
