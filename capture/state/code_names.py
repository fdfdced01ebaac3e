"""Which names the code of a step can read: its closure variables, globals and attributes.

Objects of the user's carry much that changes every step and has nothing to do with it, such as a trainer's counters.
Guards on those would recapture all the time. So the walk of the Python state looks only at attributes whose names
stand in code that the step can run. Code of functions that are marked opaque does not count.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

_UNCALLABLE = (bool, int, float, complex, str, bytes)
# Marks functions that weft.opaque made.
OPAQUE = "__weft_opaque__"
# Code of the functions that were marked opaque. Names that only they use are not walked and not guarded.
opaque_code: weakref.WeakSet[types.CodeType] = weakref.WeakSet()


def code_names(code: types.CodeType) -> Iterator[str]:
    """All global and attribute names in the code, functions that it defines included."""
    yield from code.co_names
    for constant in _inner_code(code):
        if constant not in opaque_code:
            yield from code_names(constant)


def _names_read(code: types.CodeType) -> Iterator[str]:
    """Names whose value the code reads or writes, other than to call it as a method: ``x.step()`` reads no number
    ``step``."""
    for step in dis.get_instructions(code):
        method = step.opname == "LOAD_METHOD" or (
            step.opname == "LOAD_ATTR" and sys.version_info >= (3, 12) and (step.arg or 0) & 1
        )
        if step.opname.endswith(("_ATTR", "_NAME", "_GLOBAL")) and not method:
            yield step.argval
    for constant in _inner_code(code):
        if constant not in opaque_code:
            yield from _names_read(constant)


def _inner_code(code: types.CodeType) -> list[types.CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def closed_over(code: types.CodeType) -> set[str]:
    """The variables of outer functions that ``code`` uses, itself or in functions it makes that are not opaque."""
    inner = _inner_code(code)
    if not any(constant in opaque_code for constant in inner):
        return set(code.co_freevars)
    names = {step.argval for step in dis.get_instructions(code) if "DEREF" in step.opname}
    return names.union(*(closed_over(constant) for constant in inner if constant not in opaque_code))


class AttributeNames(set[str]):
    """Attribute names in the code that a step can run.

    Attributes:
        read: those that are used for more than to call a method.

    Args:
        step: a function, a method, or an object with ``__call__``.
    """

    def __init__(self, step: Callable[..., Any]) -> None:
        super().__init__()
        self.read: set[str] = set()
        function = getattr(step, "__func__", step)
        code = getattr(function, "__code__", None) or getattr(type(step).__call__, "__code__", None)
        if code:
            self.add_code(code)

    @property
    def count(self) -> int:
        """Grows with every new name."""
        return len(self) + len(self.read)

    def add_code(self, code: types.CodeType) -> None:
        """Add the names of one function's code."""
        self.update(code_names(code))
        self.read.update(_names_read(code))

    def of(self, attributes: dict[str, Any]) -> set[str]:
        """The names that count for an object with these attributes. A plain value is never called, only read."""
        return {name for name in self if name in self.read or not isinstance(attributes.get(name), _UNCALLABLE)}


@functools.cache
def _functions_of(owner: type) -> dict[str, types.FunctionType]:
    """The plain methods of a class and its bases, as attribute look-up finds them."""
    members = {name: member for base in reversed(owner.__mro__) for name, member in vars(base).items()}
    return {name: member for name, member in members.items() if isinstance(member, types.FunctionType)}


def methods_used(owner: type, names: AttributeNames) -> list[types.FunctionType]:
    """Methods of ``owner`` that code using ``names`` can call, directly or through each other; ``names`` grows by
    theirs."""
    found: dict[str, types.FunctionType] = {}
    grown = True
    while grown:
        methods = {name: method for name, method in _functions_of(owner).items() if name in names and name not in found}
        found |= methods
        for method in methods.values():
            names.add_code(method.__code__)
        grown = bool(methods)
    return list(found.values())
