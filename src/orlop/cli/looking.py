"""`ls` and `verify`: need no torch, but for `verify --deep` and `--against`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orlop.cli.render import (
    FINDINGS,
    AsJson,
    print_findings,
    print_json,
    print_table,
    progress,
    say,
    size_text,
)
from orlop.wording import counted

if TYPE_CHECKING:
    from torch import nn

    from orlop.tools.check import CheckResult


def ls(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="The run's directory, which holds step-... directories.")
    ],
    verify: Annotated[bool, typer.Option("--verify", help="Check every byte of the complete ones.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the checkpoints of a run, and which one a resume would take (>).

    Exit code 1 when --verify finds one that is damaged or incomplete; 3 when there is none at all.

    \b
    Examples:
      orlop ls runs/7b
      orlop ls runs/7b --verify
      orlop ls s3://bucket/runs/7b --json
    """
    # Imported here, as in every command: `--help` doesn't wait for what it doesn't need.
    from orlop.tools.run import list_run

    rows = list_run(run, verify=verify)
    if as_json:
        print_json([{**asdict(row), "path": str(row.path)} for row in rows])
    else:
        print_table(
            ("", "step", "created (UTC)", "size", "ranks", "torch", "state"),
            [
                (
                    ">" if row.is_next else "",
                    row.step,
                    f"{row.created:%Y-%m-%d %H:%M:%S}" if row.created else "-",
                    size_text(row.nbytes),
                    row.world_size or "-",
                    row.torch_version or "-",
                    row.state + (f": {row.reason}" if row.reason else ""),
                )
                for row in rows
            ],
            right=(1, 3, 4),
        )
    if verify and any(row.state in ("damaged", "incomplete") for row in rows):
        raise typer.Exit(FINDINGS)


def verify(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A checkpoint, or a run's directory with several.")
    ],
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Also load every leaf, and compare the saved fingerprint (needs torch)."),
    ] = False,
    against: Annotated[
        str,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Also compare names, shapes and dtypes with the model that this makes (or FILE.py:FUNCTION).",
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Check a checkpoint without loading it: files, indexes, every checksum, coverage, names.

    Works on any DCP directory: torch's own records carry checksums that torch never checks. All findings are
    shown, not the first.

    \b
    Examples:
      orlop verify runs/7b
      orlop verify runs/7b/step-00001000 --deep
      orlop verify torchtitan/checkpoint/step-500 --against my_models:build
    """
    from orlop.tools.opened import find_checkpoints, is_checkpoint

    if against and not all(against.partition(":")):
        raise typer.BadParameter(f"--against takes module:function, such as my_models:build; not {against!r}")
    paths = [path] if is_checkpoint(path) else [str(found.path) for found in find_checkpoints(path)]
    model = _built(against) if against else None
    results = [_checked(each, deep, model) for each in paths]
    if as_json:
        print_json([_result_as_plain(result) for result in results])
    else:
        for result in results:
            _print_result(result)
    if not all(result.is_sound for result in results):
        raise typer.Exit(FINDINGS)


def _built(against: str) -> nn.Module:
    from orlop.tools.against import build_model

    return build_model(against)


def _checked(path: str, deep: bool, model: nn.Module | None) -> CheckResult:
    from orlop.tools.check import check_checkpoint

    with progress(f"verify {path}") as show:
        result = check_checkpoint(path, on_bytes=show)
    if model is not None and result.num_leaves:  # without metadata there is nothing to compare
        from orlop.tools.against import check_against

        result.findings += check_against(path, model)
    if deep and result.is_sound:
        from orlop.tools.deep import check_deep

        result.findings += check_deep(path)
    return result


def _result_as_plain(result: CheckResult) -> dict[str, Any]:
    from orlop.tools.findings import as_plain

    counts = {
        name: getattr(result, name)
        for name in ("num_leaves", "num_records", "bytes_read", "bytes_checked", "seconds")
    }
    findings = [as_plain(finding) for finding in result.findings]
    return {"path": str(result.path), "is_sound": result.is_sound, **counts, "findings": findings}


def _print_result(result: CheckResult) -> None:
    faults = sum(finding.is_fault for finding in result.findings)
    verdict = counted(faults, "finding") if faults else "sound"
    say(f"{result.path}: {verdict}", fg="red" if faults else "green", bold=True)
    speed = result.bytes_read / max(result.seconds, 1e-9) / 1e9
    covered = 100 * result.bytes_checked / result.bytes_read if result.bytes_read else 100.0
    leaves = counted(result.num_leaves, "leaf", "leaves")
    records, read = counted(result.num_records, "record"), size_text(result.bytes_read)
    say(
        f"  {leaves} in {records}; {read} read, "
        f"{covered:.4g} % of it against checksums; {result.seconds:.2f} s, {speed:.2f} GB/s"
    )
    print_findings(result.findings)
