"""`convert`: a checkpoint as safetensors, as a file for `torch.load`, or as a new DCP checkpoint.

Owns that the result appears whole or not at all. Which leaves are taken, and in which dtype, is `selection`'s; the
formats are `safetensors`', `torch_file`'s and `rewrite`'s. Needs torch; holds one region of a tensor at a time (for
DCP one chunk, of 256 MiB at most).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from orlop.dcp.memory import memory_of
from orlop.errors import (
    CheckpointExists,
    CheckpointIncomplete,
    CheckpointMismatch,
    CheckpointNotFound,
    StorageRefused,
)
from orlop.store import files, publish
from orlop.store.objects import Url, locate
from orlop.tools import overview, rewrite
from orlop.tools.leaf_names import optimizer_names
from orlop.tools.nesting import nested
from orlop.tools.opened import Opened
from orlop.tools.safetensors import DTYPES, Planned, plan_files, render_header, render_index
from orlop.tools.selection import Selection, dtype_named
from orlop.tools.stored_values import StoredValues, regions
from orlop.tools.torch_file import StreamedTensor, write_torch_file
from orlop.wording import counted

__all__ = ["Converted", "Format", "convert"]

Format = Literal["safetensors", "torch", "dcp"]
_INDEX_NAME = "model.safetensors.index.json"


@dataclass(slots=True, kw_only=True)
class Converted:
    """What was written.

    Attributes:
        path: The file or directory.
        files: Its files.
        num_leaves: How many leaves are in them.
        nbytes: Of all files.
        left_out: Leaves that were chosen and that the format can't hold, or holds under another name (tied ones).
    """

    path: Path
    files: list[str] = field(default_factory=list)
    num_leaves: int = 0
    nbytes: int = 0
    left_out: list[str] = field(default_factory=list)


def convert(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    to: Format,
    only: Sequence[str] = (),
    dtype: str | None = None,
    cast_moments: bool = False,
    shard_bytes: int = 5 * 10**9,
    on_bytes: Callable[[int, int], None] | None = None,
) -> Converted:
    """Convert a checkpoint, streaming; every byte that is read is checked as in a load.

    Args:
        checkpoint: orlop's own, or any DCP directory.
        out: Where the result appears, whole or not at all: a directory, or a file for `torch`.
        to: The format. `safetensors` takes the model alone unless `only` says otherwise, and drops the `model.` before
            names then, as Hugging Face expects.
        only: Parts that are taken.
        dtype: `bf16`, `fp16`, `fp32` or torch's name of a dtype, for the model's floating-point tensors.
        cast_moments: Whether optimizer state is cast to it as well.
        shard_bytes: Most bytes of tensors in one safetensors file.
        on_bytes: Told of progress: bytes done, bytes in all.

    Raises:
        CheckpointExists: `out` is there.
        StorageRefused: `out` would be below a file.
        CheckpointNotFound: There is no checkpoint, or nothing of these parts in it.
        CheckpointMismatch: A dtype is unknown, or the format has none for a tensor.
        CheckpointIncomplete: A region of a tensor is in no file; nothing was written.
        CheckpointError: The checkpoint can't be read; nothing is left behind.
    """
    target = locate(out)
    if isinstance(target, Url):
        raise CheckpointNotFound(
            "a conversion is written to this machine", where=str(out), todo="give a local path"
        )
    chosen = tuple(only) or (("model",) if to == "safetensors" else ())
    selection = Selection(only=chosen, dtype=dtype_named(dtype), cast_moments=cast_moments)
    opened = Opened(checkpoint)
    source = _Source(StoredValues(opened), selection, on_bytes)
    lacking = [part for part in chosen if not any(map(Selection(only=(part,)).takes, opened.catalog.leaves))]
    if lacking or not source.leaves:
        parts = {leaf.partition(".")[0] for leaf in opened.catalog.leaves}
        raise CheckpointNotFound(
            "the checkpoint has no such part" if lacking else "the checkpoint holds nothing",
            where=str(checkpoint),
            expected=", ".join(lacking) or None,
            found=", ".join(sorted(parts)) or "no leaf at all",
            todo="choose parts with --only" if parts else None,
        )
    _require_whole(source)
    _require_free(target, opened.location)
    if to == "safetensors":
        return _to_safetensors(source, target, shard_bytes)
    if to == "torch":
        return _to_torch(source, target)
    written = rewrite.rewrite(
        source.values, source.leaves, source.dtypes, target, selection.only, source.part
    )
    sizes = files.file_sizes(target)
    return Converted(path=target, files=list(sizes), num_leaves=written, nbytes=sum(sizes.values()))


def _require_free(target: Path, source: Path | Url) -> None:
    if isinstance(source, Path) and source.resolve() in target.resolve().parents:
        todo = "give a place beside it"
        raise StorageRefused("a checkpoint is not written into another one", where=str(target), todo=todo)
    if target.exists():
        todo = "give another name, or remove it first"
        raise CheckpointExists(
            "something stands there, and nothing is written over", where=str(target), todo=todo
        )
    above = next(path for path in target.absolute().parents if path.exists())
    if not above.is_dir():
        raise StorageRefused(
            "a file stands where its directory would be", where=str(target), found=str(above)
        )


class _Source:
    """The chosen leaves of a checkpoint, as they are to be written."""

    def __init__(
        self, values: StoredValues, selection: Selection, on_bytes: Callable[[int, int], None] | None
    ) -> None:
        self.values = values
        self.catalog = values.catalog
        self.leaves = [leaf for leaf in self.catalog.leaves if selection.takes(leaf)]
        optimizers = optimizer_names(self.catalog.leaves)
        self.dtypes = {
            leaf: selection.dtype_of(leaf, entry, optimizers)
            for leaf in self.leaves
            if (entry := self.catalog.leaves[leaf]) is not None
        }
        self._on_bytes = on_bytes
        self._done = 0
        chosen = set(self.leaves)
        self._total = sum(row.nbytes for row in overview.leaves(self.catalog) if row.leaf in chosen)

    def part(self, leaf: str, tensor: Tensor) -> Tensor:
        """A region as it is to be written; counted as done."""
        self._done += tensor.numel() * tensor.element_size()
        if self._on_bytes is not None:
            self._on_bytes(self._done, self._total)
        return tensor.to(getattr(torch, self.dtypes[leaf]))

    def parts(self, leaf: str) -> Iterator[Tensor]:
        """A tensor's values, row-major, region by region."""
        for box in regions(self.values.entry(leaf)):
            yield self.part(leaf, self.values.tensor(leaf, box))


def _require_whole(source: _Source) -> None:
    gaps = {leaf: entry.gap for leaf in source.leaves if (entry := source.catalog.leaves[leaf]) and entry.gap}
    for leaf, gap in gaps.items():
        raise CheckpointIncomplete(
            counted(len(gaps), "tensor is", "tensors are") + " not whole; nothing was written",
            where=leaf,
            found=gap,
        )


@contextmanager
def _partial(target: Path) -> Iterator[Path]:
    """A directory beside `target` to write into; it is gone afterwards, unless it was published."""
    room = publish.begin_partial(target)
    try:
        yield room
    except BaseException:
        publish.discard(room)
        raise
    if room.exists():
        publish.discard(room)


def _to_safetensors(source: _Source, target: Path, shard_bytes: int) -> Converted:
    result = Converted(path=target)
    planned = _plan_safetensors(source, result)
    shares = plan_files(planned, shard_bytes)
    with _partial(target) as room:
        for name, share in shares.items():
            with files.new_file(room / name) as file:
                file.write(render_header(share))
                for tensor in share:
                    for part in source.parts(tensor.leaf):
                        file.write(memory_of(part.contiguous()))
                file.fsync()
        if len(shares) > 1:
            files.write_file(room / _INDEX_NAME, render_index(shares))
        publish.publish(room, target)
    sizes = files.file_sizes(target)
    result.files, result.nbytes, result.num_leaves = list(sizes), sum(sizes.values()), len(planned)
    return result


def _plan_safetensors(source: _Source, result: Converted) -> list[Planned]:
    manifest = source.values.opened.manifest
    # Tied entries are written once, as `save_pretrained` does; whoever loads them ties them again.
    aliases = set() if manifest is None else {f"model.{name}" for name in manifest.aliases}
    is_model = all(leaf.startswith("model.") for leaf in source.leaves)
    planned = []
    for leaf in source.leaves:
        entry = source.catalog.leaves[leaf]
        if entry is None or leaf in aliases:
            result.left_out.append(leaf)
            continue
        dtype = source.dtypes[leaf]
        if dtype not in DTYPES:
            raise CheckpointMismatch(
                "safetensors has no such dtype; nothing was written",
                where=leaf,
                found=dtype,
                todo="choose one with --dtype, or convert to another format",
            )
        name = leaf.removeprefix("model.") if is_model else leaf
        planned.append(Planned(name=name, leaf=leaf, dtype=dtype, sizes=entry.sizes))
    return planned


def _to_torch(source: _Source, target: Path) -> Converted:
    leaves: dict[str, object] = {}
    for leaf in source.leaves:
        entry = source.catalog.leaves[leaf]
        if entry is None:
            leaves[leaf] = source.values.value(leaf)
            continue
        leaves[leaf] = StreamedTensor(
            dtype=source.dtypes[leaf], sizes=entry.sizes, parts=partial(source.parts, leaf)
        )
    with _partial(target) as room:
        with files.new_file(room / target.name) as file:
            write_torch_file(file, nested(leaves, source.catalog.paths))
            file.fsync()
        publish.require_free(target)
        files.rename(room / target.name, target)
        files.fsync_directory(target.parent)
    nbytes = target.stat().st_size
    return Converted(path=target, files=[target.name], num_leaves=len(leaves), nbytes=nbytes)
