"""The command line: parse, call, render, exit code.

Owns what is printed and the exit code. The commands' modules import what they call when they are called: `--help`,
`ls`, `inspect`, `verify` and `prune` start in a blink and never import torch or numpy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from orlop.cli.changing import convert, prune
from orlop.cli.comparing import diff
from orlop.cli.drilling import CONTEXT, drill
from orlop.cli.inspecting import inspect
from orlop.cli.looking import ls, verify
from orlop.cli.render import CAN_NOT_READ, print_error
from orlop.errors import OrlopError
from orlop.version import __version__

__all__ = ["app", "main"]

app = typer.Typer(
    name="orlop",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: it starts faster, and the docs are made of it
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
# What `orlop --help` says of each in one line of 80 columns.
_COMMANDS: dict[Callable[..., None], str] = {
    ls: "List a run's checkpoints, and which one a resume takes.",
    inspect: "Show what a checkpoint holds, without loading it.",
    verify: "Check files, checksums, coverage and names.",
    diff: "Compare two checkpoints: leaves, values, settings.",
    convert: "To safetensors, to a torch.load file, to new DCP.",
    prune: "Remove old checkpoints of a run.",
}
for command, line in _COMMANDS.items():
    app.command(short_help=line)(command)
app.command(short_help="Kill a training run, resume it, compare it bit for bit.", context_settings=CONTEXT)(
    drill
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"orlop {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Looks after the checkpoints of a training run: orlop's own, and any torch.distributed.checkpoint.

    Nothing in a checkpoint is ever executed. With --json, errors are still text, on stderr.

    \b
    Examples:
      orlop ls runs/7b
      orlop verify runs/7b
      orlop drill -- python train.py --run {run}

    \b
    Exit codes, of every command:
      0  fine
      1  findings: damaged, different, not identical
      2  wrong usage
      3  can't read (or write) what was asked for
    """


def main() -> None:
    """The console entry: an expected error is one message on stderr and exit code 3, never a traceback."""
    try:
        app()
    except (OrlopError, OSError) as error:
        print_error(error)
        sys.exit(CAN_NOT_READ)


if __name__ == "__main__":
    main()
