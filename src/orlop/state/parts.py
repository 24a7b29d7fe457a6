"""The parts of a run, collected on one rank as live views.

Owns what a save holds: model, optimizers' state and groups, and the plain parts. Must not know other ranks, files or
storage.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from orlop.ranks import Ranks
from orlop.state.model import view_model
from orlop.state.names import ParameterNames, group_names, require_all_named
from orlop.state.plain import plain
from orlop.state.stock import state_of

__all__ = ["Live", "LocalParts", "collect", "plain_parts"]


class Live(Protocol):
    """The live objects of a run, as an engine holds them."""

    model: nn.Module
    optimizers: Mapping[str, Optimizer]
    scheduler: Any
    parts: MutableMapping[str, Any]
    ranks: Ranks

    def invalidate(self, reason: str) -> None:
        """The live state is half old, half new from here on."""
        ...

    def mark_ready(self) -> None:
        """The live state is whole again."""
        ...

    def require_ready(self) -> None:
        """Raise StateNotReady between the two."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalParts:
    """What this rank would save.

    Attributes:
        tensors: Model and optimizer-state leaves with their nested paths; plain values too.
        groups: For each optimizer the group dicts, with names for parameters.
        data: The other parts' plain data.
        stepped: For each optimizer the FQNs with state.
        absent: For each optimizer the FQNs that never stepped.
        sharded: The FQNs whose state is spread over ranks.
    """

    tensors: dict[tuple[Any, ...], Any]
    groups: dict[str, list[dict[str, Any]]]
    data: dict[str, Any]
    stepped: dict[str, list[str]]
    absent: dict[str, list[str]]
    sharded: frozenset[str]


def plain_parts(live: Live) -> dict[str, Any]:
    """The parts that are one leaf each, by name: the scheduler, and what the engine was given; RNG last."""
    parts = {} if live.scheduler is None else {"scheduler": live.scheduler}
    parts.update(live.parts)
    return {
        **{k: v for k, v in parts.items() if k != "rng"},
        **{k: v for k, v in parts.items() if k == "rng"},
    }


def collect(live: Live, *, save_optimizer: bool, include_frozen: bool) -> LocalParts:
    """Collect this rank's parts as live views. Changes nothing and talks to nobody.

    Raises:
        ParameterReplaced: An optimizer holds parameters that are not in the model.
        CheckpointUnsafe: A part's state is not plain data.
    """
    view = view_model(live.model)
    tensors: dict[tuple[Any, ...], Any] = {}
    for fqn, value in view.entries.items():
        if include_frozen or not view.is_frozen(fqn):
            tensors["model", fqn] = value if isinstance(value, Tensor) else plain(value, f"model.{fqn}")
    local = LocalParts(
        tensors=tensors,
        groups={},
        data={name: plain(part.state_dict(), name) for name, part in plain_parts(live).items()},
        stepped={},
        absent={},
        sharded=frozenset(fqn for fqn, tensor in view.names.tensors.items() if isinstance(tensor, DTensor)),
    )
    if save_optimizer:
        require_all_named(view.names, live.optimizers)
        for label, optimizer in live.optimizers.items():
            _collect_optimizer(local, label, optimizer, view.names)
    return local


def _collect_optimizer(local: LocalParts, label: str, optimizer: Optimizer, names: ParameterNames) -> None:
    door = state_of(optimizer)
    door.require_ready()
    door.synchronize()
    local.stepped[label], local.absent[label] = [], []
    for group in optimizer.param_groups:
        for param in group["params"]:
            fqn = names.first(param)
            if not door.stepped(param):
                local.absent[label].append(fqn)
                continue
            local.stepped[label].append(fqn)
            for key, value in optimizer.state[param].items():
                path = (label, "state", fqn, key)
                if value is not None:
                    local.tensors[path] = value if isinstance(value, Tensor) else plain(value, ".".join(path))
    local.groups[label] = [
        {
            **{
                key: _hyperparameter(value, f"{label}.{key}")
                for key, value in group.items()
                if key != "params"
            },
            "params": fqns,
        }
        for group, fqns in zip(optimizer.param_groups, group_names(names, optimizer))
    ]


def _hyperparameter(value: Any, where: str) -> Any:
    return value if isinstance(value, Tensor) else plain(value, where)
