"""Leads the steps of one optimizer: which link each parameter's state takes, and what is on its way when.

Owns: links, tours between steps (prefetched windows, state still on its way home) and what a failed step
leaves behind. Must not
know: how a window is stepped (`pipeline`), where state lives (`resident`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from orlop import compat
from orlop.errors import OptimizerRefused, StateNotReady
from orlop.optim.accelerator import link_for
from orlop.optim.in_place import Crossing, Step, step_in_place
from orlop.optim.link import Link
from orlop.optim.pipeline import TornStep, Tour
from orlop.optim.proof import Method, Proof
from orlop.optim.resident import Resident
from orlop.optim.roster import Roster
from orlop.optim.stepping import Group
from orlop.optim.timeline import Span

HOST = torch.device("cpu")


@dataclass(slots=True)
class Snapshot:
    """The groups as they were before a step, and what its windows changed in them."""

    before: list[Group]
    changes: list[Group]

    @classmethod
    def of(cls, groups: Sequence[Group]) -> Snapshot:
        """As they are now."""
        return cls([dict(group) for group in groups], [{} for _ in groups])

    def write_back(self, groups: Sequence[Group]) -> None:
        """Once all windows are through."""
        for live, change in zip(groups, self.changes):
            live.update(change)


class Stepper:
    """Steps one optimizer's residents over the links of their devices.

    Args:
        optimizer: The live optimizer.
        step: Its class's own step.
        roster: Where its state lives, and how the class may be run.

    Attributes:
        links: The link of each device; made when it is first needed, and free to be replaced before.
        fault: Why the state is not whole; None where it is.
    """

    def __init__(self, optimizer: Optimizer, step: Step, roster: Roster) -> None:
        self.links: dict[torch.device, Link] = {}
        self.fault: str | None = None
        self._optimizer = optimizer
        self._step = step
        self._roster = roster
        self._prefetched: dict[torch.device, Tour] = {}
        self._last_active: list[Resident] = []

    def step(self, active: list[Resident], window_bytes: int) -> None:
        """Step everything that is active; state may still be on its way home afterwards."""
        by_device = split_by_device(active)
        self._last_active = active
        if len(by_device) == 1:
            ((device, residents),) = by_device.items()
            if not self._link(device).copies and False not in [resident.shown for resident in residents]:
                step_in_place(self._crossing(window_bytes), residents)
                return
        # Also where the device is the host and state has yet to appear: window by window, what the class
        # allocates for it is bounded, instead of all moments twice.
        groups = self._optimizer.param_groups
        snapshot = Snapshot.of(groups)
        with self.torn_step_is_a_fault():
            for number, (device, residents) in enumerate(by_device.items()):
                tour = self._prefetched.pop(device, None)
                if tour is None or not _is_for(tour, residents):
                    self._drop(tour)
                    tour = self.tour(device, residents, window_bytes)
                tour.shows_idle = number == 0
                try:
                    tour.run(snapshot.before, snapshot.changes)
                except Exception as error:
                    if number == 0 or isinstance(error, TornStep):
                        raise
                    raise TornStep(
                        f"the step on {device} failed; other devices' parameters are new"
                    ) from error
        snapshot.write_back(groups)

    def tour(self, device: torch.device, residents: Sequence[Resident], window_bytes: int) -> Tour:
        """A new step's windows over the device's link."""
        link = self._link(device)
        link.begin()
        return Tour.plan(self._crossing(window_bytes), link, residents)

    def prefetch(self, expected: Sequence[Resident], window_bytes: int) -> None:
        """Start the first windows of the next step on their way up: those that the last step had, or
        `expected`."""
        self.wait_home()
        for device, residents in split_by_device(self._last_active or list(expected)).items():
            if self._link(device).copies and device not in self._prefetched:
                tour = self.tour(device, residents, window_bytes)
                tour.send_ahead()
                self._prefetched[device] = tour

    def drop_prefetched(self) -> None:
        """The state at home is about to change: what has been sent ahead of it is void."""
        while self._prefetched:
            self._drop(self._prefetched.popitem()[1])

    def wait_home(self) -> None:
        """Return when all state is home.

        Raises:
            StateNotReady: Some of it was lost on the way: a copy home failed.
        """
        for link in self.links.values():
            try:
                link.finish()
            except Exception as error:
                self.fault = f"new state was lost on its way home: {type(error).__name__}: {error}"
                raise StateNotReady(
                    "the optimizer's state is not whole",
                    where=type(self._optimizer).__name__,
                    found=self.fault,
                    todo="load a checkpoint (load_state_dict or load_dcp), then go on",
                ) from error

    def settle(self) -> None:
        """Wait until nothing is on its way, whatever becomes of it: the state is about to be loaded."""
        for link in self.links.values():
            with contextlib.suppress(Exception):
                link.finish()

    def spans(self) -> list[Span]:
        """When the windows of the last step travelled and were stepped."""
        self.wait_home()
        return sorted(
            (span for link in self.links.values() for span in link.spans()),
            key=lambda span: span.begin_seconds,
        )

    def torn_step_is_a_fault(self) -> Any:
        """A context manager: a torn step marks the state as not whole, and raises what tore it."""
        return _Torn(self)

    def _drop(self, tour: Tour | None) -> None:
        if tour is not None:
            tour.turn_back()

    def _link(self, device: torch.device) -> Link:
        if device not in self.links:
            self.links[device] = link_for(device)
        return self.links[device]

    def _crossing(self, window_bytes: int) -> Crossing:
        return Crossing(
            optimizer=self._optimizer,
            step=self._step,
            residents=self._roster.residents,
            method=self._roster.proof.method,
            in_place=self._roster.proof.in_place,
            window_bytes=window_bytes,
        )


@dataclass(slots=True)
class _Torn:
    stepper: Stepper

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, TornStep):
            self.stepper.fault = str(error)
            raise (error.__cause__ or error) from None


def _is_for(tour: Tour, residents: Sequence[Resident]) -> bool:
    return len(tour.riders) == len(residents) and all(map(_is, tour.riders, reversed(residents)))


def _is(one: Resident, other: Resident) -> bool:
    return one is other


def split_by_device(active: list[Resident]) -> dict[torch.device, list[Resident]]:
    """Residents by the device of this rank's part of their parameter; the host's where there are none."""
    if False not in [resident.param.is_cpu for resident in active]:
        return {HOST: active}
    found: dict[torch.device, list[Resident]] = {}
    for resident in active:
        found.setdefault(compat.local_tensor(resident.param).device, []).append(resident)
    return found


def require_one_call(active: list[Resident], proof: Proof, name: str) -> None:
    """Refuse a class that needs all parameters in one call where they lie on several devices.

    Raises:
        OptimizerRefused: Says which devices.
    """
    devices = split_by_device(active)
    if proof.method is Method.WHOLE and len(devices) > 1:
        raise OptimizerRefused(
            f"{name} needs all parameters in one call, and they lie on several devices",
            expected="parameters on one device",
            found=", ".join(map(str, devices)),
            todo="give each device's parameters to an optimizer of its own",
        )


def waits_for(tour: Tour) -> list[set[Tensor]]:
    """For each window of a tour, the parameters whose gradients it needs."""
    return [{tour.riders[piece.index].param for piece in window.pieces} for window in tour.windows]
