"""The pickle machine: a stack, a memo, and what they may hold. Nothing is imported, built or called.

Owns the interpretation of one pickle, given the actions of its opcodes (`opcodes`). Must not know what a global means.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Container, Mapping
from typing import Any, NoReturn

from orlop.errors import CheckpointUnsafe

__all__ = ["MARK", "Damage", "Data", "Global", "Machine"]

_KEY_DEPTH = 4
_SCALARS = frozenset({str, int, float, bool, bytes, type(None)})
_UNSIGNED = {1: struct.Struct("<B"), 2: struct.Struct("<H"), 4: struct.Struct("<I"), 8: struct.Struct("<Q")}


class Global:
    """The name of a class or function, `module.qualname`; not the thing itself."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Data:
    """What a pickle says of one object.

    Attributes:
        name: Of its class or function.
        args: What it was to be called with.
        state: What `BUILD` gave it; None without.
        items: What was set (pairs) or appended.
    """

    __slots__ = ("args", "items", "name", "state")

    def __init__(self, name: str, args: Any) -> None:
        self.name = name
        self.args = args
        self.state: Any = None
        self.items: list[Any] = []


class Damage(Exception):
    """The bytes are no pickle of the kind that is read here."""


MARK = object()


class Machine:
    """The pickle machine: a stack and a memo."""

    def __init__(
        self, data: bytes, allowed: Container[str] | None, where: str, actions: Mapping[int, Action]
    ) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.globals: dict[str, Global] = {}
        self.allowed = allowed
        self.where = where
        self.actions = actions

    def run(self) -> Any:
        """Interpret up to STOP."""
        data, stack, memo, actions = self.data, self.stack, self.memo, self.actions
        size = len(data)
        while self.at < size:
            op = data[self.at]
            self.at += 1
            # The commonest opcodes of a `.metadata`, without a call.
            if op == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif op == 0x68:  # BINGET
                stack.append(memo[data[self.at]])
                self.at += 1
            elif op == 0x6A:  # LONG_BINGET
                stack.append(memo[int.from_bytes(data[self.at : self.at + 4], "little")])
                self.at += 4
            elif op == 0x4B:  # BININT1
                stack.append(data[self.at])
                self.at += 1
            elif op == 0x28:  # MARK
                stack.append(MARK)
            elif op == 0x29:  # EMPTY_TUPLE
                stack.append(())
            elif op == 0x71:  # BINPUT
                memo[data[self.at]] = stack[-1]
                self.at += 1
            elif op == 0x2E:  # STOP
                if len(stack) != 1:
                    raise Damage(f"{len(stack)} objects are left at its end")
                return stack[0]
            else:
                action = actions.get(op)
                if action is None:
                    raise Damage(f"opcode 0x{op:02x} at byte {self.at - 1}")
                action(self)
        raise Damage("it ends early")

    # -- operands --------------------------------------------------------------------------------------------------

    def take(self, nbytes: int) -> bytes:
        """The next bytes."""
        part = self.data[self.at : self.at + nbytes]
        if len(part) != nbytes:
            raise Damage("it ends early")
        self.at += nbytes
        return part

    def number(self, width: int) -> int:
        """The next unsigned number."""
        value: int = _UNSIGNED[width].unpack(self.take(width))[0]
        return value

    def line(self) -> str:
        """The text up to the next line feed."""
        end = self.data.find(b"\n", self.at, self.at + 1024)
        if end < 0:
            raise Damage("a line does not end")
        text = self.data[self.at : end].decode()
        self.at = end + 1
        return text

    def pop(self) -> Any:
        """The top of the stack, which is no mark."""
        value = self.stack.pop()
        if value is MARK:
            raise Damage("a mark where an object is due")
        return value

    def drop(self) -> None:
        """POP: forget the top of the stack."""
        self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        """What was pushed since the last mark."""
        stack = self.stack
        at = len(stack) - 1
        while stack[at] is not MARK:
            at -= 1
            if at < 0:
                raise Damage("a mark is missing")
        items = stack[at + 1 :]
        del stack[at:]
        return items

    # -- building --------------------------------------------------------------------------------------------------

    def push_global(self, module: str, name: str) -> None:
        """Push the name of a global, if it is allowed."""
        full = f"{module}.{name}"
        known = self.globals.get(full)
        if known is None:
            if self.allowed is not None and full not in self.allowed:
                self.refuse(full)
            known = self.globals[full] = Global(full)
        self.stack.append(known)

    def refuse(self, name: str) -> NoReturn:
        """Raise for a global outside the allow-list."""
        raise CheckpointUnsafe(
            f"it names {name}, which is not in the allow-list of data types; nothing of it was executed",
            where=self.where,
            found=name,
            todo="don't load it, unless you know where it is from; if a newer torch wrote it, update orlop",
        )

    def call(self) -> None:
        """REDUCE and NEWOBJ: an object of a global, by its arguments."""
        args, what = self.pop(), self.pop()
        if type(args) is not tuple:
            raise Damage("something is called without arguments")
        if type(what) is Global:
            self.stack.append(Data(what.name, args))
        elif type(what) is Data:  # what a call would have given is called in turn
            self.stack.append(Data(f"{what.name}()", args))
        else:
            raise Damage("something other than a global is called")

    def build(self) -> None:
        """BUILD: an object's state."""
        state = self.pop()
        target = self.stack[-1]
        if type(target) is not Data or target.state is not None:
            raise Damage("a state for something that takes none")
        target.state = state

    def set_items(self, flat: list[Any]) -> None:
        """SETITEM(S): pairs for a dict, or for an object."""
        target = self.stack[-1]
        if len(flat) % 2:
            raise Damage("a key without a value")
        pairs = list(zip(flat[::2], flat[1::2]))
        for key, _ in pairs:
            if type(key) is not str:
                _require_key(key)
        if type(target) is dict:
            target.update(pairs)
        elif type(target) is Data:
            target.items += pairs
        else:
            raise Damage("items for something that takes none")

    def append(self, items: list[Any]) -> None:
        """APPEND(S): for a list, or for an object."""
        target = self.stack[-1]
        if type(target) is list:
            target += items
        elif type(target) is Data:
            target.items += items
        else:
            raise Damage("items for something that takes none")

    def add(self, items: list[Any]) -> None:
        """ADDITEMS: for a set."""
        for item in items:
            _require_key(item)
        target = self.stack[-1]
        if type(target) is not set:
            raise Damage("items for something that takes none")
        target.update(items)


def _require_key(key: Any, depth: int = _KEY_DEPTH) -> None:
    """Hashing a tuple goes as deep as it is nested."""
    if type(key) in _SCALARS or type(key) is Data:
        return
    if type(key) is not tuple or not depth:
        raise Damage(f"a key of type {type(key).__name__}")
    for item in key:
        _require_key(item, depth - 1)


Action = Callable[[Machine], None]
