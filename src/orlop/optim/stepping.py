"""Runs a class's own update on chosen groups and state.

Owns: the one place where an optimizer object is shown other groups and other state than its own. Must not
know: arenas, links, windows. No update rule is written here or anywhere else in orlop."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Group = dict[str, Any]
State = MutableMapping[Any, Any]

# Which implementation runs the update, not which update it is: always the live run's, never a checkpoint's.
IMPLEMENTATION_FLAGS = ("foreach", "fused", "capturable", "differentiable")


class StateMap(defaultdict[Any, Any]):
    """An optimizer's state, as torch keeps it, but true even when empty.

    Torch's ``get_optimizer_state_dict`` takes a hidden step on an optimizer whose state is falsy. A class
    whose state appears with its first step has none until then, and that is the truth to save, not a reason
    to step."""

    def __bool__(self) -> bool:
        return True


def step_on(
    optimizer: Optimizer, step: Callable[[Optimizer], Any], groups: list[Group], state: State
) -> None:
    """Run `step` on the optimizer while it holds `groups` and `state` in place of its own.

    Args:
        optimizer: The live object: attributes that the class reads or writes on itself (``grad_scale``,
            counters) are the real ones.
        step: The class's step below torch's hooks (`orlop.compat.raw_step`).
        groups: What stands in for ``param_groups``; the parameters' gradients are in their ``grad``.
        state: What stands in for ``state``; entries that the class creates or replaces are left in it.
    """
    live_groups, live_state = optimizer.param_groups, optimizer.state
    optimizer.param_groups, optimizer.state = groups, state  # type: ignore[assignment]
    try:
        with torch.no_grad():
            step(optimizer)
    finally:
        optimizer.param_groups, optimizer.state = live_groups, live_state


def shell_of(optimizer: Optimizer, optimizer_class: type[Optimizer]) -> Optimizer:
    """A stand-in object of `optimizer_class` with shallow copies of the optimizer's attributes.

    For runs whose side effects on the object (counters, warned-once flags) must not reach the live one.
    """
    shell = object.__new__(optimizer_class)
    for name, value in vars(optimizer).items():
        shell.__dict__[name] = copy.copy(value) if isinstance(value, (dict, list, set)) else value
    return shell


def stand_in(local: Tensor, grad: Tensor | None) -> Tensor:
    """A leaf tensor over the same memory as `local` that carries `grad`."""
    twin = local.detach()
    twin.grad = grad
    return twin


def group_with(group: Group, params: list[Tensor]) -> Group:
    """A shallow copy of a param group that holds `params` instead of its own."""
    return {**group, "params": params}


def changed_values(before: Group, after: Group) -> Group:
    """The entries of a group copy that a step replaced or added (a counter kept in the group)."""
    return {
        key: value
        for key, value in after.items()
        if key != "params" and value is not before.get(key, _MISSING)
    }


_MISSING = object()
