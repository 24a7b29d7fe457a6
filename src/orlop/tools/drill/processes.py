"""A tree of processes: find all of it, stop it at one instant, and end it so that nothing is left running.

torchrun puts each worker into a session of its own, so that no process group holds them all: the tree is
walked in `/proc` (Linux). A process is known by its number and its start time, so that a number that was
given away again is never hit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Process:
    """One process, for as long as it lives.

    Attributes:
        pid: Its number.
        started: When, in clock ticks since boot.
    """

    pid: int
    started: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Status:
    process: Process
    parent: int
    state: str


def launch(command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Starts a command away from the terminal's Ctrl-C, its output added to `log`."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def find_tree(root: int) -> list[Process]:
    """The process `root` and all its living descendants, parents first."""
    statuses = list(_statuses())
    children: dict[int, list[_Status]] = {}
    for status in statuses:
        children.setdefault(status.parent, []).append(status)
    level = [status for status in statuses if status.process.pid == root]
    tree: list[Process] = []
    while level:
        tree += [status.process for status in level if status.state not in "ZX"]
        level = [child for status in level for child in children.get(status.process.pid, [])]
    return tree


def freeze_tree(root: int, timeout_seconds: float = 30.0) -> list[Process]:
    """Stops the whole tree and returns it once every process of it stands still.

    A parent is stopped before its children are listed again, so that none is born unseen.

    Raises:
        TimeoutError: One did not stop (it sits in the kernel).
    """
    stopped: set[Process] = set()
    while fresh := [process for process in find_tree(root) if process not in stopped]:
        for process in fresh:
            _signal(process, signal.SIGSTOP)
        # Not before they stand still: a process that waits for the disk stops only when that is over.
        _wait_until(lambda: all(_state(process) in "TtZX" for process in fresh), "to stop", timeout_seconds)
        stopped.update(fresh)
    return sorted(stopped, key=lambda process: process.pid)


def thaw(processes: Collection[Process]) -> None:
    """Lets stopped processes go on."""
    for process in processes:
        _signal(process, signal.SIGCONT)


def kill(processes: Collection[Process], timeout_seconds: float = 30.0) -> None:
    """SIGKILLs the processes and returns when all are gone.

    Raises:
        TimeoutError: One would not die.
    """
    for process in processes:
        _signal(process, signal.SIGKILL)
    _wait_until(lambda: not living(processes), "to die", timeout_seconds)


def kill_tree(child: subprocess.Popen[bytes]) -> None:
    """Ends a child and all its descendants at one instant, and reaps the child; a dead child is no error."""
    if child.poll() is None:
        # SIGKILL reaches a process that would not stop, too.
        with contextlib.suppress(TimeoutError):
            freeze_tree(child.pid)
        kill(find_tree(child.pid))
    child.wait()


def living(processes: Collection[Process]) -> list[Process]:
    """Those of the processes that still run; one that is dead but not reaped holds nothing and does not."""
    return [process for process in processes if _state(process) not in "ZX"]


def wait_gone(processes: Collection[Process], timeout_seconds: float) -> list[Process]:
    """Waits until the processes have ended by themselves; returns those that have not."""
    with contextlib.suppress(TimeoutError):
        _wait_until(lambda: not living(processes), "to end", timeout_seconds)
    return living(processes)


def find_all() -> list[Process]:
    """All living processes of this machine, or container."""
    return [status.process for status in _statuses() if status.state not in "ZX"]


def _statuses() -> Iterator[_Status]:
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (status := _read_status(int(entry.name))) is not None:
            yield status


def _read_status(pid: int) -> _Status | None:
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The second field is the command in parentheses; it may hold blanks and parentheses of its own.
    fields = text.rpartition(")")[2].split()
    return _Status(process=Process(pid, int(fields[19])), parent=int(fields[1]), state=fields[0])


def _state(process: Process) -> str:
    """The kernel's letter for the process's state; `X` when it is gone."""
    status = _read_status(process.pid)
    return status.state if status is not None and status.process == process else "X"


def _signal(process: Process, number: signal.Signals) -> None:
    if _state(process) != "X":
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _wait_until(condition: Callable[[], bool], what: str, timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_seconds} s for a process {what}")
        time.sleep(0.001)


def rank_of(process: Process) -> int | None:
    """The rank that `torchrun` gave the process; None for one without, or whose environment can't be read."""
    try:
        entries = (PROC / str(process.pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return None
    ranks = [entry[5:] for entry in entries if entry.startswith(b"RANK=")]
    return int(ranks[0]) if ranks and ranks[0].isdigit() else None


def open_for_writing(process: Process) -> dict[str, int]:
    """The files that a process holds open for writing: inodes by path; none where that can't be read."""
    place = PROC / str(process.pid)
    found = {}
    with contextlib.suppress(OSError):
        for number in os.listdir(place / "fd"):
            with contextlib.suppress(OSError):  # closed since
                path = os.readlink(place / "fd" / number)
                if path.startswith("/") and _is_for_writing((place / "fdinfo" / number).read_text()):
                    status = os.stat(place / "fd" / number)
                    if stat.S_ISREG(status.st_mode) and status.st_nlink:
                        found[path] = status.st_ino
    return found


def _is_for_writing(description: str) -> bool:
    flags = next(line.split()[1] for line in description.splitlines() if line.startswith("flags:"))
    return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY
