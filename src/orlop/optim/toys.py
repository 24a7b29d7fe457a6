"""A few small parameters of the same kinds as the live ones, and the ways of stepping a class on them.

Owns: toys, their deterministic values, and what it means for two of them to be the same. Must not know: what
follows from a comparison (`orlop.optim.proof` decides)."""

from __future__ import annotations

import copy
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

NUM_STEPS = 3
_TOY_ELEMENTS = 3 * CUT_ELEMENTS
# An `ndim` -> shape of 192 elements: three cuts of 64, and no dimension that is a multiple of another's
# stride by chance.
TOY_SHAPES: dict[int, tuple[int, ...]] = {
    0: (),
    1: (192,),
    2: (8, 24),
    3: (4, 4, 12),
    4: (2, 4, 4, 6),
    5: (2, 2, 2, 4, 6),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is to be proven: a class and how to construct it again.

    Attributes:
        optimizer_class: The stock class.
        construct: Makes an optimizer of it from param groups.
        groups: The live groups; only their options and the kinds of their parameters are looked at.
        arguments: The constructor's arguments, as text: a class may keep options on itself.
    """

    optimizer_class: type[Optimizer]
    construct: Callable[[list[Group]], Optimizer]
    groups: Sequence[Group]
    arguments: str = ""

    def key(self) -> tuple[Any, ...]:
        """Equal for subjects of which the same is true."""
        kinds = tuple((options_of(group), kinds_of(group)) for group in self.groups)
        return (self.optimizer_class, torch.get_default_dtype(), self.arguments, kinds)


class Toy:
    """A few parameters of the same kinds and options as the live ones, and an optimizer of the class over
    them."""

    def __init__(
        self, subject: Subject, *, late: bool = False, lr_factor: float = 1.0, seed: int = 0
    ) -> None:
        self.optimizer_class = subject.optimizer_class
        self.late = late
        groups = [toy_group(group, lr_factor, seed + 10 * i) for i, group in enumerate(subject.groups)]
        self.seed = seed
        self.optimizer = construct_toy(subject, groups)
        self.params = [param for group in self.optimizer.param_groups for param in group["params"]]
        # Each group has every kind of parameter twice; the second ones may get their first gradient a step
        # later.
        self.latecomers = {
            p for g in self.optimizer.param_groups for p in g["params"][len(g["params"]) // 2 :]
        }

    @property
    def state(self) -> Any:
        """The toy optimizer's state."""
        return self.optimizer.state

    def give_gradients(self, step: int) -> None:
        """Gradients for step number `step`, the same for every toy of the same subject and seed."""
        for index, param in enumerate(self.params):
            waits = self.late and step == 0 and param in self.latecomers
            grad = wave(param.shape, param.dtype, phase=self.seed + 1.7 * step + 0.3 * index)
            param.grad = None if waits else grad

    def run(self, step: Step, num_steps: int = NUM_STEPS) -> None:
        """Take some steps in one of the ways below."""
        raw = compat.raw_step(self.optimizer_class)
        for number in range(num_steps):
            self.give_gradients(number)
            step(self, raw)

    def is_finite(self) -> bool:
        """Whether its parameters are."""
        return all(bool(torch.isfinite(param).all()) for param in self.params)

    def keeps_its_tensors(self) -> bool:
        """Whether one more step leaves the same tensor objects in the state, all of them."""
        before = {p: dict(self.state.get(p, {})) for p in self.params}
        self.give_gradients(NUM_STEPS)
        compat.raw_step(self.optimizer_class)(self.optimizer)
        after = {p: self.state.get(p, {}) for p in self.params}
        return all(
            before[p].keys() == after[p].keys()
            and all(after[p][key] is value for key, value in before[p].items())
            for p in self.params
        )

    def equals(self, other: Toy) -> bool:
        """Same parameters, state, group values and counters on the object, bit for bit."""
        return (
            all(map(_same, self.params, other.params))
            and all(
                _same(_plain(self.state.get(p)), _plain(other.state.get(q)))
                for p, q in zip(self.params, other.params)
            )
            and all(
                _same(_values(g), _values(h))
                for g, h in zip(self.optimizer.param_groups, other.optimizer.param_groups)
            )
            and _counters(self.optimizer) == _counters(other.optimizer)
        )


Step = Callable[[Toy, Callable[[Optimizer], Any]], None]


def construct_toy(subject: Subject, groups: list[Group]) -> Optimizer:
    """An optimizer of the subject's class over toy parameters.

    Raises:
        OptimizerRefused: The class can't be constructed again.
    """
    try:
        return subject.construct(groups)
    except Exception as error:
        raise OptimizerRefused(
            f"{subject.optimizer_class.__name__} can't be constructed on a toy, so nothing can be proven of it",
            expected="a constructor that takes param groups and the same options again",
            found=f"{type(error).__name__}: {error}",
            todo="use the stock class, or give it a constructor without side conditions",
        ) from error


def toy_group(group: Group, lr_factor: float, seed: int) -> Group:
    """A group with the options of a live one and two toy parameters of each kind that it holds."""
    params = [
        wave(TOY_SHAPES[ndim], dtype, phase=seed + 0.9 * index).requires_grad_()
        for index, (ndim, dtype) in enumerate(kinds_of(group) * 2)
    ]
    options = {
        key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")
    }
    # `capturable` asserts on the CPU and changes where scalars live, not what they are.
    if options.get("capturable"):
        options["capturable"] = False
    if "lr" in options:
        # At a learning rate of zero (a warm-up's first step) any class would be proven to do anything.
        options["lr"] = (options["lr"] if float(options["lr"]) else options["lr"] + 1e-3) * lr_factor
    return {**options, "params": [torch.nn.Parameter(p.detach()) for p in params]}


def wave(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype, phase: float) -> Tensor:
    """Deterministic values of both signs, no two alike, as matrices of full rank; touches no random
    generator."""
    index = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    real = torch.sin(index * (1.3 + 0.37 * index) + phase)
    if dtype.is_complex:
        return torch.complex(real, real.flip(0) * 0.5).to(dtype).reshape(shape)
    return real.to(dtype).reshape(shape)


# -- ways of stepping ------------------------------------------------------------------------------------------------


def step_whole(toy: Toy, raw: Callable[[Optimizer], Any]) -> None:
    """As torch does."""
    raw(toy.optimizer)


def step_lent(toy: Toy, raw: Callable[[Optimizer], Any]) -> None:
    """All parameters in one call, on copies of the state."""
    _step_on_copies(toy, raw, [[(param, slice(None)) for param in toy.params]])


def step_windowed(toy: Toy, raw: Callable[[Optimizer], Any]) -> None:
    """One parameter per call."""
    _step_on_copies(toy, raw, [[(param, slice(None))] for param in toy.params])


def step_sliced(toy: Toy, raw: Callable[[Optimizer], Any]) -> None:
    """A third of a parameter per call."""
    cuts = [slice(start, start + CUT_ELEMENTS) for start in range(0, _TOY_ELEMENTS, CUT_ELEMENTS)]
    windows = [
        [(p, cut)] for p in toy.params for cut in (cuts if p.numel() == _TOY_ELEMENTS else [slice(None)])
    ]
    _step_on_copies(toy, raw, windows)


def _step_on_copies(
    toy: Toy, raw: Callable[[Optimizer], Any], windows: Sequence[Sequence[tuple[Tensor, slice]]]
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


# -- comparing -------------------------------------------------------------------------------------------------------


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return set(one) == set(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)


def _plain(state: Any) -> Any:
    return dict(state) if state else {}


def _values(group: Group) -> Group:
    return {key: value for key, value in group.items() if key != "params"}


def _counters(optimizer: Optimizer) -> dict[str, Any]:
    """Numbers that the class keeps on the object itself."""
    return {key: value for key, value in vars(optimizer).items() if type(value) in (int, float)}


def options_of(group: Group) -> tuple[tuple[str, str], ...]:
    """What of a group decides how its class behaves. The learning rate does not, only whether it is a
    tensor."""
    return tuple(
        sorted(
            (key, type(value).__name__ if key in ("lr", "initial_lr") else repr(value))
            for key, value in group.items()
            if key not in ("params", "param_names")
        )
    )


def kinds_of(group: Group) -> tuple[tuple[int, torch.dtype], ...]:
    """The distinct (ndim, dtype) of a group's trainable parameters; one-dimensional float32 where it has
    none."""
    kinds = {(min(p.ndim, 5), p.dtype) for p in group["params"] if p.requires_grad}
    return tuple(sorted(kinds, key=str)) or ((1, torch.float32),)
