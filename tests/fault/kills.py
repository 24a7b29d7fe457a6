"""SIGKILL a saving process at random instants, again and again; each time the next one must resume bit for bit.

    python -m tests.fault.kills [--kills 200] [--seed 0] [--report docs/faults.md]

A child resumes from the store, checks that what it got is exactly a state that this run has at that step, and saves
step after step until it is killed. It says on a pipe what it is about to do, so the report can tell where the kills
hit. A checkpoint whose save had returned must never be lost.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import pickle
import platform
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

import orlop
from orlop.store import files

# Large enough that much of a save is spent writing: 4 MiB of weights and 8 MiB of moments.
_WIDTH = 1024
_KEEP_LAST = 2
# How long a child may live after it has resumed, and take to resume.
_LIFE_SECONDS = 0.4
_PATIENCE_SECONDS = 120.0
_ENOUGH_FAULTS = 10


def _train(model: nn.Linear, optimizer: torch.optim.Optimizer, step: int) -> None:
    for param in model.parameters():
        param.grad = torch.full_like(param, float(step % 7 + 1))
    optimizer.step()


def _digest(model: nn.Linear, optimizer: torch.optim.Optimizer) -> str:
    """Of every bit of the state."""
    digest = hashlib.sha256()
    for param in model.parameters():
        for tensor in (param.detach(), *optimizer.state.get(param, {}).values()):
            digest.update(tensor.contiguous().reshape(-1).numpy())
    return digest.hexdigest()


def child(root: str, pipe: Connection) -> None:
    """Resumes and saves until it is killed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Linear(_WIDTH, _WIDTH)
    optimizer = orlop.SwapAdamW(model.parameters(), lr=0.01)
    engine = orlop.TrainEngine(model, optimizer)
    store = orlop.CheckpointStore(root, keep_last=_KEEP_LAST)
    resumed = store.resume(engine)
    step = 0 if resumed is None else resumed.step
    pipe.send(("resumed", step, _digest(model, optimizer)))

    def say(operation: files.Operation) -> None:
        pipe.send(("about to", operation.kind))

    while True:
        step += 1
        _train(model, optimizer, step)
        pipe.send(("saving", step, _digest(model, optimizer)))
        with files.observed(say):
            store.save(engine, step)
        pipe.send(("saved", step))


@dataclass(slots=True)
class Tally:
    """What all kills came to.

    Attributes:
        kills: How many.
        at: What the child had last said to be doing, and how often.
        old: Resumes that gave the last checkpoint whose save had returned.
        new: Resumes that gave the one whose save was killed.
        faults: Everything that must not happen.
    """

    kills: int = 0
    at: Counter[str] = field(default_factory=Counter)
    old: int = 0
    new: int = 0
    faults: list[str] = field(default_factory=list)


class Killer:
    """Starts a child, kills it, starts the next one on the same root.

    Args:
        root: The store's root.
        seed: Of the instants.
    """

    def __init__(self, root: Path, seed: int) -> None:
        self.tally = Tally()
        self._root = root
        self._chance = random.Random(seed)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["orlop.checkpoints", "orlop.engine", "orlop.optim.swap"])
        self._digests: dict[int, str] = {}
        self._returned = 0
        self._begun = 0
        self._doing = ""

    def kill_once(self) -> None:
        """One life of a child."""
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=child, args=(str(self._root), theirs))
        process.start()
        theirs.close()
        try:
            if ours.poll(_PATIENCE_SECONDS):
                self._hear_resumed(ours.recv())
                self._listen(ours, self._chance.uniform(0.0, _LIFE_SECONDS))
        except EOFError:
            self.tally.faults.append("a child ended by itself")
        process.kill()
        process.join()
        self._listen(ours, 0.0)
        ours.close()
        if process.exitcode != -signal.SIGKILL:
            self.tally.faults.append(f"a child ended with exit code {process.exitcode}")
        self.tally.kills += 1
        self.tally.at[self._doing] += 1

    def _hear_resumed(self, message: tuple[str, int, str]) -> None:
        _, step, digest = message
        if self.tally.kills:
            self.tally.old += step == self._returned
            self.tally.new += step == self._begun != self._returned
        if not self._returned <= step <= self._begun:
            self.tally.faults.append(
                f"resumed at {step}, when {self._returned} was saved and {self._begun} begun"
            )
        self._check(step, digest, "is not bit for bit what was saved")
        self._returned = self._begun = step
        self._doing = "before the first save"

    def _listen(self, pipe: Connection, seconds: float) -> None:
        end = time.monotonic() + seconds
        while True:
            try:
                while pipe.poll(max(0.0, end - time.monotonic())):
                    self._hear(*pipe.recv())
                return
            except (EOFError, OSError, pickle.UnpicklingError):
                # The child is gone, perhaps in the middle of a word.
                return

    def _hear(self, what: str, *rest: Any) -> None:
        if what == "saving":
            self._begun, digest = rest
            self._check(self._begun, digest, "was trained otherwise after a resume")
            self._doing = "before the first operation"
        elif what == "saved":
            self._returned = rest[0]
            self._doing = "between two saves"
        else:
            self._doing = rest[0]

    def _check(self, step: int, digest: str, fault: str) -> None:
        if self._digests.setdefault(step, digest) != digest:
            self.tally.faults.append(f"step {step} {fault}")


def render(tally: Tally, seconds: float, seed: int) -> str:
    """The report's section."""
    rows = "\n".join(f"| {what} | {count} |" for what, count in tally.at.most_common())
    faults = "none" if not tally.faults else "\n".join(["", *(f"- {fault}" for fault in tally.faults)])
    return f"""## Real kills

`make fault-long` on {time.strftime("%Y-%m-%d", time.gmtime())}, torch {torch.__version__}, {platform.system()} \
{platform.machine()}, {os.cpu_count()} CPUs, seed {seed}, {seconds:.0f} s:

- {tally.kills} SIGKILLs of a process that saved 12 MiB checkpoints, keeping {_KEEP_LAST}, one after the other;
- the next process resumed from the last checkpoint whose save had returned {tally.old} times, from the one whose save
  was killed {tally.new} times, and from nothing else; always bit for bit;
- what must not happen: {faults}.

| the child was about to | kills |
| --- | ---: |
{rows}
"""


def main() -> int:
    """Exit code 0 when nothing happened that must not."""
    parser = argparse.ArgumentParser(description="SIGKILL a saving process at random instants.")
    parser.add_argument("--kills", type=int, default=200, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the instants (default: %(default)s)")
    parser.add_argument(
        "--report", type=Path, help="a Markdown file whose last section is replaced by the result"
    )
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="orlop-kills-") as folder:
        killer = Killer(Path(folder) / "run", options.seed)
        while killer.tally.kills < options.kills and len(killer.tally.faults) < _ENOUGH_FAULTS:
            killer.kill_once()
    section = render(killer.tally, time.monotonic() - began, options.seed)
    print(section)
    if options.report is not None:
        head = options.report.read_text().partition("## Real kills")[0]
        options.report.write_text(head + section)
    return 1 if killer.tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
