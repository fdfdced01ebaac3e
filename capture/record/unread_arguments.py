"""Texts, bytes and sets among the arguments that change from call to call, and that a step only passes on.

A batch carries names of files, captions, ids. They are other ones at every call, and most steps leave them alone,
return them, or print them. The capture gives the step an :class:`UnreadValue` in the place of one that was seen to
change. It can be passed on, and each call takes its own value; and it can be compared with a known text, whose outcome
is a guard. Whatever else looks inside (a hash, a length, a method) ends the attempt, and the value is a guard again.

Code in C that wants the value itself finds an object of another type and raises. So an attempt in which the user's code
met such an exception is not trusted either.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from weft.capture.record.ended_runs import RunEnded
from weft.capture.record.late_text import late_text
from weft.capture.record.met_exceptions import MetException, exceptions_noted, may_catch
from weft.capture.record.numpy_arguments import may_be_input
from weft.capture.record.recorder import recording
from weft.capture.state.containers import StatePlace
from weft.capture.user_code import formatting_frame

_KINDS = frozenset({str, bytes, bytearray, set, frozenset})
_READING = (
    "lt le gt ge hash bool len iter contains getitem setitem delitem add radd iadd mul rmul mod rmod sub rsub "
    "isub or ror ior and rand iand xor rxor ixor int float index complex bytes reversed sizeof buffer array "
    "array_ufunc array_function copy deepcopy reduce reduce_ex"
)


@dataclass(frozen=True)
class Asked:
    """A comparison of a text, or of bytes, among the arguments with a known one.

    Attributes:
        place: of the argument.
        other: what it was compared with.
        outcome: whether they were equal.
    """

    place: StatePlace
    other: Any
    outcome: bool

    def __str__(self) -> str:
        return f"{self.place.path} is {'' if self.outcome else 'not '}{self.other!r}"


@dataclass
class ValuesOfArguments:
    """Paths of arguments of an attempt that are no tensors, by what the capture makes of their values; and of tables.

    Attributes:
        inputs: arrays and numbers of numpy's whose values are inputs of the graph.
        constants: those that could be inputs too, and are guarded by their values.
        unread: what the step may pass on, without reading it.
        read: those of them that it did read.
        asked: what they were compared with: the outcomes are guards.
        tables: lists, tuples and arrays of the state that a symbolic number indexed, and had to be plain for.
        arrays: arrays of the state that are compared with what they held, of an attempt that failed.
        written: lists among those with a stand-in to which the step writes.
        names: those of attributes that the step has computed, and that the walk of the state did not follow.
        tried: whether numbers are symbols by way of trial.
        compared: whether the exceptions that the user's code meets are compared with those of another attempt.
        symbols: whether other numbers, or sizes, are symbols.
        met: the exceptions that the user's code met (:mod:`weft.capture.record.met_exceptions`).
    """

    inputs: set[str] = field(default_factory=set)
    constants: set[str] = field(default_factory=set)
    unread: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    asked: list[Asked] = field(default_factory=list)
    tables: set[str] = field(default_factory=set)
    arrays: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    tried: bool = False
    compared: bool = False
    symbols: bool = False
    met: list[MetException] = field(default_factory=list)

    def exceptions_noted(
        self, functions: Iterable[types.FunctionType], symbols: bool, changes: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Inside, exceptions are noted where code of the step may catch what stand-ins and symbols raise.

        Args:
            functions: that the step can call.
            symbols: whether there are symbolic numbers.
            changes: whether there are more of them than learning rates, which every step with an optimizer has.
        """
        self.symbols = symbols or changes
        needed = self.unread or self.tried or self.compared or may_catch(functions, libraries=changes)
        return exceptions_noted(self.met) if needed else contextlib.nullcontext()


class ArgumentRead(RunEnded):
    """Ends an attempt in which the step looks at the value of an argument that is to change from call to call."""


class UnreadValue:
    """Stands for an argument whose value is not known.

    Args:
        place: of the argument.
        kind: its type.
        found: where it is noted what the step does with it.
        mode: the fake mode of the capture.
    """

    def __init__(self, place: StatePlace, kind: type, found: ValuesOfArguments, mode: Any) -> None:
        vars(self).update(weft_place=place, weft_kind=kind, weft_found=found, weft_mode=mode)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self.weft_kind

    def __getattr__(self, name: str) -> Any:
        getattr(self.weft_kind, name)  # an AttributeError where the value has none
        return _read(self)

    def __setattr__(self, name: str, value: Any) -> None:
        _read(self)

    def __eq__(self, other: object) -> bool:
        if self.weft_kind not in (str, bytes) or type(other) is not self.weft_kind:
            return _read(self)
        asked = Asked(self.weft_place, other, self.weft_place.outer() == other)
        self.weft_found.asked.append(asked)
        return asked.outcome

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __repr__(self) -> str:
        return _text(self, "__repr__")

    def __str__(self) -> str:
        return _text(self, "__str__")

    def __format__(self, spec: str) -> str:
        return _text(self, "__format__", spec)


def _read(value: UnreadValue, *_: Any) -> Any:
    value.weft_found.read.add(value.weft_place.path)
    raise ArgumentRead(value.weft_place.path)


for _name in _READING.split():
    setattr(UnreadValue, f"__{_name}__", _read)


def _text(value: UnreadValue, method: str, *arguments: str) -> str:
    recorder = recording()
    if recorder is None or recorder.fake_mode is not value.weft_mode:
        return f"<the value of {value.weft_place.path}>"
    text = late_text(recorder, formatting_frame(sys._getframe(2)), None, method, arguments, place=value.weft_place)
    return _read(value) if text is None else text


def count_as_read(holder: Any) -> None:
    """End the attempt where an object that cannot be made anew at each call holds such an argument."""
    held = gc.get_referents(holder)
    for each in [*held, *getattr(holder, "__dict__", {}).values()]:
        if issubclass(type(each), UnreadValue):
            _read(each)


def may_be_unread(value: Any) -> bool:
    """Whether an argument can be passed on unread: a text, bytes, a set, or an array that is no input."""
    numpy = sys.modules.get("numpy")
    return type(value) in _KINDS or (numpy is not None and type(value) is numpy.ndarray and not may_be_input(value))
