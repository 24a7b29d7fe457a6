"""Decides how a class may be run, by running it.

Owns: toys of a few tensors on which the stock step is compared, bit for bit, with the ways in which orlop
could run it. Must not know: the model, arenas, links. A class is proven, never believed: there is no list of
names here.

What is tried, from the freest to the strictest:
- sliced: parameter, gradient and state cut at multiples of 64 elements. True of elementwise rules; such a
  class may also step on the local shards of DTensors.
- windowed: one whole parameter at a time (a rule that looks at a matrix).
- whole: all parameters in one call (a rule that looks across parameters, or counts its calls on itself).
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orlop import compat
from orlop.errors import OptimizerRefused
from orlop.optim.stepping import Group, step_on
from orlop.optim.toys import (
    NUM_STEPS,
    TOY_SHAPES,
    Step,
    Subject,
    Toy,
    construct_toy,
    options_of,
    step_lent,
    step_sliced,
    step_whole,
    step_windowed,
    toy_group,
    wave,
)

_SHARDED_TOLERANCE = 0.1

Initial = Mapping[str, float]


class Method(enum.Enum):
    """How much of the optimizer one call of the class's step is shown."""

    SLICED = "sliced"
    WINDOWED = "windowed"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What was proven of a class with its options.

    Attributes:
        method: The freest way of running it that gives the stock class's bits.
        in_place: The class changes its state's tensors in place and never replaces one.
        initial: For each param group, the constant that each state key starts from, where a first step from
            that state equals the first step without state; None where only the class itself can make its
            state.
    """

    method: Method
    in_place: bool
    initial: tuple[Initial | None, ...]


_proofs: dict[tuple[Any, ...], Proof] = {}


def prove(subject: Subject) -> Proof:
    """The proof for a class and its options, made once per process and kept.

    Raises:
        OptimizerRefused: The class can't be run exactly in any of the ways; the reason is in the message.
    """
    key = subject.key()
    if key not in _proofs:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            _proofs[key] = _prove(subject)
    return _proofs[key]


def _prove(subject: Subject) -> Proof:
    stock = _stock(subject)
    if not stock.is_finite():
        raise OptimizerRefused(
            f"the stock {subject.optimizer_class.__name__} itself comes to nan or inf on ordinary gradients, so "
            "nothing can be proven of it",
            expected=f"finite parameters after {NUM_STEPS} steps",
            found="others, as where eps vanishes in the parameters' dtype: "
            + ", ".join(sorted({str(param.dtype) for param in stock.params})),
            todo="choose options that the dtype can hold (for float16: eps=1e-4), or keep float32 parameters",
        )
    for method, step in (
        (Method.SLICED, step_sliced),
        (Method.WINDOWED, step_windowed),
        (Method.WHOLE, step_lent),
    ):
        if _agrees(subject, step, stock):
            initial = _initial_states(subject, stock)
            return Proof(method=method, in_place=stock.keeps_its_tensors(), initial=initial)
    if not all(_agrees(subject, step_whole, stock) for _ in range(3)):
        raise OptimizerRefused(
            f"two runs of the stock {subject.optimizer_class.__name__} differ from each other, so nothing can equal it",
            expected="the same bits from the same parameters, gradients and options",
            found="other bits in a second run (torch's fused SGD with momentum in bfloat16 is one such)",
            todo="choose another implementation (fused=False), or use the stock class",
        )
    raise OptimizerRefused(
        f"{subject.optimizer_class.__name__} gives other results when its state is lent to it for a step",
        expected="updates that depend on parameters, gradients, param groups and `state` alone",
        found="a step on copies of its state that differs from the stock step",
        todo="use the stock class; its state then stays on the device",
    )


def _stock(subject: Subject) -> Toy:
    """The stock class after a few steps; with latecomers, unless it can't take any itself, as fused SGD."""
    for late in (True, False):
        stock = Toy(subject, late=late)
        try:
            stock.run(step_whole)
        except Exception as error:
            if late:
                continue
            raise OptimizerRefused(
                f"{subject.optimizer_class.__name__} can't be stepped on plain dense gradients without a closure",
                expected="step() on parameters with gradients",
                found=f"{type(error).__name__}: {error}",
                todo="use the stock class; its state then stays on the device",
            ) from error
        break
    return stock


def _agrees(subject: Subject, step: Step, stock: Toy) -> bool:
    toy = Toy(subject, late=stock.late)
    try:
        toy.run(step)
    except Exception:
        return False  # A class that can't be run this way is not refused, only run in a stricter way.
    return toy.equals(stock)


# -- the state before the first step ---------------------------------------------------------------------------------


def _initial_states(subject: Subject, stock: Toy) -> tuple[Initial | None, ...]:
    """For each group, constants from which the class goes the way of `stock`, which began without state.

    Two candidates: what the class puts there itself, where that depends on neither data nor learning rate;
    and zero."""
    recorded = [
        _recorded_initials(subject, lr_factor=1.0, seed=0),
        _recorded_initials(subject, lr_factor=0.5, seed=3),
    ]
    found: list[Initial | None] = []
    for index, group in enumerate(stock.optimizer.param_groups):
        own = recorded[0][index] if recorded[0][index] == recorded[1][index] else None
        keys = {key: value for p in group["params"] for key, value in stock.state.get(p, {}).items()}
        zero = {key: 0.0 for key, value in keys.items() if isinstance(value, (Tensor, int, float))}
        candidates = [c for c in (own, zero if len(zero) == len(keys) else None) if c is not None]
        found.append(next((c for c in candidates if _starts_from(subject, stock, index, c)), None))
    return tuple(found)


class _Recorder(dict[str, Any]):
    """A parameter's state that keeps a copy of the first value put under each key."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        self.first.setdefault(key, value.clone() if isinstance(value, Tensor) else value)
        super().__setitem__(key, value)


def _recorded_initials(subject: Subject, *, lr_factor: float, seed: int) -> list[dict[str, float] | None]:
    """For each group, the constant that the class first put under each key; None where one is no constant."""
    toy = Toy(subject, lr_factor=lr_factor, seed=seed)
    recorders = {param: _Recorder() for param in toy.params}
    for param, recorder in recorders.items():
        for key, value in toy.state.get(param, {}).items():
            recorder[key] = value
    toy.give_gradients(0)
    step_on(
        toy.optimizer,
        compat.raw_step(toy.optimizer_class),
        toy.optimizer.param_groups,
        defaultdict(dict, recorders),
    )
    found: list[dict[str, float] | None] = []
    for group in toy.optimizer.param_groups:
        constants: dict[str, float] | None = {}
        for param in group["params"]:
            for key, value in recorders[param].first.items():
                constant = _constant(value)
                if constants is None or constant is None or constants.setdefault(key, constant) != constant:
                    constants = None
        found.append(constants)
    return found


def _constant(value: Any) -> float | None:
    if isinstance(value, Tensor):
        flat = value.reshape(-1)
        same = flat.numel() > 0 and not value.is_complex() and bool((flat == flat[0]).all())
        zero = value.is_complex() and not bool(value.any())
        return float(flat[0]) if same else 0.0 if zero else None
    return float(value) if isinstance(value, (int, float)) else None


def _starts_from(subject: Subject, stock: Toy, index: int, initial: Initial) -> bool:
    """Whether group `index`, begun from `initial`, comes to the bits of `stock`."""
    toy = Toy(subject, late=stock.late)
    mine = toy.optimizer.param_groups[index]["params"]
    for param, like in zip(mine, stock.optimizer.param_groups[index]["params"]):
        made = stock.state.get(like, {})
        if set(made) != set(initial):
            return False
        toy.state[param] = {key: _filled(value, initial[key]) for key, value in made.items()}
    toy.run(step_whole)
    return toy.equals(stock)


def _filled(value: Any, constant: float) -> Any:
    return torch.full_like(value, constant) if isinstance(value, Tensor) else type(value)(constant)


# -- sharded parameters ----------------------------------------------------------------------------------------------


def require_sharded(subject: Subject) -> None:
    """Refuse a class that is not elementwise on DTensors, unless torch's own step on them is right.

    A collective over each parameter's mesh: the stock class steps a toy as a DTensor of the same placements,
    and as a plain tensor. The two differ by the order of sums, which Muon's bfloat16 iteration turns into up
    to 5 % of the update, so a tenth of the update is allowed; a class that takes a shard for the whole is off
    by far more.

    Raises:
        OptimizerRefused: Stepping on DTensors fails, or gives something else.
    """
    tried: set[Any] = set()
    for group in subject.groups:
        for param in group["params"]:
            if isinstance(param, compat.DTensor) and param.requires_grad:
                kind = (
                    id(param.device_mesh),
                    str(compat.placements(param)),
                    param.ndim,
                    param.dtype,
                    options_of(group),
                )
                if kind not in tried:
                    tried.add(kind)
                    _require_dtensor_step(subject, group, param)


def _require_dtensor_step(subject: Subject, group: Group, param: compat.DTensor) -> None:
    plain_group = toy_group(
        {**group, "params": [torch.nn.Parameter(torch.empty_like(param.to_local(), device="cpu"))]}, 1.0, 0
    )
    shape = TOY_SHAPES[min(param.ndim, 5)]
    device = param.device_mesh.device_type
    plain = torch.nn.Parameter(wave(shape, param.dtype, phase=0.0).to(device))
    sharded = torch.nn.Parameter(compat.shard_like(param, plain.detach().clone()))
    before = plain.detach().clone()
    raw = compat.raw_step(subject.optimizer_class)
    try:
        for toy in (plain, sharded):
            optimizer = construct_toy(subject, [{**plain_group, "params": [toy]}])
            for number in range(NUM_STEPS):
                grad = wave(shape, param.dtype, phase=1.7 * number).to(device)
                toy.grad = compat.shard_like(param, grad) if toy is sharded else grad
                raw(optimizer)
        result = compat.full_tensor(sharded.detach())
    except Exception as error:
        raise _refused_sharded(subject, f"{type(error).__name__}: {error}") from error
    update = (plain.detach() - before).abs().max().item()
    if not (result - plain.detach()).abs().max().item() <= _SHARDED_TOLERANCE * update:
        raise _refused_sharded(subject, "updates that differ from those on the whole tensor")


def _refused_sharded(subject: Subject, found: str) -> OptimizerRefused:
    return OptimizerRefused(
        f"{subject.optimizer_class.__name__} is not elementwise, and its step on sharded parameters is not right",
        expected="the same update on a DTensor as on the whole tensor",
        found=found,
        todo="give sharded parameters to an elementwise class, or this class unsharded ones",
    )
