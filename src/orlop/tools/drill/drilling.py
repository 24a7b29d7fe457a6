"""The drill, top to bottom: run uninterrupted, plan kills, run again with them, compare.

Owns what a drill demands of a command. Must not print; `Witness` is told how it goes on.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from orlop.store import files
from orlop.store.listing import list_checkpoints
from orlop.store.objects import Url
from orlop.tools.drill.comparison import Comparison, compare_fingerprints, compare_records, hint, read_records
from orlop.tools.drill.elsewhere import LIMIT, Lookout
from orlop.tools.drill.kills import Kill, Killed, plan_kills
from orlop.tools.drill.runs import FINGERPRINT_NAME, Run, RunFailed, Watcher, Witness
from orlop.tools.drill.surroundings import DRILL_MARKER, find_surroundings, from_here, matches

__all__ = ["PLACEHOLDER", "DrillOptions", "DrillResult", "drill"]

PLACEHOLDER = "{run}"
_NAMED = 5  # files of a finding


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillOptions:
    """How to drill.

    Attributes:
        out: Where both runs are kept; what two earlier runs left there is removed.
        kills: How many.
        during_save: Whether every other kill is to hit a checkpoint while it is written.
        ranks: The ranks that a kill hits; all processes when it is empty.
        seed: Decides when kills strike.
        required: Kinds of state that the checkpoints must hold.
        may_write: Globs of what the command may write outside of its run directory, absolute or from the current
            directory; one that matches a directory counts for all in it.
    """

    out: Path
    kills: int = 2
    during_save: bool = False
    ranks: tuple[int, ...] = ()
    seed: int = 0
    required: tuple[str, ...] = ()
    may_write: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillResult:
    """How the drill went.

    Attributes:
        uninterrupted: The run that was left alone.
        killed: The run that was killed.
        kills: When.
        rows: What was compared.
        hint: The usual cause of what differs.
        step: The last step of the checkpoints whose state was compared.
    """

    uninterrupted: Run
    killed: Run
    kills: tuple[Killed, ...]
    rows: tuple[Comparison, ...]
    hint: str | None
    step: int

    @property
    def is_identical(self) -> bool:
        """Whether nothing differs."""
        return all(row.difference is None for row in self.rows)

    @property
    def verdict(self) -> str:
        """In a line: that nothing differs, or what does first."""
        first = next((row for row in self.rows if row.difference is not None), None)
        return "identical" if first is None else f"DIFFERENT, first in {first.what}: {first.difference}"


def drill(command: Sequence[str], options: DrillOptions, witness: Witness) -> DrillResult:
    """Run a training command twice, kill one of them, compare.

    Args:
        command: The words that start the training and, started again, resume it; `{run}` stands for the directory.
        options: How.
        witness: Told of steps and kills.

    Raises:
        ValueError: The command has no `{run}`, or the run is too short for the kills.
        RunFailed: A run failed, wrote somewhere else, or could not be killed as planned.
    """
    if not any(PLACEHOLDER in word for word in command):
        raise ValueError(f"the command must hold {PLACEHOLDER}, which stands for the run's directory")
    _claim(options.out)
    uninterrupted, killed = (_fresh(command, options.out, name) for name in ("uninterrupted", "killed"))
    first = Watcher(uninterrupted, witness)
    _, complaint = _until_done(first, [], options)
    if complaint:
        raise RunFailed(complaint)
    records = _records(uninterrupted)
    if not uninterrupted.saved():
        raise RunFailed(
            f"{uninterrupted.name}: but for its records nothing was written in {uninterrupted.directory}: the command "
            f"saves its checkpoints outside of {PLACEHOLDER}, or none at all, so that there is no resume to try"
        )
    kills = plan_kills(
        [record["step"] for record in records],
        first.published,
        count=options.kills,
        during_save=options.during_save,
        step_seconds=first.step_seconds,
        seed=options.seed,
    )
    struck, complaint = _until_done(Watcher(killed, witness, options.ranks), kills, options)
    try:
        result = _compare(uninterrupted, killed, struck, records, options)
    except RunFailed as error:
        raise RunFailed(complaint or str(error)) from error
    if complaint:
        raise RunFailed(f"{complaint}\n  but for that, the two runs are {result.verdict}")
    return result


def _compare(
    uninterrupted: Run,
    killed: Run,
    struck: list[Killed],
    records: list[dict[str, Any]],
    options: DrillOptions,
) -> DrillResult:
    """Both runs as they stand at the end."""
    other_records = _records(killed)
    if other_records[0]["step"] != records[0]["step"]:
        raise RunFailed(
            f"the second run began with step {other_records[0]['step']} and not with {records[0]['step']}: it found a "
            f"checkpoint outside of {PLACEHOLDER}, where the command must not write"
        )
    state = [_final_state(run) for run in (uninterrupted, killed)]
    rows = [
        *compare_records(records, other_records),
        *_compare_states(state[0], state[1], options.required),
        _compare_leftovers(killed),
    ]
    return DrillResult(
        uninterrupted=uninterrupted,
        killed=killed,
        kills=tuple(struck),
        rows=tuple(rows),
        hint=hint(rows, [kill.published for kill in struck]),
        step=state[0].step,
    )


def _claim(out: Path) -> None:
    """Make sure that nothing but an earlier drill is ever removed."""
    if (
        files.is_directory(out)
        and not (out / DRILL_MARKER).exists()
        and (files.file_sizes(out) or files.directory_names(out))
    ):
        raise ValueError(f"{out} is not empty and no earlier drill's; give another directory by --out")
    files.make_directory(out)
    files.write_file(out / DRILL_MARKER, b"")


def _fresh(command: Sequence[str], out: Path, name: str) -> Run:
    directory = (out / name).absolute()
    if files.is_directory(directory):
        files.remove_tree(directory)
    run = Run(
        name=name,
        directory=directory,
        command=tuple(word.replace(PLACEHOLDER, str(directory)) for word in command),
    )
    files.write_file(run.log, b"")
    return run


def _until_done(
    watcher: Watcher, kills: Sequence[Kill], options: DrillOptions
) -> tuple[list[Killed], str | None]:
    """A run to its end: what struck it, and what is to be said of files that it left outside of its directory."""
    run = watcher.run
    lookout = Lookout(find_surroundings(run.command, options.out, [run.directory, run.log]))
    struck = watcher.until_done(kills)
    found = [path for path in lookout.find(watcher.open_files.inodes) if not matches(path, options.may_write)]
    if not lookout.is_whole:
        text = f"more than {LIMIT:,} files stand around it: what it left in the directories beyond is not noticed"
        watcher.witness.on_event(run.name, text)
    return struck, _complaint(run, found, lookout.patterns(found)) if found else None


def _complaint(run: Run, found: Sequence[str], patterns: Sequence[str]) -> str:
    more = f" and {len(found) - _NAMED:,} more" if len(found) > _NAMED else ""
    allowed = " ".join(f"--may-write {shlex.quote(pattern)}" for pattern in patterns[:_NAMED])
    return (
        f"{run.name}: outside of {PLACEHOLDER} these are new, changed or gone: "
        f"{', '.join(map(from_here, found[:_NAMED]))}{more}\n"
        "  the next run finds what this one left there, and the comparison does not see it\n"
        f"  let the command write below {PLACEHOLDER}; where it is harmless, or something else wrote it: "
        f"{allowed} (a file, a directory, or a glob where names change from run to run)"
    )


def _records(run: Run) -> list[dict[str, Any]]:
    path = run.records_path()
    records = [] if path is None else read_records(path)
    if not records:
        raise RunFailed(
            f"{run.name}: no steps are recorded in {run.directory}: the command writes elsewhere, or uses neither "
            "orlop.Trainer nor orlop.record"
        )
    return records


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """The state that a run ended with.

    Attributes:
        step: Which step it is of.
        leaves: The digest of each leaf.
        checkpoint: Where its values are; None when the command has noted digests alone.
    """

    step: int
    leaves: dict[str, str]
    checkpoint: Path | Url | None = None


def _final_state(run: Run) -> _State:
    noted = run.root / FINGERPRINT_NAME
    if noted.exists():
        content = json.loads(files.read_file(noted))
        return _State(step=content["step"], leaves=content["leaves"])
    whole = [found for found in list_checkpoints(run.root) if found.fault is None]
    if not whole:
        raise RunFailed(
            f"{run.name}: there is no complete checkpoint in {run.root} at the end: the command writes elsewhere, or "
            "saves nothing"
        )
    # Imported here: a drill of a command that notes its own digests needs no torch.
    from orlop.tools.drill.states import fingerprint_of

    newest = whole[-1]
    return _State(step=newest.step, leaves=fingerprint_of(newest.path), checkpoint=newest.path)


def _compare_states(one: _State, two: _State, required: Sequence[str]) -> list[Comparison]:
    steps = None if one.step == two.step else f"step {one.step} and step {two.step}"
    rows = [Comparison(what="step of the final state", count=1, difference=steps)]
    return rows + compare_fingerprints(one.leaves, two.leaves, required, partial(_describe, one, two))


def _describe(one: _State, two: _State, leaf: str) -> str:
    """How a leaf differs: in values where there are checkpoints, else in digests."""
    if one.checkpoint is None or two.checkpoint is None:
        return f"{leaf}: {one.leaves.get(leaf)} and {two.leaves.get(leaf)}"
    from orlop.tools.drill.states import describe_difference

    return describe_difference(one.checkpoint, two.checkpoint, leaf)


def _compare_leftovers(killed: Run) -> Comparison:
    strays = sorted(killed.writing())
    difference = f"partial checkpoints of steps {strays}" if strays else None
    return Comparison(what="partial checkpoints left", count=len(strays), difference=difference)
