"""Python's cyclic garbage collector, held back while many small objects are made.

Building some hundred thousand objects, none of them garbage, is several times faster so, and costs the same for each:
a full collection walks all that torch's import left on the heap and all that was made so far. Owns nothing else.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_collection"]


@contextmanager
def without_collection() -> Iterator[None]:
    """No cyclic collection within the block, which should leave no cycles behind; also a decorator."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
