"""``int(n)`` and ``float(n)`` of symbolic numbers, in the user's code.

Python's conversions must give plain numbers, and would fix a symbol to its value in the captured call. So while a step
is captured, the modules whose functions it can call see these two names with stand-ins that know symbols. Where they
are also used as values, torch and Python ask for the very types (``dtype=float``, ``type(n) is int``): a module that
does so keeps them.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import inspect
import math
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from weft.capture.record.plain_numbers import PYTHON_TYPES
from weft.capture.record.recorder import recording
from weft.capture.state.containers import BuiltinLike

_CONVERSIONS = frozenset({"int", "float"})


@contextlib.contextmanager
def builtin_types_know_symbols(functions: Iterable[types.FunctionType]) -> Iterator[None]:
    """Inside, the stand-ins are in the globals of modules that do not define the names themselves.

    Args:
        functions: those that the step can call; their globals may be those of no module.
    """
    scopes: dict[int, dict[str, Any]] = {}
    codes: dict[int, set[types.CodeType]] = {}
    for each in functions:
        names = scopes.setdefault(id(each.__globals__), each.__globals__)
        codes.setdefault(id(names), set(_codes(names))).add(each.__code__)
    changed: list[tuple[dict[str, Any], str]] = []
    try:
        for at, names in scopes.items():
            for name in _CONVERSIONS.difference(*map(_used_as_values, codes[at])):
                if name not in names:
                    changed.append((names, name))
                    names[name] = STAND_INS[name]
        yield
    finally:
        for names, name in changed:
            if names.get(name) is STAND_INS[name]:
                del names[name]


def _codes(names: dict[str, Any]) -> Iterator[types.CodeType]:
    """The code of the functions in a module, and of the methods of its classes."""
    for value in list(names.values()):
        own = isinstance(value, type) and value.__module__ == names.get("__name__")
        for member in list(vars(value).values()) if own else [value]:
            member = inspect.unwrap(getattr(member, "__func__", member))  # what a decorator made of a function
            if isinstance(member, types.FunctionType):
                yield member.__code__


@functools.cache
def _used_as_values(code: types.CodeType) -> frozenset[str]:
    """The conversions that a function, or one inside it, uses otherwise than to call them."""
    found: set[str] = set()
    if not _CONVERSIONS.isdisjoint(code.co_names):
        for step in dis.get_instructions(code):
            called = step.opname == "LOAD_GLOBAL" and bool((step.arg or 0) & 1)  # made ready for a call
            if step.argval in _CONVERSIONS and not called:
                found.add(step.argval)
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return frozenset(found).union(*map(_used_as_values, inner))


def _like(kind: type, convert: Callable[[Any], Any]) -> type:
    """A class that is ``kind`` in every respect but ``is``, except for what it makes of one symbolic number."""

    class Like(BuiltinLike):
        def __instancecheck__(cls, instance: Any) -> bool:
            return issubclass(PYTHON_TYPES.get(type(instance), type(instance)), kind) or isinstance(instance, kind)

        def __subclasscheck__(cls, other: type) -> bool:
            return other is cls or issubclass(other, kind)

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            symbolic = len(args) == 1 and not kwargs and recording() is not None
            return convert(args[0]) if symbolic and _is_symbolic(args[0]) else kind(*args, **kwargs)

        def __getattribute__(cls, name: str) -> Any:
            return getattr(kind, name)

        def __eq__(cls, other: object) -> bool:
            return other is cls or other is kind

        def __hash__(cls) -> int:
            return hash(kind)

        def __mro_entries__(cls, bases: tuple[Any, ...]) -> tuple[type, ...]:
            return (kind,)

        def __or__(cls, other: Any) -> Any:
            return kind | other

        def __ror__(cls, other: Any) -> Any:
            return other | kind

    return Like(kind.__name__, (), {})


def _is_symbolic(value: Any) -> bool:
    return type(value) in PYTHON_TYPES or isinstance(value, torch.Tensor)


def _number_in(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _int(value: Any) -> Any:
    value = _number_in(value)
    return (
        math.trunc(value) if isinstance(value, torch.SymFloat) else value if type(value) is torch.SymInt else int(value)
    )


def _float(value: Any) -> Any:
    value = _number_in(value)
    return torch.sym_float(value) if isinstance(value, (torch.SymInt, torch.SymFloat)) else float(value)


STAND_INS = {"int": _like(builtins.int, _int), "float": _like(builtins.float, _float)}
