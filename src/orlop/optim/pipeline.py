"""One step of the optimizer: windows of state go up, the class's own update runs on them, the new state comes
home.

Owns: the order of lending, stepping and taking home, and what an exception in the middle means. Must not
know: which class it is, how a link copies, where checkpoints are.

A `Tour` leads the windows
through the link's
slots: while one window computes, the next ones travel up and the last ones down.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from orlop import compat
from orlop.errors import OptimizerRefused
from orlop.optim.in_place import Crossing, numbers_of
from orlop.optim.link import LINE_BYTES, Cargo, Link
from orlop.optim.proof import Method
from orlop.optim.resident import Resident
from orlop.optim.stepping import Group, changed_values, group_with, stand_in, step_on
from orlop.optim.windows import Load, Piece, Window, plan_windows


class TornStep(Exception):
    """An update failed after other windows had been updated; `__cause__` is the first error."""


@dataclass(slots=True)
class _Aboard:
    """One window's cargo, and the state of each piece as the class will see it."""

    cargo: Cargo
    states: list[dict[str, Any]]


@dataclass(slots=True)
class Tour:
    """The windows of one step over one link, and how far they have come.

    Groups are as they were before the step for every window; what the class changes in them is collected, and
    written back by the caller once all windows are through: a counter in a group counts once.

    Attributes:
        crossing: What does not change from window to window.
        link: The path to the device.
        riders: The residents whose state travels, in the order of travel: the last parameters first, whose
            gradients are there first.
        windows: The plan.
        shows_idle: Whether groups in which nothing has a gradient are shown to the class: by one tour of a step.
    """

    crossing: Crossing
    link: Link
    riders: list[Resident]
    windows: tuple[Window, ...] = ()
    before: list[Group] = field(default_factory=list)
    changes: list[Group] = field(default_factory=list)
    stepped: int = 0
    shows_idle: bool = True
    _aboard: dict[int, _Aboard] = field(default_factory=dict)

    @classmethod
    def plan(cls, crossing: Crossing, link: Link, active: Sequence[Resident]) -> Tour:
        """Pack the residents' state into windows that fit into the link's slots."""
        riders = list(reversed(active))
        cap = None if crossing.method is Method.WHOLE else crossing.window_bytes // link.num_slots
        loads = [load_of(resident, crossing.method) for resident in riders]
        return cls(crossing, link, riders, plan_windows(loads, cap))

    def send_ahead(self) -> None:
        """Start as many windows on their way up as there are slots.

        The last of them waits, on the link, for its slot's window to be home; asked for any later, it would
        start later than that whenever an update takes longer than the way home."""
        last = min(self.stepped + self.link.num_slots, len(self.windows))
        for number in range(self.stepped, last):
            if number not in self._aboard:
                self._bring_up(number)

    def turn_back(self) -> None:
        """Give up the windows that are on board: their state at home is the valid one."""
        for aboard in self._aboard.values():
            self.link.release(aboard.cargo)
        self._aboard.clear()

    def run(self, before: list[Group], changes: list[Group]) -> None:
        """Step all windows that have not been stepped.

        Raises:
            TornStep: Some windows are new and some are old.
        """
        self.before, self.changes = before, changes
        while self.stepped < len(self.windows):
            self.step_next()

    def step_next(self) -> None:
        """Step the next window; the one that its slot had before it is home, or will be before it is
        overwritten."""
        number = self.stepped
        try:
            self.send_ahead()
            self._step_window(number)
        except BaseException as error:
            self.turn_back()
            if number == 0:
                raise
            raise TornStep(
                f"window {number + 1} of {len(self.windows)} failed; the {number} before it are new, it and the rest "
                "are old"
            ) from error
        self.stepped += 1

    def _bring_up(self, number: int) -> None:
        hosts: list[Tensor] = []
        states: list[dict[str, Any]] = []
        travelling: list[tuple[dict[str, Any], str, Resident]] = []
        for piece in self.windows[number].pieces:
            resident = self.riders[piece.index]
            state: dict[str, Any] = dict(self.crossing.optimizer.state.get(resident.param, {}))
            for key in [key for key in state if key in resident.leaves]:
                leaf, spec = resident.leaves[key], resident.specs[key]
                if spec.on_device and self.link.copies:
                    hosts.append(_part(leaf, piece) if spec.elementwise else leaf)
                    travelling.append((state, key, resident))
                elif spec.elementwise:
                    state[key] = _shown(resident, key, _part(leaf, piece))
                else:
                    # Every piece of a cut parameter must see the scalar as it was before the step.
                    state[key] = leaf if piece.whole else leaf.clone()
            states.append(state)
        cargo = self.link.bring_up(number, number % self.link.num_slots, hosts)
        for (state, key, resident), device in zip(travelling, cargo.lent):
            state[key] = _shown(resident, key, device)
        self._aboard[number] = _Aboard(cargo, states)

    def _step_window(self, number: int) -> None:
        aboard = self._aboard[number]
        pieces = self.windows[number].pieces
        twins = [_twin(self.riders[piece.index], piece) for piece in pieces]
        state: defaultdict[Any, Any] = defaultdict(dict)
        state.update(
            {key: v for key, v in self.crossing.optimizer.state.items() if not isinstance(key, Tensor)}
        )
        state.update({twin: shown for twin, shown in zip(twins, aboard.states) if shown})
        groups = self._groups(number, pieces, twins)
        with self.link.computing(aboard.cargo):
            step_on(self.crossing.optimizer, self.crossing.step, [group for _, group in groups], state)
        for index, group in groups:
            self.changes[index].update(changed_values(self.before[index], group))
        for key, value in state.items():
            if not isinstance(key, Tensor):
                self.crossing.optimizer.state[key] = value
        del self._aboard[number]
        self._take_home(aboard.cargo, pieces, twins, state)

    def _groups(
        self, number: int, pieces: Sequence[Piece], twins: Sequence[Tensor]
    ) -> list[tuple[int, Group]]:
        """The groups that this window is shown, with their indices."""
        twins_of: dict[Tensor, list[Tensor]] = defaultdict(list)
        for piece, twin in zip(pieces, twins):
            twins_of[self.riders[piece.index].param].append(twin)
        riding = {resident.param for resident in self.riders}
        shown: list[tuple[int, Group]] = []
        for index, group in enumerate(self.before):
            mine = [twin for p in group["params"] for twin in twins_of.get(p, ())]
            # A group in which nothing has a gradient is shown once, with its idle parameters: the class may
            # count in it.
            idle = not any(p in riding or p.grad is not None for p in group["params"])
            if not mine and number == 0 and self.shows_idle and idle:
                mine = list(group["params"])
            if mine:
                shown.append((index, group_with(group, mine)))
        return shown

    def _take_home(
        self, cargo: Cargo, pieces: Sequence[Piece], twins: Sequence[Tensor], state: defaultdict[Any, Any]
    ) -> None:
        """Everything that the class changed, made or replaced goes into the arena; scalars with the last
        piece."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for piece, twin in zip(pieces, twins):
            resident = self.riders[piece.index]
            after = dict(state.get(twin, {}))
            if twin is not resident.param:
                twin.grad = None
            for key, value in after.items():
                if not isinstance(value, Tensor):
                    continue
                if key not in resident.leaves:
                    _require_whole(resident, piece, key)
                    self.crossing.residents.take_leaf(resident, key, value)
                    continue
                elementwise = resident.specs[key].elementwise
                if elementwise or piece.last:
                    leaf = resident.leaves[key]
                    target = _part(leaf, piece) if elementwise else leaf
                    local = compat.local_tensor(value)
                    if local.data_ptr() != target.data_ptr():
                        pairs.append((local, target))
            if piece.last and after:
                # What is shown are the arena's own leaves: whoever reads them waits for them to be home.
                self.crossing.residents.show(resident, numbers_of(after), order=list(after))
        self.link.take_home(cargo, pairs)


def load_of(resident: Resident, method: Method) -> Load:
    """What one resident's state weighs on the way."""
    local = compat.local_tensor(resident.param)
    elementwise = [spec for spec in resident.specs.values() if spec.elementwise]
    others = [spec for spec in resident.specs.values() if not spec.elementwise and spec.on_device]
    dense = local.is_contiguous() and all(leaf.is_contiguous() for leaf in resident.leaves.values())
    return Load(
        num_elements=local.numel(),
        element_bytes=sum(spec.dtype.itemsize for spec in elementwise),
        # Each tensor starts on a cache line of its slot: the cap holds with what that may cost.
        fixed_bytes=sum(spec.nbytes for spec in others) + (len(elementwise) + len(others)) * LINE_BYTES,
        divisible=method is Method.SLICED and dense,
    )


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


def _require_whole(resident: Resident, piece: Piece, key: str) -> None:
    if not piece.whole:
        raise OptimizerRefused(
            "the class made state that it did not make when it was probed, on a part of a parameter",
            where=f"parameter {resident.name}, key {key!r}",
            expected=f"one of {sorted(resident.leaves)}",
            found=repr(key),
            todo="set the option that adds this state when the optimizer is constructed",
        )
