"""Which optimizer class wrote a checkpoint's param groups, where nothing records it.

Owns telling torch's classes apart by the options that each keeps in its groups. Must not know files or ranks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from orlop import compat
from orlop.state.group_values import LIVE_FLAGS

__all__ = ["contradicting_class"]

_DECOUPLED = "decoupled_weight_decay"
# Every class's, or what a class got over time.
_NOT_TELLING = LIVE_FLAGS | compat.ADDED_OPTIONS | {"params", "lr"}


def contradicting_class(
    optimizer: Optimizer, live: Mapping[str, Any], saved: Mapping[str, Any]
) -> str | None:
    """The name of the class that wrote a group, where that can't have been the optimizer's own.

    Own classes, and groups with few options, are given the benefit of the doubt: a key that the file lacks may be one
    that the class has since got.

    Args:
        optimizer: The live one.
        live: Its group.
        saved: The saved one.
    """
    kind: type[Optimizer] = getattr(optimizer, "swapped_class", type(optimizer))
    own = next((c for c in kind.__mro__ if c in _options() and _options()[c] <= live.keys()), None)
    keys = saved.keys()
    writers = {each: options for each, options in _options().items() if options and options <= keys}
    if own in writers:
        foreign = {each: options for each, options in writers.items() if options > writers[own]}
    elif own is not None or optimizer.defaults.keys() - keys - _NOT_TELLING:
        foreign = writers
    else:
        foreign = {}
    if own is None or own in writers:
        foreign = {each: options for each, options in foreign.items() if not options <= live.keys()}
    if not foreign and own in (torch.optim.Adam, torch.optim.AdamW):
        return _other_decay(live.get(_DECOUPLED), saved.get(_DECOUPLED))
    most = max(map(len, foreign.values()), default=0)
    return " or ".join(each.__name__ for each, options in foreign.items() if len(options) == most) or None


def _other_decay(live: bool | None, saved: bool | None) -> str | None:
    """Adam and AdamW keep the same options; one of them says which of the two a group is of."""
    if live is None or saved is None or bool(live) == bool(saved):
        return None
    return "AdamW" if saved else "Adam"


@functools.cache
def _options() -> dict[type[Optimizer], frozenset[str]]:
    """For each of torch's classes the options that tell it from others."""
    found: dict[type[Optimizer], frozenset[str]] = {}
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer:
            found[kind] = frozenset(inspect.signature(kind).parameters) - _NOT_TELLING
    return found
