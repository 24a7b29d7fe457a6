"""`inspect`: what a checkpoint holds, as tables; needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orlop.cli.render import FINDINGS, AsJson, one_line, print_json, print_table, say, size_text
from orlop.wording import counted

if TYPE_CHECKING:
    from orlop.tools.opened import Opened
    from orlop.tools.overview import LeafRow
    from orlop.tools.param_groups import Unread

_SHOWN = 5


def inspect(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A checkpoint's directory; of a run's, the checkpoint that a resume takes.",
        ),
    ],
    pattern: Annotated[
        str, typer.Argument(metavar="PATTERN", help="Only leaves that match: a glob, or a part of a name.")
    ] = "",
    tensors: Annotated[
        bool, typer.Option("--tensors", help="Every leaf: dtype, shape, chunks, size.")
    ] = False,
    tree: Annotated[bool, typer.Option("--tree", help="Names as a tree, with totals.")] = False,
    groups: Annotated[bool, typer.Option("--groups", help="Param groups and hyperparameters.")] = False,
    files: Annotated[bool, typer.Option("--files", help="Files, their sizes and records.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint holds, without loading it.

    Without options: who wrote it, totals by part, absent state. With a PATTERN: the leaves that match; exit code 1
    when none does.

    \b
    Examples:
      orlop inspect runs/7b/step-00001000
      orlop inspect runs/7b/step-00001000 'model.layers.0.*'
      orlop inspect runs/7b/step-00001000 --groups
    """
    from orlop.tools import overview
    from orlop.tools.opened import Opened

    opened = Opened(_chosen(checkpoint))
    rows = overview.leaves(opened.catalog, pattern or None)
    unread: Unread = {}
    if as_json:
        print_json(_inspected(opened, rows, unread))
    elif rows or not pattern:
        shown = [name for name, wanted in zip(_VIEWS, (groups, files, tree, tensors)) if wanted]
        for name in shown or (["tensors"] if pattern else ["summary"]):
            _VIEWS[name](opened, rows, unread)
    for error in unread.values():
        raise error  # all else was shown
    if pattern and not rows:
        say(f"no leaf matches {pattern!r}", err=True, fg="red")
        raise typer.Exit(FINDINGS)


def _chosen(path: str) -> str:
    """The checkpoint itself; of a run the newest complete one, and says so."""
    from orlop.tools.opened import find_checkpoints, is_checkpoint

    if is_checkpoint(path):
        return path
    found = find_checkpoints(path)
    newest = next((each for each in reversed(found) if each.fault is None), None)
    if newest is None:
        return path  # opening it will say what there is
    say(
        f"{path} is a run with {counted(len(found), 'checkpoint')}; this is its newest complete one", err=True
    )
    return str(newest.path)


def _inspected(opened: Opened, rows: list[LeafRow], unread: Unread) -> dict[str, Any]:
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
        "absent": param_groups.absent(opened, unread),
        "groups": [asdict(group) for group in param_groups.groups(opened, unread=unread)],
        "files": [asdict(row) for row in overview.files(opened)],
        "leaves": [asdict(row) for row in rows],
        "unread": {leaf: one_line(error) for leaf, error in unread.items()},
    }


def _print_summary(opened: Opened, rows: list[LeafRow], unread: Unread) -> None:
    from orlop.tools import overview, param_groups
    from orlop.tools.leaf_names import optimizer_names

    say(str(opened.location), bold=True)
    manifest = opened.manifest
    if manifest is None:
        say("  written by torch.distributed.checkpoint (there is no orlop.json)")
    else:
        step = "-" if manifest.step is None else manifest.step
        say(
            f"  step {step}, written {manifest.created:%Y-%m-%d %H:%M:%S} UTC by orlop {manifest.orlop_version} and "
            f"torch {manifest.torch_version} on {counted(manifest.world_size, 'rank')}"
        )
        for name, class_name in manifest.optimizer_classes.items():
            say(f"  {name}: {class_name}")
    table = [
        (part.part, part.num_leaves, f"{part.num_elements:,}", size_text(part.nbytes))
        for part in overview.parts(rows, optimizer_names(opened.catalog.leaves))
    ]
    print_table(("part", "leaves", "elements", "size"), table, right=(1, 2, 3))
    for name, params in param_groups.absent(opened, unread).items():
        shown = ", ".join(params[:_SHOWN]) + (", ..." if len(params) > _SHOWN else "")
        say(f"{name}: no state yet for {counted(len(params), 'parameter')}: {shown}")


def _print_leaves(opened: Opened, rows: list[LeafRow], unread: Unread) -> None:
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


def _print_tree(opened: Opened, rows: list[LeafRow], unread: Unread) -> None:
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
            say(f"{'  ' * depth}{title.removesuffix('.')}  ({size_text(_total(below))})")
            _print_node(below, depth + 1)
        else:
            kind = f"{below.dtype} {_shape(below.shape)}" if below.dtype else "data"
            say(f"{'  ' * depth}{title}  {kind}, {size_text(below.nbytes)}")


def _total(node: Any) -> int:
    return sum(map(_total, node.values())) if isinstance(node, dict) else int(node.nbytes)


def _print_groups(opened: Opened, rows: list[LeafRow], unread: Unread) -> None:
    from orlop.tools import param_groups

    for group in param_groups.groups(opened, unread=unread):
        count = counted(len(group.params), "parameter")
        say(f"{group.optimizer}, group {group.index}: {count}", bold=True)
        for key, value in sorted(group.options.items()):
            say(f"  {key} = {value}")
        for param in group.params:
            say(f"    {param}")


def _print_files(opened: Opened, rows: list[LeafRow], unread: Unread) -> None:
    from orlop.tools import overview

    table = [
        (row.name, size_text(row.nbytes), row.num_records, "yes" if row.is_indexed else "")
        for row in overview.files(opened)
    ]
    print_table(("file", "size", "records", "indexed"), table, right=(1, 2))


_VIEWS: dict[str, Callable[[Opened, list[LeafRow], Unread], None]] = {
    "groups": _print_groups,
    "files": _print_files,
    "tree": _print_tree,
    "tensors": _print_leaves,
    "summary": _print_summary,
}
