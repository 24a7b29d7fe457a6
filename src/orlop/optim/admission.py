"""Which parameters get a place in the arena, and which are refused.

Owns: the checks on parameters, what they are called in messages, and whether their state is page-locked. Must
not know: how the places are laid out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from orlop import compat
from orlop.errors import OptimizerRefused, ParameterReplaced
from orlop.optim.probe import probe_state
from orlop.optim.proof import Method, Proof
from orlop.optim.resident import Resident, Residents
from orlop.optim.stepping import Group


def plan_residents(
    optimizer: Optimizer,
    proof: Proof,
    residents: Residents,
    group_indices: Sequence[int],
    also: Collection[Tensor] = (),
) -> list[Resident]:
    """Residents, without places yet, for the parameters of some groups that need state and have no place.

    Lazy modules' parameters have no shape before the first forward: they wait for their first gradient.

    Args:
        optimizer: Whose groups.
        proof: How its class may be run.
        residents: Those that have places already.
        group_indices: Which groups.
        also: Parameters to take although they don't train.
    """
    newcomers = [
        (index, position, param)
        for index in group_indices
        for position, param in enumerate(optimizer.param_groups[index]["params"])
        if (param.requires_grad or any(param is other for other in also))
        and param not in residents
        and not is_lazy(param)
    ]
    specs = probe_state(optimizer, [param for _, _, param in newcomers])
    return [
        Resident(
            param=param,
            name=parameter_name(optimizer.param_groups[index], index, position),
            specs=specs[param],
            initial=proof.initial[index],
            on_local=steps_on_local(param, proof),
        )
        for index, position, param in newcomers
    ]


def steps_on_local(param: Tensor, proof: Proof) -> bool:
    """Whether the class steps on this rank's part of the parameter rather than on the DTensor."""
    return isinstance(param, compat.DTensor) and proof.method is Method.SLICED


def require_steppable_groups(groups: Sequence[Group]) -> None:
    """Refuse groups whose options or parameters rule out lent state.

    Raises:
        OptimizerRefused: Names the group or the parameter.
    """
    for index, group in enumerate(groups):
        if group.get("differentiable"):
            raise OptimizerRefused(
                "differentiable=True needs autograd through the step, which lent state can't give",
                where=f"param group {index}",
                todo="use the stock class for differentiable steps",
            )
        for position, param in enumerate(group["params"]):
            if not is_lazy(param):
                require_steppable(param, parameter_name(group, index, position))


def require_steppable(param: Tensor, name: str) -> None:
    """Refuse parameters whose state orlop can't keep as it should be.

    Raises:
        OptimizerRefused: FSDP1, a tensor subclass, a sparse layout, a partial placement, or a DTensor whose
            local tensor lies on another device.
    """
    local = compat.local_tensor(param)
    checks: list[tuple[Callable[[], bool], str, str]] = [
        (
            lambda: compat.is_fsdp1_parameter(param),
            "an FSDP1 parameter",
            "use fully_shard (FSDP2), whose state keeps its shape",
        ),
        (lambda: not compat.is_plain_tensor(param), type(param).__name__, "give it to a stock optimizer"),
        (lambda: param.layout != torch.strided, f"layout {param.layout}", "give it to a stock optimizer"),
        (
            lambda: any(p.is_partial() for p in compat.placements(param)),
            "a partial placement",
            "reduce it first",
        ),
        (
            lambda: param.device.type != local.device.type,
            f"on {param.device}, its local tensor on {local.device}",
            "move the module, not its local tensors",
        ),
    ]
    for is_wrong, found, todo in checks:
        if is_wrong():
            raise OptimizerRefused(
                "this parameter's state can't be kept in host memory exactly",
                where=f"parameter {name}",
                expected="a dense Tensor, Parameter or FSDP2/TP DTensor in one place",
                found=found,
                todo=todo,
            )


def parameter_name(group: Group, index: int, position: int) -> str:
    """What to call a parameter in messages: its name where the group has names."""
    names = group.get("param_names")
    return str(names[position]) if names else f"{position} of group {index}"


def replaced_parameter(name: str) -> ParameterReplaced:
    """The error for a parameter that its module has replaced by another object."""
    return ParameterReplaced(
        "a parameter is still on the meta device at step: its module holds another one now",
        where=f"parameter {name}",
        expected="the parameter that it was built with, materialised in place (as FSDP2 does, and to_empty does not)",
        found="a meta tensor",
        todo="materialise a plain model before building its optimizer",
    )


def wants_pinned(groups: Iterable[Group]) -> bool:
    """Whether any parameter lives, or will live once it is materialised, on an accelerator."""
    for group in groups:
        for param in group["params"]:
            if isinstance(param, compat.DTensor):
                kind = param.device_mesh.device_type
            elif param.is_meta:
                device = compat.accelerator()
                kind = device.type if device is not None else "cpu"
            else:
                kind = param.device.type
            if kind not in ("cpu", "meta"):
                return True
    return False
