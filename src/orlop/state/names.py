"""FQNs: the names by which a checkpoint knows parameters, and how optimizers' parameters get them.

Owns the cleaning of wrapper segments (compile, activation checkpointing, FSDP1, DistributedDataParallel) and the map
from parameter objects to FQNs. Must not know files, ranks or state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from orlop.errors import CheckpointMismatch, ParameterReplaced
from orlop.wording import counted

__all__ = ["ParameterNames", "clean_key", "group_names", "require_all_named", "walk"]

# What wrapper modules call the module that they wrap.
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_SHOWN = 5


def _wrapped_name(module: nn.Module) -> str | None:
    children = module._modules
    for name in _WRAPPED:
        if name in children:
            return name
    # Users have submodules called `module` too: it is a wrapper's only under DistributedDataParallel.
    return "module" if isinstance(module, DistributedDataParallel) else None


def walk(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module with its clean FQN prefix (`""` or `"layers.0."`), in registration order; shared ones repeat."""
    yield prefix, model
    wrapped = _wrapped_name(model)
    for name, child in model._modules.items():
        if child is not None:
            yield from walk(child, prefix if name == wrapped else f"{prefix}{name}.")


def clean_key(model: nn.Module, key: str) -> str:
    """The FQN of a `state_dict` key: without wrapper segments, for every nesting of wrappers.

    Wrappers differ in whether `state_dict` shows their segment (compile does, activation checkpointing does not):
    both forms lead to the same FQN.
    """
    module: nn.Module = model
    kept: list[str] = []
    for segment in key.split("."):
        wrapped = _wrapped_name(module)
        while wrapped is not None and segment not in module._modules:
            module = _child(module, wrapped)
            wrapped = _wrapped_name(module)
        if segment == wrapped:
            module = _child(module, segment)
            continue
        kept.append(segment)
        child = module._modules.get(segment)
        if child is not None:
            module = child
    return ".".join(kept)


def _child(module: nn.Module, name: str) -> nn.Module:
    child = module._modules[name]
    assert child is not None
    return child


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterNames:
    """The FQNs of a model's parameters and buffers.

    Attributes:
        fqns: All FQNs of each tensor object; several where it is tied; the first is its name in the checkpoint.
        tensors: The live parameter or buffer of each FQN.
    """

    fqns: Mapping[Tensor, tuple[str, ...]]
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module) -> ParameterNames:
        """The names in `model` now; parameters that are replaced later are not in them."""
        fqns: dict[Tensor, tuple[str, ...]] = {}
        tensors: dict[str, Tensor] = {}
        for prefix, module in walk(model):
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                fqn = f"{prefix}{name}"
                if tensor is None or fqn in tensors:
                    continue
                tensors[fqn] = tensor
                fqns[tensor] = (*fqns.get(tensor, ()), fqn)
        return cls(fqns=fqns, tensors=tensors)

    def first(self, tensor: Tensor) -> str:
        """The tensor's name in the checkpoint."""
        return self.fqns[tensor][0]

    def canonical(self, fqn: str) -> str:
        """The checkpoint's name for a tensor that `fqn` names: the first of its tied names; unknown ones as given."""
        tensor = self.tensors.get(fqn)
        return fqn if tensor is None else self.fqns[tensor][0]


def require_all_named(names: ParameterNames, optimizers: Mapping[str, Optimizer]) -> None:
    """Every parameter of every optimizer is one of the model's.

    Raises:
        ParameterReplaced: Some are not: the model's parameters were replaced after the optimizer was built.
    """
    for label, optimizer in optimizers.items():
        strangers = [
            f"{_own_name(group, at)} of group {index}, shape {tuple(param.shape)}"
            for index, group in enumerate(optimizer.param_groups)
            for at, param in enumerate(group["params"])
            if param not in names.fqns
        ]
        if strangers:
            more = f" and {len(strangers) - _SHOWN} more" if len(strangers) > _SHOWN else ""
            raise ParameterReplaced(
                f"the optimizer holds {counted(len(strangers), 'parameter')} missing in the model",
                where=f"{label}: {'; '.join(strangers[:_SHOWN])}{more}",
                expected="the model's own parameter objects",
                found="others: the model's were replaced (moved, wrapped, sharded) after the optimizer was built",
                todo="build the optimizer after the model has its final parameters",
            )


def _own_name(group: dict[str, Any], at: int) -> str:
    named = group.get("param_names")
    return str(named[at]) if named is not None and at < len(named) else f"parameter {at}"


def group_names(names: ParameterNames, optimizer: Optimizer) -> list[list[str]]:
    """The FQNs of every param group's parameters, in the optimizer's order.

    Raises:
        CheckpointMismatch: Two parameters would share one name.
    """
    groups = [[names.first(param) for param in group["params"]] for group in optimizer.param_groups]
    flat = [name for group in groups for name in group]
    if len(set(flat)) != len(flat):
        double = sorted({name for name in flat if flat.count(name) > 1})
        raise CheckpointMismatch("an optimizer holds a parameter twice", where=", ".join(double[:_SHOWN]))
    return groups
