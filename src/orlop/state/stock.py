"""Stock optimizers' state, seen through the same small door as host-resident ones.

Owns `OptimizerState`, the door: which parameters stepped, which tensors a load fills, how they are put in place; and
`StockState`, that door for a plain `torch.optim.Optimizer`. Must not know checkpoints or names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from orlop import compat
from orlop.optim.probe import LeafSpec, probe_state

__all__ = [
    "OptimizerState",
    "StockState",
    "class_name",
    "empty_leaf",
    "keeps_state",
    "move_stock_state",
    "rebuild",
    "state_of",
]


@runtime_checkable
class OptimizerState(Protocol):
    """What saving and loading need of an optimizer; host-resident optimizers have it themselves."""

    def stepped(self, param: Tensor) -> bool:
        """Whether the parameter has state that steps made."""
        ...

    def slots(self, param: Tensor) -> dict[str, Tensor]:
        """The tensors that a load fills for this parameter, by state key; asking changes nothing live."""
        ...

    def number_keys(self, param: Tensor) -> frozenset[str]:
        """The state keys whose value is a Python number."""
        ...

    def restored(self, present: Mapping[Tensor, Mapping[str, Any]], absent: Collection[Tensor]) -> None:
        """The slots of `present` are filled: they are its state now; `absent` ones get a fresh optimizer's state."""
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


def keeps_state(door: OptimizerState, param: Tensor) -> bool:
    """Whether the class would keep state for this parameter, without making room for it where that costs memory."""
    return door.keeps(param) if isinstance(door, StockState) else bool(door.slots(param))


class StockState:
    """A stock optimizer's state. Make one per save or load: it remembers the slots that it handed out."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._specs: dict[Tensor, dict[str, LeafSpec]] | None = None
        self._new: dict[Tensor, dict[str, Tensor]] = {}

    def stepped(self, param: Tensor) -> bool:
        """Whether there is any state; a stock class does not tell steps from construction."""
        return bool(self._live(param))

    def keeps(self, param: Tensor) -> bool:
        """Whether there is state, or the class would make some at a step."""
        return bool(self._live(param) or self._spec(param))

    def slots(self, param: Tensor) -> dict[str, Tensor]:
        """The live state's tensors, or new ones as the class would make them."""
        live = self._live(param)
        if live:
            return {key: value for key, value in live.items() if isinstance(value, Tensor)}
        if param not in self._new:
            self._new[param] = {
                key: empty_leaf(param, spec) for key, spec in self._spec(param).items() if not spec.number
            }
        return self._new[param]

    def number_keys(self, param: Tensor) -> frozenset[str]:
        """The keys of the live state's numbers, or of those that the class would make."""
        live = self._live(param)
        if live:
            numbers = (key for key, value in live.items() if isinstance(value, (bool, int, float)))
        else:
            numbers = (key for key, spec in self._spec(param).items() if spec.number)
        return frozenset(numbers)

    def restored(self, present: Mapping[Tensor, Mapping[str, Any]], absent: Collection[Tensor]) -> None:
        """Install the filled slots in `optimizer.state`; drop the state of absent ones, as before a first step."""
        for param, numbers in present.items():
            self._optimizer.state[param].update({**self.slots(param), **numbers})
        if not absent:
            return
        fresh = _fresh_state(self._optimizer)
        for param in absent:
            self._optimizer.state.pop(param, None)
            if fresh.get(param):
                self._optimizer.state[param].update(fresh[param])

    def invalidate(self, reason: str) -> None:
        """Nothing: a stock optimizer can't refuse; the engine does."""

    def require_ready(self) -> None:
        """Nothing: a stock optimizer can't refuse; the engine does."""

    def synchronize(self) -> None:
        """Nothing: stock state never leaves its place."""

    def _live(self, param: Tensor) -> dict[str, Any]:
        # `state` is a defaultdict: asking by index would create an entry.
        return cast("dict[str, Any]", self._optimizer.state.get(param, {}))

    def _spec(self, param: Tensor) -> dict[str, LeafSpec]:
        if self._specs is None:
            every = [param for group in self._optimizer.param_groups for param in group["params"]]
            self._specs = probe_state(self._optimizer, [param for param in every if not self._live(param)])
        return self._specs.get(param, {})


def empty_leaf(param: Tensor, spec: LeafSpec) -> Tensor:
    """A new tensor for one key of a parameter's state; a DTensor where it follows a DTensor parameter."""
    device = compat.local_tensor(param).device if spec.on_device else torch.device("cpu")
    if spec.elementwise:
        return compat.empty_state_like(param, spec.dtype, device)
    return torch.empty(spec.shape, dtype=spec.dtype, device=device)


def _fresh_state(optimizer: Optimizer) -> Mapping[Tensor, dict[str, Any]]:
    """What the class makes in its constructor (Adagrad's accumulator); most make nothing there."""
    if not any(optimizer.state.values()):
        return {}
    try:
        fresh = rebuild(
            type(optimizer), [dict(group) for group in optimizer.param_groups], optimizer.defaults
        )
    except (TypeError, ValueError):
        return {}
    return cast("Mapping[Tensor, dict[str, Any]]", fresh.state)


def rebuild(kind: type[Optimizer], groups: list[dict[str, Any]], defaults: Mapping[str, Any]) -> Optimizer:
    """A new optimizer of the class, built with another's defaults.

    The groups alone don't do: Adagrad takes its initial value from the constructor's argument.

    Raises:
        TypeError: The constructor takes something else.
        ValueError: Likewise.
    """
    known = inspect.signature(kind).parameters
    options = {key: value for key, value in defaults.items() if key in known}
    return cast("Callable[..., Optimizer]", kind)(groups, **options)


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
                if isinstance(value, Tensor) and (scalars_too or not _is_counter(key, value, param)):
                    local = compat.local_tensor(value)
                    there = local.to(device)
                    if there is not local:
                        state[key] = compat.dtensor_like(value, there)
                        moved = True
    return moved


def _is_counter(key: str, value: Tensor, param: Tensor) -> bool:
    return key == "step" or (value.ndim == 0 and param.ndim > 0)
