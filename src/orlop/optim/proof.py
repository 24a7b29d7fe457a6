"""Decides how a class may be run, by running it.

Owns: toys of a few tensors on which the stock step is compared, bit for bit, with the ways in which orlop could run it. Must
not know: the model, arenas, links. A class is proven, never believed: there is no list of names here.

What is tried, from the freest to the strictest:
- sliced: parameter, gradient and state cut at multiples of 64 elements. True of elementwise rules; such a class may also
  step on the local shards of DTensors.
- windowed: one whole parameter at a time (a rule that looks at a matrix).
- whole: all parameters in one call (a rule that looks across parameters, or counts its calls on itself).
"""

from __future__ import annotations

import copy
import enum
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from orlop import compat
from orlop.errors import OptimizerRefused
from orlop.optim.stepping import Group, changed_values, group_with, step_on
from orlop.optim.windows import CUT_ELEMENTS

_NUM_STEPS = 3
_TOY_ELEMENTS = 3 * CUT_ELEMENTS
# An `ndim` -> shape of 192 elements: three cuts of 64, and no dimension that is a multiple of another's stride by chance.
_TOY_SHAPES: dict[int, tuple[int, ...]] = {0: (), 1: (192,), 2: (8, 24), 3: (4, 4, 12), 4: (2, 4, 4, 6), 5: (2, 2, 2, 4, 6)}

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
        initial: For each param group, the constant that each state key starts from, where a first step from that state
            equals the first step without state; None where only the class itself can make its state.
    """

    method: Method
    initial: tuple[Initial | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is to be proven: a class and how to construct it again.

    Attributes:
        optimizer_class: The stock class.
        construct: Makes an optimizer of it from param groups.
        groups: The live groups; only their options and the kinds of their parameters are looked at.
    """

    optimizer_class: type[Optimizer]
    construct: Callable[[list[Group]], Optimizer]
    groups: Sequence[Group]

    def key(self) -> tuple[Any, ...]:
        """Equal for subjects of which the same is true."""
        kinds = tuple((_options(group), _kinds(group)) for group in self.groups)
        return (self.optimizer_class, torch.get_default_dtype(), kinds)


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
    for method, step in ((Method.SLICED, _step_sliced), (Method.WINDOWED, _step_windowed), (Method.WHOLE, _step_lent)):
        if _agrees(subject, step, stock):
            return Proof(method=method, initial=_initial_states(subject, stock))
    if not all(_agrees(subject, _step_whole, stock) for _ in range(3)):
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


def _stock(subject: Subject) -> _Toy:
    """The stock class after a few steps; with latecomers, unless it can't take any itself (fused SGD can't)."""
    for late in (True, False):
        stock = _Toy(subject, late=late)
        try:
            stock.run(_step_whole)
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


def _agrees(subject: Subject, step: _Step, stock: _Toy) -> bool:
    toy = _Toy(subject, late=stock.late)
    try:
        toy.run(step)
    except Exception:
        return False  # A class that can't be run this way is not refused, only run in a stricter way.
    return toy.equals(stock)


# -- the toy ---------------------------------------------------------------------------------------------------------


class _Toy:
    """A few parameters of the same kinds and options as the live ones, and an optimizer of the class over them."""

    def __init__(
        self, subject: Subject, *, late: bool = False, lr_factor: float = 1.0, seed: int = 0
    ) -> None:
        self.optimizer_class = subject.optimizer_class
        self.late = late
        groups = [_toy_group(group, lr_factor, seed + 10 * i) for i, group in enumerate(subject.groups)]
        self.seed = seed
        self.optimizer = _construct(subject, groups)
        self.params = [param for group in self.optimizer.param_groups for param in group["params"]]
        # Each group has every kind of parameter twice; the second ones may get their first gradient a step later.
        self.latecomers = {p for g in self.optimizer.param_groups for p in g["params"][len(g["params"]) // 2 :]}

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def give_gradients(self, step: int) -> None:
        for index, param in enumerate(self.params):
            waits = self.late and step == 0 and param in self.latecomers
            grad = _wave(param.shape, param.dtype, phase=self.seed + 1.7 * step + 0.3 * index)
            param.grad = None if waits else grad

    def run(self, step: _Step, num_steps: int = _NUM_STEPS) -> None:
        raw = compat.raw_step(self.optimizer_class)
        for number in range(num_steps):
            self.give_gradients(number)
            step(self, raw)

    def equals(self, other: _Toy) -> bool:
        """Same parameters, state, group values and counters on the object, bit for bit."""
        return (
            all(map(_same, self.params, other.params))
            and all(_same(_plain(self.state.get(p)), _plain(other.state.get(q))) for p, q in zip(self.params, other.params))
            and all(_same(_values(g), _values(h)) for g, h in zip(self.optimizer.param_groups, other.optimizer.param_groups))
            and _counters(self.optimizer) == _counters(other.optimizer)
        )


_Step = Callable[[_Toy, Callable[[Optimizer], Any]], None]


def _construct(subject: Subject, groups: list[Group]) -> Optimizer:
    try:
        return subject.construct(groups)
    except Exception as error:
        raise OptimizerRefused(
            f"{subject.optimizer_class.__name__} can't be constructed on a toy, so nothing can be proven of it",
            expected="a constructor that takes param groups and the same options again",
            found=f"{type(error).__name__}: {error}",
            todo="use the stock class, or give it a constructor without side conditions",
        ) from error


def _toy_group(group: Group, lr_factor: float, seed: int) -> Group:
    params = [
        _wave(_TOY_SHAPES[ndim], dtype, phase=seed + 0.9 * index).requires_grad_()
        for index, (ndim, dtype) in enumerate(_kinds(group) * 2)
    ]
    options = {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}
    # `capturable` asserts on the CPU and changes where scalars live, not what they are.
    if options.get("capturable"):
        options["capturable"] = False
    if "lr" in options:
        options["lr"] = options["lr"] * lr_factor
    return {**options, "params": [torch.nn.Parameter(p.detach()) for p in params]}


def _wave(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype, phase: float) -> Tensor:
    """Smooth, deterministic values of both signs, no two alike; touches no random generator."""
    count = torch.Size(shape).numel()
    real = torch.sin(torch.arange(count, dtype=torch.float64) * 1.3 + phase)
    if dtype.is_complex:
        return torch.complex(real, real.flip(0) * 0.5).to(dtype).reshape(shape)
    return real.to(dtype).reshape(shape)


# -- ways of stepping ------------------------------------------------------------------------------------------------


def _step_whole(toy: _Toy, raw: Callable[[Optimizer], Any]) -> None:
    raw(toy.optimizer)


def _step_lent(toy: _Toy, raw: Callable[[Optimizer], Any]) -> None:
    """All parameters in one call, on copies of the state."""
    _step_on_copies(toy, raw, [[(param, slice(None)) for param in toy.params]])


def _step_windowed(toy: _Toy, raw: Callable[[Optimizer], Any]) -> None:
    """One parameter per call."""
    _step_on_copies(toy, raw, [[(param, slice(None))] for param in toy.params])


def _step_sliced(toy: _Toy, raw: Callable[[Optimizer], Any]) -> None:
    """A third of a parameter per call."""
    cuts = [slice(start, start + CUT_ELEMENTS) for start in range(0, _TOY_ELEMENTS, CUT_ELEMENTS)]
    windows = [[(p, cut)] for p in toy.params for cut in (cuts if p.numel() == _TOY_ELEMENTS else [slice(None)])]
    _step_on_copies(toy, raw, windows)


def _step_on_copies(
    toy: _Toy, raw: Callable[[Optimizer], Any], windows: Sequence[Sequence[tuple[Tensor, slice]]]
) -> None:
    """Each window as the live step runs it: stand-ins, lent state, groups as they were before the step."""
    before = [dict(group) for group in toy.optimizer.param_groups]
    kept: dict[Tensor, dict[str, Any]] = {p: dict(toy.state[p]) if p in toy.state else {} for p in toy.params}
    home: dict[Tensor, dict[str, Any]] = defaultdict(dict)
    changes: list[Group] = [{} for _ in before]
    for window in windows:
        groups: list[Group] = []
        lent: defaultdict[Any, Any] = defaultdict(dict)
        twins: list[tuple[Tensor, slice, Tensor]] = []
        for group in before:
            mine = [(p, cut) for p, cut in window if any(p is q for q in group["params"])]
            stand_ins = [_cut_twin(p, cut) for p, cut in mine]
            groups.append(group_with(group, stand_ins))
            twins += [(p, cut, twin) for (p, cut), twin in zip(mine, stand_ins)]
        for param, cut, twin in twins:
            if kept[param]:
                lent[twin] = {key: _cut_state(value, param, cut) for key, value in kept[param].items()}
        visible = [group for group in groups if group["params"]]
        step_on(toy.optimizer, raw, visible, lent)
        for param, cut, twin in twins:
            _take_home(home[param], lent.get(twin, {}), param, cut)
        for index, (group, old) in enumerate(zip(groups, before)):
            if group["params"]:
                changes[index].update(changed_values(old, group))
    for param in toy.params:
        if home[param]:
            toy.state[param] = home[param]
    for live, change in zip(toy.optimizer.param_groups, changes):
        live.update(change)


def _cut_twin(param: Tensor, cut: slice) -> Tensor:
    whole = cut == slice(None)
    twin = param.detach() if whole else param.detach().view(-1)[cut]
    grad = param.grad
    twin.grad = None if grad is None else (grad if whole else grad.reshape(-1)[cut])
    return twin


def _cut_state(value: Any, param: Tensor, cut: slice) -> Any:
    if not isinstance(value, Tensor):
        return value
    if cut != slice(None) and value.shape == param.shape:
        return value.reshape(-1)[cut].clone()
    return value.clone()


def _take_home(home: dict[str, Any], lent: Mapping[str, Any], param: Tensor, cut: slice) -> None:
    for key, value in lent.items():
        cut_out = cut != slice(None) and isinstance(value, Tensor) and value.numel() == CUT_ELEMENTS
        if cut_out:
            if key not in home:
                home[key] = torch.empty(param.shape, dtype=value.dtype)
            home[key].view(-1)[cut] = value
        else:
            home[key] = value.clone() if isinstance(value, Tensor) else value


# -- the state before the first step ---------------------------------------------------------------------------------


def _initial_states(subject: Subject, stock: _Toy) -> tuple[Initial | None, ...]:
    """For each group, constants from which the class goes the way of `stock`, which had no state to begin with.

    Two candidates: what the class puts there itself, where that depends on neither data nor learning rate; and zero.
    """
    recorded = [_recorded_initials(subject, lr_factor=1.0, seed=0), _recorded_initials(subject, lr_factor=0.5, seed=3)]
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
    toy = _Toy(subject, lr_factor=lr_factor, seed=seed)
    recorders = {param: _Recorder() for param in toy.params}
    for param, recorder in recorders.items():
        for key, value in toy.state.get(param, {}).items():
            recorder[key] = value
    toy.give_gradients(0)
    step_on(toy.optimizer, compat.raw_step(toy.optimizer_class), toy.optimizer.param_groups, defaultdict(dict, recorders))
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


def _starts_from(subject: Subject, stock: _Toy, index: int, initial: Initial) -> bool:
    """Whether group `index`, begun from `initial`, comes to the bits of `stock`, which began without state."""
    toy = _Toy(subject, late=stock.late)
    mine = toy.optimizer.param_groups[index]["params"]
    for param, like in zip(mine, stock.optimizer.param_groups[index]["params"]):
        made = stock.state.get(like, {})
        if set(made) != set(initial):
            return False
        toy.state[param] = {key: _filled(value, initial[key]) for key, value in made.items()}
    toy.run(_step_whole)
    return toy.equals(stock)


def _filled(value: Any, constant: float) -> Any:
    return torch.full_like(value, constant) if isinstance(value, Tensor) else type(value)(constant)


# -- sharded parameters ----------------------------------------------------------------------------------------------


def require_sharded(subject: Subject) -> None:
    """Refuse a class that is not elementwise on DTensor parameters, unless torch's own step on DTensors is right.

    A collective over each parameter's mesh: the stock class steps a toy as a DTensor of the same placements, and as a plain
    tensor. The two may differ by the order of sums, so they are compared to 1e-4 of the update, not bit for bit.

    Raises:
        OptimizerRefused: Stepping on DTensors fails, or gives something else.
    """
    tried: set[Any] = set()
    for group in subject.groups:
        for param in group["params"]:
            if isinstance(param, compat.DTensor) and param.requires_grad:
                kind = (id(param.device_mesh), str(compat.placements(param)), param.ndim, param.dtype, _options(group))
                if kind not in tried:
                    tried.add(kind)
                    _require_dtensor_step(subject, group, param)


def _require_dtensor_step(subject: Subject, group: Group, param: compat.DTensor) -> None:
    plain_group = _toy_group({**group, "params": [torch.nn.Parameter(torch.empty_like(param.to_local(), device="cpu"))]}, 1.0, 0)
    shape = _TOY_SHAPES[min(param.ndim, 5)]
    device = param.device_mesh.device_type
    plain = torch.nn.Parameter(_wave(shape, param.dtype, phase=0.0).to(device))
    sharded = torch.nn.Parameter(compat.shard_like(param, plain.detach().clone()))
    before = plain.detach().clone()
    raw = compat.raw_step(subject.optimizer_class)
    try:
        for toy in (plain, sharded):
            optimizer = _construct(subject, [{**plain_group, "params": [toy]}])
            for number in range(_NUM_STEPS):
                grad = _wave(shape, param.dtype, phase=1.7 * number).to(device)
                toy.grad = compat.shard_like(param, grad) if toy is sharded else grad
                raw(optimizer)
        result = compat.full_tensor(sharded.detach())
    except Exception as error:
        raise _refused_sharded(subject, f"{type(error).__name__}: {error}") from error
    update = (plain.detach() - before).abs().max().item()
    if not (result - plain.detach()).abs().max().item() <= 1e-4 * update:
        raise _refused_sharded(subject, "updates that differ from those on the whole tensor")


def _refused_sharded(subject: Subject, found: str) -> OptimizerRefused:
    return OptimizerRefused(
        f"{subject.optimizer_class.__name__} is not elementwise, and its step on sharded parameters is not right",
        expected="the same update on a DTensor as on the whole tensor",
        found=found,
        todo="give sharded parameters to an elementwise class, or this class unsharded ones",
    )


# -- comparing -------------------------------------------------------------------------------------------------------


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return set(one) == set(other) and all(_same(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other)


def _plain(state: Any) -> Any:
    return dict(state) if state else {}


def _values(group: Group) -> Group:
    return {key: value for key, value in group.items() if key != "params"}


def _counters(optimizer: Optimizer) -> dict[str, Any]:
    """Numbers that the class keeps on the object itself."""
    return {key: value for key, value in vars(optimizer).items() if type(value) in (int, float)}


def _options(group: Group) -> tuple[tuple[str, str], ...]:
    """What of a group decides how its class behaves. The learning rate does not, only whether it is a tensor."""
    return tuple(
        sorted(
            (key, type(value).__name__ if key in ("lr", "initial_lr") else repr(value))
            for key, value in group.items()
            if key not in ("params", "param_names")
        )
    )


def _kinds(group: Group) -> tuple[tuple[int, torch.dtype], ...]:
    """The distinct (ndim, dtype) of a group's trainable parameters; one-dimensional float32 where it has none."""
    kinds = {(min(p.ndim, 5), p.dtype) for p in group["params"] if p.requires_grad}
    return tuple(sorted(kinds, key=str)) or ((1, torch.float32),)
