"""A tree of real processes, workers in sessions of their own as torchrun makes them, is ended whole."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orlop.tools.drill import processes

# A launcher with two workers in sessions of their own; the second has a child. Each says that it runs.
LAUNCHER = """
import subprocess, sys, time
worker = "import sys, time; open(sys.argv[1], 'a').close(); time.sleep(60)"
nest = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1], sys.argv[2]])"
subprocess.Popen([sys.executable, '-c', worker, sys.argv[1] + '/1'], start_new_session=True)
subprocess.Popen([sys.executable, '-c', nest, worker, sys.argv[1] + '/2'], start_new_session=True)
time.sleep(60)
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    child = processes.launch([sys.executable, "-c", LAUNCHER, str(tmp_path)], os.environ, tmp_path / "log")
    deadline = time.monotonic() + 20
    while not ((tmp_path / "1").exists() and (tmp_path / "2").exists()):
        assert time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.01)
    yield child
    processes.kill_tree(child)


def states(tree: list[processes.Process]) -> list[str]:
    return [processes._state(process) for process in tree]


def test_the_tree_holds_workers_in_other_sessions_and_their_children(
    launcher: subprocess.Popen[bytes],
) -> None:
    tree = processes.find_tree(launcher.pid)
    assert len(tree) == 4
    assert tree[0].pid == launcher.pid
    assert len({os.getsid(process.pid) for process in tree}) == 3
    assert os.getpid() not in {process.pid for process in tree}


def test_a_frozen_tree_stands_still_and_goes_on(launcher: subprocess.Popen[bytes]) -> None:
    frozen = processes.freeze_tree(launcher.pid)
    assert states(frozen) == ["T"] * 4
    processes.thaw(frozen)
    deadline = time.monotonic() + 10
    while "T" in states(frozen):
        assert time.monotonic() < deadline
    assert processes.living(frozen) == frozen


def test_killing_a_frozen_tree_leaves_nobody(launcher: subprocess.Popen[bytes]) -> None:
    frozen = processes.freeze_tree(launcher.pid)
    processes.kill(frozen)
    assert processes.living(frozen) == []
    assert launcher.wait(timeout=10) == -9


def test_kill_tree_leaves_nobody_and_may_be_repeated(launcher: subprocess.Popen[bytes]) -> None:
    tree = processes.find_tree(launcher.pid)
    assert processes.wait_gone(tree, timeout_seconds=0.01) == tree
    processes.kill_tree(launcher)
    assert launcher.returncode == -9
    assert processes.living(tree) == []
    processes.kill_tree(launcher)
    assert processes.find_tree(launcher.pid) == []


def test_a_number_given_away_again_is_not_hit() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        (process,) = processes.find_tree(child.pid)
        earlier = processes.Process(process.pid, process.started - 1)
        assert processes.living([earlier]) == []
        processes.kill([earlier])
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
