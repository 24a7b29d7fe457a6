"""The command line: parse, call, render, exit code.

Owns what is printed and the exit code. The commands' modules import what they call when they are called: `--help`,
`ls`, `inspect`, `verify` and `prune` start in a blink and never import torch or numpy.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

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


class _Command(TyperCommand):
    """Usage lines that show what is typed; typer puts other marks around arguments in each of its versions."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = (param for param in self.params if param.param_type_name == "argument")
        names = [(param.metavar or "", param.required) for param in arguments]
        return ["[OPTIONS]", *(name if required else f"[{name}]" for name, required in names)]


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
    app.command(cls=_Command, short_help=line)(command)
app.command(
    cls=_Command,
    short_help="Kill a training run, resume it, compare it bit for bit.",
    context_settings=CONTEXT,
)(drill)


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
    # Ended from outside, a command leaves nothing half-written behind either.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        app()
    except (OrlopError, OSError) as error:
        print_error(error)
        sys.exit(CAN_NOT_READ)


if __name__ == "__main__":
    main()
