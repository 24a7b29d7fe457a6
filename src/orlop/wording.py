"""How counts are worded in what people read: 1 part, 2 parts. Imports nothing of orlop."""

from __future__ import annotations

__all__ = ["counted"]


def counted(count: int, one: str, many: str = "") -> str:
    """A number and what it counts: `counted(2, "file")` is "2 files".

    Args:
        count: How many.
        one: What stands behind a 1.
        many: What stands behind any other number; with an s more where it isn't given.
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"
