"""`ls`, `inspect` and `verify`: what needs no torch."""

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
    size_text,
)

if TYPE_CHECKING:
    from orlop.tools.check import CheckResult
    from orlop.tools.opened import Opened
    from orlop.tools.overview import Group, LeafRow

_SHOWN = 5


def ls(
    run: Annotated[str, typer.Argument(help="The run's directory, which holds step-... directories.")],
    verify: Annotated[bool, typer.Option("--verify", help="Check every byte of the complete ones.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the checkpoints of a run, and which one a resume would take (>).

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
    elif rows:
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
    else:
        typer.echo(f"no checkpoints in {run}")
    if verify and any(row.state == "damaged" for row in rows):
        raise typer.Exit(FINDINGS)


def inspect(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint's directory.")],
    pattern: Annotated[str, typer.Argument(help="Only leaves that match: a glob, or a part of a name.")] = "",
    tensors: Annotated[
        bool, typer.Option("--tensors", help="Every leaf: dtype, shape, chunks, size.")
    ] = False,
    tree: Annotated[bool, typer.Option("--tree", help="Names as a tree, with totals.")] = False,
    groups: Annotated[bool, typer.Option("--groups", help="Param groups and hyperparameters.")] = False,
    files: Annotated[bool, typer.Option("--files", help="Files, their sizes and records.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint holds, without loading it.

    Without options: who wrote it, totals by part, absent state. With a PATTERN: the leaves that match.

    \b
    Examples:
      orlop inspect runs/7b/step-00001000
      orlop inspect runs/7b/step-00001000 'model.layers.0.*'
      orlop inspect runs/7b/step-00001000 --groups
    """
    from orlop.tools import overview
    from orlop.tools.opened import Opened

    opened = Opened(checkpoint)
    rows = overview.leaves(opened.catalog, pattern or None)
    if as_json:
        print_json(_inspected(opened, rows))
        return
    if groups:
        _print_groups(overview.groups(opened))
    if files:
        table = [
            (row.name, size_text(row.nbytes), row.num_records, "yes" if row.is_indexed else "")
            for row in overview.files(opened)
        ]
        print_table(("file", "size", "records", "indexed"), table, right=(1, 2))
    if tree:
        _print_tree(rows)
    if tensors or (pattern and not (groups or files or tree)):
        _print_leaves(rows)
    if not (groups or files or tree or tensors or pattern):
        _print_summary(opened, rows)


def verify(
    path: Annotated[str, typer.Argument(help="A checkpoint, or a run's directory with several.")],
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Also load every leaf, and compare the saved fingerprint (needs torch)."),
    ] = False,
    against: Annotated[
        str, typer.Option(metavar="MODULE:FUNCTION", help="Also compare with the model that this makes.")
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
    from orlop.tools.opened import find_checkpoints

    found = find_checkpoints(path)
    results = [_checked(str(each.path), deep, against) for each in found] or [_checked(path, deep, against)]
    if as_json:
        print_json([_result_as_plain(result) for result in results])
    else:
        for result in results:
            _print_result(result)
    if not all(result.is_sound for result in results):
        raise typer.Exit(FINDINGS)


def _checked(path: str, deep: bool, against: str) -> CheckResult:
    from orlop.tools.check import check_checkpoint

    with progress(f"verify {path}") as show:
        result = check_checkpoint(path, on_bytes=show)
    if against:
        from orlop.tools.against import check_against

        result.findings += check_against(path, against)
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
    verdict = f"{faults} findings" if faults else "sound"
    typer.secho(f"{result.path}: {verdict}", fg="red" if faults else "green", bold=True)
    speed = result.bytes_read / max(result.seconds, 1e-9) / 1e9
    covered = 100 * result.bytes_checked / result.bytes_read if result.bytes_read else 100.0
    typer.echo(
        f"  {result.num_leaves} leaves in {result.num_records} records; {size_text(result.bytes_read)} read, "
        f"{covered:.4g} % of it against checksums; {result.seconds:.2f} s, {speed:.2f} GB/s"
    )
    print_findings(result.findings)


# -- inspect -----------------------------------------------------------------------------------------------------------


def _inspected(opened: Opened, rows: list[LeafRow]) -> dict[str, Any]:
    from orlop.tools import overview

    manifest = opened.manifest
    return {
        "path": str(opened.location),
        "manifest": None
        if manifest is None
        else manifest.model_dump(mode="json", exclude={"files", "digests"}),
        "dcp_version": opened.catalog.version,
        "parts": [asdict(part) for part in overview.parts(rows, overview.labels(opened.catalog))],
        "absent": overview.absent(opened),
        "groups": [asdict(group) for group in overview.groups(opened)],
        "files": [asdict(row) for row in overview.files(opened)],
        "leaves": [asdict(row) for row in rows],
    }


def _print_summary(opened: Opened, rows: list[LeafRow]) -> None:
    from orlop.tools import overview

    typer.secho(str(opened.location), bold=True)
    manifest = opened.manifest
    if manifest is None:
        typer.echo("  written by torch.distributed.checkpoint (there is no orlop.json)")
    else:
        step = "-" if manifest.step is None else manifest.step
        typer.echo(
            f"  step {step}, written {manifest.created:%Y-%m-%d %H:%M:%S} UTC by orlop {manifest.orlop_version} and "
            f"torch {manifest.torch_version} on {manifest.world_size} ranks"
        )
        for name, class_name in manifest.optimizer_classes.items():
            typer.echo(f"  {name}: {class_name}")
    for name, params in overview.absent(opened).items():
        shown = ", ".join(params[:_SHOWN]) + (", ..." if len(params) > _SHOWN else "")
        typer.echo(f"  {name}: no state yet for {len(params)} parameters: {shown}")
    table = [
        (part.part, part.num_leaves, f"{part.num_elements:,}", size_text(part.nbytes))
        for part in overview.parts(rows, overview.labels(opened.catalog))
    ]
    print_table(("part", "leaves", "elements", "size"), table, right=(1, 2, 3))


def _print_leaves(rows: list[LeafRow]) -> None:
    table = [
        (
            row.leaf,
            row.dtype or "data",
            "" if row.shape is None else _shape(row.shape),
            row.num_chunks,
            size_text(row.nbytes),
        )
        for row in rows
    ]
    print_table(("leaf", "dtype", "shape", "chunks", "size"), table, right=(3, 4))


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _print_tree(rows: list[LeafRow]) -> None:
    """Inner names with the totals below them; a chain of single names stands on one line."""
    tree: dict[str, Any] = {}
    for row in rows:
        node = tree
        *inner, last = row.leaf.split(".")
        for name in inner:
            node = node.setdefault(f"{name}.", {})  # the dot keeps it apart from a leaf of that name
        node[last] = row
    _print_node(tree, 0)


def _print_node(node: dict[str, Any], depth: int) -> None:
    for name, below in node.items():
        title = name
        while isinstance(below, dict) and len(below) == 1:
            name, below = next(iter(below.items()))
            title += name
        if isinstance(below, dict):
            typer.echo(f"{'  ' * depth}{title.removesuffix('.')}  ({size_text(_total(below))})")
            _print_node(below, depth + 1)
        else:
            kind = f"{below.dtype} {_shape(below.shape)}" if below.dtype else "data"
            typer.echo(f"{'  ' * depth}{title}  {kind}, {size_text(below.nbytes)}")


def _total(node: Any) -> int:
    return sum(map(_total, node.values())) if isinstance(node, dict) else int(node.nbytes)


def _print_groups(groups: list[Group]) -> None:
    for group in groups:
        typer.secho(f"{group.optimizer}, group {group.index}: {len(group.params)} parameters", bold=True)
        for key, value in sorted(group.options.items()):
            typer.echo(f"  {key} = {value}")
        for param in group.params:
            typer.echo(f"    {param}")
