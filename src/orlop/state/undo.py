"""A live model as it was, to put it back after a load that is refused, or to keep its tensors in their places.

Owns what of a model a load may have changed. Must not know what was loaded, files or ranks.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from orlop import compat
from orlop.state.model import ModelView
from orlop.state.names import walk

__all__ = ["Undo", "has_memory"]


def has_memory(tensor: Tensor) -> bool:
    """Whether this rank has elements of it, in memory of torch's own kind."""
    local = compat.local_tensor(tensor)
    is_dense = local.layout == torch.strided and not local.is_nested and not local.is_meta
    return is_dense and compat.is_plain_tensor(local) and local.numel() > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    """One live tensor: the memory that it had, and on the host what stood there."""

    tensor: Tensor
    local: Tensor
    content: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> _Memory:
        local = compat.local_tensor(tensor).detach()
        return cls(tensor=tensor, local=local, content=local.to("cpu", copy=True))

    @property
    def is_moved(self) -> bool:
        """Whether the tensor has other memory now. FSDP2 moves its own, and knows where."""
        return not isinstance(self.tensor, DTensor) and self.tensor.data_ptr() != self.local.data_ptr()

    def restore(self) -> None:
        if self.is_moved:
            self.tensor.data = self.local
        compat.local_tensor(self.tensor).copy_(self.content)

    def takes(self, other: Tensor) -> bool:
        """Whether the value of `other` fits the memory."""
        local = compat.local_tensor(other)
        return local.shape == self.local.shape and local.dtype == self.local.dtype


_CONTAINERS = (dict, OrderedDict, list, set)


@dataclass(slots=True, kw_only=True)
class Undo:
    """A model as it was: its tensors on the host, its modules' attributes, their extra state.

    What hooks change in place elsewhere than in tensors, dicts, lists and sets of the modules is not in it.
    """

    attributes: dict[nn.Module, dict[str, Any]] = field(default_factory=dict)
    containers: list[tuple[Any, Any]] = field(default_factory=list)
    places: list[tuple[nn.Module, str, str, Tensor]] = field(default_factory=list)
    memories: dict[Tensor, _Memory] = field(default_factory=dict)
    extra: list[tuple[nn.Module, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module, view: ModelView) -> Undo:
        """Look at the model, and copy its tensors to the host."""
        undo = cls(memories={tensor: _Memory.of(tensor) for tensor in view.names.fqns if has_memory(tensor)})
        for prefix, module in walk(model):
            if module not in undo.attributes:
                undo._add(module)
                if (extra := f"{prefix}_extra_state") in view.entries:
                    undo.extra.append((module, copy.deepcopy(view.entries[extra])))
        return undo

    def _add(self, module: nn.Module) -> None:
        own = self.attributes[module] = dict(vars(module))
        self.containers += [(each, each.copy()) for each in own.values() if type(each) in _CONTAINERS]
        for kind in ("_parameters", "_buffers"):
            tensors = own.get(kind, {}).items()
            self.places += [(module, kind, name, tensor) for name, tensor in tensors if tensor is not None]
        for value in own.values():
            if isinstance(value, Tensor) and value not in self.memories and has_memory(value):
                self.memories[value] = _Memory.of(value)

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back."""
        try:
            for module, extra in self.extra:
                module.set_extra_state(extra)
        finally:
            for module, own in self.attributes.items():
                vars(module).clear()
                vars(module).update(own)
            for container, content in self.containers:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(content)
            for memory in self.memories.values():
                memory.restore()

    @torch.no_grad()
    def keep_in_place(self) -> list[str]:
        """Bring values that were loaded by replacing a tensor into the memory of the one that was there.

        Returns:
            In words: the parameters for which that can't be done, so that optimizers would train what is gone.
        """
        lost = []
        for module, kind, name, tensor in self.places:
            registry, memory = getattr(module, kind), self.memories.get(tensor)
            now = registry.get(name)
            if now is tensor and (memory is None or not memory.is_moved):
                continue
            if isinstance(now, Tensor) and memory is not None and memory.takes(now):
                memory.local.copy_(compat.local_tensor(now))
                if memory.is_moved:
                    tensor.data = memory.local
                registry[name] = tensor
            elif kind == "_parameters":
                lost.append(
                    f"it replaced the parameter {name} of {type(module).__qualname__} by another kind"
                )
        return lost
