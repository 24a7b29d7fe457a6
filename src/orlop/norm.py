"""The total gradient norm over all ranks, and clipping to it.

Owns how local shards, replicas and host gradients add up to one norm that has the same bits on every rank. Must not
know optimizers or steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import get_total_norm

from orlop import compat
from orlop.ranks import Ranks, add_up

__all__ = ["clip", "count_holders", "total_norm"]


def count_holders(names: Iterable[str], ranks: Ranks) -> dict[str, int]:
    """How many ranks have a parameter of each name; collective."""
    mine = list(names)
    if ranks.equal(mine):
        return dict.fromkeys(mine, ranks.world_size)
    counts: dict[str, int] = {}
    for others in ranks.gather(mine):
        for name in others:
            counts[name] = counts.get(name, 0) + 1
    return {name: counts[name] for name in mine}


def total_norm(gradients: Mapping[str, Tensor], holders: Mapping[str, int], ranks: Ranks) -> Tensor:
    """The 2-norm of all gradients, every element counted once; collective.

    Where every rank has all parameters, plain, in float32 and on one device, it has the bits of
    `torch.nn.utils.get_total_norm`. Elsewhere tensors' norms are added up in float64, so that neither a rank's share
    nor a low precision is rounded away; the last bit may then be another one than torch's.

    Args:
        gradients: This rank's gradients by the parameter's name: plain or DTensor, on device or host.
        holders: From `count_holders`.
        ranks: Who adds up.

    Returns:
        A 0-dim float32 tensor on the host, with the same bits on every rank.
    """
    is_whole = _is_whole(gradients, holders, ranks)
    mine = get_total_norm(list(gradients.values())).item() if is_whole else _squares(gradients, holders)
    everyone = ranks.gather_floats(is_whole, mine)
    if all(whole for whole, _ in everyone) and len({repr(value) for _, value in everyone}) == 1:
        return torch.tensor(mine, dtype=torch.float32)
    squares = [value for _, value in everyone]
    if any(whole for whole, _ in everyone):
        # Replicas that differ, or a rank that has no gradients.
        squares = [value for (value,) in ranks.gather_floats(_squares(gradients, holders))]
    return torch.tensor(add_up(squares), dtype=torch.float64).sqrt_().to(torch.float32)


def _is_whole(gradients: Mapping[str, Tensor], holders: Mapping[str, int], ranks: Ranks) -> bool:
    """Whether this rank alone has what a run in one process would have."""
    values = list(gradients.values())
    return (
        bool(values)
        and all(holders[name] == ranks.world_size for name in gradients)
        and all(type(each) is Tensor and each.layout == torch.strided for each in values)
        and {(each.device, each.dtype) for each in values} == {(values[0].device, torch.float32)}
    )


def _squares(gradients: Mapping[str, Tensor], holders: Mapping[str, int]) -> float:
    """This rank's share of the squared norm."""
    norms: dict[torch.device, list[Tensor]] = {}
    weights: dict[torch.device, list[float]] = {}
    for name, gradient in gradients.items():
        whole = _without_partial(gradient)
        local = compat.local_tensor(whole).detach()
        precise = torch.promote_types(torch.float32, local.dtype)
        norms.setdefault(local.device, []).append(
            torch.linalg.vector_norm(local, dtype=precise).to(torch.float64)
        )
        weights.setdefault(local.device, []).append(_shards(whole) / holders[name])
    squares = 0.0
    for device, values in norms.items():
        weight = torch.tensor(weights[device], dtype=torch.float64, device=device)
        squares += torch.stack(values).square_().mul_(weight).sum().item()
    return squares


def _shards(gradient: Tensor) -> int:
    """Over how many ranks one copy of the tensor is spread: each of `holders / shards` ranks has the same shard."""
    if not isinstance(gradient, DTensor):
        return 1
    spread = 1
    for dim, placement in enumerate(gradient.placements):
        if not placement.is_replicate():
            spread *= gradient.device_mesh.size(dim)
    return spread


def _without_partial(gradient: Tensor) -> Tensor:
    # A sum that is still pending over a mesh dimension has no norm yet.
    if not isinstance(gradient, DTensor) or not any(p.is_partial() for p in gradient.placements):
        return gradient
    return gradient.redistribute(
        placements=[Replicate() if p.is_partial() else p for p in gradient.placements]
    )


def clip(gradients: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place so that their total norm is at most `max_norm`, by torch's own formula.

    A norm that is not finite leaves them as they are: such a step is to be skipped.
    """
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if not torch.isfinite(norm) or factor >= 1.0:
        return
    for gradient in gradients:
        local = compat.local_tensor(gradient).detach()
        local.mul_(factor.to(local.device))
