"""Train, kill, resume, compare: is a run that was killed twice the same, bit for bit, as one that never was?

A drill (`orlop drill`) of `train_gpt.py` on two ranks: one kill of all ranks between two steps, one while a checkpoint
is being written; after each, the same command starts it again. Then every step's loss, gradient norm and learning rate
are compared, and the final state leaf by leaf. Exit code 0: identical; 1: not, or a planned kill did not happen.

    python examples/demo.py [--steps 60] [--save-every 10] [--seed 0] [--out .demo]
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from orlop.tools.drill.comparison import KINDS, read_records
from orlop.tools.drill.drilling import PLACEHOLDER, DrillOptions, DrillResult, drill
from orlop.tools.drill.runs import RunFailed
from report import draw_losses, print_comparison, print_kills

EXAMPLE = Path(__file__).with_name("train_gpt.py")


class Bars:
    """A progress bar for each run.

    Args:
        progress: Where the bars are.
        steps: How many steps each run has.
    """

    def __init__(self, progress: Progress, steps: int) -> None:
        self.progress = progress
        self.steps = steps
        self.tasks: dict[str, TaskID] = {}

    def on_step(self, run: str, step: int) -> None:
        if run not in self.tasks:
            self.tasks[run] = self.progress.add_task(run, total=self.steps)
        self.progress.update(self.tasks[run], completed=step)

    def on_event(self, run: str, text: str) -> None:
        self.progress.console.print(f"{run}: {text}", markup=False)


def torchrun_logs(options: argparse.Namespace) -> Path:
    """torchrun keeps files of its own, which it can't remove when it is killed: they are no part of a run."""
    return (options.out / "torchrun").resolve()


def command(options: argparse.Namespace) -> list[str]:
    """The one command that starts the training and that starts it again."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launcher += ["--log-dir", str(torchrun_logs(options))]
    words = ["--run", PLACEHOLDER, "--steps", options.steps, "--save-every", options.save_every]
    # After `--` torchrun takes no option of the script for an abbreviated one of its own (`--run-path`).
    return [*launcher, "--", str(EXAMPLE), *map(str, words), "--seed", str(options.seed)]


def run_demo(options: argparse.Namespace, console: Console) -> int:
    """The drill, the tables, the picture; returns the exit code."""
    how = DrillOptions(
        out=options.out,
        kills=2,
        during_save=True,
        seed=options.seed,
        required=KINDS,
        may_write=(str(torchrun_logs(options)),),
    )
    columns = (TextColumn("{task.description:<14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        result = drill(command(options), how, Bars(progress, options.steps))
    print_kills(console, result.kills)
    print_comparison(console, result.rows, result.hint)
    console.print(f"loss curves: {draw(result, options.out / 'losses.png')}")
    return 0 if result.is_identical else 1


def draw(result: DrillResult, picture: Path) -> Path:
    """Both loss curves, and the kills."""
    paths = [run.records_path() for run in (result.uninterrupted, result.killed)]
    curves = [read_records(path) for path in paths if path is not None]
    draw_losses(picture, curves[0], curves[1], result.kills)
    return picture


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
    # One thread for each rank: on a small machine more would only wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
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
