"""How well up, compute and down overlap, on the thread link: wall time against the slowest of the three
lanes.

The link is throttled so that copying a window up, or down, takes as long as stepping it. A step that overlaps
all three takes as long as one of them (the bar: 1.15x the slowest lane); one that shares a lane for both
directions takes twice that, a serial one three times: both are measured as baselines in the same run. Then
the same with one parameter of half the total, which has to be cut, and with the cap halved and quartered. One
intra-op thread; medians over rounds that take turns."""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table

import orlop
from orlop.optim.timeline import busy_seconds, wall_seconds
from orlop.testing import ThreadLink

HOST = torch.device("cpu")
NUM_WINDOWS = 24


def make_params(total: int, *, one_large: bool) -> list[torch.nn.Parameter]:
    """Equal parameters, or one of half the total and the rest equal."""
    sizes = [total // 2] + [total // 2 // 24] * 24 if one_large else [total // 48] * 48
    params = [torch.nn.Parameter(torch.randn(size // 64 * 64)) for size in sizes]
    for param in params:
        param.grad = torch.randn(param.shape)
    return params


def compute_rate(params: list[torch.nn.Parameter]) -> float:
    """Bytes of state that are stepped per second, without any copies."""
    optimizer = orlop.SwapAdamW(params)
    seconds = []
    for _ in range(7):
        begin = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    return optimizer.state_bytes / statistics.median(seconds[2:])


def make(
    params: list[torch.nn.Parameter], rate: float, windows: int, *, slots: int, half_duplex: bool
) -> orlop.SwapAdamW:
    """An optimizer whose plan has about `windows` windows, over a link of `rate` bytes per second each
    way."""
    state = sum(2 * param.nbytes for param in params)
    optimizer = orlop.SwapAdamW(params, window_bytes=slots * (state // windows))
    optimizer.links[HOST] = ThreadLink(
        num_slots=slots, up_bytes_per_second=rate, down_bytes_per_second=rate, half_duplex=half_duplex
    )
    return optimizer


def measure(optimizers: dict[str, orlop.SwapAdamW], rounds: int) -> dict[str, tuple[float, float, int]]:
    """For each: wall seconds, wall over the slowest lane's busy seconds, number of windows; medians."""
    found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in optimizers}
    for number in range(rounds + 1):
        for name, optimizer in optimizers.items():
            optimizer.step()
            spans = optimizer.timeline()
            wall = wall_seconds(spans)
            windows = 1 + max(span.window for span in spans)
            if number:
                found[name].append((wall, wall / max(busy_seconds(spans).values()), windows))
    return {
        name: (statistics.median(w for w, _, _ in each), statistics.median(r for _, r, _ in each), each[0][2])
        for name, each in found.items()
    }


def draw(optimizers: dict[str, orlop.SwapAdamW], path: str) -> None:
    """The last step of each, one row per lane, one bar per window, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(optimizers), sharex=True, figsize=(11, 1.7 * len(optimizers)))
    colours = {"up": "#4477aa", "compute": "#228833", "down": "#cc6677"}
    for axis, (name, optimizer) in zip(axes, optimizers.items()):
        for span in optimizer.timeline():
            row = ("down", "compute", "up").index(span.lane)
            begin, length = span.begin_seconds * 1000, (span.end_seconds - span.begin_seconds) * 1000
            axis.barh(row, length, left=begin, color=colours[span.lane], edgecolor="white", linewidth=0.6)
        axis.set_yticks([0, 1, 2], ["down", "compute", "up"])
        axis.set_title(name, loc="left", fontsize=10)
    axes[-1].set_xlabel("milliseconds since the step began")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=24_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--picture", metavar="PNG", help="draw the last step of three of them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rate = compute_rate(make_params(options.elements, one_large=False))
    sides = {}
    for name, windows, slots, half, large in (
        ("three slots, full duplex", NUM_WINDOWS, 3, False, False),
        ("one parameter of half the total, cut", NUM_WINDOWS, 3, False, True),
        ("the cap halved", 2 * NUM_WINDOWS, 3, False, False),
        ("the cap quartered", 4 * NUM_WINDOWS, 3, False, False),
        ("baseline: half duplex", NUM_WINDOWS, 3, True, False),
        ("baseline: serial", NUM_WINDOWS, 1, False, False),
    ):
        params = make_params(options.elements, one_large=large)
        sides[name] = make(params, rate, windows, slots=slots, half_duplex=half)
    table = Table("what", "windows", "wall", "wall / slowest lane", "bar")
    for name, (wall, ratio, windows) in measure(sides, options.rounds).items():
        bar = "" if name.startswith("baseline") else "stated" if name.startswith("the cap") else "<= 1.15"
        table.add_row(name, str(windows), f"{wall * 1000:.0f} ms", f"{ratio:.3f}", bar)
    if options.picture:
        shown = ("three slots, full duplex", "baseline: half duplex", "baseline: serial")
        draw({name: sides[name] for name in shown}, options.picture)
    console = Console()
    console.print(f"link throttled to {rate / 1e9:.2f} GB/s each way, as fast as the update itself")
    console.print(table)


if __name__ == "__main__":
    main()
