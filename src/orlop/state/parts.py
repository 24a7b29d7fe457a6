"""The parts of a run, collected on one rank as live views.

Owns what a save holds: model, optimizers' state and groups, and the plain parts. Must not know other ranks, files or
storage.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from orlop.dcp.layout import describe_layout
from orlop.errors import OptimizerRefused
from orlop.ranks import Ranks
from orlop.state.model import is_extra_state, view_model
from orlop.state.names import ParameterNames, group_names, require_all_named
from orlop.state.plain import digest, plain, require_storable
from orlop.state.stock import state_of
from orlop.state.uneven import Scalars
from orlop.store.manifest import StateKeys

__all__ = ["Live", "LocalParts", "collect", "is_per_rank", "is_scalar", "plain_parts", "read_scalars"]


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
        per_rank: The parts that say of themselves that each rank has its own.
        stepped: For each optimizer the FQNs with state, each with the state's scalars (`step`).
        state_keys: For each optimizer the keys of that state.
        absent: For each optimizer the FQNs without any.
        aliases: Tied names of the model, each with the name under which the tensor is saved.
        left_out: The FQNs of the model that are not saved, on purpose.
        params: The live parameters and buffers by FQN.
        replicas: Digests of what DCP takes for the same on all ranks and an optimizer may keep otherwise, by key: plain
            tensors for DTensor parameters, and plain data.
        extra: Digests of modules' extra state, by FQN; likewise.
    """

    tensors: dict[tuple[Any, ...], Any]
    groups: dict[str, list[dict[str, Any]]]
    data: dict[str, Any]
    per_rank: frozenset[str]
    stepped: dict[str, dict[str, Scalars]]
    state_keys: dict[str, StateKeys]
    absent: dict[str, list[str]]
    aliases: dict[str, str]
    left_out: list[str]
    params: Mapping[str, Tensor]
    replicas: dict[str, str] = field(default_factory=dict)
    extra: dict[str, str] = field(default_factory=dict)


def plain_parts(live: Live) -> dict[str, Any]:
    """The parts that are one leaf each, by name: the scheduler, and what the engine was given; RNG last."""
    parts = {} if live.scheduler is None else {"scheduler": live.scheduler}
    parts.update(live.parts)
    return {
        **{k: v for k, v in parts.items() if k != "rng"},
        **{k: v for k, v in parts.items() if k == "rng"},
    }


def is_per_rank(part: Any) -> bool:
    """Whether a part says (`per_rank = True`) that each rank has its own, even where all hold the same right now."""
    return bool(getattr(part, "per_rank", False))


def collect(live: Live, *, save_optimizer: bool, include_frozen: bool) -> LocalParts:
    """Collect this rank's parts as live views. Changes nothing and talks to nobody.

    Raises:
        ParameterReplaced: An optimizer holds parameters that are not in the model.
        CheckpointUnsafe: A part's state is not plain data.
        OptimizerRefused: An optimizer keeps state where no load would find it.
    """
    view = view_model(live.model)
    aliases = view.aliases()
    left_out = [] if include_frozen else [fqn for fqn in view.entries if view.is_frozen(fqn)]
    unsaved = frozenset(left_out)
    tensors: dict[tuple[Any, ...], Any] = {
        ("model", fqn): require_storable(value, f"model.{fqn}")
        if isinstance(value, Tensor)
        else plain(value, f"model.{fqn}")
        for fqn, value in view.entries.items()
        if fqn not in aliases and fqn not in unsaved
    }
    local = LocalParts(
        tensors=tensors,
        groups={},
        data={name: plain(part.state_dict(), name) for name, part in plain_parts(live).items()},
        per_rank=frozenset(name for name, part in plain_parts(live).items() if is_per_rank(part)),
        stepped={},
        state_keys={},
        absent={},
        aliases={alias: fqn for alias, fqn in aliases.items() if fqn not in left_out},
        left_out=left_out,
        params=view.names.tensors,
    )
    if live.ranks.world_size > 1:
        local.extra.update(
            {
                path[1]: digest(plain(value, path[1]))
                for path, value in tensors.items()
                if is_extra_state(path[1])
            }
        )
    if save_optimizer:
        require_all_named(view.names, live.optimizers)
        for label, optimizer in live.optimizers.items():
            _collect_optimizer(local, label, optimizer, view.names, is_alone=live.ranks.world_size == 1)
    return local


def _collect_optimizer(
    local: LocalParts, label: str, optimizer: Optimizer, names: ParameterNames, *, is_alone: bool
) -> None:
    door = state_of(optimizer)
    door.require_ready()
    door.synchronize()
    _require_loadable(label, optimizer)
    local.stepped[label], local.absent[label] = {}, []
    scalars: dict[tuple[str, str], Any] = {}
    keys: dict[str, list[str]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            fqn = names.first(param)
            state = optimizer.state[param] if door.stepped(param) else {}
            if all(value is None for value in state.values()):
                local.absent[label].append(fqn)
                continue
            local.stepped[label][fqn], keys[fqn] = {}, list(state)
            for key, value in state.items():
                path = (label, "state", fqn, _require_key(key, f"{label}.state.{fqn}"))
                _require_placed(".".join(path), value, param)
                local.tensors[path] = value if isinstance(value, Tensor) else plain(value, ".".join(path))
                if is_scalar(value):
                    scalars[fqn, key] = value
                elif not is_alone and _is_replica(value, param):
                    local.replicas[f"{label}.state.{fqn}.{key}"] = digest(plain(value, fqn))
    for (fqn, key), number in zip(scalars, read_scalars(list(scalars.values()))):
        local.stepped[label][fqn][key] = number
    local.state_keys[label] = StateKeys.of(keys)
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


def _is_replica(value: Any, param: Tensor) -> bool:
    """Whether DCP takes the value for the same on all ranks, whatever it is."""
    return not isinstance(value, Tensor) or (isinstance(param, DTensor) and not isinstance(value, DTensor))


def _require_loadable(label: str, optimizer: Optimizer) -> None:
    """Refuse what torch's classes never have, and what a checkpoint has no name for."""
    params = {param for group in optimizer.param_groups for param in group["params"]}
    for key, entry in optimizer.state.items():
        if key not in params and not (isinstance(entry, Mapping) and not entry):
            raise OptimizerRefused(
                "`optimizer.state` holds an entry for no parameter of its groups, and a checkpoint has no name for it",
                where=f"{label}.state",
                expected="parameters of its groups",
                found=f"a tensor of shape {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key),
                todo="keep such state in the param groups, or with the parameters",
            )
    kind: type[Optimizer] = getattr(optimizer, "swapped_class", type(optimizer))
    if kind.state_dict is not Optimizer.state_dict:
        more = sorted(map(repr, optimizer.state_dict().keys() - {"state", "param_groups"}))
        if more:
            raise OptimizerRefused(
                f"{kind.__name__}.state_dict() has keys of its own, which a checkpoint would lose",
                where=label,
                expected="'state' and 'param_groups'",
                found=f"{', '.join(more)} besides",
                todo="keep such state in the param groups, or save it as a part of its own",
            )


def _require_key(key: Any, where: str) -> str:
    if isinstance(key, str) and "." not in key:
        return key
    raise OptimizerRefused(
        "this key of an optimizer's state could not be told from a parameter's name in a checkpoint",
        where=where,
        expected="a string without dots",
        found=repr(key),
        todo="name the state otherwise",
    )


def _require_placed(leaf: str, value: Any, param: Tensor) -> None:
    """Refuse a sharded value for which a fresh run would have no place: nothing says how its axes are cut."""
    if isinstance(value, DTensor) and value.shape != param.shape:
        raise OptimizerRefused(
            "the optimizer keeps a DTensor of another shape than its parameter, and no load could make a place for it",
            where=leaf,
            expected=f"shape {tuple(param.shape)}, or a plain tensor that is the same on all ranks",
            found=f"shape {tuple(value.shape)}, {describe_layout(value)}",
            todo="keep it as a plain tensor (`full_tensor()`), or give such parameters to another optimizer",
        )


def is_scalar(value: Any) -> bool:
    """Whether a state's value is one number, such as `step`."""
    if isinstance(value, Tensor):
        return value.ndim == 0 and not isinstance(value, DTensor) and not value.is_complex()
    return isinstance(value, (bool, int, float))


def read_scalars(values: list[Any]) -> list[int | float]:
    """The numbers in scalar tensors; those on one device come to the host in one copy."""
    together: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, Tensor):
            together.setdefault((value.device, value.dtype), []).append(index)
    numbers = list(values)
    for indices in together.values():
        stacked = torch.stack([values[index].detach() for index in indices])
        for index, number in zip(indices, stacked.tolist()):
            numbers[index] = number
    return numbers


def _hyperparameter(value: Any, where: str) -> Any:
    return value if isinstance(value, Tensor) else plain(value, where)
