"""What loading onto more ranks than saved costs: one rank's checkpoint onto eight, sharded by rows and by columns.

Real processes with gloo on this machine; the time is that of the slowest rank. Bytes: those read by all ranks over
those that they need; `dcp.load` reads whole stored tensors on every rank. The bar for rows is 1.05.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, empty

from orlop.dcp import Reader, Writer
from orlop.testing import run_ranks
from sides import Results, folder, large_state, options

RANKS = 8


def load(rank: int, path: str, shapes: dict[str, tuple[int, int]], axis: int, rounds: int) -> list[object]:
    """On one rank: seconds of each round of both sides, bytes needed and read."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (RANKS,))
    target = {key: empty(shape, device_mesh=mesh, placements=[Shard(axis)]) for key, shape in shapes.items()}
    for tensor in target.values():
        assert isinstance(tensor, DTensor)
        tensor.to_local().zero_()
    seconds: list[list[float]] = [[], []]
    reader = Reader(path, num_threads=1)
    for _ in range(rounds):
        for side in (0, 1):
            reader = Reader(path, num_threads=1) if side == 0 else reader
            dist.barrier()
            begin = time.perf_counter()
            dcp.load(target, storage_reader=reader if side == 0 else FileSystemReader(path))
            seconds[side].append(time.perf_counter() - begin)
    del mesh, target
    return [seconds, reader.report.bytes_needed, reader.report.bytes_read]


def main() -> None:
    """Measure and print."""
    chosen = options(__doc__)
    results = Results(f"Resharding 1 to {RANKS}")
    state = large_state(chosen.megabytes)
    shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
    nbytes = sum(tensor.nbytes for tensor in state.values())
    with folder(chosen.tmpfs) as path:
        dcp.save(state, storage_writer=Writer(path / "x", num_threads=1))
        del state
        for axis, name, bar in ((0, "rows", "<= 1.05"), (1, "columns", "stated")):
            ranks = run_ranks(load, RANKS, str(path / "x"), shapes, axis, chosen.rounds, timeout_seconds=900)
            # A round takes as long as its slowest rank.
            a, b = (
                statistics.median(max(times) for times in zip(*(each[0][side] for each in ranks)))
                for side in (0, 1)
            )
            needed, read = sum(each[1] for each in ranks), sum(each[2] for each in ranks)
            what = f"{nbytes >> 20:,} MiB by {name} vs dcp.load"
            results.add(f"{what}: time", ours=f"{a:.2f} s", other=f"{b:.2f} s", ratio=f"{b / a:.1f}x")
            ratios = f"{read / needed:.3f}", f"{RANKS * nbytes / needed:.1f}"
            results.add("  bytes read / bytes needed", ours=ratios[0], other=ratios[1], bar=bar)
    results.show()


if __name__ == "__main__":
    main()
