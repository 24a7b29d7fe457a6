"""The order of operations around a published directory, and what is left after each way out."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from orlop.errors import CheckpointExists
from orlop.store import files, owned, publish
from orlop.store.catalog import unpublished_name
from orlop.store.manifest import Manifest, write_manifest


def fill(partial: Path) -> None:
    (partial / "__0_0.distcp").write_bytes(b"data")
    (partial / "__1_0.distcp").write_bytes(b"data")
    (partial / ".metadata").write_bytes(b"meta")
    write_manifest(partial, Manifest(torch_version="2", world_size=2, files=files.file_sizes(partial)))


def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def stray(root: Path, *, host: str, pid: int, final: str = "step-5", kind: str = "partial") -> Path:
    path = root / unpublished_name(final, kind=kind, host=host, pid=pid, token="00ff00ff")  # type: ignore[arg-type]
    path.mkdir()
    (path / "x").write_text("x")
    return path


def test_the_order_of_a_publish(tmp_path: Path) -> None:
    final = tmp_path / "run" / "step-1"
    partial = publish.begin_partial(final)
    fill(partial)
    log: list[tuple[str, str]] = []
    with files.observed(lambda operation: log.append((operation.kind, operation.path.name))):
        publish.publish(partial, final)
    assert log == [
        ("fsync", ".metadata"),
        ("fsync", "__0_0.distcp"),
        ("fsync", "__1_0.distcp"),
        ("fsync", "orlop.json"),
        ("fsync", partial.name),
        ("rename", partial.name),
        ("fsync", "run"),
    ]
    assert [path.name for path in final.parent.iterdir()] == ["step-1"]


def test_nested_files_and_their_directories_are_synced_before_the_rename(tmp_path: Path) -> None:
    final = tmp_path / "step-1"
    partial = publish.begin_partial(final)
    (partial / "part").mkdir()
    (partial / "part" / "x").write_text("x")
    log: list[tuple[str, str]] = []
    with files.observed(lambda operation: log.append((operation.kind, operation.path.name))):
        publish.publish(partial, final)
    assert log[:3] == [("fsync", "x"), ("fsync", "part"), ("fsync", partial.name)]


@pytest.mark.parametrize("kind", ["fsync", "rename"])
def test_nothing_is_published_when_an_operation_fails(tmp_path: Path, kind: str) -> None:
    final = tmp_path / "step-1"
    partial = publish.begin_partial(final)
    fill(partial)

    def refuse(operation: files.Operation) -> None:
        if operation.kind == kind:
            raise OSError(5, "Input/output error")

    with files.observed(refuse), pytest.raises(OSError, match="Input/output"):
        publish.publish(partial, final)
    assert not final.exists()
    publish.discard(partial)
    assert list(tmp_path.iterdir()) == []


def test_an_occupied_name_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    final = tmp_path / "step-1"
    final.mkdir()
    (final / "x").write_text("mine")
    with pytest.raises(CheckpointExists) as caught:
        publish.begin_partial(final)
    assert caught.value.where == str(final)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert (final / "x").read_text() == "mine"


def test_a_file_of_that_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step-1").write_text("mine")
    with pytest.raises(CheckpointExists) as caught:
        publish.begin_partial(tmp_path / "step-1")
    assert caught.value.where == str(tmp_path / "step-1")
    assert (tmp_path / "step-1").read_text() == "mine"


def test_an_empty_directory_is_free(tmp_path: Path) -> None:
    final = tmp_path / "step-1"
    final.mkdir()
    partial = publish.begin_partial(final)
    fill(partial)
    publish.publish(partial, final)
    assert (final / ".metadata").exists()


def test_a_writer_that_was_faster_is_not_written_over(tmp_path: Path) -> None:
    final = tmp_path / "step-1"
    partial = publish.begin_partial(final)
    fill(partial)
    final.mkdir()
    (final / "x").write_text("theirs")
    with pytest.raises(CheckpointExists) as caught:
        publish.publish(partial, final)
    assert caught.value.where == str(final)
    assert [path.name for path in final.iterdir()] == ["x"]
    assert (partial / ".metadata").exists()


def test_retire_gives_up_the_name_durably_before_it_removes(tmp_path: Path) -> None:
    final = tmp_path / "step-1"
    final.mkdir()
    (final / "x").write_text("x")
    log: list[tuple[str, bool]] = []
    with files.observed(lambda operation: log.append((operation.kind, final.exists()))):
        publish.retire(final)
    assert log == [("rename", True), ("fsync", False), ("remove", False), ("remove", False)]
    assert list(tmp_path.iterdir()) == []


def test_set_aside_keeps_the_content(tmp_path: Path) -> None:
    final = tmp_path / "step-1"
    final.mkdir()
    (final / "x").write_text("x")
    aside = publish.set_aside(final)
    assert not final.exists()
    assert (aside / "x").read_text() == "x"
    assert aside not in owned.find_strays(tmp_path)


def test_strays_are_those_of_dead_processes(tmp_path: Path) -> None:
    host = socket.gethostname()
    dead = stray(tmp_path, host=host, pid=dead_pid())
    retired = stray(tmp_path, host=host, pid=dead_pid(), kind="retired", final="step-4")
    reused = stray(tmp_path, host=host, pid=os.getpid())
    silent = stray(tmp_path, host="elsewhere", pid=1, final="step-6")
    for path in (silent / "x", silent):
        os.utime(path, (1.0, 1.0))
    stray(tmp_path, host=host, pid=os.getppid())  # alive
    stray(tmp_path, host="elsewhere", pid=2)  # it has just written
    (tmp_path / "step-9.partial-mine").mkdir()  # a foreign name
    begun = publish.begin_partial(tmp_path / "step-7")
    assert owned.find_strays(tmp_path) == sorted([dead, retired, reused, silent])
    publish.discard(begun)
