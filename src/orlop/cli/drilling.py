"""`drill`: runs and kills the user's own command."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orlop.cli.render import CAN_NOT_READ, FINDINGS, AsJson, print_json, print_table, say

if TYPE_CHECKING:
    from orlop.tools.drill.drilling import DrillOptions, DrillResult

CONTEXT = {"allow_interspersed_args": False}


def drill(
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- COMMAND...", help="The training command; {run} is its directory."),
    ],
    kills: Annotated[int, typer.Option(min=1, help="How many kills.")] = 2,
    during_save: Annotated[
        bool, typer.Option("--during-save", help="Every other kill hits a checkpoint while it is written.")
    ] = False,
    ranks: Annotated[
        str, typer.Option(help="Kill only these ranks (0,3); by default all processes, the launcher too.")
    ] = "",
    seed: Annotated[
        int, typer.Option(help="Decides when kills strike; the same seed again: to within a step or two.")
    ] = 0,
    out: Annotated[Path, typer.Option(help="Where both runs are kept.")] = Path(".drill"),
    may_write: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="A file, directory or glob outside of {run} that may be written; may be repeated.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fire drill: run a training command once uninterrupted and once with SIGKILLs, and compare the two.

    The command is run twice in fresh directories; whenever it is killed, it is started again as it stands and
    has to resume by itself. Then the step records are compared bit for bit, and the final state leaf by leaf.
    Scripts that use orlop.Trainer work as they are; others call orlop.record(step, engine).

    Refused: a command without {run}; one that leaves no records, or nothing else, in {run} after the first run; one
    whose second run goes on from where the first ended; one that writes outside of {run}, where the next run would
    find it. Seen are files that are new, changed or gone in the current directory and next to the files that the
    command names, whoever wrote them; and anywhere else, files that its processes hold open for writing when they are
    looked at, many times a second. Not seen are a file elsewhere that is open for a moment only, and what is no file:
    a database, an object store. Nothing counts in caches (CACHEDIR.TAG, ~/.cache), virtual environments and .git, nor
    what tempfile and torch make in the temporary directory. A PATTERN is absolute or from the current directory; *
    stands for any number of levels.

    Both runs, the launcher and all ranks are on this machine. By --ranks only these ranks are killed (by their RANK):
    the others have to end by themselves within a minute.

    \b
    Examples:
      orlop drill -- python train.py --run {run}
      orlop drill --kills 4 --during-save --seed 7 -- torchrun --nproc-per-node 2 -- train.py --run {run}
    """
    from orlop.tools.drill.drilling import DrillOptions
    from orlop.tools.drill.drilling import drill as run_drill
    from orlop.tools.drill.runs import RunFailed

    try:
        options = DrillOptions(
            out=out,
            kills=kills,
            during_save=during_save,
            ranks=_ranks(ranks),
            seed=seed,
            may_write=tuple(may_write or ()),
        )
        result = run_drill(command, options, _Witness())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except RunFailed as error:
        say(str(error), err=True, fg="red")
        raise typer.Exit(CAN_NOT_READ) from error
    if as_json:
        print_json(_as_plain(result, command, options))
    else:
        _print(result, _replay(command, options))
    if not result.is_identical:
        raise typer.Exit(FINDINGS)


def _ranks(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(",") if word)
    except ValueError as error:
        raise typer.BadParameter(f"ranks are numbers: {text!r}") from error


class _Witness:
    """Tells a person on stderr how the runs go on; steps only on a terminal."""

    def on_step(self, run: str, step: int) -> None:
        """One line that is written over."""
        if sys.stderr.isatty():
            typer.echo(f"\r{run}: step {step}   ", err=True, nl=False)

    def on_event(self, run: str, text: str) -> None:
        """A line of its own."""
        start = "\r" if sys.stderr.isatty() else ""
        typer.echo(f"{start}{run}: {text}", err=True)


def _as_plain(result: DrillResult, command: list[str], options: DrillOptions) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "is_identical": result.is_identical,
        "command": command,
        "seed": options.seed,
        "may_write": list(options.may_write),
        "step": result.step,
        "kills": [asdict(killed) for killed in result.kills],
        "comparisons": [asdict(row) for row in result.rows],
        "hint": result.hint,
        "runs": [str(result.uninterrupted.directory), str(result.killed.directory)],
    }


def _replay(command: list[str], options: DrillOptions) -> str:
    words = ["orlop", "drill", "--seed", str(options.seed), "--kills", str(options.kills)]
    words += ["--during-save"] * options.during_save
    words += ["--ranks", ",".join(map(str, options.ranks))] if options.ranks else []
    words += [word for pattern in options.may_write for word in ("--may-write", pattern)]
    return shlex.join([*words, "--out", str(options.out), "--", *command])


def _print(result: DrillResult, replay: str) -> None:
    print_table(
        ("kill", "after step", "went on from", "done again", "processes"),
        [
            (
                killed.kill.moment + (f" step {killed.writing}" if killed.writing is not None else ""),
                killed.last_step,
                killed.published,
                killed.last_step - killed.published,
                killed.processes,
            )
            for killed in result.kills
        ],
        right=(1, 2, 3, 4),
    )
    say("")
    print_table(
        ("compared", "places", "result"),
        [(row.what, row.count, row.difference or ("identical" if row.count else "-")) for row in result.rows],
        right=(1,),
    )
    if result.is_identical:
        say(result.verdict, fg="green", bold=True)
        return
    say(result.verdict, fg="red", bold=True)
    if result.hint:
        say(f"usual cause: {result.hint}")
    say(f"replay: {replay}")
