"""A step where the device is the host: the class steps on the arena itself, without a copy.

Owns: the one call, on live groups or on this rank's parts of DTensors, and taking in what the class made or
replaced. Must not
know: windows, links.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from orlop.optim.proof import Method
from orlop.optim.resident import Resident, Residents
from orlop.optim.stepping import changed_values, group_with, step_on

Step = Callable[[Optimizer], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """What does not change from window to window.

    Attributes:
        optimizer: The live optimizer.
        step: The class's own step.
        residents: Where its state lives.
        method: How much the class may be shown at once.
        in_place: The class was proven to keep its tensors. Whether it did is then looked at when the state is
            read, not in every step: until then `state` shows what the class itself goes on with.
        window_bytes: The most device memory for all slots together; ignored for `Method.WHOLE`.
    """

    optimizer: Optimizer
    step: Step
    residents: Residents
    method: Method
    in_place: bool
    window_bytes: int


def step_in_place(crossing: Crossing, active: Sequence[Resident]) -> None:
    """One call of the class's step, on the arena itself."""
    if any(resident.on_local for resident in active):
        _step_on_parts(crossing, active)
        return
    optimizer = crossing.optimizer
    num_entries = len(optimizer.state)
    with torch.no_grad():
        crossing.step(optimizer)
    if not crossing.in_place or len(optimizer.state) != num_entries:
        for resident in active:
            shown = optimizer.state.get(resident.param, {})
            bring_home(crossing.residents, resident, shown, resident.canonical)


def _step_on_parts(crossing: Crossing, active: Sequence[Resident]) -> None:
    """On this rank's parts of DTensors, with the arena's leaves as their state."""
    optimizer = crossing.optimizer
    lent: defaultdict[Any, Any] = defaultdict(dict)
    twin_of: dict[Tensor, Tensor] = {}
    for resident in active:
        twin = twin_of[resident.param] = resident.local()
        if resident.on_local:
            twin.grad = resident.gradient()
        shown = optimizer.state.get(resident.param, {})
        if shown:
            lent[twin] = {key: resident.leaves.get(key, value) for key, value in shown.items()}
    live = optimizer.param_groups
    groups = [group_with(group, [twin_of.get(p, p) for p in group["params"]]) for group in live]
    step_on(optimizer, crossing.step, groups, lent)
    for resident in active:
        twin = twin_of[resident.param]
        if resident.on_local:
            twin.grad = None
        bring_home(crossing.residents, resident, lent.get(twin, {}), resident.leaves)
    for group, stepped in zip(live, groups):
        group.update(changed_values(group, stepped))


def bring_home(
    residents: Residents, resident: Resident, after: dict[str, Any], lent: dict[str, Tensor]
) -> None:
    """Take into the arena what the class made or replaced; what it changed in place is there already."""
    foreign = [key for key, value in after.items() if value is not lent.get(key)]
    if foreign:
        for key in foreign:
            if isinstance(after[key], Tensor):
                residents.take_leaf(resident, key, after[key])
        residents.show(resident, numbers_of(after), order=list(after))


def numbers_of(state: dict[str, Any]) -> dict[str, Any]:
    """The entries of a parameter's state that are no tensors."""
    return {key: value for key, value in state.items() if not isinstance(value, Tensor)}
