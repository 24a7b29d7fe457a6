"""The param groups in a checkpoint: hyperparameters, parameters, and which of these have no state.

Owns the way from either of torch's layouts to groups. Opens only the records of hyperparameters. Must not know torch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from orlop.dcp.archive import Unusual, locate_tensor
from orlop.dcp.catalog import Extent
from orlop.errors import CheckpointError
from orlop.tools.leaf_names import group_option, optimizer_names, split_state
from orlop.tools.opened import Opened
from orlop.tools.plain_records import Described, read_plain, scalar

__all__ = ["Group", "Unread", "absent", "groups"]

Unread = dict[str, CheckpointError | OSError]  # by leaf


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


def groups(
    opened: Opened, read: Callable[[str], Any] | None = None, unread: Unread | None = None
) -> list[Group]:
    """The param groups of all optimizers, with their hyperparameters.

    Args:
        opened: The checkpoint.
        read: Gives the value of a leaf; by default it is read without torch, and what is no plain data is described.
        unread: Where it is noted which leaves can't be read, so that the groups lack them; None raises instead.

    Raises:
        CheckpointError: A record of theirs can't be read.
        OSError: Likewise.
    """
    read = read or partial(_value, opened)
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for leaf in opened.catalog.leaves:
        option = group_option(leaf)
        if option is None:
            continue
        label, name, key = option
        if f"{label}.param_groups.0.params" in opened.catalog.leaves:
            # Numbered groups: what comes after the number is one option, or a place in the dict that it is.
            name, _, key = f"{name}.{key}".partition(".")
        options = found.setdefault((label, name), {})
        try:
            options[key] = read(leaf)
        except (CheckpointError, OSError) as error:
            if unread is None:
                raise
            unread[leaf] = error
    by_label: defaultdict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for (label, name), options in found.items():
        by_label[label][name] = options
    return [
        group
        for label, named in sorted(by_label.items())
        for group in (_numbered if all(map(str.isdigit, named)) else _grouped)(label, named)
    ]


def _numbered(label: str, named: dict[str, dict[str, Any]]) -> list[Group]:
    """The groups of torch's nested layout."""
    return [
        Group(
            optimizer=label,
            index=int(name),
            params=_params(named[name].pop("params", None)),
            options=named[name],
        )
        for name in sorted(named, key=int)
    ]


def _params(value: Any) -> list[str]:
    """Names or numbers; none of what is but described."""
    return list(map(str, value)) if isinstance(value, (list, tuple)) else []


def absent(opened: Opened, unread: Unread | None = None) -> dict[str, list[str]]:
    """The parameters without state, by optimizer: as the manifest tells, or else those in a group that have none.

    Args:
        opened: The checkpoint.
        unread: Where it is noted which leaves of groups can't be read; None raises instead.

    Raises:
        CheckpointError: A param group can't be read.
    """
    manifest = opened.manifest
    if manifest is not None:
        return {optimizer: list(params) for optimizer, params in manifest.absent.items() if params}
    optimizers = optimizer_names(opened.catalog.leaves)
    states = (split_state(leaf, optimizers) for leaf in opened.catalog.leaves)
    present = {state[:2] for state in states if state is not None}
    found: defaultdict[str, list[str]] = defaultdict(list)
    for group in groups(opened, unread=unread):
        found[group.optimizer] += [param for param in group.params if (group.optimizer, param) not in present]
    return {optimizer: params for optimizer, params in found.items() if params}


def _grouped(label: str, named: dict[str, dict[str, Any]]) -> list[Group]:
    """Parameters with the same hyperparameters make one group: that is all a flattened checkpoint tells."""
    same: dict[str, Group] = {}
    for name, options in named.items():
        key = repr(sorted(options.items(), key=lambda item: item[0]))
        group = Group(optimizer=label, index=len(same), options=options, params=[])
        same.setdefault(key, group).params.append(name)
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
