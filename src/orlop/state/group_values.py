"""The values of one param group: what a saved one changes in the live one, and writing that in place.

Owns how a number meets a tensor. Must not know which saved group is which live one (`pairing`), nor files or ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from numbers import Number
from typing import Any

from torch import Tensor

from orlop import compat
from orlop.errors import CheckpointMismatch
from orlop.state.plain import digest
from orlop.state.report import GroupDifference

__all__ = ["LIVE_FLAGS", "plan_group", "take_over", "text_of", "write_group"]

_log = logging.getLogger("orlop")

# How a run computes, not what: always the live run's.
LIVE_FLAGS = frozenset({"foreach", "fused", "capturable", "differentiable"})
_SHOWN = 8
_NOT_VALUES = LIVE_FLAGS | {"params", "param_names"}


def plan_group(
    label: str,
    live: Mapping[str, Any],
    saved: Mapping[str, Any],
    added: Mapping[str, Any] | None = None,
    *,
    taken: bool = True,
) -> tuple[dict[str, Any], list[GroupDifference]]:
    """The values that a saved group changes or adds in a live one, and what differs. Changes nothing.

    Args:
        label: The group's name, for messages.
        live: The live group.
        saved: The saved one.
        added: Options that a class got over time, with the value of the time before: taken where the saved group,
            written by an older torch, lacks one that the live group has.
        taken: Whether the values are going to be written; without that, nothing needs to fit.

    Raises:
        CheckpointMismatch: A live tensor, which stays the same object, can't hold a saved value.
    """
    values = {key: value for key, value in saved.items() if key not in _NOT_VALUES}
    for key, value in (added or {}).items() if taken and len(saved) > 1 else ():
        if key in live and key not in values:
            values[key] = value
            _log.info("%s: the checkpoint knows no %s; set to %s, as before there was one", label, key, value)
    differences = []
    for key, value in values.items():
        if key not in live:
            continue
        if taken:
            values[key] = _fitted(value, live[key], f"{label} {key}")
        ours, theirs = _texts(live[key], value)
        if ours != theirs:
            differences.append(GroupDifference(group=label, key=key, live=ours, saved=theirs, taken=taken))
    return values, differences


def _fitted(value: Any, held: Any, where: str) -> Any:
    """A saved value as it can be put where `held` is: in tensors that are there, and as numbers where those are."""
    if isinstance(held, Tensor):
        _require_room(value, held, where)
        return value
    if isinstance(held, (list, tuple)) and isinstance(value, (list, tuple)) and len(held) == len(value):
        items = (_fitted(item, held[i], f"{where}[{i}]") for i, item in enumerate(value))
        return list(items) if isinstance(value, list) else tuple(items)
    if isinstance(held, Mapping) and type(value) is dict:
        return {
            key: _fitted(item, held[key], f"{where}[{key!r}]") if key in held else item
            for key, item in value.items()
        }
    if isinstance(held, (list, tuple)) and any(isinstance(other, Tensor) for other in held):
        raise _other_kind(value, f"{len(held)} values, as here, of which some are tensors", where)
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _require_room(value: Any, held: Tensor, where: str) -> None:
    """Refuse what a tensor can't hold: a captured graph or a compiled step may hold that very tensor."""
    shape = tuple(value.shape) if isinstance(value, Tensor) else ()
    if not isinstance(value, (Tensor, Number)) or (
        shape != tuple(held.shape) and (shape or held.numel() != 1)
    ):
        raise _other_kind(
            value, f"a tensor of shape {tuple(held.shape)}, or a number for its only element", where
        )
    is_complex = value.is_complex() if isinstance(value, Tensor) else isinstance(value, complex)
    if is_complex and not held.is_complex():
        raise _other_kind(value, f"a real number, for a tensor of {held.dtype}", where)


def _other_kind(value: Any, expected: str, where: str) -> CheckpointMismatch:
    found = text_of(value) if isinstance(value, Tensor) else f"{value!r} ({type(value).__name__})"
    return CheckpointMismatch(
        "a hyperparameter is of another kind", where=where, expected=expected, found=found
    )


def write_group(live: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Put the planned values into the live dict; a live tensor stays the same object and is filled."""
    for key, value in values.items():
        live[key] = _put(value, live.get(key))


def take_over(live: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Make the live dict hold the same values as another one; a live tensor is filled where it can hold its value."""
    for key in live.keys() - other.keys():
        del live[key]
    for key in other.keys() - {"params"}:
        try:
            live[key] = _put(_fitted(other[key], live.get(key), key), live.get(key))
        except CheckpointMismatch:
            live[key] = other[key]


def _put(value: Any, held: Any) -> Any:
    if isinstance(held, Tensor):
        held.detach().copy_(value) if isinstance(value, Tensor) else held.detach().fill_(value)
        return held
    if isinstance(held, (list, tuple)) and isinstance(value, (list, tuple)) and len(held) == len(value):
        items = map(_put, value, held)
        return list(items) if isinstance(value, list) else tuple(items)
    if isinstance(held, Mapping) and type(value) is dict:
        return {key: _put(item, held.get(key)) for key, item in value.items()}
    return value


def _texts(held: Any, value: Any) -> tuple[str, str]:
    """Both as text; with their kinds where those differ and are no two kinds of number, nor of sequence.

    The live kind of a tensor stays, and a value that it rounds, or another kernel, makes other bits of the next step.
    """
    texts = text_of(held), text_of(value)
    kinds = [str(each.dtype) if isinstance(each, Tensor) else type(each).__name__ for each in (held, value)]
    if kinds[0] != kinds[1] and any(isinstance(each, (Tensor, str)) for each in (held, value)):
        return f"{texts[0]} ({kinds[0]})", f"{texts[1]} ({kinds[1]})"
    return texts


def text_of(value: Any) -> str:
    """A hyperparameter as text: a tensor of one element as its number."""
    if isinstance(value, Tensor):
        if value.numel() == 1:
            return str(value.item())
        local = compat.local_tensor(value).detach().cpu()
        told = local.tolist() if local.numel() <= _SHOWN else f"digest {digest(local)[:_SHOWN]}"
        return f"{told}, tensor of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_text_within, value))})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_text_within(item)}' for key, item in value.items())}}}"
    return str(value)


def _text_within(value: Any) -> str:
    return repr(value) if isinstance(value, str) else text_of(value)
