"""FaultyFiles: which operation fails, how, and that nothing else does."""

import errno
from pathlib import Path

import pytest

from orlop.store import files
from orlop.testing import FaultyFiles


def write_two(root: Path) -> None:
    files.write_file(root / "a", b"0123")
    files.write_file(root / "b", b"4567")


def test_it_records_what_was_done(tmp_path: Path) -> None:
    with FaultyFiles() as disk:
        write_two(tmp_path)
    files.write_file(tmp_path / "c", b"")
    assert [(operation.kind, operation.path.name) for operation in disk.operations] == [
        (kind, name) for name in ("a", "b") for kind in ("open", "write", "fsync")
    ]
    assert disk.struck == []


@pytest.mark.parametrize("fault", ["ENOSPC", "EIO"])
def test_one_operation_fails_and_the_others_do_not(tmp_path: Path, fault: str) -> None:
    with FaultyFiles(fail_at=4, fault=fault) as disk:  # type: ignore[arg-type]
        with pytest.raises(OSError) as caught:
            write_two(tmp_path)
        files.write_file(tmp_path / "c", b"89")
    assert caught.value.errno == getattr(errno, fault)
    assert caught.value.filename == str(tmp_path / "b")
    assert [(operation.kind, operation.path.name) for operation in disk.struck] == [("write", "b")]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "a": b"0123",
        "b": b"",
        "c": b"89",
    }


def test_a_lasting_fault_lasts_until_the_block_ends(tmp_path: Path) -> None:
    with FaultyFiles(fail_at=1, fault="ENOSPC", lasting=True) as disk:
        for name in ("a", "b"):
            with pytest.raises(OSError, match="No space"):
                files.write_file(tmp_path / name, b"0123")
    assert len(disk.struck) == 2
    write_two(tmp_path)


def test_interruptions_and_short_writes_are_no_failures(tmp_path: Path) -> None:
    with FaultyFiles(fail_at=1, fault="EINTR") as interrupted:
        write_two(tmp_path)
    assert len(interrupted.operations) == 7
    with FaultyFiles(fail_at=0, fault="short write", lasting=True) as short:
        write_two(tmp_path)
    assert [operation.size for operation in short.struck] == [4, 3, 2, 1] * 2
    assert (tmp_path / "b").read_bytes() == b"4567"


def test_an_endless_interruption_is_refused() -> None:
    with pytest.raises(ValueError, match="never ends"):
        FaultyFiles(fail_at=0, fault="EINTR", lasting=True)
