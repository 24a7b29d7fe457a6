"""The command line: parse, call, render, exit code.

Owns what is printed and the exit code. Must not import torch or numpy, so that it starts in a blink, also on
a login node without an accelerator.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orlop.errors import CheckpointNotFound, OrlopError
from orlop.version import __version__

if TYPE_CHECKING:
    from orlop.store.listing import Checkpoint

app = typer.Typer(
    name="orlop",
    help="Looks after the checkpoints of a training run.",
    add_completion=False,
    no_args_is_help=True,
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
    """Looks after the checkpoints of a training run."""


@app.command()
def ls(
    run: Annotated[Path, typer.Argument(help="The run's directory, which holds step-… directories.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list instead of a table.")] = False,
) -> None:
    """List the checkpoints of a run: step, time, size, world size, and whether each is complete."""
    # Imported here, so that `--help` and `--version` don't wait for pydantic.
    from orlop.store.listing import list_checkpoints

    if not run.is_dir():
        raise CheckpointNotFound("There is no such run directory.", where=str(run))
    checkpoints = list_checkpoints(run)
    if as_json:
        typer.echo(json.dumps([_as_plain(checkpoint) for checkpoint in checkpoints], indent=2))
    elif checkpoints:
        _print_table(checkpoints)
    else:
        typer.echo(f"no checkpoints in {run}")


def _as_plain(checkpoint: Checkpoint) -> dict[str, object]:
    manifest, fault = checkpoint.manifest, checkpoint.fault
    return {
        "step": checkpoint.step,
        "path": str(checkpoint.path),
        "created": manifest.created.isoformat() if manifest else None,
        "size_bytes": checkpoint.size,
        "world_size": manifest.world_size if manifest else None,
        "complete": fault is None,
        "why_not": None if fault is None else (fault.found or fault.what),
    }


def _print_table(checkpoints: list[Checkpoint]) -> None:
    from rich import filesize
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("step", "created (UTC)", "size", "ranks", "state", box=None, pad_edge=False)
    for column in (0, 2, 3):
        table.columns[column].justify = "right"
    for checkpoint in checkpoints:
        manifest, fault = checkpoint.manifest, checkpoint.fault
        table.add_row(
            str(checkpoint.step),
            f"{manifest.created:%Y-%m-%d %H:%M:%S}" if manifest else "-",
            filesize.decimal(checkpoint.size),
            str(manifest.world_size) if manifest else "-",
            # Text, not markup: a reason may quote a file name with brackets.
            Text("complete", "green") if fault is None else Text(fault.found or fault.what, "yellow"),
        )
    Console().print(table)


def main() -> None:
    """The console entry: an expected error is one message on stderr and exit code 1, never a traceback."""
    try:
        app()
    except OrlopError as error:
        typer.secho(f"{type(error).__name__}: {error}", err=True, fg="red")
        sys.exit(1)


if __name__ == "__main__":
    main()
