"""Train, kill, resume, compare: is a run that was killed twice the same, bit for bit, as one that never was?

Runs `train_gpt.py` on two ranks, once uninterrupted and once with all ranks SIGKILLed: between two steps, and
while a checkpoint is being written. After each kill the same command starts it again. Then every step's loss,
gradient norm and learning rate are compared, and the final state leaf by leaf. Exit code 0: identical; 1:
not, or a kill that was planned did not happen.

    python examples/demo.py [--steps 60] [--save-every 10] [--seed 0] [--out .demo]
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from comparison import Comparison, compare_fingerprints, compare_metrics, read_metrics
from kills import plan_kills
from report import draw_losses, print_comparison, print_kills
from runs import Run, RunFailed, Watcher


def compare(uninterrupted: Run, killed: Run) -> list[Comparison]:
    """Compares what the two runs left."""
    metrics = [read_metrics(run.directory / "metrics.jsonl") for run in (uninterrupted, killed)]
    finals = [json.loads((run.directory / "fingerprint.json").read_text()) for run in (uninterrupted, killed)]
    strays = killed.writing()
    swept = Comparison(
        what="partial checkpoints left",
        count=len(strays),
        difference=f"partial checkpoints of steps {sorted(strays)}" if strays else None,
    )
    return [*compare_metrics(*metrics), *compare_fingerprints(*finals), swept]


def run_demo(options: argparse.Namespace, console: Console) -> int:
    """Both runs, the comparison, the picture; returns the exit code."""
    kills = plan_kills(options.steps, options.save_every, options.seed)
    runs = []
    for name in ("uninterrupted", "killed"):
        directory = options.out / name
        shutil.rmtree(directory, ignore_errors=True)
        run = Run(directory=directory, steps=options.steps, save_every=options.save_every, seed=options.seed)
        run.log.unlink(missing_ok=True)
        runs.append(run)
    uninterrupted, killed = runs
    columns = (TextColumn("{task.description:<18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        Watcher(uninterrupted, progress, "uninterrupted").until_done([])
        struck = Watcher(killed, progress, "killed and resumed").until_done(kills)
    rows = compare(uninterrupted, killed)
    print_kills(console, struck)
    print_comparison(console, rows)
    picture = options.out / "losses.png"
    curves = [read_metrics(run.directory / "metrics.jsonl") for run in runs]
    draw_losses(picture, curves[0], curves[1], struck)
    console.print(f"loss curves: {picture}")
    return 0 if all(row.difference is None for row in rows) else 1


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train, kill, resume, compare bit for bit.")
    parser.add_argument(
        "--steps", type=int, default=60, help="training steps of each run (default: %(default)s)"
    )
    parser.add_argument(
        "--save-every", type=int, default=10, help="steps between checkpoints (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the kills and of the training (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(".demo"), help="where the runs are kept (default: %(default)s)"
    )
    return parser.parse_args(arguments)


def main() -> int:
    """Runs the demo; Ctrl-C and SIGTERM end it cleanly, with every rank gone."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    options = parse_options()
    console = Console()
    start = time.monotonic()
    try:
        code = run_demo(options, console)
    except (RunFailed, ValueError) as error:
        console.print(str(error), style="bold red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; all ranks are gone")
        return 130
    console.print(f"{time.monotonic() - start:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
