"""Steps windows while the backward pass is still at work, and frees their gradients at once.

Owns: counting gradients as they arrive, and stepping each window, in the order of the plan, once all of its
gradients are there. Must not know: how a window is stepped.

Order against streams: the hooks run where autograd accumulates, which may be another stream than the caller's
(FSDP2 runs them on its reduce stream). A window's update is queued on that stream, behind the gradient;
`finish`, which `step` calls, makes the caller's current stream wait for all of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from orlop.optim.pipeline import Tour
from orlop.optim.resident import Resident
from orlop.optim.stepper import Snapshot, Stepper, split_by_device, waits_for
from orlop.wording import counted


class BackwardSteps:
    """The windows of the step that is being made, gradient by gradient.

    Args:
        stepper: Leads the windows.
        residents: Gives all residents, in order, when a step begins.
        groups: Gives the live param groups.
        window_bytes: Gives the cap.
        require_ready: Called when a step begins.
        num_passes: How many backward passes add up to one step.
    """

    def __init__(
        self,
        stepper: Stepper,
        residents: Callable[[], list[Resident]],
        groups: Callable[[], list[dict[str, Any]]],
        window_bytes: Callable[[], int],
        require_ready: Callable[[], None],
        num_passes: int,
    ) -> None:
        self._stepper = stepper
        self._all = residents
        self._groups = groups
        self._window_bytes = window_bytes
        self._require_ready = require_ready
        self._num_passes = num_passes
        self._handles: dict[Tensor, Any] = {}
        self._tours: list[tuple[Tour, list[set[Tensor]]]] = []
        self._snapshot: Snapshot | None = None
        self._count: dict[Tensor, int] = {}
        weakref.finalize(self, _remove, self._handles)

    def reset(self) -> None:
        """Give up the step that is being made: the state that it began from is about to be replaced."""
        for tour, _ in self._tours:
            tour.turn_back()
        self._snapshot, self._tours, self._count = None, [], {}

    def watch(self, params: Iterable[Tensor]) -> None:
        """Hear of each parameter's gradients from now on."""
        arrived = weakref.WeakMethod(self._arrived)  # parameters must not keep an optimizer alive

        def hook(param: Tensor) -> None:
            method = arrived()
            if method is not None:
                method(param)

        for param in params:
            if param not in self._handles:
                self._handles[param] = param.register_post_accumulate_grad_hook(hook)

    def finish(self) -> list[Resident]:
        """Step the windows that are left with the gradients that are there; returns who stepped."""
        if self._snapshot is None:
            self._begin()
        snapshot = self._snapshot
        assert snapshot is not None
        with self._stepper.torn_step_is_a_fault():
            for tour, _ in self._tours:
                late = {r.param for r in tour.riders if r.param.grad is not None}
                self._count.update({param: self._num_passes for param in late if param not in self._count})
                while tour.stepped < len(tour.windows):
                    self._step_next(tour)
                tour.link.join()
        snapshot.write_back(self._groups())
        stepped = [r for tour, _ in self._tours for r in tour.riders if r.param in self._count]
        self._snapshot, self._tours, self._count = None, [], {}
        return stepped

    def _begin(self) -> None:
        self._require_ready()
        self._stepper.wait_home()
        self._stepper.drop_prefetched()
        self._snapshot = Snapshot.of(self._groups())
        for device, residents in split_by_device(self._all()).items():
            tour = self._stepper.tour(device, residents, self._window_bytes())
            tour.before, tour.changes = self._snapshot.before, self._snapshot.changes
            tour.send_ahead()
            self._tours.append((tour, waits_for(tour)))

    def _arrived(self, param: Tensor) -> None:
        if self._snapshot is None:
            self._begin()
        count = self._count[param] = self._count.get(param, 0) + 1
        if count > self._num_passes:
            passes = counted(self._num_passes, "backward pass", "backward passes")
            raise RuntimeError(
                f"a step is due: a gradient arrived after {passes} of this step. Call "
                "step() after them, or give step_in_backward the number of passes per step"
            )
        if count < self._num_passes:
            return
        with self._stepper.torn_step_is_a_fault():
            for tour, missing in self._tours:
                for params in missing:
                    params.discard(param)
                while tour.stepped < len(tour.windows) and not missing[tour.stepped]:
                    self._step_next(tour)

    def _step_next(self, tour: Tour) -> None:
        window = tour.windows[tour.stepped]
        with torch.no_grad():
            tour.step_next()
        for piece in window.pieces:
            if piece.last:
                tour.riders[piece.index].param.grad = None


def _remove(handles: dict[Tensor, Any]) -> None:
    for handle in handles.values():
        handle.remove()
