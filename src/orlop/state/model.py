"""The model's part: its tensors as live views by FQN, and putting loaded values in place.

Owns when a model can be filled in place and when its values must go through its own `load_state_dict`. Must not
know files or ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from orlop import compat
from orlop.errors import CheckpointMismatch
from orlop.state.extra import is_extra_state
from orlop.state.names import ParameterNames, clean_key, walk
from orlop.state.plain import require_dense

__all__ = ["ModelView", "install", "is_extra_state", "view_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """What a model's `state_dict` holds now, by FQN.

    Attributes:
        names: The FQNs of its parameters and buffers.
        entries: The live tensors and, for modules with extra state, their values.
        raw_keys: The `state_dict` key of each entry.
        through: Why loading must go through `load_state_dict`; None when the entries can be filled in place.
        versions: The modules' versions, as `load_state_dict` hooks are told them.
    """

    names: ParameterNames
    entries: Mapping[str, Any]
    raw_keys: Mapping[str, str]
    through: str | None
    versions: Any = None

    def is_frozen(self, fqn: str) -> bool:
        """Whether the entry is a parameter that does not train."""
        tensor = self.names.tensors.get(fqn)
        return isinstance(tensor, nn.Parameter) and not tensor.requires_grad

    def raw_names(self, fqns: Iterable[str]) -> dict[str, str]:
        """The `state_dict` keys of these names; those of names that are no entry have their module's wrappers, too."""
        wrapped: dict[str, str] = {}
        for fqn, raw in self.raw_keys.items():
            for module, rest in _cuts(fqn):
                if not raw.endswith(rest):
                    break
                wrapped.setdefault(module, raw.removesuffix(rest))

        def key(fqn: str) -> str:
            near = ((wrapped[module], rest) for module, rest in _cuts(fqn) if module in wrapped)
            return self.raw_keys.get(fqn) or "".join(next(near, ("", fqn)))

        return {fqn: key(fqn) for fqn in fqns}

    def aliases(self) -> dict[str, str]:
        """Tied names, each with the name that its tensor is saved under: the first in registration order."""
        found: dict[str, str] = {}
        for fqn, value in self.entries.items():
            tensor = self.names.tensors.get(fqn)
            first = fqn if tensor is None else self.names.first(tensor)
            # A model may show other values than its parameters; then names that are tied need not be equal.
            other = self.entries.get(first)
            if (
                first != fqn
                and isinstance(value, Tensor)
                and isinstance(other, Tensor)
                and _same_memory(value, other)
            ):
                found[fqn] = first
        return found

    def targets(self) -> dict[str, Tensor]:
        """The live tensors that a load fills, by FQN.

        Modules' extra state is not among them: it may have another shape in every checkpoint.

        Raises:
            CheckpointMismatch: The model is still on the meta device.
        """
        tensors = {
            fqn: value
            for fqn, value in self.entries.items()
            if isinstance(value, Tensor) and not is_extra_state(fqn)
        }
        if metas := [fqn for fqn, tensor in tensors.items() if compat.local_tensor(tensor).is_meta]:
            raise CheckpointMismatch(
                "the model is on the meta device and has no memory to load into; nothing was changed",
                where=", ".join(metas[:5]),
                todo="call model.to_empty(device=...) before loading",
            )
        return tensors


def _cuts(fqn: str) -> Iterator[tuple[str, str]]:
    """Each way to cut a name in a module's and the rest, the nearest module first."""
    segments = fqn.split(".")
    for cut in reversed(range(len(segments))):
        yield ".".join(segments[:cut]), ".".join(segments[cut:])


def view_model(model: nn.Module) -> ModelView:
    """Look at a model; copies nothing. FSDP2 reshards its parameters at this, as for any `state_dict` call.

    Raises:
        CheckpointMismatch: Two keys become the same FQN once the wrappers' segments are gone.
        CheckpointUnsafe: A tensor is of a form that can't be saved and read back: sparse, quantized, expanded.
    """
    state = model.state_dict()
    entries: dict[str, Any] = {}
    raw_keys: dict[str, str] = {}
    for key, value in state.items():
        fqn = clean_key(model, key)
        if fqn in entries:
            raise CheckpointMismatch(
                "two entries of the model have one name", where=fqn, found=f"{raw_keys[fqn]}, {key}"
            )
        if isinstance(value, Tensor) and is_lazy(value):
            raise CheckpointMismatch(
                "a lazy module has no parameters yet; nothing was changed",
                where=f"model.{fqn}",
                expected="a model of which every parameter has its shape",
                found="an uninitialized parameter",
                todo="run the model forward once before it is saved or loaded into",
            )
        if isinstance(value, Tensor):
            require_dense(value, f"model.{fqn}", is_live=not is_extra_state(fqn))
        entries[fqn], raw_keys[fqn] = value, key
    names = ParameterNames.of(model)
    return ModelView(
        names=names,
        entries=entries,
        raw_keys=raw_keys,
        through=_why_through(model, names, entries),
        versions=getattr(state, "_metadata", None),
    )


def _why_through(model: nn.Module, names: ParameterNames, entries: Mapping[str, Any]) -> str | None:
    for prefix, module in walk(model):
        if (reason := compat.own_loading(module)) is not None:
            return f"{prefix.rstrip('.') or 'the model'} has {reason}"
    for fqn, value in entries.items():
        if isinstance(value, Tensor) and not is_extra_state(fqn):
            live = names.tensors.get(fqn)
            if live is None or not _same_memory(value, live):
                return f"{fqn} in state_dict() is not the live tensor"
    return None


def _same_memory(one: Tensor, other: Tensor) -> bool:
    a, b = compat.local_tensor(one), compat.local_tensor(other)
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.dtype == b.dtype


def install(model: nn.Module, view: ModelView, extra: Mapping[str, Any]) -> None:
    """Finish a load in place: hand over extra state, by FQN, and fire the hooks; tensors stay where they are."""
    for prefix, module in walk(model):
        fqn = f"{prefix}_extra_state"
        if fqn in extra and fqn in view.entries:
            module.set_extra_state(extra[fqn])
    compat.fire_load_post_hooks(model)
