"""Learns which state an optimizer class keeps for a parameter, without making any.

Owns: running a class's own step on meta tensors and reading keys, shapes, strides and dtypes off the state it
creates. Must not know: where state will live. Nothing live changes, and no memory is allocated on any device.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from orlop import compat
from orlop.errors import OptimizerRefused
from orlop.optim.stepping import Group, shell_of, step_on

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafSpec:
    """What a class keeps under one key of one parameter's state.

    Attributes:
        shape: The local shape (this rank's part).
        stride: The local strides, in elements.
        dtype: The dtype, for a number too (``torch.float64`` or ``torch.int64``).
        elementwise: Its shape follows the parameter's: one element of state for one of the parameter. On a
            DTensor parameter such state is a DTensor; everything else is the same on all ranks.
        number: A Python number rather than a tensor.
        on_device: The class wants it on the parameter's device (moments; `step` too with `fused` or
            `capturable`).
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    elementwise: bool
    number: bool = False
    on_device: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's part; 0 for a number."""
        return 0 if self.number else self.shape.numel() * self.dtype.itemsize


def probe_state(optimizer: Optimizer, params: Sequence[Tensor]) -> dict[Tensor, dict[str, LeafSpec]]:
    """Which state the optimizer's class makes for each parameter.

    Args:
        optimizer: Any optimizer; a host-resident one is probed as the class it was made from.
        params: Parameters of its groups (meta, DTensor, on any device).

    Returns:
        For each parameter its state keys, in the order in which the class makes them; ``{}`` for a class
        without state.

    Raises:
        OptimizerRefused: The state holds something other than tensors and plain values.
    """
    optimizer_class: type[Optimizer] = getattr(optimizer, "swapped_class", type(optimizer))
    wanted = {id(param) for param in params}
    specs: dict[Tensor, dict[str, LeafSpec]] = {}
    known: dict[tuple[Any, ...], dict[str, LeafSpec]] = {}
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) in wanted:
                key = (index, *_signature(param), tuple(optimizer.state.get(param, ())))
                if key not in known:
                    known[key] = _probe_one(optimizer, optimizer_class, group, param)
                specs[param] = known[key]
    return specs


def _signature(param: Tensor) -> tuple[Any, ...]:
    local = compat.local_tensor(param)
    return local.shape, local.stride(), local.dtype, isinstance(param, compat.DTensor), param.shape


def _probe_one(
    optimizer: Optimizer, optimizer_class: type[Optimizer], group: Group, param: Tensor
) -> dict[str, LeafSpec]:
    """Step the class once on a meta twin of this rank's part and read the state that appeared.

    A twin of the local part may have a shape that the class refuses, or is 0-dim or empty; a second twin of a
    telling shape says which keys follow the parameter. `fused` and `capturable` ask for devices that meta is
    not, so they are off here; they only decide on which side scalars live."""
    local = compat.local_tensor(param)
    twin = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="meta")
    state = _meta_state(optimizer, optimizer_class, group, twin, optimizer.state.get(param, {}))
    telling = torch.empty((67, 3) if param.ndim >= 2 else (201,), dtype=local.dtype, device="meta")
    follows = {
        key
        for key, value in _meta_state(optimizer, optimizer_class, group, telling, {}).items()
        if isinstance(value, Tensor) and value.shape == telling.shape
    }
    if not follows:
        follows = {k for k, v in state.items() if isinstance(v, Tensor) and v.ndim and v.shape == twin.shape}
    device_scalars = bool(group.get("fused") or group.get("capturable"))
    return {
        key: _leaf_spec(optimizer_class, key, value, twin, elementwise=key in follows, forced=device_scalars)
        for key, value in state.items()
    }


def _meta_state(
    optimizer: Optimizer,
    optimizer_class: type[Optimizer],
    group: Group,
    twin: Tensor,
    existing: dict[str, Any],
) -> dict[str, Any]:
    """The state that one step on `twin` leaves; classes that read values (``.item()``) have made it by
    then."""
    twin.grad = torch.empty_strided(twin.shape, twin.stride(), dtype=twin.dtype, device="meta")
    off: Group = {flag: False for flag in ("foreach", "fused", "capturable") if flag in group}
    on_meta: Group = {**group, **off, "params": [twin]}
    for key, value in group.items():
        if isinstance(value, Tensor):
            on_meta[key] = float(value) if not value.is_meta and value.numel() == 1 else value
    state: defaultdict[Any, Any] = defaultdict(dict)
    if existing:
        state[twin] = {key: _meta_like(value, twin) for key, value in existing.items()}
    shell = shell_of(optimizer, optimizer_class)
    for name in ("grad_scale", "found_inf"):
        shell.__dict__.pop(name, None)
    with contextlib.suppress(Exception):
        step_on(shell, compat.raw_step(optimizer_class), [on_meta], state)
    return dict(state.get(twin, {}))


def _meta_like(value: Any, twin: Tensor) -> Any:
    """A stand-in on meta for state that the class made in its constructor (Adagrad)."""
    if not isinstance(value, Tensor):
        return value
    local = compat.local_tensor(value)
    if local.ndim == 0 and not local.is_meta and local.device.type == "cpu":
        return local.clone()
    return torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="meta")


def _leaf_spec(
    optimizer_class: type[Optimizer], key: str, value: Any, twin: Tensor, *, elementwise: bool, forced: bool
) -> LeafSpec:
    if isinstance(value, Tensor) and compat.is_plain_tensor(value) and value.layout == torch.strided:
        return LeafSpec(
            shape=value.shape,
            stride=tuple(value.stride()),
            dtype=value.dtype,
            elementwise=elementwise and value.shape == twin.shape,
            on_device=forced or value.is_meta,
        )
    if isinstance(value, _PLAIN):
        dtype = torch.float64 if isinstance(value, float) else torch.int64
        return LeafSpec(
            shape=torch.Size(), stride=(), dtype=dtype, elementwise=False, number=True, on_device=False
        )
    raise OptimizerRefused(
        f"{optimizer_class.__name__} keeps state that orlop can't hold in host memory leaf by leaf",
        where=f"state key {key!r}",
        expected="a strided tensor or a plain number",
        found=type(value).__name__,
        todo="use the stock class for these parameters",
    )
