"""Loading a model by its own `load_state_dict`, and what that did with what it was given.

Only running a model's load hooks tells what they do, and they may reach the live modules. So they run on those, and
what they did is put back where it is refused. Owns finding out what they did. Must not know the checkpoint, policies
or ranks.
"""

from __future__ import annotations

import inspect
import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from orlop import compat
from orlop.dcp.layout import local_box
from orlop.state.model import ModelView
from orlop.state.names import clean_key
from orlop.state.undo import Undo, has_memory

__all__ = ["Outcome", "load_by_itself"]

_SIZE = re.compile(r"size mismatch for (\S+): (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a model's `load_state_dict` did.

    Attributes:
        missing: The FQNs that it lacked, after its hooks; None where it does not tell.
        unexpected: The FQNs that it did not want, after its hooks.
        copied: The dtypes of what was copied into each live tensor, by the tensor's first FQN.
        shapes: The FQNs for which there was a tensor of another shape, each with torch's words.
        refusals: What else it could not do, in words.
    """

    missing: frozenset[str] | None
    unexpected: frozenset[str]
    copied: Mapping[str, frozenset[torch.dtype]]
    shapes: Mapping[str, str]
    refusals: tuple[str, ...]


def load_by_itself(model: nn.Module, view: ModelView, values: Mapping[str, Any], undo: Undo) -> Outcome:
    """Load by the model's own `load_state_dict`; its parameters stay the same objects, in the same memory.

    Args:
        model: The live model.
        view: How it looks now.
        values: Values by FQN.
        undo: Of the same model; taken before.
    """
    raw = view.raw_names(values)
    state: OrderedDict[str, Any] = OrderedDict((raw[fqn], value) for fqn, value in values.items())
    # A checkpoint has no record of the modules' versions. Without any, hooks would take it for one of the oldest.
    state._metadata = view.versions  # type: ignore[attr-defined]
    copies = _Copies(view)
    with torch.no_grad(), copies:
        told, errors = _load(model, state)
    fqns = {raw: fqn for fqn, raw in view.raw_keys.items()}

    def named(key: str) -> str:
        return fqns.get(key) or clean_key(model, key)

    sizes = [match.groups() for line in errors if (match := _SIZE.match(line))]
    return Outcome(
        missing=None if told is None else frozenset(map(named, told.missing_keys)),
        unexpected=frozenset() if told is None else frozenset(map(named, told.unexpected_keys)),
        copied={fqn: frozenset(dtypes) for fqn, dtypes in copies.dtypes.items()},
        shapes={named(key): detail for key, detail in sizes},
        refusals=(*(line for line in errors if not _SIZE.match(line)), *undo.keep_in_place()),
    )


def _load(model: nn.Module, state: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """What the model says is missing and unexpected (None where it does not tell), and what it raised, in lines."""
    told, errors = [], []
    # The last of the root's hooks: it sees what the others leave in the lists, also where an error follows.
    handle = model.register_load_state_dict_post_hook(lambda _, keys: told.append(keys))
    try:
        result = model.load_state_dict(state, **_tolerant(model))
        told += [result] if hasattr(result, "missing_keys") and hasattr(result, "unexpected_keys") else []
    except Exception as error:
        errors = _lines(error)
    finally:
        handle.remove()
    return (told[-1] if told else None), errors


def _tolerant(model: nn.Module) -> dict[str, bool]:
    """What lacks or is too much is judged afterwards; a `load_state_dict` of the model's own may not know `strict`."""
    params = inspect.signature(model.load_state_dict).parameters.values()
    takes = any(param.name == "strict" or param.kind is param.VAR_KEYWORD for param in params)
    return {"strict": False} if takes else {}


def _lines(error: Exception) -> list[str]:
    """Torch gives all that it found in one RuntimeError, below a title."""
    title, *lines = str(error).split("\n\t")
    if isinstance(error, RuntimeError) and lines and title.startswith("Error(s) in loading state_dict"):
        return lines
    return [f"{type(error).__name__}: {error}"]


class _Copies(TorchFunctionMode):
    """Notes what is copied into live tensors: renamed by hooks or not, a value of another dtype is seen here."""

    def __init__(self, view: ModelView) -> None:
        super().__init__()
        self.dtypes: dict[str, set[torch.dtype]] = {}
        spans = sorted(
            (*_span(compat.local_tensor(tensor)), fqns[0])
            for tensor, fqns in view.names.fqns.items()
            if has_memory(tensor)
        )
        self._spans = spans
        self._starts = [start for start, *_ in spans]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        at = _SOURCES.get(func, len(args))
        if at < len(args) and isinstance(source := args[at], Tensor):
            target = args[0]
            if (fqn := self._name(target)) is not None:
                self.dtypes.setdefault(fqn, set()).add(source.dtype)
            is_whole = isinstance(target, DTensor) and not isinstance(source, DTensor)
            if func is Tensor.copy_ and is_whole and source.shape == target.shape:
                return _copy_part(target, source)
        return func(*args, **(kwargs or {}))

    def _name(self, target: Tensor) -> str | None:
        address = compat.local_tensor(target).data_ptr() if has_memory(target) else 0
        at = bisect_right(self._starts, address) - 1
        return self._spans[at][2] if at >= 0 and address < self._spans[at][1] else None


# What writes into its first argument, and which argument it takes the values from.
_SOURCES: dict[Any, int] = {Tensor.copy_: 1, Tensor.__setitem__: 2}


def _span(local: Tensor) -> tuple[int, int]:
    return local.data_ptr(), local.data_ptr() + local.numel() * local.element_size()


def _copy_part(target: DTensor, whole: Tensor) -> DTensor:
    """A leaf that hooks renamed was read whole, as nobody knew whose it was; torch copies no plain one to a DTensor."""
    box = local_box("", target)
    part = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes))
    compat.local_tensor(target).copy_(whole[part])
    return target
