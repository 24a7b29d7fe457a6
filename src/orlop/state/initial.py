"""The state that an optimizer's class starts a parameter from, as tensors that can be saved.

Owns making it without touching anything live. Must not know why it is wanted, nor ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from orlop.errors import OptimizerRefused
from orlop.optim.probe import LeafSpec, foresee_state, rebuild
from orlop.optim.proof import Initial, prove
from orlop.optim.toys import Subject
from orlop.state.stock import empty_leaf

__all__ = ["InitialState", "initial_state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialState:
    """One parameter's state before its first step.

    Attributes:
        elementwise: The tensors that follow the parameter's shape (and sharding), by state key.
        others: Scalars and whatever else is the same on all ranks.
        is_exact: A first step from this state equals the first step without any. Where the class can't be begun from
            constants (SGD's momentum is its first gradient), everything here is zero and means nothing.
    """

    elementwise: dict[str, Tensor]
    others: dict[str, Tensor | int | float]
    is_exact: bool


def initial_state(optimizer: Optimizer, param: Tensor) -> InitialState:
    """What the class would make for `param`, which has no state; nothing live changes."""
    specs = foresee_state(optimizer, [param], optimizer.param_groups)[param]
    constants = _constants(optimizer, param)
    elementwise: dict[str, Tensor] = {}
    others: dict[str, Tensor | int | float] = {}
    for key, spec in specs.items():
        value = 0.0 if constants is None else constants.get(key, 0.0)
        if spec.number:
            others[key] = value if spec.dtype.is_floating_point else int(value)
        elif spec.elementwise:
            elementwise[key] = _filled(param, spec, value)
        else:
            others[key] = _filled(param, spec, value)
    return InitialState(elementwise=elementwise, others=others, is_exact=constants is not None)


def _filled(param: Tensor, spec: LeafSpec, value: float) -> Tensor:
    return empty_leaf(param, spec).fill_(value)


def _constants(optimizer: Optimizer, param: Tensor) -> Initial | None:
    kind: type[Optimizer] = getattr(optimizer, "swapped_class", type(optimizer))
    index = next(
        index
        for index, group in enumerate(optimizer.param_groups)
        if any(param is other for other in group["params"])
    )
    subject = Subject(
        optimizer_class=kind,
        construct=lambda groups: rebuild(kind, groups, optimizer.defaults),
        groups=optimizer.param_groups,
    )
    try:
        return prove(subject).initial[index]
    except (OptimizerRefused, TypeError, ValueError):
        return None
