"""The file operations: what they leave on disk, and that every one of them is announced before it happens."""

from pathlib import Path

import pytest

from orlop.store import files
from orlop.store.files import Operation


def record(log: list[tuple[str, str]]):
    return lambda operation: log.append((operation.kind, operation.path.name))


def test_write_file_syncs_after_writing(tmp_path: Path) -> None:
    log: list[tuple[str, str]] = []
    with files.observed(record(log)):
        files.write_file(tmp_path / "a", b"abc")
    assert log == [("open", "a"), ("write", "a"), ("fsync", "a")]
    assert files.read_file(tmp_path / "a") == b"abc"


def test_replace_file_shows_the_old_or_the_new_content(tmp_path: Path) -> None:
    path = tmp_path / "a"
    files.write_file(path, b"old")

    def refuse_rename(operation: Operation) -> None:
        if operation.kind == "rename":
            assert path.read_bytes() == b"old"
            raise OSError(5, "no rename today")

    with files.observed(refuse_rename), pytest.raises(OSError, match="no rename today"):
        files.replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    files.replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_append_adds_and_syncs_on_request(tmp_path: Path) -> None:
    log: list[tuple[str, str]] = []
    with files.observed(record(log)):
        files.append_file(tmp_path / "a", b"1\n")
        files.append_file(tmp_path / "a", b"2\n", durable=True)
    assert (tmp_path / "a").read_bytes() == b"1\n2\n"
    assert log == [("open", "a"), ("append", "a"), ("open", "a"), ("append", "a"), ("fsync", "a")]


def test_an_observer_that_raises_stops_the_operation(tmp_path: Path) -> None:
    def refuse(operation: Operation) -> None:
        raise OSError(28, "No space left on device")

    with files.observed(refuse), pytest.raises(OSError, match="No space left"):
        files.write_file(tmp_path / "a", b"abc")
    assert not (tmp_path / "a").exists()
    files.write_file(tmp_path / "a", b"abc")  # the observer is gone with its block
    assert (tmp_path / "a").exists()


def test_make_directory_makes_each_level_durable(tmp_path: Path) -> None:
    log: list[tuple[str, str]] = []
    with files.observed(record(log)):
        files.make_directory(tmp_path / "a" / "b")
        files.make_directory(tmp_path / "a" / "b")
    assert log == [("make", "a"), ("fsync", tmp_path.name), ("make", "b"), ("fsync", "a")]


def test_sizes_names_and_removal(tmp_path: Path) -> None:
    files.make_directory(tmp_path / "d" / "sub")
    files.write_file(tmp_path / "d" / ".metadata", b"12")
    files.write_file(tmp_path / "d" / "sub" / "x", b"")
    files.write_file(tmp_path / "file", b"")
    assert files.file_sizes(tmp_path / "d") == {".metadata": 2, "sub/x": 0}
    assert files.directory_names(tmp_path) == ["d"]
    assert files.directory_names(tmp_path / "nowhere") == []
    assert files.last_change(tmp_path / "d") > 0
    files.remove_tree(tmp_path / "d")
    files.remove_tree(tmp_path / "d")
    assert files.directory_names(tmp_path) == []
    assert files.last_change(tmp_path / "d") == 0.0


def test_an_interrupted_operation_is_done_again(tmp_path: Path) -> None:
    log: list[tuple[str, str]] = []

    def interrupt(operation: Operation) -> None:
        log.append((operation.kind, operation.path.name))
        if len(log) % 2:
            raise InterruptedError(4, "Interrupted system call")

    with files.observed(interrupt):
        files.make_directory(tmp_path / "d")
        files.write_file(tmp_path / "d" / "a", b"abc")
        files.rename(tmp_path / "d" / "a", tmp_path / "d" / "b")
        assert files.read_file(tmp_path / "d" / "b") == b"abc"
        files.remove_tree(tmp_path / "d")
    assert log[::2] == log[1::2]
    assert [kind for kind, _ in log[::2]] == [
        *("make", "fsync", "open", "write", "fsync", "rename", "remove", "remove")
    ]
    assert list(tmp_path.iterdir()) == []


def test_short_writes_are_followed_by_the_rest(tmp_path: Path) -> None:
    sizes: list[int | None] = []

    def shorten(operation: Operation) -> int | None:
        if operation.size is not None:
            sizes.append(operation.size)
        return 4

    with files.observed(shorten):
        files.write_file(tmp_path / "a", b"0123456789")
        files.append_file(tmp_path / "a", b"abcdef")
    assert files.read_file(tmp_path / "a") == b"0123456789abcdef"
    assert sizes == [10, 6, 2, 6, 2]


def test_a_system_that_takes_nothing_is_an_error_not_a_hang(tmp_path: Path) -> None:
    with files.observed(lambda operation: 0), pytest.raises(OSError, match="no more bytes"):
        files.write_file(tmp_path / "a", b"abc")


def test_removal_never_follows_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "x").write_text("x")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "link").symlink_to(tmp_path / "precious")
    files.remove_tree(tmp_path / "d")
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
    assert (tmp_path / "precious" / "x").read_text() == "x"


def test_free_bytes_asks_the_nearest_directory_that_is_there(tmp_path: Path) -> None:
    free = files.free_bytes(tmp_path / "not" / "yet")
    assert free is not None
    assert 0 < free <= 2**80


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_what_fails_on_an_open_file_names_it(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match="No space left on device: '/dev/full'"),
        files.new_file(Path("/dev/full")) as full,
    ):
        full.write(b"x")
    folder = files.open_ranged(tmp_path)
    for read in (lambda: folder.read(0, 1), lambda: folder.read_into(0, [memoryview(bytearray(1))])):
        with pytest.raises(IsADirectoryError) as caught:
            read()
        assert caught.value.filename == str(tmp_path)
    folder.close()
