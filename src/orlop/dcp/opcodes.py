"""The opcodes of a pickle, as actions of the machine: those that DCP and `torch.save` write, and no others.

Owns the table. Must not know what a pickle means.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from orlop.dcp.machine import MARK, Damage, Data, Machine

__all__ = ["ACTIONS"]

_SIGNED = struct.Struct("<i")
_FLOAT = struct.Struct(">d")


def _skip(nbytes: int) -> Callable[[Machine], None]:
    def action(machine: Machine) -> None:
        machine.take(nbytes)

    return action


def _push(value: Callable[[Machine], Any]) -> Callable[[Machine], None]:
    def action(machine: Machine) -> None:
        machine.stack.append(value(machine))

    return action


def _tuple_of(count: int) -> Callable[[Machine], None]:
    def action(machine: Machine) -> None:
        items = tuple(machine.stack[-count:])
        if len(items) != count or MARK in items:
            raise Damage("the stack is too short")
        machine.stack[-count:] = (items,)

    return action


def _put(machine: Machine) -> None:
    machine.memo[machine.number(4)] = machine.stack[-1]


def _global(machine: Machine) -> None:
    module, name = machine.line(), machine.line()
    machine.push_global(module, name)


def _stack_global(machine: Machine) -> None:
    name, module = machine.pop(), machine.pop()
    if type(name) is not str or type(module) is not str:
        raise Damage("the name of a global is no text")
    machine.push_global(module, name)


def _set_item(machine: Machine) -> None:
    value, key = machine.pop(), machine.pop()
    machine.set_items([key, value])


def _text(width: int) -> Callable[[Machine], None]:
    return _push(lambda m: m.take(m.number(width)).decode("utf-8", "surrogatepass"))


def _blob(width: int) -> Callable[[Machine], None]:
    return _push(lambda m: m.take(m.number(width)))


ACTIONS: dict[int, Callable[[Machine], None]] = {
    0x80: _skip(1),  # PROTO: opcodes say themselves what they are
    0x95: _skip(8),  # FRAME: only a hint for buffering
    ord("0"): lambda m: m.drop(),
    ord("N"): _push(lambda m: None),
    0x88: _push(lambda m: True),
    0x89: _push(lambda m: False),
    ord("J"): _push(lambda m: _SIGNED.unpack(m.take(4))[0]),
    ord("M"): _push(lambda m: m.number(2)),
    0x8A: _push(lambda m: int.from_bytes(m.take(m.number(1)), "little", signed=True)),
    ord("G"): _push(lambda m: _FLOAT.unpack(m.take(8))[0]),
    0x8C: _text(1),
    ord("X"): _text(4),
    0x8D: _text(8),
    ord("C"): _blob(1),
    ord("B"): _blob(4),
    0x8E: _blob(8),
    0x85: _tuple_of(1),
    0x86: _tuple_of(2),
    0x87: _tuple_of(3),
    ord("t"): _push(lambda m: tuple(m.pop_to_mark())),
    ord("]"): _push(lambda m: []),
    ord("}"): _push(lambda m: {}),
    0x8F: _push(lambda m: set()),
    0x90: lambda m: m.add(m.pop_to_mark()),
    ord("a"): lambda m: m.append([m.pop()]),
    ord("e"): lambda m: m.append(m.pop_to_mark()),
    ord("s"): _set_item,
    ord("u"): lambda m: m.set_items(m.pop_to_mark()),
    ord("r"): _put,
    ord("c"): _global,
    0x93: _stack_global,
    ord("R"): Machine.call,
    0x81: Machine.call,
    ord("b"): Machine.build,
    ord("Q"): _push(lambda m: Data("persistent", (m.pop(),))),
}
