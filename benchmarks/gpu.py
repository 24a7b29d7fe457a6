"""On one accelerator, in under five minutes: is the step right, how near the link's limit is it, what does it
cost in memory.

1. Bits: SwapAdamW against stock AdamW on the device, same flags. 2. Time: a step against the time that its
bytes need at the measured duplex bandwidth of the link, against a serial swap (one
   slot), and against stock AdamW with its state on the device.
3. Memory: the device's peak over a step, against the cap; its rise over a load.
4. Order: 20 steps with long kernels queued before gradients and before copies, against a run without them.

Prints a table; exits with 1 where bits differ. Without an accelerator it says so and exits with 2.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import orlop
from orlop.optim.accelerator import AcceleratorLink

FLAGS: tuple[dict[str, bool], ...] = ({}, {"foreach": False}, {"fused": True})


def make_params(device: torch.device, elements: int) -> list[torch.nn.Parameter]:
    """One parameter of an eighth of the elements, the rest in equal ones; gradients on the device."""
    generator = torch.Generator().manual_seed(0)
    sizes = [elements // 8] + [elements // 64] * 56
    params = [torch.nn.Parameter(torch.randn(size, generator=generator).to(device)) for size in sizes]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(device)
    return params


def median_step(optimizer: torch.optim.Optimizer, rounds: int) -> float:
    """Seconds of a step, its state home."""
    seconds = []
    for number in range(rounds + 2):
        torch.accelerator.synchronize()
        begin = time.perf_counter()
        optimizer.step()
        torch.accelerator.synchronize()
        if number > 1:
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def duplex_seconds(device: torch.device, nbytes: int) -> float:
    """Seconds for `nbytes` up and `nbytes` down at once, page-locked, in one copy each way."""
    module: Any = torch.get_device_module(device)
    up, down = module.Stream(), module.Stream()
    hosts = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    devices = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    seconds = []
    for _ in range(5):
        torch.accelerator.synchronize()
        begin = time.perf_counter()
        with module.stream(up):
            devices[0].copy_(hosts[0], non_blocking=True)
        with module.stream(down):
            hosts[1].copy_(devices[1], non_blocking=True)
        torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def check_bits(device: torch.device, elements: int) -> list[str]:
    """The flags under which parameters or state differ from the stock class."""
    wrong = []
    for flags in FLAGS:
        params, others = make_params(device, elements), make_params(device, elements)
        swapped = orlop.SwapAdamW(params, window_bytes=elements, **flags)
        stock = torch.optim.AdamW(others, **flags)
        for _ in range(3):
            swapped.step()
            stock.step()
        swapped.synchronize()
        same = all(torch.equal(param, other) for param, other in zip(params, others)) and all(
            torch.equal(swapped.state[param][key], value.cpu())
            for param, other in zip(params, others)
            for key, value in stock.state[other].items()
        )
        if not same:
            wrong.append(str(flags))
    return wrong


def check_order(device: torch.device) -> bool:
    """20 steps with long kernels in the way give the bits of 20 steps without."""
    module: Any = torch.get_device_module(device)
    sleep = getattr(module, "_sleep", None)
    if sleep is None:
        return True
    results = []
    for delayed in (False, True):
        params = make_params(device, 64_000)
        optimizer = orlop.SwapAdamW(params, window_bytes=100_000)
        for number in range(20):
            if delayed:
                sleep(2_000_000)
            for param in params:
                param.grad = torch.full_like(param, 0.01 * (number + 1)) * param
            if delayed and optimizer.links:
                link = next(iter(optimizer.links.values()))
                for stream in (link._up, link._down):
                    with module.stream(stream):
                        sleep(1_000_000)
            optimizer.step()
        optimizer.synchronize()
        results.append([param.detach().clone() for param in params])
    return all(map(torch.equal, *results))


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=256_000_000)
    parser.add_argument("--window-bytes", type=int, default=256 * 2**20)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    console = Console()
    if not torch.accelerator.is_available():
        console.print("no accelerator here: nothing was measured")
        return 2
    device = torch.accelerator.current_accelerator()
    assert device is not None
    device = torch.device(device.type, torch.accelerator.current_device_index())
    wrong = check_bits(device, 1_000_000)
    order = check_order(device)
    params = make_params(device, options.elements)
    swapped = orlop.SwapAdamW(params, window_bytes=options.window_bytes)
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    ours = median_step(swapped, options.rounds)
    peak = torch.accelerator.max_memory_allocated() - before
    limit = (
        duplex_seconds(device, min(swapped.state_bytes, 2**30))
        * swapped.state_bytes
        / min(swapped.state_bytes, 2**30)
    )
    saved = copy.deepcopy(swapped.state_dict())
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    swapped.load_state_dict(saved)
    spike = torch.accelerator.max_memory_allocated() - before
    description = swapped.describe()
    swapped.links[device] = AcceleratorLink(device, num_slots=1)
    serial = median_step(swapped, options.rounds)
    stock = median_step(torch.optim.AdamW(params), options.rounds)
    table = Table("what", "value", "bar")
    table.add_row("bits equal to stock", "no: " + ", ".join(wrong) if wrong else "yes", "yes")
    table.add_row("bits equal under delays", "yes" if order else "no", "yes")
    table.add_row("step", f"{ours * 1000:.1f} ms", "")
    table.add_row("step / duplex link time", f"{ours / limit:.2f}", "near 1")
    table.add_row("serial swap / step", f"{serial / ours:.2f}", "> 1")
    table.add_row("step / stock on the device", f"{ours / stock:.1f}", "stated")
    table.add_row("device peak in a step / cap", f"{peak / options.window_bytes:.2f}", "stated")
    table.add_row("device rise in a load", f"{spike} bytes", "0")
    console.print(torch.cuda.get_device_name() if torch.cuda.is_available() else str(device))
    console.print(table)
    console.print(description)
    return 1 if wrong or not order or spike else 0


if __name__ == "__main__":
    sys.exit(main())
