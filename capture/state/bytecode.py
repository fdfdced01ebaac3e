"""Which names the instructions of a piece of code use, in one pass over its bytes; and a memory of facts about code.

A step of a library model reaches thousands of functions. ``dis`` makes an object for each instruction and finds its
line and its jumps, none of which matters here: the pass below takes a twentieth of its time.
"""

from __future__ import annotations

import contextlib
import dis
import re
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

_WIDE = dis.opmap["EXTENDED_ARG"]
_CONSTANT = dis.opmap["LOAD_CONST"]
_SMALL_NUMBER = dis.opmap.get("LOAD_SMALL_INT")  # from Python 3.14 on
_ATTRIBUTE = dis.opmap["LOAD_ATTR"] if sys.version_info >= (3, 12) else None
# How far the argument of an instruction is shifted, where its lowest bits say something else than the name.
_SHIFTS = {"LOAD_GLOBAL": 1} | ({"LOAD_ATTR": 1, "LOAD_SUPER_ATTR": 2} if sys.version_info >= (3, 12) else {})
_SHIFT_OF = {op: _SHIFTS.get(dis.opname[op], 0) for op in dis.hasname if op < 256}  # larger ones are in no bytecode
_NAMED = re.compile(b"[" + b"".join(re.escape(bytes([op])) for op in _SHIFT_OF) + b"]", re.DOTALL)


class NameUse(NamedTuple):
    """One instruction that uses a name.

    Attributes:
        op: its number, see ``dis.opname``.
        name: the name.
        flag: the lowest bit of its argument where that is no part of the name's position: of ``LOAD_GLOBAL``, whether
            what is loaded is called; of ``LOAD_ATTR``, whether it is loaded as a method.
        at: its position, in instructions.
    """

    op: int
    name: str
    flag: bool
    at: int


class ByCode(Generic[T]):
    """What is known of code objects, by their identity, as long as they exist.

    Code objects are compared by content, and so is their hash taken, of all instructions at each look-up.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[types.CodeType], T]] = {}

    def get(self, code: types.CodeType) -> T | None:
        """What is known of ``code``, None for nothing."""
        entry = self._known.get(id(code))
        return entry[1] if entry is not None and entry[0]() is code else None

    def keep(self, code: types.CodeType, fact: T) -> T:
        """Remember ``fact`` of ``code``, and return it."""
        at = id(code)
        self._known[at] = weakref.ref(code, lambda gone: self._forget(at, gone)), fact
        return fact

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()

    def _forget(self, at: int, gone: weakref.ref[types.CodeType]) -> None:
        entry = self._known.get(at)
        if entry is not None and entry[0] is gone:  # and not other code in the same place
            del self._known[at]


@contextlib.contextmanager
def code_replaced(function: types.FunctionType, code: types.CodeType) -> Iterator[None]:
    """Inside, calls of the function run other code."""
    original = function.__code__
    function.__code__ = code
    try:
        yield
    finally:
        if function.__code__ is code:
            function.__code__ = original


def uses_of_names(code: types.CodeType) -> Iterator[NameUse]:
    """The instructions of the code that use names, in order; those of functions that it defines are not among them."""
    names, instructions = code.co_names, code.co_code
    if not names:
        return
    # Inline caches are zeros here, which is the number of no instruction with a name.
    ops, arguments = instructions[::2], instructions[1::2]
    for found in _NAMED.finditer(ops):
        at = found.start()
        op, argument = ops[at], arguments[at]
        if at and ops[at - 1] == _WIDE:
            argument = _wide(ops, arguments, at)
        shift = _SHIFT_OF[op]
        yield NameUse(op, names[argument >> shift], bool(shift and argument & 1), at)


def place_of(step: dis.Instruction) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Where in the source the expression of an instruction begins and ends: lines and columns."""
    at = step.positions
    if at is None or None in (at.lineno, at.col_offset, at.end_lineno, at.end_col_offset):
        return None
    return (at.lineno, at.col_offset), (at.end_lineno, at.end_col_offset)  # type: ignore[bad-return]


def level_of_import(code: types.CodeType, at: int) -> int:
    """The level of the import at a position: how many packages up a relative one starts, 0 for an absolute one.

    Python pushes the level, then the names that it imports from the module.
    """
    instructions = code.co_code
    ops, arguments = instructions[::2], instructions[1::2]
    pushed = _before(ops, _before(ops, at))
    if pushed < 0:
        return 0
    argument = _wide(ops, arguments, pushed)
    if ops[pushed] == _SMALL_NUMBER:
        return argument
    value = code.co_consts[argument] if ops[pushed] == _CONSTANT else 0
    return value if isinstance(value, int) else 0


def is_method_load(use: NameUse) -> bool:
    """Whether an attribute is loaded to be called as a method at once."""
    return dis.opname[use.op] == "LOAD_METHOD" or (use.op == _ATTRIBUTE and use.flag)


def _before(ops: bytes, at: int) -> int:
    """The position of the instruction before one, without its prefixes."""
    at -= 1
    while at > 0 and ops[at] == _WIDE:
        at -= 1
    return at


def _wide(ops: bytes, arguments: bytes, at: int) -> int:
    """The whole argument of an instruction: prefixes in front of it hold the higher bytes."""
    argument, shift = arguments[at], 8
    while at and ops[at - 1] == _WIDE:
        at -= 1
        argument |= arguments[at] << shift
        shift += 8
    return argument
