"""What a checkpoint holds: its leaves, the boxes of them that files hold, and where these stand.

Owns the rules that hold before any of its numbers is used (`docs/format.md`, rules C1 to C8), and the catalog's own
form as JSON. Pure. Must not know torch, files, or pickles (`metadata` reads DCP's `.metadata` into a catalog).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any, NoReturn

from orlop.dcp.boxes import Box, tiling_fault
from orlop.dcp.dtypes import ITEM_BYTES, OTHER_DTYPES
from orlop.errors import CheckpointCorrupt
from orlop.wording import counted

__all__ = ["Catalog", "Extent", "Index", "Rules", "TensorEntry", "from_json", "require_safe_name", "to_json"]

_MOST_AXES = 64
_MOST_BYTES = 1 << 62
_MOST_PATH_STEPS = 256
_LARGEST_ITEM = 16

Index = tuple[
    str, tuple[int, ...] | None
]  # a leaf, and the offsets of one chunk of it (None for a byte leaf)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor leaf.

    Attributes:
        dtype: Torch's name.
        sizes: The global shape.
        chunks: The boxes that files hold.
        gap: Why they are not the whole tensor; empty when they are.
        requires_grad: Whether it was a parameter that trains.
    """

    dtype: str
    sizes: tuple[int, ...]
    chunks: tuple[Box, ...]
    gap: str = ""
    requires_grad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Where one record stands.

    Attributes:
        path: The file, relative to the checkpoint's directory.
        offset: Of its first byte.
        nbytes: Its length.
        transforms: What was applied to its bytes (compression), last first.
    """

    path: str
    offset: int
    nbytes: int
    transforms: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class Catalog:
    """A checkpoint's contents.

    Attributes:
        leaves: By key; None for byte leaves.
        extents: The record of each chunk and byte leaf.
        paths: The nested path of each key, where the writer's planner noted it.
        version: DCP's own format version.
    """

    leaves: dict[str, TensorEntry | None] = field(default_factory=dict)
    extents: dict[Index, Extent] = field(default_factory=dict)
    paths: dict[str, tuple[str | int, ...]] | None = None
    version: str | None = None


class Rules:
    """The rules, and the place that messages name.

    Args:
        where: The file that is read.
        budget: Its bytes. A file may refer to one list a million times; an honest one spends some bytes on each element
            that counts, so no more elements than that are looked at.
    """

    def __init__(self, where: str, budget: int) -> None:
        self.where = where
        self.budget = budget

    def refuse(self, what: str, found: object) -> NoReturn:
        """Raise for a broken rule.

        Raises:
            CheckpointCorrupt: Always.
        """
        raise CheckpointCorrupt(
            f"the metadata can't be right: {what}", where=self.where, found=str(found)[:500]
        )

    def spend(self, count: int) -> None:
        """Count elements against the file's bytes."""
        self.budget -= count
        if self.budget < 0:
            self.refuse(
                "it claims more elements than its bytes could tell", "one list, referred to again and again"
            )

    def numbers(self, value: Any, leaf: str) -> tuple[int, ...]:
        """A shape or offsets: ints that are not negative and not absurd."""
        if type(value) not in (tuple, list) or len(value) > _MOST_AXES:
            self.refuse(f"a shape of {leaf!r} is none", type(value).__name__)
        for number in value:
            if type(number) is not int or not 0 <= number < _MOST_BYTES:
                self.refuse(f"a shape of {leaf!r} is out of range", value)
        return tuple(value)

    def tensor(
        self, leaf: str, dtype: Any, sizes: tuple[int, ...], chunks: list[Box], requires_grad: bool
    ) -> TensorEntry:
        """A tensor leaf whose chunks lie inside it and apart from each other."""
        if type(dtype) is not str or (dtype not in ITEM_BYTES and dtype not in OTHER_DTYPES):
            self.refuse(f"the dtype of {leaf!r} is unknown", dtype)
        if math.prod(sizes) * ITEM_BYTES.get(dtype, _LARGEST_ITEM) >= _MOST_BYTES:
            self.refuse(f"{leaf!r} is larger than any memory", sizes)
        fault = tiling_fault(sizes, chunks)
        if fault is not None and fault.kind != "gap":
            self.refuse(f"the chunks of {leaf!r}: {fault.text}", counted(len(chunks), "chunk"))
        gap = fault.text if fault is not None else ""
        return TensorEntry(
            dtype=dtype, sizes=sizes, chunks=tuple(chunks), gap=gap, requires_grad=requires_grad
        )

    def extent(self, path: Any, offset: Any, nbytes: Any, transforms: Any) -> Extent:
        """A record's place: inside the checkpoint's directory, with possible numbers."""
        if type(path) is not str:
            self.refuse("a record is in no file", type(path).__name__)
        require_safe_name(path, self.where)
        for number in (offset, nbytes):
            if type(number) is not int or not 0 <= number < _MOST_BYTES:
                self.refuse(f"a record's place in {path} is out of range", f"{offset}, {nbytes}")
        if type(transforms) not in (list, tuple) or not all(type(name) is str for name in transforms):
            self.refuse(f"a record's transforms in {path} are of an unknown form", transforms)
        if transforms:
            self.spend(len(transforms))
        return Extent(path=path, offset=offset, nbytes=nbytes, transforms=tuple(transforms))

    def disjoint(self, extents: Mapping[Index, Extent]) -> None:
        """No byte belongs to two records. (Tied leaves may share a whole one.)"""
        spans = sorted({(extent.path, extent.offset, extent.nbytes) for extent in extents.values()})
        for (path, offset, nbytes), (next_path, next_offset, next_bytes) in pairwise(spans):
            if path == next_path and offset + nbytes > next_offset and next_bytes:
                self.refuse(f"two records of {path} overlap", f"at byte {next_offset:,}")

    def paths(self, value: Any) -> dict[str, tuple[str | int, ...]] | None:
        """The nested path of each key, as the default planner writes them; another planner's data is left alone."""
        if type(value) is not dict:
            return None
        paths: dict[str, tuple[str | int, ...]] = {}
        for key, path in value.items():
            if type(key) is not str or type(path) not in (tuple, list) or len(path) > _MOST_PATH_STEPS:
                return None
            self.spend(len(path))
            if not all(type(step) in (str, int) for step in path):
                return None
            paths[key] = tuple(path)
        return paths


@lru_cache(maxsize=4096)  # a file holds many records
def require_safe_name(path: str, where: str) -> None:
    """Raise for a file name that leads out of the checkpoint's directory.

    Raises:
        CheckpointCorrupt: It is absolute, climbs, or is no name.
    """
    parts: Sequence[str] = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or any(mark in path for mark in "\0\\:"):
        raise CheckpointCorrupt(
            "a file's name leads out of the checkpoint", where=where, found=repr(path)[:500]
        )


# -- as JSON -----------------------------------------------------------------------------------------------------------


def to_json(catalog: Catalog) -> dict[str, Any]:
    """A catalog as plain JSON data."""
    return {
        "dcp_version": catalog.version,
        "leaves": {
            leaf: None
            if entry is None
            else [entry.dtype, entry.sizes, [[b.offsets, b.sizes] for b in entry.chunks], entry.requires_grad]
            for leaf, entry in catalog.leaves.items()
        },
        "extents": [
            [leaf, offsets, extent.path, extent.offset, extent.nbytes, *extent.transforms]
            for (leaf, offsets), extent in catalog.extents.items()
        ],
        "paths": catalog.paths,
    }


def from_json(content: Mapping[str, Any], where: str) -> Catalog:
    """The reverse of `to_json`, by the same rules as a `.metadata`.

    Raises:
        CheckpointCorrupt: It breaks one.
    """
    rules = Rules(where, budget=_MOST_BYTES)  # JSON has no references
    catalog = Catalog(version=content.get("dcp_version"))
    try:
        for leaf, entry in content["leaves"].items():
            catalog.leaves[leaf] = None if entry is None else _entry_from_json(rules, leaf, entry)
        for leaf, offsets, path, offset, nbytes, *transforms in content["extents"]:
            index = (leaf, None if offsets is None else rules.numbers(offsets, leaf))
            catalog.extents[index] = rules.extent(path, offset, nbytes, transforms)
        catalog.paths = rules.paths(content["paths"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        rules.refuse("it is of an unknown form", f"{type(error).__name__}: {error}")
    rules.disjoint(catalog.extents)
    return catalog


def _entry_from_json(rules: Rules, leaf: str, entry: Any) -> TensorEntry:
    dtype, sizes, chunks, requires_grad = entry
    boxes = [Box(rules.numbers(offsets, leaf), rules.numbers(extents, leaf)) for offsets, extents in chunks]
    return rules.tensor(leaf, dtype, rules.numbers(sizes, leaf), boxes, requires_grad is True)
