"""A pickle read as data: its opcodes are interpreted here, and nothing it names is imported, built or called.

Owns the opcodes that DCP and `torch.save` write. Every object becomes a `Data`: the global's name, its arguments, its
state. Time and memory are linear in the bytes given. Must not know torch, nor what any global means.

Python's own unpickler is not used, not even with an allow-list of globals: a few hostile bytes make it reserve
gigabytes (a memo index) or overflow the C stack (a deeply nested tuple as the key of a dict).
"""

from __future__ import annotations

import struct
from collections.abc import Container
from typing import Any

from orlop.dcp.machine import Damage, Data, Global, Machine
from orlop.dcp.opcodes import ACTIONS
from orlop.errors import CheckpointCorrupt

__all__ = ["Data", "Global", "read_pickle"]


def read_pickle(data: bytes, allowed: Container[str] | None, where: str) -> Any:
    """Interpret one pickle.

    Args:
        data: The pickle's bytes; what follows its end is ignored.
        allowed: The globals that it may name; None for any (they are only names).
        where: File or leaf, for messages.

    Returns:
        Plain Python data with `Data` and `Global` where the pickle had objects; a persistent id is a `Data` named
        `persistent`.

    Raises:
        CheckpointUnsafe: It names a global outside `allowed`.
        CheckpointCorrupt: It is damaged or of an unknown form.
    """
    try:
        return Machine(data, allowed, where, ACTIONS).run()
    except (
        Damage,
        IndexError,
        struct.error,
        UnicodeDecodeError,
        TypeError,
        KeyError,
        AttributeError,
    ) as error:
        raise CheckpointCorrupt(
            f"{where} can't be read: it is truncated or damaged",
            where=where,
            found=str(error) or type(error).__name__,
        ) from error
