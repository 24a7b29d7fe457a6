"""One step of the optimizer: windows of state go up, the class's own update runs on them, the new state comes
home.

Owns: the order of lending, stepping and taking home, and what an exception in the middle means. Must not
know: which class it is, how a link copies, where checkpoints are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from orlop import compat
from orlop.errors import OptimizerRefused
from orlop.optim.link import Cargo, Link
from orlop.optim.proof import Method
from orlop.optim.resident import Resident, Residents
from orlop.optim.stepping import Group, changed_values, group_with, stand_in, step_on
from orlop.optim.windows import Load, Piece, Window, plan_windows

Step = Callable[[Optimizer], Any]


class TornStep(Exception):
    """An update failed after other windows had been updated; `__cause__` is the class's own error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """One device's share of a step.

    Attributes:
        optimizer: The live optimizer.
        step: The class's own step.
        residents: Where its state lives.
        active: Those on this device that have a gradient, in the order of the groups.
        link: The path to the device.
        method: How much the class may be shown at once.
        in_place: The class was proven to keep its tensors. Whether it did is then looked at when the state is read, not in
            every step: until then `state` shows what the class itself goes on with, in the arena or not.
        window_bytes: The cap; ignored for `Method.WHOLE`.
    """

    optimizer: Optimizer
    step: Step
    residents: Residents
    active: Sequence[Resident]
    link: Link
    method: Method
    in_place: bool
    window_bytes: int


def cross(crossing: Crossing) -> None:
    """Step everything that is active.

    Raises:
        TornStep: Some windows are new and some are old.
    """
    missing = False in [resident.shown for resident in crossing.active]
    if not crossing.link.copies and not missing:
        _step_in_place(crossing)
    else:
        # Also where the device is the host and state has yet to appear: window by window, what the class
        # allocates for it is bounded, instead of all moments twice.
        _step_windows(crossing)


# -- the device is the host: no copies -------------------------------------------------------------------------------


def _step_in_place(crossing: Crossing) -> None:
    """One call on the arena itself."""
    optimizer = crossing.optimizer
    if any(r.on_local for r in crossing.active):
        groups, lent, twins = _lend_all(crossing)
        before = optimizer.param_groups
        step_on(optimizer, crossing.step, groups, lent)
        for resident, twin in twins:
            twin.grad = None
            bring_home(crossing.residents, resident, lent.get(twin, {}), resident.leaves)
        for live, group in zip(before, groups):
            live.update(changed_values(live, group))
        return
    num_entries = len(optimizer.state)
    with torch.no_grad():
        crossing.step(optimizer)
    if not crossing.in_place or len(optimizer.state) != num_entries:
        for resident in crossing.active:
            bring_home(
                crossing.residents, resident, optimizer.state.get(resident.param, {}), resident.canonical
            )


def _lend_all(crossing: Crossing) -> tuple[list[Group], defaultdict[Any, Any], list[tuple[Resident, Tensor]]]:
    """Groups of stand-ins over this rank's parts, with the arena's leaves as their state."""
    lent: defaultdict[Any, Any] = defaultdict(dict)
    twins: list[tuple[Resident, Tensor]] = []
    local_of: dict[Tensor, Tensor] = {}
    for resident in crossing.active:
        twin = resident.local()
        if resident.on_local:
            twin.grad = resident.gradient()
        shown = crossing.optimizer.state.get(resident.param, {})
        if shown:
            lent[twin] = {key: resident.leaves.get(key, value) for key, value in shown.items()}
        twins.append((resident, twin))
        local_of[resident.param] = twin
    groups = [
        group_with(group, [local_of.get(p, p) for p in group["params"]])
        for group in crossing.optimizer.param_groups
    ]
    return groups, lent, twins


def bring_home(
    residents: Residents, resident: Resident, after: dict[str, Any], lent: dict[str, Tensor]
) -> None:
    """Take into the arena what the class made or replaced; what it changed in place is there already."""
    foreign = [key for key, value in after.items() if value is not lent.get(key)]
    if foreign:
        for key in foreign:
            if isinstance(after[key], Tensor):
                residents.take_leaf(resident, key, after[key])
        numbers = {key: value for key, value in after.items() if not isinstance(value, Tensor)}
        residents.show(resident, numbers, order=list(after))


# -- window by window ------------------------------------------------------------------------------------------------


def _step_windows(crossing: Crossing) -> None:
    """Plan, then for each window: up, step, home. Groups are as they were before the step for every
    window."""
    before = [dict(group) for group in crossing.optimizer.param_groups]
    changes: list[Group] = [{} for _ in before]
    cap = None if crossing.method is Method.WHOLE else crossing.window_bytes
    windows = plan_windows([_load(r, crossing.method) for r in crossing.active], cap)
    for number, window in enumerate(windows):
        try:
            _step_window(crossing, window, before, changes, first=number == 0)
        except Exception as error:
            if number == 0:
                raise
            raise TornStep(
                f"window {number + 1} of {len(windows)} failed; {number} had been stepped"
            ) from error
    for live, change in zip(crossing.optimizer.param_groups, changes):
        live.update(change)


def _load(resident: Resident, method: Method) -> Load:
    local = compat.local_tensor(resident.param)
    elementwise = [spec for spec in resident.specs.values() if spec.elementwise]
    others = [spec for spec in resident.specs.values() if not spec.elementwise]
    dense = local.is_contiguous() and all(leaf.is_contiguous() for leaf in resident.leaves.values())
    return Load(
        num_elements=local.numel(),
        element_bytes=sum(spec.dtype.itemsize for spec in elementwise),
        fixed_bytes=sum(spec.nbytes for spec in others),
        divisible=method is Method.SLICED and dense,
    )


@dataclass(frozen=True, slots=True)
class _Lent:
    """One piece as the class sees it."""

    piece: Piece
    resident: Resident
    twin: Tensor
    state: dict[str, Any]


def _step_window(
    crossing: Crossing, window: Window, before: Sequence[Group], changes: Sequence[Group], *, first: bool
) -> None:
    cargo, lent = _bring_up(crossing, window)
    state: defaultdict[Any, Any] = defaultdict(dict)
    twins_of: dict[Tensor, list[Tensor]] = defaultdict(list)
    for item in lent:
        if item.state:
            state[item.twin] = item.state
        twins_of[item.resident.param].append(item.twin)
    shared = {key: value for key, value in crossing.optimizer.state.items() if not isinstance(key, Tensor)}
    state.update(shared)
    active = {resident.param for resident in crossing.active}
    groups: list[tuple[int, Group]] = []
    for index, group in enumerate(before):
        twins = [twin for p in group["params"] for twin in twins_of.get(p, ())]
        # A group in which nothing is active is shown once, with its idle parameters: the class may count
        # steps in it.
        idle = first and not any(p in active for p in group["params"])
        if twins or idle:
            groups.append((index, group_with(group, twins if twins else list(group["params"]))))
    step_on(crossing.optimizer, crossing.step, [group for _, group in groups], state)
    for index, group in groups:
        changes[index].update(changed_values(before[index], group))
    for key, value in state.items():
        if not isinstance(key, Tensor):
            crossing.optimizer.state[key] = value
    _take_home(crossing, cargo, lent, state)


def _bring_up(crossing: Crossing, window: Window) -> tuple[Cargo, list[_Lent]]:
    """Send the window's leaves up and give each piece a stand-in; scalars of a cut parameter are lent as
    copies."""
    hosts: list[Tensor] = []
    lent: list[_Lent] = []
    travelling: list[tuple[dict[str, Any], str, Resident]] = []
    for piece in window.pieces:
        resident = crossing.active[piece.index]
        state: dict[str, Any] = dict(crossing.optimizer.state.get(resident.param, {}))
        for key in list(state):
            leaf = resident.leaves.get(key)
            if leaf is None:
                continue
            spec = resident.specs[key]
            if spec.on_device and crossing.link.copies:
                hosts.append(_part(leaf, piece) if spec.elementwise else leaf)
                travelling.append((state, key, resident))
            elif spec.elementwise:
                state[key] = _shown(resident, key, _part(leaf, piece))
            else:
                state[key] = leaf if piece.whole else leaf.clone()
        lent.append(_Lent(piece, resident, _twin(resident, piece), state))
    cargo = crossing.link.bring_up(hosts)
    for (state, key, resident), device in zip(travelling, cargo.lent):
        state[key] = _shown(resident, key, device)
    cargo.wait_arrived()
    return cargo, lent


def _shown(resident: Resident, key: str, tensor: Tensor) -> Tensor:
    """A class that steps on DTensors is lent DTensors."""
    whole = resident.specs[key].elementwise and not resident.on_local
    return compat.dtensor_like(resident.param, tensor) if whole else tensor


def _part(leaf: Tensor, piece: Piece) -> Tensor:
    return leaf if piece.whole else leaf.view(-1)[piece.start : piece.stop]


def _twin(resident: Resident, piece: Piece) -> Tensor:
    """What stands for the piece in the groups, with the piece's gradient."""
    if piece.whole and not resident.on_local:
        return resident.param
    grad = resident.gradient()
    if piece.whole:
        twin = resident.local()
        twin.grad = grad
        return twin
    flat = compat.local_tensor(resident.param).detach().view(-1)[piece.start : piece.stop]
    return stand_in(flat, None if grad is None else grad.reshape(-1)[piece.start : piece.stop])


def _take_home(crossing: Crossing, cargo: Cargo, lent: Sequence[_Lent], state: defaultdict[Any, Any]) -> None:
    """Everything that the class changed, made or replaced goes into the arena; scalars with the last piece
    only."""
    pairs: list[tuple[Tensor, Tensor]] = []
    arrived: list[tuple[Resident, dict[str, Any]]] = []
    for item in lent:
        after = dict(state.get(item.twin, {}))
        if item.twin is not item.resident.param:
            item.twin.grad = None
        for key, value in after.items():
            if not isinstance(value, Tensor):
                continue
            if key not in item.resident.leaves:
                _require_whole(item, key)
                crossing.residents.take_leaf(item.resident, key, value)
                continue
            leaf = item.resident.leaves[key]
            elementwise = item.resident.specs[key].elementwise
            if elementwise or item.piece.last:
                target = _part(leaf, item.piece) if elementwise else leaf
                local = compat.local_tensor(value)
                if local.data_ptr() != target.data_ptr() or local.numel() == 0:
                    pairs.append((local, target))
        if item.piece.last and after:
            arrived.append((item.resident, after))
    crossing.link.take_home(cargo, pairs)
    crossing.link.finish()
    for resident, after in arrived:
        numbers = {key: value for key, value in after.items() if not isinstance(value, Tensor)}
        crossing.residents.show(resident, numbers, order=list(after))


def _require_whole(item: _Lent, key: str) -> None:
    if not item.piece.whole:
        raise OptimizerRefused(
            "the class made state that it did not make when it was probed, on a part of a parameter",
            where=f"parameter {item.resident.name}, key {key!r}",
            expected=f"one of {sorted(item.resident.leaves)}",
            found=repr(key),
            todo="set the option that adds this state when the optimizer is constructed",
        )
