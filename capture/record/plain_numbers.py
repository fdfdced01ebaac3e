"""What Python asks of a symbolic number that only a plain number can answer.

The sizes and numbers of a step that change from call to call are symbols while it is captured. Where torch computes
with them they stay symbols. Elsewhere Python must not notice: ``epoch.__class__`` is ``int``, and the hash and the text
of a number are those of its value in the captured call, which is then a guard. Numbers that only the data decides
have no value yet; torch and :mod:`weft.capture.record.printed` refuse what needs one.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from weft.capture.record.recorder import recording
from weft.source_files import is_user_file
from weft.thread_patches import present, replaced, stand_in

PYTHON_TYPES: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
_SYMBOLIC = tuple(PYTHON_TYPES)
_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
_OF_TORCH = ("torch.distributions.utils",)  # it takes numbers and tensors, and asks which they are
_ABSTRACT = ("abc.py", "<frozen abc>")  # `isinstance(n, numbers.Number)` asks from there


class NumpyFloat(torch.SymFloat):
    """A symbolic number for which eager has a ``numpy.float64``: a learning rate from a table of numpy's.

    Torch computes with it as with all symbolic numbers. To the user's code its type is numpy's. Operators for which
    numpy gives the same bits as Python stay symbolic and give another such number. For everything else, the value in
    the captured call is used and becomes a guard (:mod:`weft.capture.record.numpy_functions`).

    Args:
        number: the symbolic number.
    """

    def __init__(self, number: Any) -> None:
        super().__init__(number.node)
        PYTHON_TYPES[NumpyFloat] = sys.modules["numpy"].float64

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "node" or recording() is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(plain_number(self), name)

    def __getitem__(self, index: Any) -> Any:
        return plain_number(self)[index]

    @property
    def imag(self) -> Any:
        """Zero, as numpy has it."""
        return plain_number(self).imag


def numpy_float(number: float) -> Any:
    """``numpy.float64(number)``."""
    return sys.modules["numpy"].float64(number)


def plain_number(number: Any) -> Any:
    """The value of a symbolic number in the captured call, which becomes a guard; None where only the data decides."""
    if not number.node.has_hint():
        return None
    if type(number) is NumpyFloat:
        return numpy_float(float(torch.SymFloat(number.node)))
    return PYTHON_TYPES[type(number)](number)


@contextlib.contextmanager
def symbols_answer_as_numbers() -> Iterator[None]:
    """Inside, the user's code takes symbolic numbers for ``int``, ``float`` and ``bool``, and they have the hash of
    their value."""
    with contextlib.ExitStack() as stack:
        for kind in _SYMBOLIC:
            stack.enter_context(stand_in(kind, "__getattribute__", _attribute))
            stack.enter_context(replaced(kind, "__hash__", _hash_of(kind.__hash__)))
            for name in () if kind is torch.SymBool else _COMPARISONS:
                stack.enter_context(replaced(kind, name, _outcome_of(present(kind, name))))
        for kind in (torch.SymInt, torch.SymFloat):
            # Python's own computes both parts as `//` and `%` do.
            stack.enter_context(stand_in(kind, "__divmod__", _divmod))
            stack.enter_context(stand_in(kind, "__rdivmod__", _rdivmod))
            stack.enter_context(stand_in(kind, "__getattr__", _missing_attribute))
            for name, part in _PARTS[kind].items():
                stack.enter_context(stand_in(kind, name, part))
        yield


def _attribute(number: Any, name: str) -> Any:
    """An attribute of a symbolic number. The user's code finds those of Python's type, and no others. ``isinstance``
    asks for the attribute ``__class__`` of what is no instance by its type."""
    if name == "node" or recording() is None:
        return object.__getattribute__(number, name)
    frame = sys._getframe(1)
    while frame.f_code.co_filename.endswith(_ABSTRACT) and frame.f_back is not None:
        frame = frame.f_back
    is_users = is_user_file(frame.f_code.co_filename)
    kind = PYTHON_TYPES[type(number)]
    if name == "__class__":
        return kind if is_users or frame.f_globals.get("__name__") in _OF_TORCH else type(number)
    if is_users and not name.startswith("_") and not hasattr(kind, name):  # libraries look for torch's and numpy's own
        raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}", name=name, obj=number)
    return object.__getattribute__(number, name)


def _missing_attribute(number: Any, name: str) -> Any:
    """An attribute that only Python's type has: that of the value, which becomes a guard."""
    kind = type(number)
    if recording() is not None and is_user_file(_asking_file()):
        kind = PYTHON_TYPES[kind]
        value = plain_number(number) if hasattr(kind, name) else None
        if value is not None:
            return getattr(value, name)
    raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")


def _asking_file() -> str:
    """That of the code that asks, above what stands in for a method in this thread."""
    frame = sys._getframe(2)
    while str(frame.f_globals.get("__name__")).startswith("weft.") and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename


def _divmod(a: Any, b: Any) -> Any:
    if not all(issubclass(type(each), (int, float, torch.SymInt, torch.SymFloat)) for each in (a, b)):
        return NotImplemented
    return a // b, a % b


def _rdivmod(a: Any, b: Any) -> Any:
    return _divmod(b, a)


_ITSELF = property(lambda number: number)
# Those of SymInt are found by the user's code alone: torch asks for some to tell a SymInt from an int.
_PARTS: dict[type, dict[str, property]] = {
    torch.SymFloat: {"real": _ITSELF, "imag": property(lambda number: 0.0)},
    torch.SymInt: {
        "real": _ITSELF,
        "numerator": _ITSELF,
        "imag": property(lambda number: 0),
        "denominator": property(lambda number: 1),
    },
}


def _outcome_of(original: Any) -> Any:
    """A comparison of symbolic numbers, which gives the user's code a plain ``bool`` where their values are known: what
    is made of it may be no question (``model.train(epoch > 3)``), and torch's functions want plain ones."""

    def compare(number: Any, other: Any) -> Any:
        found = original(number, other)
        if type(found) is not torch.SymBool or recording() is None or not found.node.has_hint():
            return found
        frame = sys._getframe(1)
        while str(frame.f_globals.get("__name__")).startswith("weft.") and frame.f_back is not None:
            frame = frame.f_back  # what stands in for the method in this thread
        return bool(found) if is_user_file(frame.f_code.co_filename) else found

    return compare


def _hash_of(original: Any) -> Any:
    def value_hash(number: Any) -> int:
        value = plain_number(number) if recording() is not None else None
        return original(number) if value is None else hash(value)

    return value_hash
