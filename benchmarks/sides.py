"""What the benchmarks of loading and saving share: states, sides that take turns, peaks, and the table.

Sides are measured in one run, in turns, each first in every other round; a ratio is that of the medians. The spread
is the largest over the smallest time of a side: on a busy machine it says what a ratio is worth, and there the ratio of
CPU seconds (all threads, kernel and user) is the steadier one.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from orlop import TrainEngine

TMPFS = "/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir()


def options(description: str | None) -> argparse.Namespace:
    """The options that all of them take."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=1536, help="size of the large state, in MiB")
    parser.add_argument("--tensors", type=int, default=20_000, help="how many small tensors")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="orlop's reading and writing threads")
    parser.add_argument("--tmpfs", default=TMPFS, help="a folder in memory")
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="a folder on a disk")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    warnings.filterwarnings("ignore", message="torch.distributed is unavailable")
    return parser.parse_args()


def large_state(megabytes: int) -> dict[str, torch.Tensor]:
    """Tensors of 16 to 64 MiB, as the moments of a transformer's matrices have."""
    torch.manual_seed(0)
    sizes = [(2048, 2048), (4096, 4096), (8192, 2048)]
    state: dict[str, torch.Tensor] = {}
    while sum(tensor.nbytes for tensor in state.values()) < megabytes << 20:
        state[f"layers.{len(state)}.exp_avg"] = torch.randn(sizes[len(state) % 3])
    return state


def small_state(count: int) -> dict[str, torch.Tensor]:
    """Many tensors of 1 KiB."""
    torch.manual_seed(0)
    return {f"layers.{number}.weight": torch.randn(16, 16) for number in range(count)}


def small_engine(state: dict[str, torch.Tensor]) -> TrainEngine:
    """An engine whose parameters are these tensors, with an optimizer that keeps no state."""
    model = torch.nn.Module()
    for key, tensor in state.items():
        model.register_parameter(key.replace(".", "_"), torch.nn.Parameter(tensor))
    return TrainEngine(model, torch.optim.SGD(model.parameters(), lr=0.1))


def blank(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Targets of the same form, their memory touched already."""
    return {key: torch.zeros_like(tensor) for key, tensor in state.items()}


class Times:
    """What the rounds of some sides took: wall seconds, and CPU seconds of all threads."""

    def __init__(self, wall: list[list[float]], cpu: list[list[float]]) -> None:
        self.medians = [statistics.median(each) for each in wall]
        self.cpu_medians = [statistics.median(each) for each in cpu]
        self.spread = max(max(each) / min(each) for each in wall)

    def ratio(self, ours: int = 0, theirs: int = -1) -> str:
        """How many times as long the other side takes."""
        return f"{self.medians[theirs] / self.medians[ours]:.2f}x"

    def cpu_ratio(self, ours: int = 0, theirs: int = -1) -> str:
        """The same in CPU seconds."""
        return f"{self.cpu_medians[theirs] / self.cpu_medians[ours]:.2f}x"


def take_turns(
    sides: list[Callable[[], object]], rounds: int, before: Callable[[], object] = lambda: None
) -> Times:
    """The seconds of each side over rounds in which each runs once; `before` runs before each, unmeasured."""
    wall: list[list[float]] = [[] for _ in sides]
    cpu: list[list[float]] = [[] for _ in sides]
    for number in range(rounds + 1):
        order = range(len(sides)) if number % 2 == 0 else reversed(range(len(sides)))
        for index in order:
            before()
            begin, cpu_begin = time.perf_counter(), time.process_time()
            sides[index]()
            if number:  # the first round warms up
                wall[index].append(time.perf_counter() - begin)
                cpu[index].append(time.process_time() - cpu_begin)
    return Times(wall, cpu)


def peak_above(act: Callable[[], object]) -> int:
    """How far the resident memory rises above where it stands while `act` runs, in bytes; sampled."""
    done = threading.Event()
    samples = [_resident()]

    def watch() -> None:
        while not done.wait(0.001):
            samples.append(_resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    act()
    done.set()
    watcher.join()
    return max(samples) - samples[0]


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@contextmanager
def folder(parent: str) -> Iterator[Path]:
    """A folder for a while."""
    with tempfile.TemporaryDirectory(dir=parent, prefix="orlop-bench-") as path:
        yield Path(path)


def forget(path: Path) -> None:
    """Drop a checkpoint's pages from the cache, so that the next read is cold."""
    for file in path.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


class Growth:
    """What each of some things costs a side, in CPU seconds, as their number grows tenfold."""

    def __init__(self) -> None:
        self._each: list[list[float]] = []

    def note(self, times: Times, count: int) -> None:
        """The next measurement, of so many things."""
        self._each.append([seconds / count for seconds in times.cpu_medians])

    def show(self, results: Results, sides: dict[str, int]) -> None:
        """A line for each of our sides, with the last side's own growth beside it."""
        for what, side in sides.items():
            first, last = self._each
            a, b = ((f"{last[at] * 1e6:.0f} us", f"{last[at] / first[at]:.2f}x") for at in (side, -1))
            growth = f"{a[1]} (other: {b[1]})"
            name = f"  CPU of each, {what}, ten times as many"
            results.add(name, ours=a[0], other=b[0], ratio=growth, bar="about 1")


class Results:
    """The table, as text and as Markdown."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._rows: list[tuple[str, ...]] = []

    def add(self, what: str, *, ours: str, other: str = "", ratio: str = "", bar: str = "") -> None:
        """One line that is no comparison of times."""
        self._append(what, ours, other, ratio, bar, "", "")

    def compare(self, what: str, times: Times, bar: str = "", *, nbytes: int = 0, ours: int = 0) -> None:
        """One comparison of two sides' times, of which the last is the other one."""
        a, b = (rate(nbytes, seconds) for seconds in (times.medians[ours], times.medians[-1]))
        self._append(what, a, b, times.ratio(ours), bar, times.cpu_ratio(ours), f"{times.spread:.2f}")

    def _append(self, *row: str) -> None:
        self._rows.append(row)
        print("  ".join(row), flush=True)  # a run takes minutes

    def show(self) -> None:
        """Print it, and the machine's load, which says how far to trust it."""
        header = ("what", "orlop", "other", "ratio", "bar", "CPU ratio", "spread")
        table = Table(*header, title=self._title)
        for row in self._rows:
            table.add_row(*row)
        console = Console(width=160)
        console.print(table)
        load = os.getloadavg()[0]
        console.print(f"torch {torch.__version__}, {os.cpu_count()} CPUs, load {load:.1f}", highlight=False)
        for row in (header, ("---",) * len(header), *self._rows):
            print("| " + " | ".join(row) + " |")


def rate(nbytes: int, seconds: float) -> str:
    """Seconds, and gigabytes per second where there are bytes to speak of."""
    return f"{seconds:.2f} s ({nbytes / seconds / 1e9:.2f} GB/s)" if nbytes else f"{seconds:.2f} s"
