"""What loading a checkpoint costs, against `dcp.load` and against reading the file's bytes.

1. Large tensors from the page cache, checksums on, against `dcp.load` (which checks nothing): the bar is 4x.
2. The same from a cold cache, against reading the file once with large reads.
3. Host memory above the state while loading: the bar is 64 MiB.
4. Many small tensors, orlop's and plain DCP's own checkpoint, and the cost per tensor as their number grows tenfold.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.storage import StorageReader

from orlop.dcp import Reader, Writer
from sides import (
    Growth,
    Results,
    blank,
    folder,
    forget,
    large_state,
    options,
    peak_above,
    small_engine,
    small_state,
    take_turns,
)


def read_once(path: Path) -> None:
    """All bytes of the data files, in reads of 8 MiB."""
    buffer = bytearray(8 << 20)
    for file in sorted(path.glob("*.distcp")):
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def measure_large(chosen: Namespace, results: Results) -> None:
    """Large tensors: warm, cold, memory."""
    state = large_state(chosen.megabytes)
    target = blank(state)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    size = f"{nbytes >> 20:,} MiB"

    def ours(path: Path) -> None:
        dcp.load(target, storage_reader=Reader(path, num_threads=chosen.threads))

    def theirs(path: Path) -> None:
        dcp.load(target, storage_reader=FileSystemReader(path))

    for name, writer, bar in (("orlop's", Writer, ">= 4x"), ("plain DCP's", FileSystemWriter, "")):
        with folder(chosen.tmpfs) as root:
            path = root / "x"
            dcp.save(state, storage_writer=writer(path))
            times = take_turns([lambda path=path: ours(path), lambda path=path: theirs(path)], chosen.rounds)
            results.compare(f"{size}, warm, {name} checkpoint, vs dcp.load", times, bar, nbytes=nbytes)
            assert all(torch.equal(target[key], state[key]) for key in state)
            peaks = [peak_above(lambda path=path, side=side: side(path)) >> 20 for side in (ours, theirs)]
            what = "  host memory above the state"
            results.add(what, ours=f"{peaks[0]} MiB", other=f"{peaks[1]} MiB", bar="<= 64 MiB")
    with folder(chosen.disk) as root:
        path = root / "x"
        dcp.save(state, storage_writer=Writer(path, num_threads=1))
        times = take_turns([lambda: ours(path), lambda: read_once(path)], chosen.rounds, lambda: forget(path))
        results.compare(f"{size}, cold from disk, vs reading the file once", times, nbytes=nbytes)


def measure_small(chosen: Namespace, results: Results) -> None:
    """Many small tensors; and a tenth of them, for the growth."""
    growth = Growth()
    for number in (chosen.tensors // 10, chosen.tensors):
        state = small_state(number)
        target = blank(state)
        with folder(chosen.tmpfs) as path:
            dcp.save(state, storage_writer=Writer(path / "orlop"))
            dcp.save(state, storage_writer=FileSystemWriter(path / "torch"))
            engine = small_engine(state)
            engine.save_dcp(path / "engine")

            def load(reader: StorageReader, target: dict[str, torch.Tensor] = target) -> None:
                dcp.load(target, storage_reader=reader)

            times = take_turns(
                [
                    lambda engine=engine, path=path: engine.load_dcp(path / "engine"),
                    lambda load=load, path=path: load(Reader(path / "orlop", num_threads=chosen.threads)),
                    lambda load=load, path=path: load(Reader(path / "torch", num_threads=chosen.threads)),
                    lambda load=load, path=path: load(FileSystemReader(path / "torch")),
                ],
                chosen.rounds,
            )
        growth.note(times, number)
        results.compare(f"{number:,} small tensors, an engine's load, vs dcp.load", times)
        results.compare("  the same by dcp.load with orlop's reader", times, ours=1)
        results.compare("  … of plain DCP's checkpoint", times, ours=2)
    growth.show(results, {"an engine's load": 0, "dcp.load with orlop's reader": 1})


def main() -> None:
    """Measure and print."""
    chosen = options(__doc__)
    results = Results("Loading")
    measure_large(chosen, results)
    measure_small(chosen, results)
    results.show()


if __name__ == "__main__":
    main()
