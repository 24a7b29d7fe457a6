"""What a compressed file inside a record unfolds to: never more than it says, and not many times the record's size.

Torch writes none; other writers may. Pure. Must not know what the bytes mean.
"""

from __future__ import annotations

import zlib

from orlop.dcp.archive import Member

__all__ = ["SLACK_BYTES", "inflated", "most_unfolded"]

# A compressed record may unfold to this many times its size, and this much more.
_MOST_TIMES, SLACK_BYTES = 16, 1 << 20


def most_unfolded(record_bytes: int) -> int:
    """How many bytes all files inside a record of that size may have."""
    return _MOST_TIMES * record_bytes + SLACK_BYTES


def inflated(content: bytes, member: Member, record_bytes: int) -> bytes:
    """A compressed file's content, or nothing when it can't be that, or would be too much."""
    if member.nbytes > most_unfolded(record_bytes):
        return b""
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(content, member.nbytes + 1)
    except zlib.error:
        return b""
