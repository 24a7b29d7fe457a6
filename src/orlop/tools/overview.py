"""What a checkpoint holds, as rows to show: leaves, totals by part, param groups, files, who wrote it.

Owns which row says what. Opens only the records of param groups, and only when groups are asked for. Must not know
torch, nor how rows are printed.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from orlop.dcp.archive import Unusual, locate_tensor
from orlop.dcp.catalog import Catalog, Extent, TensorEntry
from orlop.dcp.dtypes import ITEM_BYTES
from orlop.errors import CheckpointError
from orlop.tools.opened import Opened
from orlop.tools.plain_records import Described, read_plain, scalar

__all__ = [
    "FileRow",
    "Group",
    "LeafRow",
    "PartRow",
    "files",
    "groups",
    "labels",
    "leaves",
    "parts",
    "split_state",
]

_GROUP = re.compile(r"(?P<label>(?:.+\.)?[^.]+)\.param_groups\.(?P<name>.+)\.(?P<key>[^.]+)")
_STATE = re.compile(r"(?P<label>(?:.+?\.)?[^.]+?)\.state\.(?P<fqn>.+)\.(?P<key>[^.]+)")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One param group.

    Attributes:
        optimizer: Its optimizer's name.
        index: Its place among the groups; by hyperparameters where the checkpoint keeps these by parameter.
        options: Its hyperparameters.
        params: The names of its parameters.
    """

    optimizer: str
    index: int
    options: dict[str, Any]
    params: list[str]


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
    match = _GROUP.fullmatch(leaf)
    return f"{match['label']}.param_groups" if match else leaf.partition(".")[0]


def labels(catalog: Catalog) -> set[str]:
    """The names of the optimizers: what stands before `.param_groups.`."""
    return {match["label"] for leaf in catalog.leaves if (match := _GROUP.fullmatch(leaf)) is not None}


def split_state(leaf: str, optimizers: set[str]) -> tuple[str, str, str] | None:
    """Optimizer, parameter and state key of an optimizer's leaf; None for another leaf."""
    match = _STATE.fullmatch(leaf)
    if match is None or (match["label"] not in optimizers and match["label"] != "optimizer"):
        return None
    return match["label"], match["fqn"], match["key"]


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


def groups(opened: Opened) -> list[Group]:
    """The param groups of all optimizers, with their hyperparameters.

    Raises:
        CheckpointError: A record of theirs can't be read.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for leaf in opened.catalog.leaves:
        match = _GROUP.fullmatch(leaf)
        if match is not None:
            found.setdefault((match["label"], match["name"]), {})[match["key"]] = _value(opened, leaf)
    if all(name.isdigit() for _, name in found):
        return [
            Group(
                optimizer=label,
                index=int(name),
                params=[str(param) for param in options.pop("params", None) or ()],
                options=options,
            )
            for (label, name), options in sorted(
                found.items(), key=lambda item: (item[0][0], int(item[0][1]))
            )
        ]
    return _grouped(found)


def absent(opened: Opened) -> dict[str, list[str]]:
    """The parameters without state, by optimizer: as the manifest tells, or else those in a group that have none.

    Raises:
        CheckpointError: A param group can't be read.
    """
    manifest = opened.manifest
    if manifest is not None:
        return {optimizer: list(params) for optimizer, params in manifest.absent.items() if params}
    optimizers = labels(opened.catalog)
    states = (split_state(leaf, optimizers) for leaf in opened.catalog.leaves)
    present = {state[:2] for state in states if state is not None}
    found: defaultdict[str, list[str]] = defaultdict(list)
    for group in groups(opened):
        found[group.optimizer] += [param for param in group.params if (group.optimizer, param) not in present]
    return {optimizer: params for optimizer, params in found.items() if params}


def _grouped(by_parameter: dict[tuple[str, str], dict[str, Any]]) -> list[Group]:
    """Parameters with the same hyperparameters make one group: that is all a flattened checkpoint tells."""
    same: dict[tuple[str, str], Group] = {}
    for (label, name), options in by_parameter.items():
        key = (label, repr(sorted(options.items(), key=lambda item: item[0])))
        if key not in same:
            index = sum(other == label for other, _ in same)
            same[key] = Group(optimizer=label, index=index, options=options, params=[])
        same[key].params.append(name)
    return list(same.values())


def _value(opened: Opened, leaf: str) -> Any:
    """The value of a hyperparameter's leaf."""
    entry = opened.catalog.leaves[leaf]
    if entry is None:
        extent = opened.catalog.extents.get((leaf, None))
        if extent is None:
            return Described("not in any file")
        return read_plain(opened.record(extent), f"{leaf} in {extent.path}")
    if math.prod(entry.sizes) != 1:
        return Described(f"tensor of {entry.dtype} {entry.sizes}")
    extent = opened.catalog.extents.get((leaf, (0,) * len(entry.sizes)))
    return Described("not in any file") if extent is None else _scalar(opened.record(extent), extent, leaf)


def _scalar(record: bytes, extent: Extent, leaf: str) -> Any:
    try:
        found = locate_tensor(
            lambda at, count: record[at : at + count], len(record), f"{leaf} in {extent.path}"
        )
    except (Unusual, CheckpointError) as reason:
        return Described(str(reason).splitlines()[0])
    return scalar(found.dtype, record[found.data_at : found.data_at + found.nbytes])
