"""What callers hand to the public functions, checked at the door.

Owns the words: which argument, what it must be, what it is. Python's own TypeError and ValueError are raised, before
anything has happened. Must not know what an argument is used for.
"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Iterable

__all__ = [
    "frozen_names",
    "refuse",
    "require_callable",
    "require_count",
    "require_engine",
    "require_flags",
    "require_kind",
    "require_path",
    "require_positive",
]

_SHOWN = 60


def refuse(name: str, meant: str, value: object, write: str = "") -> TypeError:
    """The error for an argument of another type.

    Args:
        name: The argument.
        meant: What it must be.
        value: What it is.
        write: What to write instead, where that can be told.
    """
    return TypeError(f"{name} must be {meant}; it is {_shown(value)}" + (f": write {write}" if write else ""))


def require_kind(
    name: str, value: object, kind: type | tuple[type, ...], meant: str, write: str = ""
) -> None:
    """Raise TypeError unless `value` is of that kind."""
    if not isinstance(value, kind):
        raise refuse(name, meant, value, write)


def require_flags(**flags: object) -> None:
    """Raise TypeError for what is not True or False: `"no"` would count as true."""
    for name, value in flags.items():
        require_kind(name, value, bool, "True or False")


def require_count(name: str, value: object, least: int = 0, *, optional: bool = False) -> None:
    """Raise unless `value` is an int (no bool, no float, no tensor) of at least `least`, or None where that counts."""
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        write = (
            f"int({name})" if isinstance(value, (numbers.Number, str)) or hasattr(value, "__index__") else ""
        )
        raise refuse(name, "an int", value, write)
    if value < least:
        raise ValueError(f"{name} must be at least {least}{', or None' if optional else ''}; it is {value}")


def require_positive(name: str, value: object) -> None:
    """Raise unless `value` is a finite number above zero, or None."""
    if value is None:
        return
    meant = "a finite number above 0, or None"
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise refuse(name, meant, value, f"float({name})" if hasattr(value, "__float__") else "")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be {meant}; it is {value}")


def require_path(name: str, value: object) -> None:
    """Raise TypeError unless `value` is a path."""
    require_kind(name, value, (str, os.PathLike), "a path: a string or a pathlib.Path")


def require_callable(name: str, value: object, meant: str) -> None:
    """Raise TypeError unless `value` can be called."""
    if not callable(value):
        raise refuse(name, meant, value)


def require_engine(value: object) -> None:
    """Raise TypeError for anything but an engine: a model alone has no ranks to talk to."""
    if not hasattr(value, "ranks"):
        raise refuse("engine", "a TrainEngine", value, "orlop.TrainEngine(model, optimizer)")


def frozen_names(name: str, value: object) -> tuple[str, ...]:
    """The strings in a collection.

    Raises:
        TypeError: It holds something else, is none, or is a string, which would be taken letter by letter.
    """
    meant = "a collection of strings"
    if isinstance(value, str):
        raise refuse(name, meant, value, f"{name}=({value!r},)")
    if not isinstance(value, Iterable):
        raise refuse(name, meant, value)
    names: tuple[str, ...] = tuple(value)
    for each in names:
        require_kind(f"every one of {name}", each, str, "a string")
    return names


def _shown(value: object) -> str:
    if value is None or isinstance(value, (str, bytes, numbers.Number)):
        text = repr(value)
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    return f"of type {type(value).__name__}"
