"""CRC-32 of bytes, per block and combined, and how a row of them is packed into text.

Owns the block size of the index and the algebra that joins checksums of neighbouring pieces, so that every byte is
passed over once. Pure. Must not know files or torch.
"""

from __future__ import annotations

import base64
import struct
import sys
from array import array
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Protocol

    class _Crc32(Protocol):
        def __call__(self, data: bytes | bytearray | memoryview, value: int = 0, /) -> int: ...


__all__ = ["BLOCK_BYTES", "BlockCrcs", "combine", "crc32", "pack", "unpack"]

# One checksum for each so many bytes of a tensor: a ranged read has to fetch whole blocks to check them, so blocks
# are small against the ranges (2 MiB and more) and large against the cost of a call.
BLOCK_BYTES = 64 * 1024

_POLYNOMIAL = 0xEDB88320


def _choose() -> _Crc32:
    try:
        # Several times as fast as zlib's; the same numbers.
        from isal import isal_zlib
    except ImportError:
        import zlib

        return zlib.crc32
    chosen: _Crc32 = isal_zlib.crc32
    return chosen


crc32: _Crc32 = _choose()


class BlockCrcs:
    """The CRC-32 of each block of bytes that come in pieces of any length."""

    def __init__(self) -> None:
        self._closed: list[int] = []
        self._open = 0
        self._open_bytes = 0

    def add(self, data: memoryview) -> None:
        """The next bytes."""
        if self._open_bytes and data:
            part = data[: BLOCK_BYTES - self._open_bytes]
            self._open = crc32(part, self._open)
            self._open_bytes += len(part)
            data = data[len(part) :]
            if self._open_bytes == BLOCK_BYTES:
                self._closed.append(self._open)
                self._open_bytes = 0
        whole = len(data) - len(data) % BLOCK_BYTES
        self._closed += [crc32(data[at : at + BLOCK_BYTES]) for at in range(0, whole, BLOCK_BYTES)]
        if whole < len(data):
            self._open = crc32(data[whole:])
            self._open_bytes = len(data) - whole

    def crcs(self) -> list[int]:
        """Those of all blocks so far, the last one possibly shorter."""
        return [*self._closed, self._open] if self._open_bytes else self._closed

    def total(self) -> int:
        """The CRC-32 of all bytes so far."""
        total = 0
        for crc in self._closed:
            total = combine(total, crc, BLOCK_BYTES)
        return combine(total, self._open, self._open_bytes) if self._open_bytes else total


def combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of two pieces in a row, from theirs.

    Args:
        first: CRC-32 of the first piece; 0 when it is empty.
        second: CRC-32 of the second piece.
        second_bytes: Length of the second piece.
    """
    # A CRC is a polynomial remainder over GF(2): appending n bytes multiplies the first by x^(8n).
    tables = _shift_tables(second_bytes)
    shifted = (
        tables[0][first & 0xFF]
        ^ tables[1][first >> 8 & 0xFF]
        ^ tables[2][first >> 16 & 0xFF]
        ^ tables[3][first >> 24]
    )
    return shifted ^ second


@lru_cache(maxsize=256)
def _shift_tables(nbytes: int) -> tuple[tuple[int, ...], ...]:
    factor = _power_of_x(8 * nbytes)
    bits = [_multiply(1 << bit, factor) for bit in range(32)]
    return tuple(tuple(_xor_bits(byte, bits[8 * place :]) for byte in range(256)) for place in range(4))


def _xor_bits(byte: int, bits: list[int]) -> int:
    value = 0
    for bit in range(8):
        if byte >> bit & 1:
            value ^= bits[bit]
    return value


def _multiply(a: int, b: int) -> int:
    """The product modulo the CRC's polynomial; the highest bit is the coefficient of x^0."""
    product = 0
    while a:
        if a & 0x80000000:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def _power_of_x(exponent: int) -> int:
    power, square = 0x80000000, 0x40000000  # 1 and x
    while exponent:
        if exponent & 1:
            power = _multiply(power, square)
        square = _multiply(square, square)
        exponent >>= 1
    return power


def pack(crcs: list[int]) -> str:
    """Checksums as text: base64 of little-endian 32-bit words."""
    return base64.b64encode(struct.pack(f"<{len(crcs)}I", *crcs)).decode("ascii")


def unpack(text: str) -> array[int]:
    """The reverse of `pack`; four bytes for each, however many there are.

    Raises:
        ValueError: It is no such text.
    """
    crcs = array("I")
    try:
        crcs.frombytes(base64.b64decode(text, validate=True))
    except ValueError as error:  # also binascii.Error
        raise ValueError(f"not a row of checksums: {error}") from error
    if sys.byteorder == "big":
        crcs.byteswap()
    return crcs


assert array("I").itemsize == 4
