"""Learns which state an optimizer class keeps for a parameter, without making any.

Owns: running a class's own step on meta tensors and reading keys, shapes, strides and dtypes off the state it
creates. Must not know: where state will live. Nothing live changes, and no memory is allocated on any device.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

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
        number: A Python number rather than a tensor; from `foresee_state`, any value that is no tensor.
        on_device: The class wants it on the parameter's device (moments; `step` too with `fused` or
            `capturable`).
        is_none: It is None after the first step, which says nothing of what it will be.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    elementwise: bool
    number: bool = False
    on_device: bool = True
    is_none: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's part; 0 for a number."""
        return 0 if self.number else self.shape.numel() * self.dtype.itemsize


def probe_state(optimizer: Optimizer, params: Sequence[Tensor]) -> dict[Tensor, dict[str, LeafSpec]]:
    """Which state the optimizer's class makes for each parameter, beside what it made in its constructor.

    Args:
        optimizer: Any optimizer; a host-resident one is probed as the class it was made from.
        params: Parameters of its groups (meta, DTensor, on any device).

    Returns:
        For each parameter its state keys, in the order in which the class makes them; ``{}`` for a class
        without state.

    Raises:
        OptimizerRefused: The state holds something other than tensors and plain values.
    """
    made = _probe(optimizer, params, optimizer.param_groups, optimizer.state)
    for specs in made.values():
        for key, spec in specs.items():
            if not isinstance(spec, LeafSpec):
                raise _refused(optimizer, key, spec)
    return cast("dict[Tensor, dict[str, LeafSpec]]", made)


def foresee_state(
    optimizer: Optimizer, params: Sequence[Tensor], groups: Sequence[Group]
) -> dict[Tensor, dict[str, LeafSpec]]:
    """Which state a first step would make for each parameter, with other groups than the live ones.

    Args:
        optimizer: As for `probe_state`; its state is not looked at. Where a step shows nothing, its class is
            constructed again: Adagrad makes its state there.
        params: Parameters of the groups.
        groups: The hyperparameters that count.

    Returns:
        As `probe_state`; ``{}`` too for a class that meta tensors don't bring to making its state (LBFGS). What
        is no tensor counts as a number.
    """
    made = _probe(optimizer, params, groups, {})
    unseen = [param for param in params if not made.get(param)]
    if unseen and (begun := _constructed(optimizer, unseen, groups)):
        made |= _probe(optimizer, unseen, groups, begun)
    return {
        param: {key: spec if isinstance(spec, LeafSpec) else _NUMBER for key, spec in specs.items()}
        for param, specs in made.items()
    }


def _constructed(
    optimizer: Optimizer, params: Sequence[Tensor], groups: Sequence[Group]
) -> dict[Tensor, dict[str, Any]]:
    """The state that the class's constructor makes, on meta."""
    twins = {param: _twin(param) for param in params}
    on_meta = [_on_meta(group, [twins[p] for p in group["params"] if p in twins]) for group in groups]
    optimizer_class: type[Optimizer] = getattr(optimizer, "swapped_class", type(optimizer))
    with contextlib.suppress(Exception):
        fresh = rebuild(optimizer_class, [group for group in on_meta if group["params"]], optimizer.defaults)
        return {param: dict(fresh.state[twin]) for param, twin in twins.items() if fresh.state.get(twin)}
    return {}


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


def constructed_state(optimizer: Optimizer, params: Iterable[Tensor]) -> Mapping[Tensor, dict[str, Any]]:
    """What the class makes for parameters in its constructor (Adagrad's accumulator); most make nothing there."""
    kind: type[Optimizer] = getattr(optimizer, "swapped_class", type(optimizer))
    wanted = set(params)
    cut = (
        {**group, "params": [p for p in group["params"] if p in wanted]} for group in optimizer.param_groups
    )
    groups = [group for group in cut if group["params"]]
    try:
        fresh = rebuild(kind, groups, optimizer.defaults) if groups else None
    except (TypeError, ValueError):
        return {}
    return {} if fresh is None else cast("Mapping[Tensor, dict[str, Any]]", fresh.state)


def _probe(
    optimizer: Optimizer,
    params: Sequence[Tensor],
    groups: Sequence[Group],
    existing: Mapping[Tensor, Mapping[str, Any]],
) -> dict[Tensor, dict[str, Any]]:
    """A `LeafSpec` for each key, or the value itself where it is none that has one."""
    optimizer_class: type[Optimizer] = getattr(optimizer, "swapped_class", type(optimizer))
    wanted = {id(param) for param in params}
    specs: dict[Tensor, dict[str, Any]] = {}
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    for index, group in enumerate(groups):
        for param in group["params"]:
            if id(param) in wanted:
                state = existing.get(param, {})
                key = (index, *_signature(param), tuple(state))
                if key not in known:
                    known[key] = _probe_one(optimizer, optimizer_class, group, param, state)
                specs[param] = known[key]
    return specs


def _signature(param: Tensor) -> tuple[Any, ...]:
    local = compat.local_tensor(param)
    return local.shape, local.stride(), local.dtype, isinstance(param, compat.DTensor), param.shape


def _probe_one(
    optimizer: Optimizer,
    optimizer_class: type[Optimizer],
    group: Group,
    param: Tensor,
    existing: Mapping[str, Any],
) -> dict[str, Any]:
    """Step the class once on a meta twin of this rank's part and read the state that appeared.

    A twin of the local part may have a shape that the class refuses, or is 0-dim or empty; a second twin of a
    telling shape says which keys follow the parameter. `fused` and `capturable` ask for devices that meta is
    not, so they are off here; they only decide on which side scalars live."""
    twin = _twin(param)
    state = _meta_state(optimizer, optimizer_class, group, twin, existing)
    telling = torch.empty((67, 3) if param.ndim >= 2 else (201,), dtype=twin.dtype, device="meta")
    follows = {
        key
        for key, value in _meta_state(optimizer, optimizer_class, group, telling, {}).items()
        if isinstance(value, Tensor) and value.shape == telling.shape
    }
    if not follows:
        follows = {k for k, v in state.items() if isinstance(v, Tensor) and v.ndim and v.shape == twin.shape}
    device_scalars = bool(group.get("fused") or group.get("capturable"))
    return {
        key: _leaf_spec(value, twin, elementwise=key in follows, forced=device_scalars)
        for key, value in state.items()
    }


def _twin(param: Tensor) -> Tensor:
    """This rank's part on meta."""
    local = compat.local_tensor(param)
    return torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="meta")


def _on_meta(group: Group, params: list[Tensor]) -> Group:
    off: Group = {flag: False for flag in ("foreach", "fused", "capturable") if flag in group}
    values = {key: _hyperparameter(value) for key, value in group.items() if key != "params"}
    return {**values, **off, "params": params}


def _meta_state(
    optimizer: Optimizer,
    optimizer_class: type[Optimizer],
    group: Group,
    twin: Tensor,
    existing: Mapping[str, Any],
) -> dict[str, Any]:
    """The state that one step on `twin` leaves; classes that read values (``.item()``) have made it by
    then."""
    twin.grad = torch.empty_strided(twin.shape, twin.stride(), dtype=twin.dtype, device="meta")
    state: defaultdict[Any, Any] = defaultdict(dict)
    if existing:
        state[twin] = {key: _meta_like(value, twin) for key, value in existing.items()}
    shell = shell_of(optimizer, optimizer_class)
    for name in ("grad_scale", "found_inf"):
        shell.__dict__.pop(name, None)
    with contextlib.suppress(Exception):
        step_on(shell, compat.raw_step(optimizer_class), [_on_meta(group, [twin])], state)
    return dict(state.get(twin, {}))


def _hyperparameter(value: Any) -> Any:
    """A value that the step may change in place without the live group's changing."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    return float(value) if not value.is_meta and value.numel() == 1 else value


def _meta_like(value: Any, twin: Tensor) -> Any:
    """A stand-in on meta for state that the class made in its constructor (Adagrad)."""
    if not isinstance(value, Tensor):
        return value
    local = compat.local_tensor(value)
    if local.ndim == 0 and not local.is_meta and local.device.type == "cpu":
        return local.clone()
    return torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="meta")


_NUMBER = LeafSpec(
    shape=torch.Size(), stride=(), dtype=torch.int64, elementwise=False, number=True, on_device=False
)


def _leaf_spec(value: Any, twin: Tensor, *, elementwise: bool, forced: bool) -> Any:
    """What is kept for one value; the value itself where that can't be said."""
    if isinstance(value, Tensor) and compat.is_plain_tensor(value) and value.layout == torch.strided:
        return LeafSpec(
            shape=value.shape,
            stride=tuple(value.stride()),
            dtype=value.dtype,
            elementwise=elementwise and value.shape == twin.shape,
            on_device=forced or value.is_meta,
        )
    if isinstance(value, float):
        return replace(_NUMBER, dtype=torch.float64)
    if isinstance(value, _PLAIN):
        return replace(_NUMBER, is_none=value is None)
    return value


def _refused(optimizer: Optimizer, key: str, value: Any) -> OptimizerRefused:
    optimizer_class: type[Optimizer] = getattr(optimizer, "swapped_class", type(optimizer))
    return OptimizerRefused(
        f"{optimizer_class.__name__} keeps state that orlop can't hold in host memory leaf by leaf",
        where=f"state key {key!r}",
        expected="a strided tensor or a plain number",
        found=type(value).__name__,
        todo="use the stock class for these parameters",
    )
