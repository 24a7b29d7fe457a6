"""How rows, sizes and findings are printed, and the exit codes.

Owns the look of the output; plain text, so that nothing is cut in a pipe. Must not know what is printed.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orlop.errors import OrlopError
from orlop.wording import counted

if TYPE_CHECKING:
    from orlop.tools.findings import Finding

__all__ = [
    "CAN_NOT_READ",
    "FINDINGS",
    "AsJson",
    "one_line",
    "print_error",
    "print_findings",
    "print_json",
    "print_table",
    "progress",
    "say",
    "size_text",
]

FINDINGS, CAN_NOT_READ = 1, 3
_READER_GONE = 128 + signal.SIGPIPE
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]
_SHOWN = 100


def say(text: str, *, err: bool = False, fg: str | None = None, bold: bool = False) -> None:
    """Prints text. What is not to be seen in it is escaped: names are their writer's, and a terminal obeys some.

    Args:
        text: One line or several.
        err: On stderr.
        fg: Its colour.
        bold: Whether it is; NO_COLOR, which others honour too, leaves out both.
    """
    text = _visible(text)
    if (fg or bold) and not os.environ.get("NO_COLOR"):
        text = typer.style(text, fg=fg, bold=bold or None)
    try:
        typer.echo(text, err=err)
    except BrokenPipeError:
        # Whoever read has seen enough, as `head` does: no finding. What is still buffered goes nowhere.
        with suppress(BrokenPipeError):
            (sys.stderr if err else sys.stdout).close()
        raise typer.Exit(_READER_GONE) from None


def _visible(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(mark if mark.isprintable() or mark == "\n" else ascii(mark)[1:-1] for mark in text)


def print_json(value: Any) -> None:
    """Prints plain data; what JSON lacks (paths, times, infinity, keys that are no text) becomes text."""
    say(json.dumps(_jsonable(value), indent=2, default=str, allow_nan=False))


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _jsonable(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def size_text(nbytes: int) -> str:
    """A size in decimal units."""
    size = float(nbytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return counted(nbytes, "byte") if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"


def print_table(header: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[int] = ()) -> None:
    """Prints columns, each as wide as its widest cell.

    Args:
        header: Names of the columns.
        rows: As many cells in each.
        right: The columns that are aligned to the right.
    """
    cells = [list(header), *([str(cell).replace("\n", "\\n") for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    for number, row in enumerate(cells):
        texts = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ]
        line = "  ".join(texts).rstrip()
        say(line, bold=number == 0)


def one_line(error: OrlopError | OSError) -> str:
    """What happened, and where; the place once."""
    if isinstance(error, OrlopError):
        names_it = not error.where or error.where in error.what
        return error.what.rstrip(".") + ("" if names_it else f": {error.where}")
    return str(error)


def print_error(error: OrlopError | OSError) -> None:
    """Prints an error on stderr: what and where in one line, and a line for whatever else it says."""
    lines = [f"{type(error).__name__}: {one_line(error)}"]
    if isinstance(error, OrlopError):
        labelled = (("expected", error.expected), ("found", error.found), ("what to do", error.todo))
        lines += [f"  {label}: {said}" for label, said in labelled if said]
    with suppress(OSError, typer.Exit):  # where stderr takes nothing, the exit code still tells
        say("\n".join(lines), err=True, fg="red")


def print_findings(findings: Sequence[Finding]) -> None:
    """Prints faults, then notes; of each at most a hundred."""
    for is_fault, colour in ((True, "red"), (False, "yellow")):
        chosen = [finding for finding in findings if finding.is_fault == is_fault]
        for finding in chosen[:_SHOWN]:
            say(f"  {finding}", fg=colour)
        if len(chosen) > _SHOWN:
            say(f"  and {len(chosen) - _SHOWN} more; --json has all of them")
    for todo in dict.fromkeys(finding.todo for finding in findings if finding.is_fault and finding.todo):
        say(f"what to do: {todo}")


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
