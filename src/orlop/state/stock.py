"""Stock optimizers' state, seen through the same small door as host-resident ones.

Owns `OptimizerState`, the door: which parameters stepped, which live tensors a load fills, how a state is put in place;
and `StockState`, that door for a plain `torch.optim.Optimizer`. Must not know checkpoints or names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol, cast, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from orlop import compat
from orlop.errors import StateNotReady
from orlop.optim.probe import LeafSpec, constructed_state

__all__ = [
    "OptimizerState",
    "StockState",
    "class_name",
    "empty_leaf",
    "half_loaded",
    "is_counter",
    "let_step",
    "move_stock_state",
    "state_of",
]


@runtime_checkable
class OptimizerState(Protocol):
    """What saving and loading need of an optimizer; host-resident optimizers have it themselves."""

    def stepped(self, param: Tensor) -> bool:
        """Whether the parameter has state that steps made."""
        ...

    def slots(self, param: Tensor) -> dict[str, Tensor]:
        """The tensors that are there for a load to fill, by state key; asking changes nothing live."""
        ...

    def number_keys(self, param: Tensor) -> frozenset[str]:
        """The state keys whose value is a Python number, or other plain data."""
        ...

    def restored(self, present: Mapping[Tensor, Mapping[str, Any]], absent: Collection[Tensor]) -> None:
        """Each of `present` has exactly that state now: slots that were filled, new tensors, and plain values.

        `absent` ones get a fresh optimizer's state."""
        ...

    def invalidate(self, reason: str) -> None:
        """Refuse to step and to save until `restored`."""
        ...

    def require_ready(self) -> None:
        """Raise StateNotReady after `invalidate`."""
        ...

    def synchronize(self) -> None:
        """Wait until all state is at rest."""
        ...


def state_of(optimizer: Optimizer) -> OptimizerState:
    """The door to an optimizer's state: itself if it is host-resident, else a `StockState` around it."""
    return optimizer if isinstance(optimizer, OptimizerState) else StockState(optimizer)


def class_name(optimizer: Optimizer) -> str:
    """The class whose rule the optimizer follows, whether its state is host-resident or not."""
    kind: type[Optimizer] = getattr(optimizer, "swapped_class", type(optimizer))
    return kind.__qualname__


# By optimizer, not by engine: the state stays half loaded when the engine that loaded it is gone, and whichever engine
# loads it next makes it whole.
_refusals: WeakKeyDictionary[Optimizer, tuple[str, RemovableHandle]] = WeakKeyDictionary()


class StockState:
    """A stock optimizer's state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def stepped(self, param: Tensor) -> bool:
        """Whether there is any state; a stock class does not tell steps from construction."""
        return bool(self._live(param))

    def slots(self, param: Tensor) -> dict[str, Tensor]:
        """The live state's tensors; none before the class has made them."""
        return {key: value for key, value in self._live(param).items() if isinstance(value, Tensor)}

    def number_keys(self, param: Tensor) -> frozenset[str]:
        """The keys of the live state's other values; None carries nothing."""
        live = self._live(param).items()
        return frozenset(key for key, value in live if value is not None and not isinstance(value, Tensor))

    def restored(self, present: Mapping[Tensor, Mapping[str, Any]], absent: Collection[Tensor]) -> None:
        """Put the loaded state into `optimizer.state`; drop that of absent ones, as before a first step."""
        for param, state in present.items():
            live = self._optimizer.state[param]
            for key in live.keys() - state.keys():
                del live[key]
            live.update(state)
        # A class that makes state in its constructor has some by now.
        fresh = constructed_state(self._optimizer, absent) if any(self._optimizer.state.values()) else {}
        for param in absent:
            self._optimizer.state.pop(param, None)
            if fresh.get(param):
                self._optimizer.state[param].update(fresh[param])

    def invalidate(self, reason: str) -> None:
        """Refuse its own `step()`, by a hook of torch's, until `let_step`."""

        def refuse(*_: object) -> None:
            raise half_loaded(reason)

        let_step(self._optimizer)
        _refusals[self._optimizer] = (reason, self._optimizer.register_step_pre_hook(refuse))

    def require_ready(self) -> None:
        """Raise StateNotReady after `invalidate`."""
        if (refusal := _refusals.get(self._optimizer)) is not None:
            raise half_loaded(refusal[0])

    def synchronize(self) -> None:
        """Nothing: stock state never leaves its place."""

    def _live(self, param: Tensor) -> dict[str, Any]:
        # `state` is a defaultdict: asking by index would create an entry.
        return cast("dict[str, Any]", self._optimizer.state.get(param, {}))


def let_step(optimizer: Optimizer) -> None:
    """A load has succeeded: what `StockState.invalidate` put in the way of the optimizer's step is taken away."""
    _, handle = _refusals.pop(optimizer, (None, None))
    if handle is not None:
        handle.remove()


def half_loaded(reason: str) -> StateNotReady:
    """The error for whoever would go on with such state."""
    return StateNotReady(
        "the live state is half old, half new",
        found=reason,
        todo="load a checkpoint before stepping or saving",
    )


def empty_leaf(param: Tensor, spec: LeafSpec) -> Tensor:
    """A new tensor for one key of a parameter's state; a DTensor where it follows a DTensor parameter."""
    device = compat.local_tensor(param).device if spec.on_device else torch.device("cpu")
    leaf = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
    return compat.dtensor_like(param, leaf) if spec.elementwise else leaf


def move_stock_state(optimizer: Optimizer, device: torch.device) -> bool:
    """Move a stock optimizer's state; scalars stay on the host unless the group's flags want them on the device.

    Returns:
        Whether anything moved.
    """
    moved = False
    for group in optimizer.param_groups:
        scalars_too = bool(group.get("fused") or group.get("capturable"))
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and (scalars_too or not is_counter(key, value.ndim, param)):
                    local = compat.local_tensor(value)
                    there = local.to(device)
                    if there is not local:
                        state[key] = compat.dtensor_like(value, there)
                        moved = True
    return moved


def is_counter(key: str, ndim: int, param: Tensor) -> bool:
    """Whether a state's tensor is one number, which classes keep on the host."""
    return key == "step" or (ndim == 0 and param.ndim > 0)
