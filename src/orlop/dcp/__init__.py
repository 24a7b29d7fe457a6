"""Standard `torch.distributed.checkpoint` files, read and written by orlop: `Reader` and `Writer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orlop.dcp.reader import Reader
    from orlop.dcp.writer import Writer

__all__ = ["Reader", "Writer"]

_HOMES = {"Reader": "orlop.dcp.reader", "Writer": "orlop.dcp.writer"}


def __getattr__(name: str) -> Any:
    # Lazy: the pure modules of this package are used where torch is not imported.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
