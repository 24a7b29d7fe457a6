"""What `orlop verify` costs against reading the same bytes once with large reads, both from the page cache.

The bar is 0.7x: checking may take at most 1/0.7 of the time that reading takes.
"""

from __future__ import annotations

import torch.distributed.checkpoint as dcp

from load import read_once
from orlop.dcp import Writer
from orlop.tools.check import check_checkpoint
from sides import Results, folder, large_state, options, take_turns


def main() -> None:
    """Measure and print."""
    chosen = options(__doc__)
    state = large_state(chosen.megabytes)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    results = Results("Verifying")
    with folder(chosen.tmpfs) as path:
        dcp.save(state, storage_writer=Writer(path / "x", num_threads=1))
        assert check_checkpoint(path / "x").is_sound
        times = take_turns(
            [lambda: check_checkpoint(path / "x"), lambda: read_once(path / "x")], chosen.rounds
        )
    results.compare(f"{nbytes >> 20:,} MiB, warm, vs reading once", times, ">= 0.7x", nbytes=nbytes)
    results.show()


if __name__ == "__main__":
    main()
