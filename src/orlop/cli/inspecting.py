"""`inspect`: what a checkpoint holds, as tables; needs no torch."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orlop.cli.render import AsJson, print_json, print_table, size_text

if TYPE_CHECKING:
    from orlop.tools.opened import Opened
    from orlop.tools.overview import LeafRow
    from orlop.tools.param_groups import Group

_SHOWN = 5


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
    from orlop.tools import overview, param_groups
    from orlop.tools.opened import Opened

    opened = Opened(checkpoint)
    rows = overview.leaves(opened.catalog, pattern or None)
    if as_json:
        print_json(_inspected(opened, rows))
        return
    if groups:
        _print_groups(param_groups.groups(opened))
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


def _inspected(opened: Opened, rows: list[LeafRow]) -> dict[str, Any]:
    from orlop.tools import overview, param_groups
    from orlop.tools.leaf_names import optimizer_names

    manifest = opened.manifest
    return {
        "path": str(opened.location),
        "manifest": None
        if manifest is None
        else manifest.model_dump(mode="json", exclude={"files", "digests"}),
        "dcp_version": opened.catalog.version,
        "parts": [asdict(part) for part in overview.parts(rows, optimizer_names(opened.catalog.leaves))],
        "absent": param_groups.absent(opened),
        "groups": [asdict(group) for group in param_groups.groups(opened)],
        "files": [asdict(row) for row in overview.files(opened)],
        "leaves": [asdict(row) for row in rows],
    }


def _print_summary(opened: Opened, rows: list[LeafRow]) -> None:
    from orlop.tools import overview, param_groups
    from orlop.tools.leaf_names import optimizer_names

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
    for name, params in param_groups.absent(opened).items():
        shown = ", ".join(params[:_SHOWN]) + (", ..." if len(params) > _SHOWN else "")
        typer.echo(f"  {name}: no state yet for {len(params)} parameters: {shown}")
    table = [
        (part.part, part.num_leaves, f"{part.num_elements:,}", size_text(part.nbytes))
        for part in overview.parts(rows, optimizer_names(opened.catalog.leaves))
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
