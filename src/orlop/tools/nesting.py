"""The containers that a checkpoint's leaves were in, made again from their paths.

Owns what the paths don't tell: DCP saves every key of a dict as text. Must not know what the leaves hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orlop import compat

__all__ = ["nested"]


def nested(leaves: dict[str, object], paths: Mapping[str, tuple[Any, ...]] | None) -> dict[str, Any]:
    """The leaves as the containers that were saved; flat where the metadata doesn't tell."""
    if paths is None or not all(leaf in paths for leaf in leaves):
        return leaves
    found = compat.unflatten_state_dict(leaves, {leaf: paths[leaf] for leaf in leaves})
    _number_states(found)
    return found


def _number_states(value: Any) -> None:
    """DCP saves every key as text; which keys of an optimizer's state were numbers, its param groups tell."""
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _number_states(inner)
    match value:
        case {"state": dict(state), "param_groups": list(groups)}:
            members = [
                param for group in groups if isinstance(group, dict) for param in group.get("params") or ()
            ]
            names = {str(param): param for param in members}
            value["state"] = {names.get(key, key): entry for key, entry in state.items()}
