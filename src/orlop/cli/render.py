"""How rows, sizes and findings are printed, and the exit codes.

Owns the look of the output; plain text, so that nothing is cut in a pipe. Must not know what is printed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orlop.errors import OrlopError

if TYPE_CHECKING:
    from orlop.tools.findings import Finding

__all__ = [
    "CAN_NOT_READ",
    "FINDINGS",
    "AsJson",
    "counted",
    "print_error",
    "print_findings",
    "print_json",
    "print_table",
    "progress",
    "size_text",
]

FINDINGS, CAN_NOT_READ = 1, 3
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]
_SHOWN = 100


def print_json(value: Any) -> None:
    """Prints plain data; what JSON lacks (paths, times) becomes text."""
    typer.echo(json.dumps(value, indent=2, default=str))


def size_text(nbytes: int) -> str:
    """A size in decimal units."""
    size = float(nbytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{nbytes} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"


def print_table(header: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[int] = ()) -> None:
    """Prints columns, each as wide as its widest cell.

    Args:
        header: Names of the columns.
        rows: As many cells in each.
        right: The columns that are aligned to the right.
    """
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    for number, row in enumerate(cells):
        texts = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ]
        line = "  ".join(texts).rstrip()
        typer.secho(line, bold=True) if number == 0 else typer.echo(line)


def counted(count: int, noun: str) -> str:
    """A number and what it counts, in the plural where there is not one."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def print_error(error: OrlopError | OSError) -> None:
    """Prints an error on stderr: what and where in one line, and a line for whatever else it says."""
    if isinstance(error, OrlopError):
        first = error.what.rstrip(".") + (f": {error.where}" if error.where else "")
        labelled = (("expected", error.expected), ("found", error.found), ("what to do", error.todo))
        text = "\n  ".join([first, *(f"{label}: {said}" for label, said in labelled if said)])
    else:
        text = str(error)
    typer.secho(f"{type(error).__name__}: {text}", err=True, fg="red")


def print_findings(findings: Sequence[Finding]) -> None:
    """Prints faults, then notes; of each at most a hundred."""
    for is_fault, colour in ((True, "red"), (False, "yellow")):
        chosen = [finding for finding in findings if finding.is_fault == is_fault]
        for finding in chosen[:_SHOWN]:
            typer.secho(f"  {finding}", fg=colour)
        if len(chosen) > _SHOWN:
            typer.echo(f"  and {len(chosen) - _SHOWN} more; --json has all of them")
    for todo in dict.fromkeys(finding.todo for finding in findings if finding.is_fault and finding.todo):
        typer.echo(f"what to do: {todo}")


@contextmanager
def progress(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar over bytes on a terminal, as (done, total); None elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
