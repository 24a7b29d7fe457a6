"""One training run as seen from outside: started, followed, killed at the planned moment, started again.

Knows the run by its command, its directory and its processes; must not know what is trained.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

import processes
from comparison import read_metrics
from kills import Kill, Killed

EXAMPLE = Path(__file__).with_name("train_gpt.py")
POLL_SECONDS = 0.005
STALLED_SECONDS = 180.0
ENDING_SECONDS = 10.0  # what a process may take to end after its launcher did

_PUBLISHED = re.compile(r"step-(\d+)")
_PARTIAL = re.compile(r"step-(\d+)\.partial-.+")


class RunFailed(Exception):
    """A run did not go as planned: it failed or stalled, outlived its launcher, or could not be killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run: its directory, its command, and what can be seen of it.

    Attributes:
        directory: Where the run keeps its checkpoints and metrics.
        steps: How many it trains.
        save_every: Steps between checkpoints.
        seed: Of the training.
    """

    directory: Path
    steps: int
    save_every: int
    seed: int

    @property
    def log(self) -> Path:
        """The output of all its launches."""
        return self.directory.with_name(f"{self.directory.name}.log")

    @property
    def launcher_files(self) -> Path:
        """Where torchrun keeps files of its own, which it can't remove when it is killed."""
        return self.directory.with_name(f"{self.directory.name}.torchrun")

    @property
    def command(self) -> list[str]:
        """The one command that starts it and that starts it again."""
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        launcher += ["--log-dir", str(self.launcher_files)]
        options = {
            "--run": self.directory,
            "--steps": self.steps,
            "--save-every": self.save_every,
            "--seed": self.seed,
        }
        # After `--` torchrun takes no option of the script for an abbreviated one of its own (`--run-path`).
        return [*launcher, "--", str(EXAMPLE), *(str(word) for option in options.items() for word in option)]

    def last_step(self) -> int:
        """The last step in its metrics; 0 before the first."""
        lines = read_metrics(self.directory / "metrics.jsonl", last=1)
        return int(lines[-1]["step"]) if lines else 0

    def published(self) -> set[int]:
        """The steps of the checkpoints that stand under their final names."""
        return self._steps_named(_PUBLISHED)

    def writing(self) -> set[int]:
        """The steps of the checkpoints that are begun and not published."""
        return self._steps_named(_PARTIAL) - self.published()

    def _steps_named(self, pattern: re.Pattern[str]) -> set[int]:
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return set()
        return {int(match[1]) for name in names if (match := pattern.fullmatch(name))}


class Watcher:
    """Starts a run, follows it on a progress bar, and strikes when a kill is due.

    Args:
        run: What to run.
        progress: Where the bar is.
        title: What the bar is called.
    """

    def __init__(self, run: Run, progress: Progress, title: str) -> None:
        self.run = run
        self.progress = progress
        self.title = title
        self.bar = progress.add_task(title, total=run.steps)

    def until_done(self, kills: Sequence[Kill]) -> list[Killed]:
        """Runs to the end; whenever a planned kill has struck, starts the same command again.

        Raises:
            RunFailed: The run failed or stalled, a process outlived it, or a kill found no moment to strike.
        """
        struck: list[Killed] = []
        try:
            for kill in kills:
                killed = self._launch(kill)
                if killed is None:
                    raise RunFailed(f"{self.title}: finished before it could be killed {kill.moment}")
                struck.append(killed)
            self._launch(None)
        finally:
            shutil.rmtree(self.run.launcher_files, ignore_errors=True)
        return struck

    def _launch(self, kill: Kill | None) -> Killed | None:
        """One launch: until the kill has struck, or else until the run is done; nothing of it runs on."""
        self.run.directory.mkdir(parents=True, exist_ok=True)
        # A partial directory that an earlier launch left is no sign of a write by this one.
        left = self.run.writing()
        child = processes.launch(self.run.command, {**os.environ, "OMP_NUM_THREADS": "1"}, self.run.log)
        seen: set[processes.Process] = set()
        try:
            killed = self._follow(child, kill, left, seen)
            outlived = processes.wait_gone(seen, ENDING_SECONDS)
        finally:
            processes.kill_tree(child)
            processes.kill(processes.living(seen))
        if killed is None and child.returncode != 0:
            raise RunFailed(f"{self.title}: ended with exit code {child.returncode}\n{self._log_tail()}")
        if outlived:
            raise RunFailed(f"{self.title}: {len(outlived)} processes outlived their launcher")
        return killed

    def _follow(
        self,
        child: subprocess.Popen[bytes],
        kill: Kill | None,
        left: set[int],
        seen: set[processes.Process],
    ) -> Killed | None:
        """Watches until the kill has struck or the launcher has ended; notes every process it sees."""
        shown, moved = 0, time.monotonic()
        while child.poll() is None:
            step = self.run.last_step()
            if kill is not None and kill.is_due(step, self.run.writing() - left):
                killed = self._strike(child.pid, kill, left)
                if killed is not None:
                    return killed
                kill = kill.after_a_miss(self.run.last_step())
            if step != shown:
                shown, moved = step, time.monotonic()
                seen.update(processes.find_tree(child.pid))
                self.progress.update(self.bar, completed=step)
            if time.monotonic() - moved > STALLED_SECONDS:
                raise RunFailed(f"{self.title}: no step for {STALLED_SECONDS} s\n{self._log_tail()}")
            time.sleep(POLL_SECONDS)
        self.progress.update(self.bar, completed=self.run.last_step())
        return None

    def _strike(self, pid: int, kill: Kill, left: set[int]) -> Killed | None:
        """Stops all ranks, looks whether the moment is the planned one, and kills; else lets them go on."""
        time.sleep(kill.delay_seconds)
        frozen = processes.freeze_tree(pid)
        writing = max(self.run.writing() - left, default=None)
        if kill.moment == "while writing" and writing is None:
            self.progress.console.print("the write was over before the kill struck: trying the next save")
            processes.thaw(frozen)
            return None
        processes.kill(frozen)
        killed = Killed(
            kill=kill,
            last_step=self.run.last_step(),
            published=max(self.run.published(), default=0),
            writing=writing,
            processes=len(frozen),
        )
        self.progress.console.print(
            f"killed {len(frozen)} processes {kill.moment}, after step {killed.last_step}; "
            f"newest checkpoint: step {killed.published}"
        )
        return killed

    def _log_tail(self) -> str:
        lines = self.run.log.read_text(errors="replace").splitlines()
        # What the first rank says of its own end, where it says anything, comes before torchrun's summary.
        said = [line for line in lines if line.startswith("[rank0]:")] or lines
        return "\n".join([*said[-30:], f"(the whole output: {self.run.log})"])
