"""What a checkpoint holds, as rows to show: leaves, totals by part, files.

Owns which row says what. Opens no data file. Must not know torch, nor how rows are printed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from fnmatch import fnmatchcase

from orlop.dcp.catalog import Catalog, TensorEntry
from orlop.dcp.dtypes import ITEM_BYTES
from orlop.tools.leaf_names import group_option, split_state
from orlop.tools.opened import Opened

__all__ = ["FileRow", "LeafRow", "PartRow", "files", "leaves", "parts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafRow:
    """One leaf.

    Attributes:
        leaf: Its key.
        dtype: Torch's name; None for plain data.
        shape: The global shape; None for plain data.
        num_chunks: How many records hold it.
        nbytes: Of its values; for plain data, of its record.
        stored_bytes: Of its records.
    """

    leaf: str
    dtype: str | None
    shape: tuple[int, ...] | None
    num_chunks: int
    nbytes: int
    stored_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRow:
    """The leaves of one part, or of one kind of optimizer state, together."""

    part: str
    num_leaves: int
    num_elements: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRow:
    """One file.

    Attributes:
        name: Relative to the checkpoint.
        nbytes: Its size.
        num_records: That the metadata places in it.
        is_indexed: Whether orlop's index stands beside it.
    """

    name: str
    nbytes: int
    num_records: int
    is_indexed: bool


def leaves(catalog: Catalog, pattern: str | None = None) -> list[LeafRow]:
    """Every leaf whose key matches the glob pattern, by key; a plain word matches anywhere in it."""
    stored: defaultdict[str, list[int]] = defaultdict(list)
    for (leaf, _), extent in catalog.extents.items():
        stored[leaf].append(extent.nbytes)
    return [
        _leaf(leaf, catalog.leaves[leaf], stored[leaf])
        for leaf in sorted(catalog.leaves)
        if pattern is None or _matches(leaf, pattern)
    ]


def _matches(leaf: str, pattern: str) -> bool:
    return fnmatchcase(leaf, pattern if any(mark in pattern for mark in "*?[") else f"*{pattern}*")


def _leaf(leaf: str, entry: TensorEntry | None, stored: list[int]) -> LeafRow:
    if entry is None:
        nbytes = sum(stored)
        return LeafRow(
            leaf=leaf, dtype=None, shape=None, num_chunks=len(stored), nbytes=nbytes, stored_bytes=nbytes
        )
    nbytes = math.prod(entry.sizes) * ITEM_BYTES.get(entry.dtype, 1)
    return LeafRow(
        leaf=leaf,
        dtype=entry.dtype,
        shape=entry.sizes,
        num_chunks=len(entry.chunks),
        nbytes=nbytes,
        stored_bytes=sum(stored),
    )


def parts(rows: list[LeafRow], optimizers: set[str]) -> list[PartRow]:
    """Totals by part, and within an optimizer by kind of state.

    Args:
        rows: The leaves.
        optimizers: Their names.
    """
    totals: dict[str, list[int]] = {}
    for row in rows:
        total = totals.setdefault(_part(row.leaf, optimizers), [0, 0, 0])
        total[0] += 1
        total[1] += math.prod(row.shape) if row.shape is not None else 0
        total[2] += row.nbytes
    return [
        PartRow(part=part, num_leaves=count, num_elements=elements, nbytes=nbytes)
        for part, (count, elements, nbytes) in sorted(totals.items())
    ]


def _part(leaf: str, optimizers: set[str]) -> str:
    state = split_state(leaf, optimizers)
    if state is not None:
        return f"{state[0]}.state.*.{state[2]}"
    option = group_option(leaf)
    return f"{option[0]}.param_groups" if option is not None else leaf.partition(".")[0]


def files(opened: Opened) -> list[FileRow]:
    """Every file."""
    counts: defaultdict[str, int] = defaultdict(int)
    for extent in set(opened.catalog.extents.values()):
        counts[extent.path] += 1
    return [
        FileRow(
            name=name,
            nbytes=nbytes,
            num_records=counts[name],
            is_indexed=f"{name.removesuffix('.distcp')}.index.json" in opened.sizes,
        )
        for name, nbytes in opened.sizes.items()
    ]
