"""Names that carry their owner: leases of readers, leftovers of the dead."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from orlop.store import files, owned
from orlop.store.catalog import parse_unpublished, unpublished_name


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def lease(root: Path, *, host: str, pid: int) -> Path:
    path = root / unpublished_name("step-1", kind="reading", host=host, pid=pid, token="00ff00ff")
    path.mkdir()
    return path


def test_a_reader_shows_itself_while_it_reads(tmp_path: Path) -> None:
    final = tmp_path / "step-1"
    with owned.reading(final):
        (name,) = names(tmp_path)
        found = parse_unpublished(name)
        assert found is not None
        assert (found.final, found.kind, found.pid) == ("step-1", "reading", os.getpid())
        assert owned.being_read(tmp_path) == {"step-1"}
        assert owned.find_strays(tmp_path) == []
    assert names(tmp_path) == []
    assert owned.being_read(tmp_path) == set()


def test_the_sign_goes_when_the_reading_fails(tmp_path: Path) -> None:
    try:
        with owned.reading(tmp_path / "step-1"):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert names(tmp_path) == []


def test_a_missing_root_is_not_made_by_a_reader(tmp_path: Path) -> None:
    with owned.reading(tmp_path / "run" / "step-1"):
        pass
    assert names(tmp_path) == []


def test_only_the_living_hold_a_checkpoint(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    host = socket.gethostname()
    dead = lease(tmp_path, host=host, pid=child.pid)
    reused = lease(tmp_path, host=host, pid=os.getpid())
    assert owned.being_read(tmp_path) == set()
    assert owned.find_strays(tmp_path) == sorted([dead, reused])
    lease(tmp_path, host=host, pid=os.getppid())
    assert owned.being_read(tmp_path) == {"step-1"}


def test_a_reader_on_another_host_is_believed_for_a_day(tmp_path: Path) -> None:
    path = lease(tmp_path, host="elsewhere", pid=1)
    now = files.last_change(path)
    for age, living in ((86400 - 60, {"step-1"}), (86400 + 60, set())):
        os.utime(path, (now - age, now - age))
        assert owned.being_read(tmp_path) == living
