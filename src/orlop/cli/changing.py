"""`convert` and `prune`: what writes or removes. `convert` imports torch when it is called."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from orlop.cli.render import AsJson, print_json, progress, say, size_text
from orlop.wording import counted

if TYPE_CHECKING:
    from orlop.tools.convert import Format

_FORMATS: tuple[Format, ...] = ("safetensors", "torch", "dcp")


def _format(name: str) -> Format:
    """Not by an enum: what is said of another name would then be the parser's."""
    for known in _FORMATS:
        if name == known:
            return known
    raise typer.BadParameter(f"{name!r} is none of {', '.join(_FORMATS)}", param_hint="'--to'")


def convert(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint: orlop's own, or any DCP directory.")
    ],
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="Where the result appears, whole or not at all.")
    ] = "",
    to: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help="The format: safetensors, torch or dcp.",
            autocompletion=lambda: list(_FORMATS),
        ),
    ] = "",
    only: Annotated[
        list[str] | None, typer.Option(help="Take only this part (model, optimizer, ...); may be repeated.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="bf16, fp16 or fp32: for the model's floating-point tensors.")
    ] = "",
    cast_moments: Annotated[
        bool, typer.Option("--cast-moments", help="Cast optimizer state to that dtype, too.")
    ] = False,
    shard_gigabytes: Annotated[float, typer.Option(help="Most of one safetensors file.", min=0.001)] = 5.0,
    in_place_index: Annotated[
        bool, typer.Option("--in-place-index", help="Only add orlop's indexes beside the data files.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Convert a checkpoint, as a stream: to safetensors, to a file for torch.load, or to a new DCP checkpoint.

    safetensors takes the model alone (unless --only says otherwise), under the names that Hugging Face expects.
    dcp writes the checkpoint anew, repaired and with checksums; plain dcp.load reads it.

    \b
    Examples:
      orlop convert runs/7b/step-00001000 export --to safetensors --dtype bf16
      orlop convert runs/7b/step-00001000 all.pt --to torch
      orlop convert torchtitan/step-500 fixed --to dcp
      orlop convert torchtitan/step-500 --in-place-index
    """
    if in_place_index:
        if out or to or only or dtype or cast_moments:
            raise typer.BadParameter("--in-place-index takes neither OUT nor other options")
        _index(checkpoint, as_json)
        return
    if not out or not to:
        raise typer.BadParameter("OUT and --to are needed (or --in-place-index)")
    if cast_moments and not dtype:
        raise typer.BadParameter("--cast-moments needs --dtype")
    form = _format(to)
    from orlop.tools.convert import convert as run

    with progress("convert") as show:
        result = run(
            checkpoint,
            out,
            to=form,
            only=tuple(only or ()),
            dtype=dtype or None,
            cast_moments=cast_moments,
            shard_bytes=int(shard_gigabytes * 1e9),
            on_bytes=show,
        )
    if as_json:
        print_json(asdict(result))
        return
    leaves = counted(result.num_leaves, "leaf", "leaves")
    written = f"{counted(len(result.files), 'file')}, {size_text(result.nbytes)}"
    say(f"{result.path}: {leaves} in {written}", fg="green")
    if result.left_out:
        say(
            f"  left out, as the format can't hold plain data or holds tied ones once: {len(result.left_out)}"
        )


def _index(checkpoint: str, as_json: bool) -> None:
    from orlop.tools.reindex import index_in_place

    with progress("index") as show:
        added = index_in_place(checkpoint, on_bytes=show)
    if as_json:
        print_json({"path": checkpoint, "added": added})
    else:
        say(
            f"{checkpoint}: "
            + (f"{counted(len(added), 'index', 'indexes')} added" if added else "all files have indexes")
        )


def prune(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's directory.")],
    keep_last: Annotated[int, typer.Option(min=1, help="How many of the newest complete checkpoints stay.")],
    keep_every: Annotated[int | None, typer.Option(min=1, help="Multiples of this step stay, too.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say which would go.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove old checkpoints of a run. Incomplete ones, and those that a process reads, are left alone.

    The newest one is read before anything is removed: where it is damaged, the newest sound one stays, too.

    \b
    Examples:
      orlop prune runs/7b --keep-last 3 --keep-every 1000 --dry-run
      orlop prune runs/7b --keep-last 3
    """
    from orlop.tools.prune import prune as run_prune

    result = run_prune(run, keep_last=keep_last, keep_every=keep_every, dry_run=dry_run)
    if as_json:
        print_json({**asdict(result), "dry_run": dry_run})
        return
    verb = "would remove" if dry_run else "removed"
    steps = ", ".join(map(str, result.removed)) or "nothing"
    say(
        f"{verb} {steps} ({size_text(result.freed_bytes)}); kept {', '.join(map(str, result.kept)) or 'nothing'}"
    )
    if result.busy:
        say(f"being read, so left for later: {', '.join(map(str, result.busy))}")
    if result.damaged:
        say(f"damaged, so older ones stay: {', '.join(map(str, result.damaged))}", fg="yellow")
    if result.passed_over:
        say(f"not complete, left alone: {', '.join(map(str, result.passed_over))}")
