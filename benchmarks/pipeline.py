"""How well up, compute and down overlap, on the thread link: wall time against the slowest of the three
lanes.

The link is throttled so that copying a window up, or down, takes about as long as stepping it. A step that overlaps
all three takes as long as one of them (the bar: 1.15x the slowest lane); one that shares a lane for both
directions takes twice that, a serial one three times: both are measured as baselines in the same run. Then
the same with one parameter of half the total, which has to be cut, and with the cap halved and quartered. One
intra-op thread; medians over rounds that take turns."""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table

import orlop
from orlop.optim.link import NUM_SLOTS
from orlop.optim.timeline import Span, busy_seconds, wall_seconds
from orlop.testing import ThreadLink

HOST = torch.device("cpu")
NUM_WINDOWS = 40
LINK_SHARE = 0.9  # of the update's own speed: about equal, and the link the slower one, as on real devices


def make_params(total: int, *, one_large: bool) -> list[torch.nn.Parameter]:
    """Equal parameters, or one of half the total and the rest equal."""
    sizes = [total // 2] + [total // 80] * 40 if one_large else [total // 80] * 80
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
    # With a page to spare: what a window holds beside its moments must not push one parameter into the next window.
    optimizer = orlop.SwapAdamW(params, window_bytes=slots * (state // windows + 4096))
    optimizer.links[HOST] = ThreadLink(
        num_slots=slots,
        up_bytes_per_second=rate,
        down_bytes_per_second=rate,
        half_duplex=half_duplex,
        poison=False,
    )
    return optimizer


def measure(optimizer: orlop.SwapAdamW, rounds: int) -> tuple[float, float, int, list[Span]]:
    """Wall seconds, wall over the slowest lane's busy seconds, number of windows, and the last step's spans."""
    walls, ratios = [], []
    for number in range(rounds + 2):
        optimizer.step()
        spans = optimizer.timeline()
        if number > 1:
            walls.append(wall_seconds(spans))
            ratios.append(wall_seconds(spans) / max(busy_seconds(spans).values()))
    return statistics.median(walls), statistics.median(ratios), 1 + max(span.window for span in spans), spans


def draw(steps: dict[str, list[Span]], path: str) -> None:
    """The last step of each, one row per lane, one bar per window, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(steps), sharex=True, figsize=(11, 1.7 * len(steps)))
    colours = {"up": "#4477aa", "compute": "#228833", "down": "#cc6677"}
    for axis, (name, spans) in zip(axes, steps.items()):
        for span in spans:
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
    parser.add_argument("--elements", type=int, default=160_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--picture", metavar="PNG", help="draw the last step of three of them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    equal = make_params(options.elements, one_large=False)
    rate = LINK_SHARE * compute_rate(equal)
    table = Table("what", "windows", "wall", "wall / slowest lane", "bar")
    steps: dict[str, list[Span]] = {}
    for name, windows, slots, half, bar in (
        ("full duplex", NUM_WINDOWS, NUM_SLOTS, False, "<= 1.15"),
        ("the same, once more", NUM_WINDOWS, NUM_SLOTS, False, "<= 1.15"),
        ("three slots only", NUM_WINDOWS, 3, False, "stated"),
        ("the cap halved", 2 * NUM_WINDOWS, NUM_SLOTS, False, "stated"),
        ("the cap quartered", 4 * NUM_WINDOWS, NUM_SLOTS, False, "stated"),
        ("baseline: half duplex", NUM_WINDOWS, NUM_SLOTS, True, ""),
        ("baseline: serial", NUM_WINDOWS, 1, False, ""),
        ("one parameter of half the total, cut", NUM_WINDOWS, NUM_SLOTS, False, "<= 1.15"),
    ):
        if name.startswith("one parameter"):
            equal.clear()
            equal += make_params(options.elements, one_large=True)
        optimizer = make(equal, rate, windows, slots=slots, half_duplex=half)
        wall, ratio, found, steps[name] = measure(optimizer, options.rounds)
        del optimizer
        gc.collect()
        table.add_row(name, str(found), f"{wall * 1000:.0f} ms", f"{ratio:.3f}", bar)
    if options.picture:
        shown = ("full duplex", "baseline: half duplex", "baseline: serial")
        draw({name: steps[name] for name in shown}, options.picture)
    console = Console()
    console.print(
        f"link throttled to {rate / 1e9:.2f} GB/s each way, {LINK_SHARE:.0%} of the update's own speed"
    )
    console.print(table)


if __name__ == "__main__":
    main()
