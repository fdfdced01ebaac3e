"""``"loss %.4f" % loss.item()``: formatting by ``%`` of numbers that a step computes.

A ``str`` on the left of ``%`` asks a number for its value, which a symbolic number does not have. So while a step is
captured, the code of the functions that it can call has constants of a subclass of ``str`` there. They format symbolic
numbers as f-strings do: each call makes the text (:mod:`weft.capture.record.late_text`).
"""

from __future__ import annotations

import contextlib
import dis
import re
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from weft.capture.record.host_arrays import HostArray
from weft.capture.record.plain_numbers import PYTHON_TYPES
from weft.capture.record.printed import text_of_value
from weft.capture.record.recorder import recording
from weft.capture.state.bytecode import ByCode, code_replaced, place_of
from weft.short_tracebacks import mark_refused_call

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_CONSTANT, _WIDE = dis.opmap["LOAD_CONST"], dis.opmap["EXTENDED_ARG"]
# A conversion without a name, and without a width or precision among the values.
_CONVERSION = re.compile(r"%(?:%|[-+ #0]*[0-9]*(?:\.[0-9]+)?[hlL]?([diouxXeEfFgGcrsa]))")
_OF_TEXT = frozenset("sra")


class _Format(str):
    """A constant on the left of ``%``."""

    __slots__ = ()

    def __mod__(self, values: Any) -> str:
        items = values if isinstance(values, tuple) else (values,)
        if recording() is None or not any(map(_is_unknown, items)):
            try:
                return str.__mod__(self, values)
            except Exception as error:
                mark_refused_call(error)
                raise
        conversions = [each for each in _CONVERSION.finditer(self) if each[0] != "%%"]
        if len(conversions) != len(items) or _CONVERSION.sub("", self).count("%"):
            # Whatever is wrong, or a width among the values: Python says so of plain numbers.
            return str.__mod__(self, tuple(PYTHON_TYPES.get(type(each), _same)(each) for each in items))
        frame = sys._getframe(1)
        pieces, end = [], 0
        for conversion, item in zip(conversions, items, strict=True):
            pieces += [str.__mod__(self[end : conversion.start()], ()), _converted(frame, conversion, item)]
            end = conversion.end()
        return "".join([*pieces, str.__mod__(self[end:], ())])


def _same(value: Any) -> Any:
    return value


def _is_unknown(item: Any) -> bool:
    return isinstance(item, (torch.Tensor, *_SYMBOLIC)) or type(item) is HostArray


def _converted(frame: types.FrameType, conversion: re.Match[str], item: Any) -> str:
    """The text of one value: of one that no call knows yet, a mark for it."""
    if type(item) is HostArray:
        return item.weft_text("%", conversion[0], frame=frame)
    if not _is_unknown(item):
        return conversion[0] % (item,)
    is_number = isinstance(item, torch.Tensor) and conversion[1] not in _OF_TEXT
    return text_of_value(frame, item.item() if is_number else item, "%", (conversion[0],))


@contextlib.contextmanager
def percent_formats_know_symbols(functions: Iterable[types.FunctionType]) -> Iterator[None]:
    """Inside, texts in the source of these functions format symbolic numbers."""
    with contextlib.ExitStack() as stack:
        for function in functions:
            code = function.__code__
            if (known := _codes.get(code)) is None:
                made = _with_formats(code)
                known = _codes.keep(code, [] if made is code else [made])
            for made in known:
                stack.enter_context(code_replaced(function, made))
        yield


# Other code, where there is some. The code itself would be kept by this.
_codes: ByCode[list[types.CodeType]] = ByCode()


def _with_formats(code: types.CodeType) -> types.CodeType:
    """The code with other constants on the left of ``%``; the same where there are none."""
    constants = [_with_formats(each) if isinstance(each, types.CodeType) else each for each in code.co_consts]
    text, known = bytearray(code.co_code), len(constants)
    if any(isinstance(each, str) and "%" in each for each in constants):
        steps = [(each, place) for each in dis.get_instructions(code) if (place := place_of(each)) is not None]
        formats = [place for each, place in steps if each.opname == "BINARY_OP" and each.argrepr in ("%", "%=")]
        for begin, end in formats:
            # An operation is computed from the leftmost leaf on. One that the left side consists of is not harmed.
            first = next(each for each, place in steps if begin <= place[0] and place[1] <= end)
            wide = first.offset and text[first.offset - 2] == _WIDE
            if first.opcode == _CONSTANT and type(first.argval) is str and not wide and len(constants) <= 255:
                text[first.offset + 1] = len(constants)
                constants.append(_Format(first.argval))
    if len(constants) == known and all(new is old for new, old in zip(constants, code.co_consts, strict=True)):
        return code
    return code.replace(co_code=bytes(text), co_consts=tuple(constants))
