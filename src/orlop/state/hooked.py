"""Loading an optimizer through its own `load_state_dict`, since hooks of its user's change what is loaded.

Owns what torch's does besides, and must not: it casts state to the parameters' dtype, and makes new groups and tensors.
Must not know checkpoints, files or ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from orlop import compat
from orlop.state.group_values import take_over
from orlop.state.stock import StockState, state_of

__all__ = ["load_through"]


def load_through(
    optimizer: Optimizer,
    states: Mapping[Tensor, Mapping[str, Any]],
    values: Sequence[Mapping[str, Any]],
) -> None:
    """Give state and values to the optimizer's own `load_state_dict`; what its hooks make of them is its state.

    Args:
        optimizer: The live one.
        states: The state of each parameter that has some; its tensors become the optimizer's, or fill live ones.
        values: What each group takes.
    """
    ids = {param: index for index, param in enumerate(_params(optimizer.param_groups))}
    state_dict = {
        "state": {ids[param]: dict(state) for param, state in states.items()},
        "param_groups": [
            {**group, **new, "params": [ids[param] for param in group["params"]]}
            for group, new in zip(optimizer.param_groups, values)
        ],
    }
    if not isinstance(state_of(optimizer), StockState):
        optimizer.load_state_dict(state_dict)
        return
    groups = optimizer.param_groups
    slots = {param: dict(optimizer.state.get(param, {})) for param in states}
    given: dict[Tensor, Mapping[Any, Any]] = {}

    def see(_: Optimizer, working: Mapping[str, Any]) -> None:
        there = zip(_params(working["param_groups"]), _params(groups))
        given.update({param: working["state"][name] for name, param in there if name in working["state"]})

    def put_back(_: Optimizer) -> None:
        ours = {id(value) for state in states.values() for value in state.values()}
        for param, state in given.items():
            live, before = optimizer.state[param], slots.get(param, {})
            for key, value in state.items():
                # `step` follows the group's flags instead.
                if key in live and key != "step":
                    live[key] = _uncast(live[key], value)
                if id(value) in ours:
                    live[key] = _into(before.get(key), live[key])
        if len(groups) == len(optimizer.param_groups):
            for group, new in zip(groups, optimizer.param_groups):
                take_over(group, new)
            optimizer.param_groups = groups

    # The last to see what torch's own is given, and the first to see what it made of that.
    handles = (
        optimizer.register_load_state_dict_pre_hook(see),
        optimizer.register_load_state_dict_post_hook(put_back, prepend=True),
    )
    try:
        optimizer.load_state_dict(state_dict)
    finally:
        for handle in handles:
            handle.remove()


def _params(groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(group["params"] for group in groups))


def _uncast(live: Any, given: Any) -> Any:
    """What was given, on the device where torch has put it."""
    if isinstance(live, Tensor) and isinstance(given, Tensor):
        if live.dtype == given.dtype:
            return live
        local = compat.local_tensor(given).to(compat.local_tensor(live).device)
        return compat.dtensor_like(given, local)
    if isinstance(live, dict) and isinstance(given, Mapping):
        return {key: _uncast(item, given.get(key)) for key, item in live.items()}
    if isinstance(live, (list, tuple)) and isinstance(given, (list, tuple)) and len(live) == len(given):
        items = map(_uncast, live, given)
        return list(items) if isinstance(live, list) else tuple(items)
    return live


def _into(slot: Any, value: Any) -> Any:
    """The slot that was there, filled, where it holds such a value."""
    if not (isinstance(slot, Tensor) and isinstance(value, Tensor) and type(slot) is type(value)):
        return value
    here, there = compat.local_tensor(slot), compat.local_tensor(value)
    if (here.dtype, here.device, here.shape) != (there.dtype, there.device, there.shape):
        return value
    here.detach().copy_(there)
    return slot
