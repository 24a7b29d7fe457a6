"""What every host-resident optimizer class has besides the behaviour of the class that it was made from.

Owns: construction, the step's entry, state dicts, copying, and what the rest of orlop may ask. Must not know: what
is shown of it (`figures`), who has a place in the arena (`roster`), update rules (the class's own runs), windows and
copies (`pipeline`), how a state dict is judged (`adopt`), how the class is made (`swap`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from orlop import compat
from orlop.arguments import require_count
from orlop.errors import OptimizerRefused, StateNotReady
from orlop.optim.admission import require_steppable_groups
from orlop.optim.adopt import (
    apply_adoption,
    paired_params,
    plan_adoption,
    replay_post_hooks,
    replay_pre_hooks,
    require_state_dict,
)
from orlop.optim.backward import BackwardSteps
from orlop.optim.figures import Figures, note_step
from orlop.optim.in_place import bring_home
from orlop.optim.proof import Method, Proof, prove, require_sharded
from orlop.optim.resident import Resident
from orlop.optim.roster import Roster
from orlop.optim.stepper import Stepper, require_one_call
from orlop.optim.stepping import StateMap
from orlop.optim.toys import Subject

logger = logging.getLogger("orlop")

WINDOW_BYTES = 256 * 2**20


class Swapped(Figures, Optimizer):
    """What every class made by `swap` has besides its own class's behaviour.

    The state lives in an arena in host memory from construction on; `state`, what `step` updates, what is
    saved and what is loaded are the same storage.

    Args:
        params: As for the class that was swapped.
        *args: As for the class that was swapped.
        window_bytes: The most device memory that state may take during `step`. A parameter whose class can't
            be cut may need more.
        step_in_backward: Step each window during the backward pass, once all of its gradients are there, and
            free them; a number says how many backward passes add up to a step. `step` then only finishes.
            Gradients are gone before their norm is known: clipping and skipping by the norm are refused with
            it.
        **kwargs: As for the class that was swapped.

    Raises:
        OptimizerRefused: A class, option or parameter that can't be stepped exactly this way; says why.
        HostMemoryError: The host can't hold the state; nothing was allocated.
    """

    swapped_class: type[Optimizer]

    def __init__(
        self,
        params: Any,
        *args: Any,
        window_bytes: int = WINDOW_BYTES,
        step_in_backward: bool | int = False,
        **kwargs: Any,
    ) -> None:
        require_count("window_bytes", window_bytes, 1)
        if step_in_backward < 0:
            raise ValueError(f"step_in_backward must be a number of backward passes, not {step_in_backward}")
        self._settled = False
        self._args, self._kwargs = args, kwargs
        self.window_bytes = window_bytes
        self.step_in_backward = int(step_in_backward)
        super().__init__(params, *args, **kwargs)
        self._settle()

    # -- construction ------------------------------------------------------------------------------------------------

    def _settle(self, stepped: Collection[int] = ()) -> None:
        """Prove the class, give every parameter its place, move the state that exists into it."""
        self.state = StateMap(dict, self.state)
        self._roster = Roster(
            self,
            self._prove,
            on_other_proof=lambda: self._stepper.drop_prefetched(),
            on_admitted=self._watch,
        )
        self._stepper = Stepper(self, compat.raw_step(self.swapped_class), self._roster)
        self._backward = self._make_backward() if self.step_in_backward else None
        params = [param for group in self.param_groups for param in group["params"]]
        self._roster.admit(range(len(self.param_groups)), also=[p for p in params if self.state.get(p)])
        for position in stepped:
            self._roster.residents[params[position]].stepped = True
        self._settled = True
        if self.device_bytes > self.window_bytes:
            logger.info(
                "%s can't be cut into windows of %s bytes: a step may take %s bytes of device memory (run %s)",
                type(self).__name__,
                f"{self.window_bytes:,}",
                f"{self.device_bytes:,}",
                self.method,
            )

    def _prove(self) -> Proof:
        require_steppable_groups(self.param_groups)
        subject = Subject(
            optimizer_class=self.swapped_class,
            construct=lambda groups: self.swapped_class(groups, *self._args, **self._kwargs),
            arguments=repr((self._args, sorted((k, v) for k, v in self._kwargs.items() if k != "lr"))),
            groups=self.param_groups,
        )
        proof = prove(subject)
        if proof.method is not Method.SLICED:
            require_sharded(subject)
        return proof

    def _make_backward(self) -> BackwardSteps:
        return BackwardSteps(
            self._stepper,
            residents=self._roster.trainable,
            groups=lambda: self.param_groups,
            window_bytes=lambda: self.window_bytes,
            require_ready=self.require_ready,
            num_passes=self.step_in_backward,
        )

    def _watch(self, params: Sequence[Tensor]) -> None:
        if self._backward is not None:
            self._backward.watch(params)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the new parameters' state gets a block of its own in the arena."""
        super().add_param_group(param_group)
        if getattr(self, "_settled", False):
            try:
                self.synchronize()
                self._roster.prove_again()
                self._roster.admit([len(self.param_groups) - 1])
            except BaseException:
                self.param_groups.pop()
                raise

    # -- the step ----------------------------------------------------------------------------------------------------

    @compat.without_dynamo
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have gradients, by the class's own rule.

        Args:
            closure: Called once, first, with gradients enabled; its result is returned.

        Raises:
            StateNotReady: The state is half old, half new.
            ParameterReplaced: A parameter is still on the meta device: its module has another one now.
            OptimizerRefused: A gradient is sparse.
        """
        self.require_ready()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._backward is not None:
            active = self._finish_backward(self._backward)
        else:
            self._stepper.wait_home()
            active = self._roster.active()
            require_one_call(active, self._roster.proof, type(self).__name__)
            self._stepper.step(active, self.window_bytes)
        note_step(self)
        if False in [resident.stepped for resident in active] and not self._is_skipped_by_scaler():
            for resident in active:
                resident.stepped = True
        return loss

    def _finish_backward(self, backward: BackwardSteps) -> list[Resident]:
        if getattr(self, "found_inf", None) is not None or getattr(self, "grad_scale", None) is not None:
            raise OptimizerRefused(
                "a GradScaler decides after the backward pass, when step_in_backward has stepped already",
                todo="build the optimizer without step_in_backward, or train without a GradScaler",
            )
        self._roster.active()
        return backward.finish()

    def prefetch(self) -> None:
        """Start the first windows of the next step on their way to the device; may be called during backward.

        Which parameters will have gradients is taken from the last step; where that turns out wrong, what was
        sent ahead is sent again. Nothing happens where the device is the host."""
        self.require_ready()
        if self._backward is None:
            trainable = [r for r in self._roster.trainable() if r.param.requires_grad]
            self._stepper.prefetch(trainable, self.window_bytes)

    def _is_skipped_by_scaler(self) -> bool:
        """Whether a GradScaler told a fused class to leave everything as it is (``found_inf``)."""
        found_inf = getattr(self, "found_inf", None)
        return found_inf is not None and bool(found_inf)

    # -- state dicts -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch's; the tensors are the live ones.

        Raises:
            StateNotReady: The state is half old, half new.
        """
        self.require_ready()
        self.synchronize()
        return super().state_dict()

    @compat.without_dynamo
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Fill the live state in place: tensors, storage, pinning, dtypes and group dicts stay the same
        objects.

        Args:
            state_dict: As `state_dict` makes it, also with FQNs for ids. Never changed, never aliased. An
                empty ``state`` gives every parameter a fresh optimizer's. A parameter without an entry was
                absent when it was saved.

        Raises:
            CheckpointMismatch: Anything differs; names parameter, key, expected and found. Nothing has
                changed.
        """
        self._stepper.settle()
        self._drop_started()
        working = replay_pre_hooks(self, state_dict)
        require_state_dict(working)
        in_order = self._roster.in_order()
        self._roster.admit_late([param for param, resident in in_order if resident and resident.is_outgrown])
        self._admit_saved_frozen(working)
        adoption = plan_adoption(self._roster.residents, self.param_groups, working)
        try:
            apply_adoption(self._roster.residents, adoption)
        except BaseException:
            self.invalidate("a load failed half-way")
            raise
        self._stepper.fault = None
        replay_post_hooks(self)

    def _drop_started(self) -> None:
        """What has been started on the state that is there now is void: prefetched windows, a step during backward."""
        self._stepper.drop_prefetched()
        if self._backward is not None:
            self._backward.reset()

    def _admit_saved_frozen(self, state_dict: Mapping[str, Any]) -> None:
        """Places for parameters that are frozen now and had state when it was saved: trained, then frozen."""
        pairs = paired_params(self.param_groups, state_dict["param_groups"])
        self._roster.make_room(
            [
                param
                for key, param in pairs.items()
                if not param.requires_grad and state_dict["state"].get(key)
            ]
        )

    # -- what the rest of orlop asks ---------------------------------------------------------------------------------

    def stepped(self, param: Tensor) -> bool:
        """Whether the parameter ever took a step, here or in the run that its state was loaded from."""
        return param in self._roster.residents and self._roster.residents[param].stepped

    def slots(self, param: Tensor) -> dict[str, Tensor]:
        """The tensors that a load has to fill for this parameter, by state key; DTensors for a DTensor
        parameter.

        Nothing live changes. For a class whose state exists from construction they are the live ones.
        """
        self._roster.make_room([param])
        return dict(self._roster.residents[param].canonical)

    def number_keys(self, param: Tensor) -> frozenset[str]:
        """State keys under which the class keeps a Python number."""
        self._roster.make_room([param])
        return self._roster.residents[param].number_keys

    def restored(self, present: Mapping[Tensor, Mapping[str, object]], absent: Collection[Tensor]) -> None:
        """Take over slots that were filled, and give the absent a fresh optimizer's state.

        Args:
            present: Each parameter that had state, with all of it: its slots, which were filled, tensors for
                which it had no slot, and values that are no tensors.
            absent: Parameters that had no state when it was saved.
        """
        self._drop_started()
        for param, state in present.items():
            self._roster.residents.become(self._roster.residents[param], state)
            self._roster.residents[param].stepped = True
        for param in absent:
            if param in self._roster.residents:
                self._roster.residents.refresh(self._roster.residents[param])
        self._stepper.fault = None

    def invalidate(self, reason: str) -> None:
        """From now on, stepping and saving raise `StateNotReady`, until a load succeeds."""
        self._drop_started()
        self._stepper.fault = reason

    def require_ready(self) -> None:
        """Raise `StateNotReady` where the state is half old, half new."""
        if self._stepper.fault is not None:
            raise StateNotReady(
                "the optimizer's state is not whole",
                where=type(self).__name__,
                found=self._stepper.fault,
                todo="load a checkpoint (load_state_dict or load_dcp), then go on",
            )

    def synchronize(self) -> None:
        """Return when all state is home, and all of it in the arena.

        Raises:
            StateNotReady: New state was lost on its way home.
        """
        if self.__dict__.get("_settled", False):
            if self._stepper.fault is not None:
                self._stepper.settle()
                return
            self._stepper.wait_home()
            for resident in self._roster.residents:
                bring_home(
                    self._roster.residents, resident, self.state.get(resident.param, {}), resident.canonical
                )

    def put_state_to_device(self, device: torch.device | str) -> bool:
        """False: the state is host-resident, and nothing was moved."""
        return False

    # -- copying and pickling ----------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        self.synchronize()
        plain = {
            name: value
            for name, value in vars(self).items()
            if isinstance(value, (bool, int, float, str))
            and name not in ("_settled", "_zero_grad_profile_name")
        }
        stepped = [
            position
            for position, (_, resident) in enumerate(self._roster.in_order())
            if resident is not None and resident.stepped
        ]
        carried = {
            "_args": self._args,
            "_kwargs": self._kwargs,
            "_stepped": stepped,
            "_fault": self._stepper.fault,
        }
        return {**super().__getstate__(), **plain, **carried}

    def __setstate__(self, state: dict[str, Any]) -> None:
        carried = dict(state)
        stepped, fault = carried.pop("_stepped"), carried.pop("_fault")
        self._settled = False
        super().__setstate__(carried)
        self._settle(stepped=stepped)
        self._stepper.fault = fault
