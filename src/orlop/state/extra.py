"""Modules' extra state as leaves: one, or those that DCP makes of a nested dict.

Owns which leaves belong together, and making one value of them. Must not know modules or files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from orlop import compat
from orlop.state.groups import path_below

__all__ = ["extra_parts", "is_extra_state", "join_extra"]

_NAME = "_extra_state"


def is_extra_state(fqn: str) -> bool:
    """Whether the entry is what a module's `get_extra_state` gives, rather than a parameter or buffer."""
    return fqn.rpartition(".")[2] == _NAME


def extra_parts(fqns: Collection[str]) -> dict[str, list[str]]:
    """The extra states that are there in several leaves: for each entry's FQN those of its leaves."""
    parts = defaultdict(list)
    for fqn in fqns:
        first, name, _ = f".{fqn}".partition(f".{_NAME}.")
        if name and (entry := f"{first}.{_NAME}"[1:]) not in fqns:
            parts[entry].append(fqn)
    return dict(parts)


def join_extra(
    entry: str, keys: Iterable[str], leaves: Mapping[str, Any], paths: Mapping[str, Sequence[Any]] | None
) -> Any:
    """What DCP made leaves of, in dicts and lists again.

    Args:
        entry: The key of the extra state.
        keys: The keys of its leaves, one at least.
        leaves: Their values, others among them.
        paths: The checkpoint's nested paths, where it has them.
    """
    below = {key: (_NAME, *path_below(key, f"{entry}.", paths)) for key in keys}
    return compat.unflatten_state_dict({key: leaves[key] for key in below}, below)[_NAME]
