"""What saving a checkpoint costs, against `dcp.save` and against writing the same bytes.

1. Large tensors to memory, checksums on, against `dcp.save`: the bar is 2x.
2. The same to a disk with fsync, against writing as many bytes from memory and fsync: the bar is 0.9x.
3. Many small tensors, and the cost per tensor as their number grows tenfold. In `dcp.save` with orlop's writer, torch's
   own planner and its garbage collections are a part of it; an engine's save holds these back.
"""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from orlop.dcp import Writer
from sides import (
    Growth,
    Results,
    folder,
    large_state,
    options,
    peak_above,
    small_engine,
    small_state,
    take_turns,
)


def write_raw(state: dict[str, torch.Tensor], path: Path) -> None:
    """The tensors' bytes in one file, from their own memory, with fsync."""
    path.mkdir()
    with (path / "raw").open("wb", buffering=0) as file:
        for tensor in state.values():
            memory = memoryview(tensor.view(-1).view(torch.uint8).numpy())
            for start in range(0, len(memory), 8 << 20):
                file.write(memory[start : start + (8 << 20)])
        os.fsync(file.fileno())


def measure_large(chosen: Namespace, results: Results) -> None:
    """Large tensors: to memory, to a disk, memory used."""
    state = large_state(chosen.megabytes)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    size = f"{nbytes >> 20:,} MiB"

    def ours(path: Path) -> None:
        dcp.save(state, storage_writer=Writer(path, num_threads=chosen.threads))

    def theirs(path: Path) -> None:
        dcp.save(state, storage_writer=FileSystemWriter(path))

    with folder(chosen.tmpfs) as root:
        path = root / "x"
        times = take_turns([lambda: ours(path), lambda: theirs(path)], chosen.rounds, lambda: clear(path))
        results.compare(f"{size} to memory vs dcp.save", times, ">= 2x", nbytes=nbytes)
        peaks = []
        for side in (ours, theirs):
            clear(path)
            peaks.append(peak_above(lambda side=side: side(path)) >> 20)
        results.add("  host memory above the state", ours=f"{peaks[0]} MiB", other=f"{peaks[1]} MiB")
    with folder(chosen.disk) as root:
        path = root / "x"
        sides = [lambda: ours(path), lambda: write_raw(state, path)]
        times = take_turns(sides, chosen.rounds, lambda: clear(path))
        results.compare(f"{size} to disk with fsync, vs raw write + fsync", times, ">= 0.9x", nbytes=nbytes)


def clear(path: Path) -> None:
    """Remove what the last side wrote."""
    shutil.rmtree(path, ignore_errors=True)


def measure_small(chosen: Namespace, results: Results) -> None:
    """Many small tensors; and a tenth of them, for the growth."""
    growth = Growth()
    for number in (chosen.tensors // 10, chosen.tensors):
        state = small_state(number)
        engine = small_engine(state)
        with folder(chosen.tmpfs) as root:
            path = root / "x"
            times = take_turns(
                [
                    lambda engine=engine, path=path: engine.save_dcp(path),
                    lambda state=state, path=path: dcp.save(state, storage_writer=Writer(path)),
                    lambda state=state, path=path: dcp.save(state, storage_writer=FileSystemWriter(path)),
                ],
                chosen.rounds,
                lambda path=path: clear(path),
            )
        growth.note(times, number)
        results.compare(f"{number:,} small tensors, an engine's save, vs dcp.save", times)
        results.compare("  the same by dcp.save with orlop's writer", times, ours=1)
    growth.show(results, {"an engine's save": 0, "dcp.save with orlop's writer": 1})


def main() -> None:
    """Measure and print."""
    chosen = options(__doc__)
    results = Results("Saving")
    measure_large(chosen, results)
    measure_small(chosen, results)
    results.show()


if __name__ == "__main__":
    main()
