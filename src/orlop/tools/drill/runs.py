"""One training run as seen from outside: started, watched, killed at the planned moment, started again.

Knows the run by its command, its directory and its processes. Must not know what is trained, nor print.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from orlop.store import files
from orlop.store.catalog import parse_step, parse_unpublished
from orlop.tools.drill import processes
from orlop.tools.drill.comparison import read_records
from orlop.tools.drill.elsewhere import OpenFiles
from orlop.tools.drill.kills import Kill, Killed
from orlop.wording import counted

__all__ = ["Run", "RunFailed", "Watcher", "Witness"]

POLL_SECONDS = 0.005
STALLED_SECONDS = 600.0
ENDING_SECONDS = 60.0  # what processes may take to end after one rank was killed, or after their launcher did
METRICS_NAME, RECORDS_NAME, FINGERPRINT_NAME = "metrics.jsonl", "records.jsonl", "fingerprint.json"
RUN_VARIABLE = "ORLOP_DRILL_RUN"  # tells `orlop.record` in the processes of a drill where their run is
_OUTPUT_LINES = 30


class RunFailed(Exception):
    """A run did not go as planned: it failed or stalled, outlived its launcher, or could not be killed."""


class Witness(Protocol):
    """Who is told how a run goes on."""

    def on_step(self, run: str, step: int) -> None:
        """The run has recorded a step."""

    def on_event(self, run: str, text: str) -> None:
        """Something else happened to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run: its directory, its command, and what can be seen of it.

    Attributes:
        name: What it is called.
        directory: The run directory of its own.
        command: What starts it, and starts it again.
    """

    name: str
    directory: Path
    command: tuple[str, ...]

    @property
    def log(self) -> Path:
        """The output of all its launches."""
        return self.directory.with_name(f"{self.directory.name}.log")

    @property
    def root(self) -> Path:
        """Where its checkpoints stand: the run directory, or the one below it that holds its records."""
        records = self.records_path()
        return self.directory if records is None else records.parent

    def records_path(self) -> Path | None:
        """The file of its step records; None before there is one."""
        for folder in self._folders():
            for name in (METRICS_NAME, RECORDS_NAME):
                if (folder / name).is_file():
                    return folder / name
        return None

    def last_step(self) -> int:
        """The last step in its records; 0 before the first."""
        path = self.records_path()
        lines = [] if path is None else read_records(path, last=1)
        return int(lines[-1]["step"]) if lines else 0

    def records_mark(self) -> tuple[float, int]:
        """Changes whenever the records do."""
        path = self.records_path()
        try:
            found = None if path is None else path.stat()
        except FileNotFoundError:  # just being replaced
            found = None
        return (0.0, 0) if found is None else (found.st_mtime_ns, found.st_size)

    def published(self) -> set[int]:
        """The steps of the checkpoints that stand under their final names."""
        names = (name for folder in self._folders() for name in files.directory_names(folder))
        return {step for name in names if (step := parse_step(name)) is not None}

    def saved(self) -> bool:
        """Whether there is more in the run directory than what a drill compares."""
        compared = {METRICS_NAME, RECORDS_NAME, FINGERPRINT_NAME}
        names = {name.rpartition("/")[2] for name in files.file_sizes(self.directory)}
        return bool(names - compared or self.published())

    def writing(self) -> set[int]:
        """The steps of the checkpoints that are begun and not published."""
        steps = set()
        for folder in self._folders():
            for name in files.directory_names(folder):
                unpublished = parse_unpublished(name)
                if unpublished is not None and unpublished.kind == "partial":
                    step = parse_step(unpublished.final)
                    steps |= set() if step is None else {step}
        return steps - self.published()

    def _folders(self) -> list[Path]:
        """The run directory and those right in it that are no checkpoints."""
        below = [
            name
            for name in files.directory_names(self.directory)
            if parse_step(name.partition(".")[0]) is None
        ]
        return [self.directory, *(self.directory / name for name in below)]


class Watcher:
    """Starts a run, follows it, and strikes when a kill is due.

    Args:
        run: What to run.
        witness: Who is told.
        ranks: The ranks that a kill hits; all processes when it is empty.

    Attributes:
        published: The steps of all checkpoints that were seen, those that have expired since included.
        open_files: What processes of the run were seen to hold open for writing.
    """

    def __init__(self, run: Run, witness: Witness, ranks: Collection[int] = ()) -> None:
        self.run = run
        self.witness = witness
        self.ranks = frozenset(ranks)
        self.published: set[int] = set()
        self.open_files = OpenFiles()
        self._first: tuple[float, int] | None = None
        self._latest: tuple[float, int] | None = None

    @property
    def step_seconds(self) -> float:
        """Wall time of a step, by the records of the last launch; 0 where there are too few."""
        if self._first is None or self._latest is None or self._latest[1] <= self._first[1]:
            return 0.0
        return (self._latest[0] - self._first[0]) / (self._latest[1] - self._first[1])

    def until_done(self, kills: Sequence[Kill]) -> list[Killed]:
        """Runs to the end; whenever a planned kill has struck, starts the same command again.

        Raises:
            RunFailed: The run failed or stalled, a process outlived it, or a kill found no moment to strike.
        """
        struck: list[Killed] = []
        for kill in kills:
            killed = self._launch(kill, struck[-1].published if struck else 0)
            if killed is None:
                raise RunFailed(f"{self.run.name}: finished before it could be killed {kill.moment}")
            struck.append(killed)
        self._launch(None, struck[-1].published if struck else 0)
        return struck

    def _launch(self, kill: Kill | None, start: int) -> Killed | None:
        """One launch: until the kill has struck, or else until the run is done; nothing of it runs on.

        Args:
            kill: What it is to be hit by.
            start: The step of the newest checkpoint, from which it goes on."""
        files.make_directory(self.run.directory)
        # A partial directory that an earlier launch left is no sign of a write by this one.
        left = self.run.writing()
        self._first = self._latest = None
        environment = {**os.environ, RUN_VARIABLE: str(self.run.directory)}
        child = processes.launch(self.run.command, environment, self.run.log)
        seen: set[processes.Process] = set()
        try:
            killed = self._follow(child, kill, start, left, seen)
            outlived = processes.wait_gone(seen, ENDING_SECONDS)
        finally:
            processes.kill_tree(child)
            processes.kill(processes.living(seen))
        if killed is None and child.returncode != 0:
            raise RunFailed(f"{self.run.name}: ended with exit code {child.returncode}\n{self._log_tail()}")
        if outlived:
            raise RunFailed(
                f"{self.run.name}: {counted(len(outlived), 'process', 'processes')} outlived their launcher"
            )
        return killed

    def _follow(
        self,
        child: subprocess.Popen[bytes],
        kill: Kill | None,
        start: int,
        left: set[int],
        seen: set[processes.Process],
    ) -> Killed | None:
        """Watches until the kill has struck or the launcher has ended; notes every process it sees."""
        shown, moved = 0, time.monotonic()
        # Until this launch has written some, the records are those of the launch before.
        old = self.run.records_mark()
        while child.poll() is None:
            step = self.run.last_step() if self.run.records_mark() != old else 0
            if kill is not None and kill.is_due(step, self.run.writing() - left):
                killed = self._strike(child, kill, left)
                if killed is not None:
                    return killed
                kill = kill.after_a_miss(self.run.last_step())
            if 0 < step < start and not shown:
                # All would come out identical, and no resume had been tried.
                raise RunFailed(
                    f"{self.run.name}: started again, it did step {step} once more, although the checkpoint of step "
                    f"{start} stands there: the command does not go on from its newest checkpoint"
                )
            if step != shown:
                shown, moved = step, time.monotonic()
                self._first, self._latest = self._first or (moved, step), (moved, step)
                self.published |= self.run.published()
                seen.update(processes.find_tree(child.pid))
                self.witness.on_step(self.run.name, step)
            self.open_files.look(child.pid)
            if time.monotonic() - moved > STALLED_SECONDS:
                raise RunFailed(f"{self.run.name}: no step for {STALLED_SECONDS:.0f} s\n{self._log_tail()}")
            time.sleep(POLL_SECONDS)
        self.published |= self.run.published()
        self.witness.on_step(self.run.name, self.run.last_step())
        return None

    def _strike(self, child: subprocess.Popen[bytes], kill: Kill, left: set[int]) -> Killed | None:
        """Stops all ranks, looks whether the moment is the planned one, and kills; else lets them go on."""
        time.sleep(kill.delay_seconds)
        frozen = processes.freeze_tree(child.pid)
        writing = max(self.run.writing() - left, default=None)
        if kill.moment == "while writing" and writing is None:
            self.witness.on_event(
                self.run.name, "the write was over before the kill struck: trying the next save"
            )
            processes.thaw(frozen)
            return None
        victims = (
            frozen if not self.ranks else [each for each in frozen if processes.rank_of(each) in self.ranks]
        )
        if not victims:
            processes.thaw(frozen)
            raise RunFailed(f"{self.run.name}: no process has one of the ranks {sorted(self.ranks)}")
        processes.kill(victims)
        killed = Killed(
            kill=kill,
            last_step=self.run.last_step(),
            published=max(self.run.published(), default=0),
            writing=writing if kill.moment == "while writing" else None,
            processes=len(victims),
        )
        count = counted(len(victims), "process", "processes")
        self.witness.on_event(
            self.run.name,
            f"killed {count} {kill.moment}, after step {killed.last_step}; newest checkpoint: step {killed.published}",
        )
        if len(victims) < len(frozen):
            self._await_end(frozen)
        return killed

    def _await_end(self, frozen: list[processes.Process]) -> None:
        """The ranks that were spared have to end by themselves: a job that hangs would never be restarted."""
        processes.thaw(frozen)
        outlived = processes.wait_gone(frozen, ENDING_SECONDS)
        if outlived:
            raise RunFailed(
                f"{self.run.name}: {counted(len(outlived), 'process', 'processes')} still ran {ENDING_SECONDS:.0f} s "
                "after a rank was killed"
            )

    def _log_tail(self) -> str:
        try:
            lines = self.run.log.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return ""
        # What the first rank says of its own end, where it says anything, comes before torchrun's summary.
        said = [line for line in lines if line.startswith("[rank0]:")] or lines
        return "\n".join([*said[-_OUTPUT_LINES:], f"(the whole output: {self.run.log})"])
