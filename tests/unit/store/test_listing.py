"""What a run's directory holds, complete or why not."""

from pathlib import Path

from orlop.errors import CheckpointCorrupt, CheckpointError, CheckpointIncomplete
from orlop.store import files
from orlop.store.listing import list_checkpoints, read_checkpoint
from orlop.store.manifest import Manifest, write_manifest


def checkpoint(path: Path, *, manifest: bool = True) -> Path:
    path.mkdir(parents=True)
    (path / ".metadata").write_bytes(b"meta")
    (path / "__0_0.distcp").write_bytes(b"data!")
    if manifest:
        write_manifest(path, Manifest(torch_version="2", world_size=1, files=files.file_sizes(path)))
    return path


def test_lists_checkpoints_alone_by_ascending_step(tmp_path: Path) -> None:
    checkpoint(tmp_path / "step-00000020")
    checkpoint(tmp_path / "step-3", manifest=False)
    checkpoint(tmp_path / "step-12x")
    checkpoint(tmp_path / "step-12.partial-h-1-00ff00ff")
    (tmp_path / "step-7").write_text("a file")
    found = list_checkpoints(tmp_path)
    assert [(entry.step, entry.path.name, entry.fault) for entry in found] == [
        (3, "step-3", None),
        (20, "step-00000020", None),
    ]
    assert found[0].manifest is None
    assert found[0].size == 9
    assert list_checkpoints(tmp_path / "nowhere") == []


def test_of_two_names_for_one_step_orlops_own_wins(tmp_path: Path) -> None:
    for name in ("step-00000012", "step-12", "step-012"):
        checkpoint(tmp_path / name)
    assert [entry.path.name for entry in list_checkpoints(tmp_path)] == ["step-00000012"]


def test_a_fault_says_what_and_where(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "step-1")
    (path / "__0_0.distcp").write_bytes(b"")
    entry = read_checkpoint(path, 1)
    assert isinstance(entry.fault, CheckpointIncomplete)
    assert entry.fault.where == str(path)
    assert entry.fault.found == "__0_0.distcp has 0 bytes instead of 5"
    assert entry.skippable


def test_an_unreadable_manifest_is_a_fault_that_may_be_skipped(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "step-1")
    (path / "orlop.json").write_bytes(b"")
    entry = read_checkpoint(path, 1)
    assert isinstance(entry.fault, CheckpointCorrupt)
    assert entry.skippable


def test_a_newer_manifest_is_a_fault_that_may_not_be_skipped(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "step-1")
    (path / "orlop.json").write_text('{"schema_version": 99}')
    entry = read_checkpoint(path, 1)
    assert type(entry.fault) is CheckpointError
    assert not entry.skippable


def test_a_directory_that_vanishes_reads_as_incomplete(tmp_path: Path) -> None:
    entry = read_checkpoint(tmp_path / "gone", 1)
    assert isinstance(entry.fault, CheckpointIncomplete)
