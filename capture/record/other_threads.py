"""Symbolic numbers as other threads see them: as the numbers that they stand for.

While a step is captured, a symbol is at the place of each number of the Python state that changes. A thread that writes
logs or watches the training may read it meanwhile: ``f"{scheduler.last_epoch}"``. What it computes with a symbol is
computed with its value in the captured call, and is no guard. A type in C, which asks for no method, sees the symbol.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

_SYMBOLIC: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, f"{name}_" if name in ("and", "or") else name)
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
} | {"divmod": divmod}
_COMPARISONS = ("lt", "le", "eq", "ne", "gt", "ge")
_UNARY: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("neg", "pos", "abs", "invert", "index")},
    **{"round": round, "trunc": math.trunc, "floor": math.floor, "ceil": math.ceil},
    **{"int": int, "float": float, "bool": bool, "hash": hash, "repr": repr, "str": str, "format": format},
}
_METHODS: dict[str, Callable[..., Any]] = {
    **{f"__{name}__": function for name, function in (*_BINARY.items(), *_UNARY.items())},
    **{f"__r{name}__": (lambda a, b, function=function: function(b, a)) for name, function in _BINARY.items()},
    **{f"__{name}__": getattr(operator, name) for name in _COMPARISONS},
}


class _Capture:
    """The capture that goes on, if one does.

    Attributes:
        thread: in which; shape_env: of its symbols.
    """

    thread: int | None = None
    shape_env: Any = None


@contextlib.contextmanager
def numbers_in_other_threads(shape_env: Any) -> Iterator[None]:
    """Inside, other threads than this one compute with the values of the symbols of ``shape_env``. One thread captures
    at a time."""
    with contextlib.ExitStack() as stack:
        for kind, name, method in _methods():
            if name in vars(kind):
                stack.callback(setattr, kind, name, vars(kind)[name])
            else:
                stack.callback(delattr, kind, name)
            setattr(kind, name, method)
        _Capture.thread, _Capture.shape_env = threading.get_ident(), shape_env
        try:
            yield
        finally:
            _Capture.thread = _Capture.shape_env = None


@functools.cache
def _methods() -> list[tuple[type, str, Callable[..., Any]]]:
    """(class, name, method) of the methods of symbolic numbers. What replaces a method keeps what it finds for good
    (:mod:`weft.thread_patches`), so it must find the same one at each capture."""
    named = [(kind, name, function) for kind in _SYMBOLIC for name, function in _METHODS.items()]
    return [(kind, name, _method(kind, name, function)) for kind, name, function in named if hasattr(kind, name)]


def _method(kind: type, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    original = getattr(kind, name)

    @functools.wraps(original)
    def method(number: Any, *others: Any) -> Any:
        if threading.get_ident() == _Capture.thread or (value := value_elsewhere(number)) is number:
            return original(number, *others)
        return function(value, *map(value_elsewhere, others))

    return method


def value_elsewhere(number: Any) -> Any:
    """The plain number for which a symbol stands that another thread than the capturing one has read; other values as
    they are."""
    kind = next((kind for kind in type(number).__mro__ if kind in _SYMBOLIC), None)
    if kind is None or threading.get_ident() == _Capture.thread:
        return number
    node = object.__getattribute__(number, "node")
    known = _Capture.shape_env is not None and getattr(node, "shape_env", None) is _Capture.shape_env
    return _SYMBOLIC[kind](node.hint) if known and node.has_hint() else number
