"""Whether a part could take a saved state, told without giving it to it.

Owns what is known of torch's own kinds; other parts say so themselves, or are believed. Must not know checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler

from orlop import compat
from orlop.wording import counted

__all__ = ["find_misfit"]

_SHOWN = 3


def find_misfit(part: Any, state: Any) -> str:
    """Why a part would refuse a state; empty where it would take it, or where nobody can tell. Changes nothing."""
    check = getattr(part, "check_state_dict", None)
    if check is not None:
        return str(check(state))
    if isinstance(part, GradScaler) and part.is_enabled() and not state:
        return "saved by a GradScaler that was disabled, and it is enabled here"
    if isinstance(part, nn.Module) and not any(map(compat.own_loading, part.modules())):
        return _misfit_of_module(part, state)
    return ""


def _misfit_of_module(module: nn.Module, state: Any) -> str:
    if not isinstance(state, Mapping):
        return f"a module's state is a dict, and {type(state).__name__} was saved"
    live = module.state_dict()
    for what, names in (
        ("missing", [name for name in live if name not in state]),
        ("more than here", [name for name in state if name not in live]),
    ):
        if names:
            more = ", …" if len(names) > _SHOWN else ""
            return f"{counted(len(names), 'entry', 'entries')} {what}: {', '.join(map(str, names[:_SHOWN]))}{more}"
    for name, value in live.items():
        saved = state[name]
        if isinstance(value, Tensor) and isinstance(saved, Tensor) and value.shape != saved.shape:
            return f"{name}: expected {tuple(value.shape)}, found {tuple(saved.shape)}"
    return ""
