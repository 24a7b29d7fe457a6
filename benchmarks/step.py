"""What a step of SwapAdamW costs on the CPU, against torch's own AdamW: ratios of two sides measured in one
run.

1. Local tensors, 2,000 small and 20 large parameters, the same flags on both sides: the bar is 1.05x.
2. FSDP2 (one rank, gloo): SwapAdamW steps on local shards, stock AdamW on DTensors: the bar is below 1x.
3. The arena's bytes against the state's: the bar is 1.02.

The sides take turns, round by round, each side first in every other round; the ratio is that of the medians.
`--noise` measures two stock optimizers against each other the same way, which says what a ratio is worth on
this machine."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import orlop

NUM_SMALL, NUM_LARGE = 2_000, 20
SMALL_SHAPE, LARGE_SHAPE = (64, 8), (1024, 512)


def make_params() -> list[torch.nn.Parameter]:
    """Parameters with gradients, the same values each time."""
    generator = torch.Generator().manual_seed(0)
    shapes = [SMALL_SHAPE] * NUM_SMALL + [LARGE_SHAPE] * NUM_LARGE
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    return params


def take_turns(sides: list[Callable[[], object]], rounds: int) -> list[float]:
    """The median seconds of each side over rounds in which each side runs once."""
    for side in sides:
        side()
        side()
    seconds: list[list[float]] = [[] for _ in sides]
    for number in range(rounds):
        order = range(len(sides)) if number % 2 == 0 else reversed(range(len(sides)))
        for index in order:
            begin = time.perf_counter()
            sides[index]()
            seconds[index].append(time.perf_counter() - begin)
    return [statistics.median(each) for each in seconds]


def measure_local(flags: dict[str, bool], rounds: int) -> tuple[float, float, float, float]:
    """Seconds of SwapAdamW, of AdamW, of a second AdamW, and arena bytes over state bytes."""
    swapped = orlop.SwapAdamW(make_params(), **flags)
    stock, other = torch.optim.AdamW(make_params(), **flags), torch.optim.AdamW(make_params(), **flags)
    ours, theirs, noise = take_turns([swapped.step, stock.step, other.step], rounds)
    return ours, theirs, noise, swapped.arena_bytes / swapped.state_bytes


def measure_fsdp(flags: dict[str, bool], rounds: int) -> tuple[float, float]:
    """Seconds of SwapAdamW and of AdamW on the DTensor parameters of an FSDP2 model."""
    from torch.distributed.fsdp import fully_shard

    optimizers = []
    for make in (orlop.SwapAdamW, torch.optim.AdamW):
        layers = [torch.nn.Linear(256, 256) for _ in range(60)]
        model = torch.nn.Sequential(*layers)
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
        optimizers.append((model, make(model.parameters(), **flags)))
        model(torch.ones(2, 256)).sum().backward()
    ours, theirs = take_turns([optimizer.step for _, optimizer in optimizers], rounds)
    return ours, theirs


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=21)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    table = Table("what", "SwapAdamW", "AdamW", "ratio", "bar", "two stock AdamW")
    arena = 0.0
    for name, flags in (("plain", {}), ("foreach", {"foreach": True}), ("fused", {"fused": True})):
        ours, theirs, noise, arena = measure_local(flags, rounds)
        table.add_row(
            f"local tensors, {name}",
            ms(ours),
            ms(theirs),
            f"{ours / theirs:.3f}",
            "<= 1.05",
            f"{noise / theirs:.3f}",
        )
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
        for name, flags in (("plain", {}), ("foreach", {"foreach": True})):
            ours, theirs = measure_fsdp(flags, rounds)
            table.add_row(f"FSDP2 DTensors, {name}", ms(ours), ms(theirs), f"{ours / theirs:.3f}", "< 1", "")
        dist.destroy_process_group()
    console = Console()
    console.print(table)
    console.print(f"arena bytes / state bytes: {arena:.4f} (bar 1.02)")


def ms(seconds: float) -> str:
    """Milliseconds, for the table."""
    return f"{seconds * 1000:.1f} ms"


if __name__ == "__main__":
    main()
