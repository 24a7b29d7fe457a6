"""What the demo shows at the end: the tables and the picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from rich.console import Console
from rich.table import Table
from rich.text import Text

from orlop.tools.drill.comparison import Comparison
from orlop.tools.drill.kills import Killed

matplotlib.use("Agg")  # needs no display; must be chosen before pyplot is imported
from matplotlib import pyplot


def print_kills(console: Console, kills: Sequence[Killed]) -> None:
    """One line for each kill: when it struck and what it cost."""
    table = Table("kill", "after step", "went on from", "steps done again", "processes killed", title="Kills")
    for killed in kills:
        moment: str = killed.kill.moment
        if killed.writing is not None:
            moment += f" step {killed.writing}"
        lost = killed.last_step - killed.published
        table.add_row(moment, *map(str, (killed.last_step, killed.published, lost, killed.processes)))
    console.print(table)


def print_comparison(console: Console, rows: Sequence[Comparison], hint: str | None) -> None:
    """One line for each thing compared, then the verdict, and the usual cause of what differs."""
    table = Table("compared", "places", "result", title="Uninterrupted and killed run")
    table.columns[2].overflow = "fold"  # a leaf's name is never cut short
    for row in rows:
        result = Text("identical", "green") if row.difference is None else Text(row.difference, "red")
        table.add_row(row.what, str(row.count), result)
    console.print(table)
    first = next((row for row in rows if row.difference is not None), None)
    if first is None:
        console.print("[bold green]identical")
    else:
        console.print(Text(f"DIFFERENT, first in {first.what}: {first.difference}", "bold red"))
        if hint is not None:
            console.print(f"usual cause: {hint}", markup=False)


def draw_losses(
    path: Path,
    uninterrupted: Sequence[Mapping[str, Any]],
    killed: Sequence[Mapping[str, Any]],
    kills: Sequence[Killed],
) -> None:
    """A PNG of both loss curves (over each other, if all went well) and the kill points."""
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for label, lines, color, width in (
        ("uninterrupted", uninterrupted, "lightskyblue", 5.0),
        ("killed and resumed", killed, "black", 1.2),
    ):
        steps, losses = [line["step"] for line in lines], [line["loss"] for line in lines]
        axes.plot(steps, losses, label=label, color=color, linewidth=width)
    loss_at = {line["step"]: line["loss"] for line in killed}
    for number, event in enumerate(kills):
        color = ("tab:red", "tab:orange")[number % 2]
        axes.axvspan(event.published, event.last_step, color=color, alpha=0.12, linewidth=0)
        axes.plot(
            event.last_step,
            loss_at.get(event.last_step, float("nan")),
            "X",
            color=color,
            markersize=11,
            label=f"killed {event.kill.moment}, went on from step {event.published}",
        )
    axes.set(xlabel="step", ylabel="loss", title="Training loss; shaded: steps done again after a kill")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
