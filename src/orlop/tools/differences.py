"""How two values differ: tensors region by region in numbers, plain data by the first place.

Pure arithmetic on tensors and data. Must not know checkpoints.
"""

from __future__ import annotations

import reprlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orlop.dcp.boxes import Box
from orlop.wording import counted

__all__ = ["Difference", "ValueComparison", "first_difference", "shown"]

_LONG, _MOST = 80, 200
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How one tensor's values differ.

    Attributes:
        leaf: Its key.
        num_elements: Of the tensor.
        num_different: Elements that differ.
        max_abs: The largest absolute difference; infinity where only one side is a finite number.
        max_rel: The largest difference relative to the larger magnitude.
        max_ulp: The largest distance in representable numbers; None across dtypes or for what has none.
        first_index: The first element that differs, in row-major order.
        first_values: Its values.
    """

    leaf: str
    num_elements: int
    num_different: int
    max_abs: float
    max_rel: float
    max_ulp: int | None
    first_index: tuple[int, ...]
    first_values: tuple[Any, Any]


class ValueComparison:
    """Two tensors of one shape, compared region by region in row-major order.

    Args:
        leaf: Their key.
    """

    def __init__(self, leaf: str) -> None:
        self.leaf = leaf
        self.is_identical = True
        self._num_elements = 0
        # By whether bits or numbers count: how many differ, and the first that does.
        self._counts = {True: 0, False: 0}
        self._first: dict[bool, tuple[tuple[int, ...], tuple[Any, Any]]] = {}
        self._max_abs = self._max_rel = 0.0
        self._max_ulp: int | None = 0

    def add(self, one: Tensor, two: Tensor, box: Box) -> None:
        """The values of one region."""
        self._num_elements += one.numel()
        same_dtype = one.dtype == two.dtype
        if same_dtype and torch.equal(_bits(one), _bits(two)):
            return
        self.is_identical = False
        a, b = _wide(one), _wide(two)
        equal = (a == b) | ((a != a) & (b != b))
        bits_differ = _bits(one) != _bits(two) if same_dtype else ~equal
        bits_differ = bits_differ.reshape(*equal.shape, -1).any(dim=-1)
        for exact, differ in ((True, bits_differ), (False, ~equal)):
            self._counts[exact] += int(differ.sum())
            if exact not in self._first and bool(differ.any()):
                at = int(differ.reshape(-1).nonzero()[0])
                index = _index(at, box)
                self._first[exact] = (index, (one.reshape(-1)[at].item(), two.reshape(-1)[at].item()))
        self._measure(one, two, a, b, ~equal)

    def _measure(self, one: Tensor, two: Tensor, a: Tensor, b: Tensor, differ: Tensor) -> None:
        if not bool(differ.any()):
            return
        gap = (a[differ] - b[differ]).abs().to(torch.float64)
        gap = torch.where(gap.isnan(), torch.inf, gap)
        size = torch.maximum(a[differ].abs(), b[differ].abs()).to(torch.float64)
        self._max_abs = max(self._max_abs, float(gap.max()))
        relative = torch.where(gap.isinf(), torch.inf, gap / size)
        self._max_rel = max(self._max_rel, float(relative.max()))
        if one.dtype != two.dtype or not one.dtype.is_floating_point:
            self._max_ulp = None
        if self._max_ulp is not None:
            distance = _ordered(one)[differ] - _ordered(two)[differ]
            # In 64 bits the distance of opposite signs may wrap; what counts there is that it is enormous.
            self._max_ulp = max(self._max_ulp, int(distance.abs().max()))

    def result(self, *, exact: bool) -> Difference | None:
        """How they differ; None when they don't.

        Args:
            exact: Bit for bit; otherwise as numbers, where -0.0 is 0.0 and any NaN any other.
        """
        if exact not in self._first:
            return None
        index, values = self._first[exact]
        return Difference(
            leaf=self.leaf,
            num_elements=self._num_elements,
            num_different=self._counts[exact],
            max_abs=self._max_abs,
            max_rel=self._max_rel,
            max_ulp=self._max_ulp,
            first_index=index,
            first_values=values,
        )


def _bits(tensor: Tensor) -> Tensor:
    plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return plain.contiguous().view(_INTEGERS[plain.element_size()])


def _wide(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    if tensor.dtype.is_floating_point:
        return tensor.to(torch.float64)
    # Distances of large integers are not exact in floating point, but equality has to be.
    return tensor.to(torch.int64)


def _ordered(tensor: Tensor) -> Tensor:
    """Integers in the order of the floats, neighbours one apart; both zeros are 0."""
    bits = _bits(tensor).to(torch.int64)
    width = 8 * tensor.element_size()
    magnitude = bits & ((1 << (width - 1)) - 1)
    return torch.where(bits < 0, -magnitude, magnitude)


def _index(at: int, box: Box) -> tuple[int, ...]:
    index: list[int] = []
    for size, offset in zip(reversed(box.sizes), reversed(box.offsets)):
        index.append(offset + at % size)
        at //= size
    return tuple(reversed(index))


def first_difference(one: Any, two: Any, at: str = "") -> tuple[str, str, str] | None:
    """The first place where plain data differs, and both values there as text; floats by their bits.

    Args:
        one: Nested dicts, lists, tuples, sets, numbers, text, bytes and tensors.
        two: Likewise.
        at: The place so far.
    """
    if type(one) is not type(two):
        return at, f"{type(one).__name__} {shown(one)}", f"{type(two).__name__} {shown(two)}"
    if isinstance(one, Tensor):
        return _first_of_tensors(one, two, at)
    if isinstance(one, Mapping):
        if _typed(one) != _typed(two):
            return at, f"keys {sorted(map(repr, one))}"[:_MOST], f"keys {sorted(map(repr, two))}"[:_MOST]
        pairs = [(key, one[key], two[key]) for key in one]
    elif isinstance(one, (list, tuple)):
        if len(one) != len(two):
            return at, counted(len(one), "item"), counted(len(two), "item")
        pairs = [(number, *pair) for number, pair in enumerate(zip(one, two))]
    elif _same(one, two):
        return None
    elif isinstance(one, (bytes, bytearray)):
        index = _first_place(one, two)
        return at, _byte_of(one, index), _byte_of(two, index)
    elif isinstance(one, str) and max(len(one), len(two)) > _LONG:
        index = _first_place(one, two)
        part = slice(index, index + _LONG // 4)
        return f"{at}[{index}:]", repr(one[part]), repr(two[part])
    else:
        return at, shown(one), shown(two)
    for key, mine, other in pairs:
        found = first_difference(mine, other, f"{at}[{key!r}]")
        if found is not None:
            return found
    return None


def _first_place(one: Sequence[Any], two: Sequence[Any]) -> int:
    shorter = min(len(one), len(two))
    return next((place for place in range(shorter) if one[place] != two[place]), shorter)


def _byte_of(content: bytes | bytearray, index: int) -> str:
    """How long it is and what stands there: no one reads more of it."""
    there = f"byte {index:,} is 0x{content[index]:02x}" if index < len(content) else "ending there"
    return f"{counted(len(content), 'byte')}, {there}"


class _Shown(reprlib.Repr):
    """What a person can read: of bytes and tensors the size alone, of containers all, in as many letters as fit."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 8
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = _MOST
        self.maxstring = self.maxlong = self.maxother = _MOST

    def repr_bytes(self, value: bytes, level: int) -> str:
        return f"<{counted(len(value), 'byte')}>"

    repr_bytearray = repr_bytes

    def repr_Tensor(self, value: Tensor, level: int) -> str:
        return f"<{value.dtype} {tuple(value.shape)}>" if value.numel() != 1 else repr(value.item())


def shown(value: Any) -> str:
    """Plain data as text for people, in some 200 letters."""
    return _Shown().repr(value)[:_MOST]


def _typed(mapping: Mapping[Any, Any]) -> set[tuple[type, Any]]:
    """Its keys with their types: 1, 1.0 and True are one key to Python, and are not the same."""
    return {(type(key), key) for key in mapping}


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", two)
    if isinstance(one, complex):
        return _same(one.real, two.real) and _same(one.imag, two.imag)
    return bool(one == two)


def _first_of_tensors(one: Tensor, two: Tensor, at: str) -> tuple[str, str, str] | None:
    if (one.shape, one.dtype) != (two.shape, two.dtype):
        return at, f"{one.dtype} {tuple(one.shape)}", f"{two.dtype} {tuple(two.shape)}"
    if not one.numel():
        return None
    differ = (_bits(one) != _bits(two)).reshape(*one.shape, -1).any(dim=-1)
    places = differ.nonzero()
    if not len(places):
        return None
    index = tuple(places[0].tolist())
    return f"{at}{list(index)}" if index else at, repr(one[index].item()), repr(two[index].item())
