"""A digest of state values that does not depend on how they are sharded.

Every element is mixed with its index in the global tensor, and the mixed values are added up: any order and any
sharding give the same sum. Owns that arithmetic and its reduction over ranks. Must not know files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from orlop import compat
from orlop.dcp.layout import local_box
from orlop.ranks import Ranks
from orlop.state.agreement import Collected, SaveOptions, agree
from orlop.state.parts import Live, collect
from orlop.state.plain import digest

__all__ = ["Fingerprint", "fingerprint", "fingerprint_leaves", "tensor_sum"]

# Elements at a time: bounds the working memory to some ten MiB per tensor, however large.
_CHUNK = 2**20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd 64-bit constants of splitmix64, as signed numbers; products wrap.
_INDEX, _VALUE, _FIRST, _SECOND = (
    -7046029254386353131,
    -4658895280553007687,
    -7723592293110705685,
    -3335678366873096957,
)

Box = tuple[tuple[int, ...], tuple[int, ...]]
# What one rank knows of a leaf: its dtype and global shape, the box that it holds, the box's sum.
_Piece = tuple[str, Box, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """A digest of each saved leaf and one of them all.

    Attributes:
        leaves: Hex digest by key.
        total: Hex digest of all keys and digests.
        torn: Leaves whose replicas differ: for each the ranks that hold one place of it, those of one content together.
    """

    leaves: Mapping[str, str]
    total: str
    torn: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)


def fingerprint(engine: Live) -> Fingerprint:
    """The fingerprint of all that a save of this engine would hold; collective, changes nothing.

    Equal state gives equal digests on any number of ranks, except for parts that are kept per rank.
    """
    with engine.ranks.together("collect the parts"):
        engine.require_ready()
        local = collect(engine, save_optimizer=True, include_frozen=True)
    collected = agree(local, engine.ranks, SaveOptions(), engine.optimizers)
    return fingerprint_leaves(collected, engine.ranks)


def fingerprint_leaves(collected: Collected, ranks: Ranks) -> Fingerprint:
    """The fingerprint of collected leaves; collective."""
    mine: dict[str, _Piece] = {}
    with ranks.together("fingerprint the leaves"):
        for key, value in collected.leaves.items():
            if isinstance(value, Tensor):
                held = local_box(key, value)
                box = held.offsets, held.sizes
                kind = f"{value.dtype} {tuple(value.shape)}"
                mine[key] = (kind, box, tensor_sum(compat.local_tensor(value), box[0], tuple(value.shape)))
            else:
                mine[key] = ("plain", ((), ()), int(digest(value), 16))
    return _merge(ranks.gather(mine))


def _merge(everyone: list[dict[str, _Piece]]) -> Fingerprint:
    # Replicas hold the same box and count once; replicas that differ show in the digest.
    pieces: dict[str, dict[tuple[str, Box], dict[int, list[int]]]] = {}
    for rank, mine in enumerate(everyone):
        for key, (kind, box, value) in mine.items():
            place = pieces.setdefault(key, {}).setdefault((kind, box), {})
            place.setdefault(value, []).append(rank)
    leaves: dict[str, str] = {}
    differing: dict[str, tuple[tuple[int, ...], ...]] = {}
    for key, boxes in pieces.items():
        kinds = sorted({kind for kind, _ in boxes})
        for values in boxes.values():
            if len(values) > 1:
                differing.setdefault(key, tuple(tuple(ranks) for ranks in values.values()))
        torn = sorted(str(value) for values in boxes.values() if len(values) > 1 for value in values)
        total = sum(min(values) for values in boxes.values())
        leaves[key] = _hex([*kinds, *torn, str(total % 2**64 if kinds != ["plain"] else total)])
    total_digest = _hex(f"{key}={leaves[key]}" for key in sorted(leaves))
    return Fingerprint(leaves=leaves, total=total_digest, torn=differing)


def _hex(texts: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=16).hexdigest()


def tensor_sum(local: Tensor, offsets: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The sum mod 2^64 of this box's mixed elements.

    Args:
        local: The box's values, on any device.
        offsets: Where the box starts in the global tensor.
        shape: The global shape.
    """
    total = 0
    sizes = tuple(local.shape)
    flat = local.detach().reshape(-1) if local.is_contiguous() else None
    rows = max(1, _CHUNK // max(1, local[:1].numel())) if local.ndim else 1
    if flat is not None:
        for start in range(0, flat.numel(), _CHUNK):
            total += _mixed(flat[start : start + _CHUNK], start, sizes, offsets, shape)
    else:
        # A strided tensor is copied some rows at a time.
        step = local[:1].numel()
        for row in range(0, local.shape[0], rows):
            piece = local.detach()[row : row + rows].reshape(-1)
            total += _mixed(piece, row * step, sizes, offsets, shape)
    return total % 2**64


def _mixed(
    piece: Tensor, start: int, sizes: tuple[int, ...], offsets: tuple[int, ...], shape: tuple[int, ...]
) -> int:
    index = _global_index(start, piece.numel(), sizes, offsets, shape, piece.device)
    bits: Tensor = piece.resolve_neg().contiguous()
    if piece.is_complex():
        bits = torch.view_as_real(bits.resolve_conj()).reshape(-1)
        index = torch.stack((2 * index, 2 * index + 1), dim=-1).reshape(-1)
    # A copy even of 64-bit values: the live tensor must not be mixed in place.
    mixed = bits.view(_BITS[bits.element_size()]).to(torch.int64, copy=True).add_(1).mul_(_VALUE)
    mixed.add_(index.mul_(_INDEX))
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        mixed.bitwise_xor_(mixed >> shift).mul_(factor)
    mixed.bitwise_xor_(mixed >> 31)
    return int(mixed.sum().item())


def _global_index(
    start: int,
    count: int,
    sizes: tuple[int, ...],
    offsets: tuple[int, ...],
    shape: tuple[int, ...],
    device: torch.device,
) -> Tensor:
    rest = torch.arange(start, start + count, dtype=torch.int64, device=device)
    index = torch.zeros_like(rest)
    stride = 1
    for size, offset, extent in zip(reversed(sizes), reversed(offsets), reversed(shape)):
        index.add_((rest % size).add_(offset).mul_(stride))
        rest.div_(size, rounding_mode="floor")
        stride *= extent
    return index
