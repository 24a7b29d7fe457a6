"""The slots that one parameter's state has for a load: live ones, such as its class would make, and such as only the
checkpoint knows of.

Owns which keys are taken, which must be there, and making new slots. Must not know files, ranks or policies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from orlop import compat
from orlop.optim.probe import LeafSpec
from orlop.state.absence import Stored
from orlop.state.foresight import Foresight
from orlop.state.stock import OptimizerState, StockState, empty_leaf, is_counter

__all__ = ["Slots", "fit_slots"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """What one parameter's state can take.

    Attributes:
        tensors: To be filled, by state key; the live ones where those fit.
        numbers: The keys whose value is no tensor.
        optional: The keys that need not be there: the class makes them some steps later. The live ones are then
            dropped.
    """

    tensors: dict[str, Tensor]
    numbers: frozenset[str]
    optional: frozenset[str] = frozenset()


def fit_slots(
    param: Tensor,
    door: OptimizerState,
    stored: Mapping[str, Stored],
    foresight: Foresight,
    *,
    is_vouched: bool,
    nothing: Collection[str] = (),
) -> Slots:
    """The slots for a parameter that has state in the checkpoint. Changes nothing live.

    Args:
        param: The parameter.
        door: Its optimizer's state.
        stored: What the checkpoint has of it, by state key.
        foresight: What the class would make: asked only where `stored` is not just what is live.
        is_vouched: Whether the checkpoint's record says that the same class saved it. Then keys that nobody foresaw
            (LBFGS makes its state from a closure) are taken as they are, and late ones may be missing.
        nothing: The keys under which None is stored: some writers' word for a moment that is switched off.
    """
    tensors, numbers = door.slots(param), set(door.number_keys(param))
    held = tensors.keys() | numbers
    if stored.keys() == held and all(_fits(leaf, tensors.get(key)) for key, leaf in stored.items()):
        return Slots(tensors=tensors, numbers=frozenset(numbers))
    # What a host-resident class may do was proven for its own options, so no others are assumed for it.
    is_hosted = not isinstance(door, StockState)
    foreseen = foresight.now(param) if is_hosted else foresight.then(param)
    new = {key: spec for key, spec in foreseen.items() if key not in held}
    for key, leaf in stored.items():
        if key in foreseen:
            is_open = foreseen[key].is_none
        else:
            # State of other hyperparameters than those that will hold is no strange state, but the wrong one.
            is_open = is_vouched and key not in foresight.before(param) and not (foreseen and key in nothing)
        if is_open and not (key in held and _fits(leaf, tensors.get(key))):
            new[key] = _spec_of(param, key, leaf, foresight, is_hosted=is_hosted)
    for key, spec in new.items():
        tensors.pop(key, None)
        numbers.discard(key)
        if spec.number:
            numbers.add(key)
        else:
            tensors[key] = empty_leaf(param, spec)
    # A class that makes nothing in a first step, as far as can be seen, can't be missing anything either.
    late = held - foreseen.keys() if is_vouched else ()
    return Slots(tensors=tensors, numbers=frozenset(numbers), optional=frozenset(late))


def _fits(leaf: Stored, slot: Tensor | None) -> bool:
    if slot is None:
        return leaf.is_bytes
    return leaf.shape == tuple(slot.shape) and leaf.dtype == slot.dtype


def _spec_of(param: Tensor, key: str, leaf: Stored, foresight: Foresight, *, is_hosted: bool) -> LeafSpec:
    """A place for what was stored: like the parameter where the shapes are equal, and else the same on all ranks."""
    if leaf.shape is None or leaf.dtype is None:
        return LeafSpec(
            shape=torch.Size(), stride=(), dtype=torch.int64, elementwise=False, number=True, on_device=False
        )
    group = foresight.live_group(param)
    counts = is_counter(key, len(leaf.shape), param)
    follows = leaf.shape == tuple(param.shape) and not counts
    on_device = bool(group.get("fused") or group.get("capturable")) or not counts
    # As `zeros_like` would make it: dense, with the order of dimensions that the parameter has.
    form = compat.local_tensor(param) if follows else torch.empty(leaf.shape, device="meta")
    twin = torch.empty_like(form, device="meta")
    return LeafSpec(
        shape=twin.shape,
        stride=twin.stride(),
        dtype=leaf.dtype,
        elementwise=follows,
        # Moments of all parameters together may be more than the device holds; the arena takes them in from the host.
        on_device=on_device and not (is_hosted and follows and param.ndim > 0),
    )
