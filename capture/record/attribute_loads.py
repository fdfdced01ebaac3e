"""``obj.__dict__``, ``obj.__getattribute__(name)``: attributes of all objects that Python gives no way to replace.

The code of the functions that a step can call is changed while it is captured: where it loads such an attribute, it
hands the object to a stand-in, which gives the attribute.
"""

from __future__ import annotations

import contextlib
import dis
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from weft.capture.state.bytecode import code_replaced, is_method_load, uses_of_names
from weft.capture.state.code_names import code_names
from weft.errors import UncapturableDraw

_CONSTANT, _SWAP, _NULL = dis.opmap["LOAD_CONST"], dis.opmap["SWAP"], dis.opmap["PUSH_NULL"]
_WIDE, _NOTHING, _LOAD = dis.opmap["EXTENDED_ARG"], dis.opmap["NOP"], dis.opmap["LOAD_ATTR"]

_LAST_CONSTANT = (1 << 16) - 1


def _bytes_of(text: str, name: str) -> bytes:
    """The bytes of the instruction ``name`` of an expression, those that Python keeps free behind it included."""
    code = compile(text, "", "eval")
    steps = list(dis.get_instructions(code))
    at = next(at for at, step in enumerate(steps) if step.opname == name)
    return code.co_code[steps[at].offset : steps[at + 1].offset]


_MATMUL = _bytes_of("a @ b", "BINARY_OP")
_LENGTHS = {_LOAD: len(_bytes_of("a.b", "LOAD_ATTR"))}
if sys.version_info < (3, 12):  # later ones have one instruction for both
    _LENGTHS[dis.opmap["LOAD_METHOD"]] = len(_bytes_of("a.b()", "LOAD_METHOD"))


class _Load:
    """Gives an attribute of the object on the right of ``@``: this operator has a place for two objects."""

    __slots__ = ("_give",)

    def __init__(self, give: Callable[[Any], Any]) -> None:
        self._give = give

    def __matmul__(self, obj: Any) -> Any:
        return self._give(obj)


@contextlib.contextmanager
def loads_replaced(
    functions: Iterable[types.FunctionType], given: Mapping[str, Callable[[Any], Any]]
) -> Iterator[None]:
    """Inside, code of these functions gets attributes from ``given``, by their names."""
    loads = {name: _Load(give) for name, give in given.items()}
    with contextlib.ExitStack() as stack:
        for function in functions:
            if not loads.keys().isdisjoint(code_names(function.__code__)):
                stack.enter_context(code_replaced(function, _with_loads(function.__code__, loads)))
        yield


def _with_loads(code: types.CodeType, loads: Mapping[str, _Load]) -> types.CodeType:
    """The code with other loads of these attributes, functions that it defines included."""
    constants: list[Any] = [
        _with_loads(each, loads) if isinstance(each, types.CodeType) else each for each in code.co_consts
    ]
    text = bytearray(code.co_code)
    for use in uses_of_names(code):
        if use.op not in _LENGTHS or use.name not in loads:
            continue
        at, length = 2 * use.at, _LENGTHS[use.op]
        if len(constants) > _LAST_CONSTANT:
            where = f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"
            why = f"the function has more than {_LAST_CONSTANT:,} constants"
            raise UncapturableDraw(f"a load of {use.name}", where, why, "move the load to a function of its own")
        new = _argument(len(constants)) + bytes([_SWAP, 2]) + _MATMUL
        if is_method_load(use):  # a method that is called at once has no object of its own beside it
            new += bytes([_NULL, 0]) + (bytes([_SWAP, 2]) if sys.version_info < (3, 13) else b"")
        constants.append(loads[use.name])
        text[at : at + length] = new + bytes([_NOTHING, 0]) * ((length - len(new)) // 2)
        while at and text[at - 2] == _WIDE:
            at -= 2
            text[at : at + 2] = bytes([_NOTHING, 0])
    return code.replace(co_code=bytes(text), co_consts=tuple(constants), co_stacksize=code.co_stacksize + 2)


def _argument(constant: int) -> bytes:
    """What loads the constant at a position: there is room for one prefix."""
    return (bytes([_WIDE, constant >> 8]) if constant > 255 else b"") + bytes([_CONSTANT, constant & 255])
