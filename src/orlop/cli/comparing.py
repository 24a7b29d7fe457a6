"""`diff`: imports torch when it is called."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from orlop.cli.render import FINDINGS, AsJson, print_findings, print_json, print_table, progress, say
from orlop.wording import counted

if TYPE_CHECKING:
    from orlop.tools.diff import DiffResult

_SHOWN = 50


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    exact: Annotated[
        bool, typer.Option("--exact", help="Bit for bit: -0.0 is not 0.0, and implementation flags count.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints: leaves, shapes, dtypes, hyperparameters, values.

    Any two: steps of one run, other numbers of ranks, orlop's against plain DCP. Of values it shows the largest
    absolute and relative difference, the largest distance in representable numbers (ulp), and the first element
    that differs.

    \b
    Examples:
      orlop diff runs/7b/step-00001000 runs/7b/step-00002000
      orlop diff saved-on-8 saved-on-16 --exact
    """
    from orlop.tools.diff import diff_checkpoints

    with progress("diff") as show:
        result = diff_checkpoints(a, b, exact=exact, on_leaf=show)
    if as_json:
        print_json({"a": a, "b": b, **_as_plain(result)})
    else:
        _print(result, a, b)
    if not result.is_same:
        raise typer.Exit(FINDINGS)


def _as_plain(result: DiffResult) -> dict[str, object]:
    from orlop.tools.findings import as_plain

    return {
        "is_same": result.is_same,
        "num_compared": result.num_compared,
        "num_identical": result.num_identical,
        "findings": [as_plain(finding) for finding in result.findings],
        "values": [asdict(difference) for difference in result.values],
    }


def _print(result: DiffResult, a: str, b: str) -> None:
    common = counted(result.num_compared, "common leaf is", "common leaves are")
    verdict = "the same" if result.is_same else "different"
    say(
        f"{verdict}: {result.num_identical:,} of {common} identical bit for bit",
        fg="green" if result.is_same else "red",
        bold=True,
    )
    if not result.is_same:
        say(f"  A: {a}\n  B: {b}")
    print_findings(
        [finding for finding in result.findings if finding.where not in {v.leaf for v in result.values}]
    )
    if not result.values:
        return
    ordered = sorted(result.values, key=lambda difference: -difference.max_rel)
    table = [
        (
            each.leaf,
            f"{each.num_different:,} of {each.num_elements:,}",
            f"{each.max_abs:.3g}",
            f"{each.max_rel:.3g}",
            "-" if each.max_ulp is None else f"{each.max_ulp:,}",
            f"{list(each.first_index)}: {_number(each.first_values[0])} and {_number(each.first_values[1])}",
        )
        for each in ordered[:_SHOWN]
    ]
    print_table(("leaf", "differ", "max abs", "max rel", "max ulp", "first: A and B"), table, right=(2, 3, 4))
    if len(ordered) > _SHOWN:
        say(f"and {len(ordered) - _SHOWN} more; --json has all of them")


def _number(value: object) -> str:
    """As many digits as tell two float32 apart; --json has all of them."""
    return f"{value:.9g}" if isinstance(value, float) else repr(value)
