"""numpy's functions of single numbers, such as ``np.isfinite(loss.item())``, as nodes of the graph.

numpy knows no symbolic numbers. It hands a function of which one is an argument to the ``__array_ufunc__`` of that
argument's class. There the call becomes a node, which calls the function with the numbers of the step. So the result
has the type and the value that it has in eager (``np.float64``, which divides by zero without an error).
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from weft.capture.record.plain_numbers import plain_number
from weft.source_files import is_user_file
from weft.thread_patches import stand_in

_SYMBOLIC = (torch.SymInt, torch.SymFloat)
_PLAIN = frozenset({bool, int, float})
_DTYPES = {"f": torch.float64, "i": torch.int64, "b": torch.bool}  # by the kind of numpy's dtype


class NumpyFunction:
    """The target of a node that calls a function of numpy.

    Args:
        function: a ``numpy.ufunc`` with one result.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self.__name__ = self.__qualname__ = f"numpy_{function.__name__}"
        self.__module__ = __name__

    def __call__(self, *numbers: Any) -> Any:
        return self.function(*numbers)


class NumpyFunctions:
    """Records numpy's functions of the symbolic numbers of one capture.

    Args:
        shape_env: of the capture.
        computed: makes the symbol of ``function(*operands)``, of a dtype.
    """

    def __init__(self, shape_env: ShapeEnv, computed: Callable[[Any, list[Any], torch.dtype], Any]) -> None:
        self._shape_env = shape_env
        self._computed = computed
        self._functions: dict[str, NumpyFunction] = {}

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """While active, calls of this thread are recorded."""
        with contextlib.ExitStack() as stack:
            for kind in _SYMBOLIC:
                stack.enter_context(stand_in(kind, "__array_ufunc__", _call))
                stack.enter_context(stand_in(kind, "__array_function__", _call_function))
            outer, _mine.functions = _mine.functions, self
            try:
                yield
            finally:
                _mine.functions = outer

    def knows(self, number: Any) -> bool:
        """Whether a symbolic number is of this capture."""
        return number.node.shape_env is self._shape_env

    def call(self, ufunc: Any, method: str, operands: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The symbol of a call; NotImplemented makes numpy raise a TypeError that names the class of the symbol."""
        if method != "__call__" or options or ufunc.nout != 1 or not all(map(self._is_number, operands)):
            return NotImplemented
        if _asked_by_user():
            # Its type is numpy's, of which the user's code may make use: the numbers of the call are guards.
            values = [plain_number(each) if isinstance(each, _SYMBOLIC) else each for each in operands]
            if None not in values:
                return ufunc(*values)
        dtype = ufunc(*map(_sample, operands)).dtype
        if dtype.kind not in _DTYPES or dtype.itemsize not in (1, 8):
            return NotImplemented
        function = self._functions.setdefault(ufunc.__name__, NumpyFunction(ufunc))
        return self._computed(function, list(operands), _DTYPES[dtype.kind])

    def _is_number(self, operand: Any) -> bool:
        if isinstance(operand, _SYMBOLIC):
            return self.knows(operand)
        # Not a scalar of numpy's smaller types: whether it decides the type of the result depends on the others' types.
        return type(operand) in _PLAIN or (isinstance(operand, float) and type(operand).__name__ == "float64")


class _FunctionsOfThread(threading.local):
    """Those of the capture that is going on in the running thread."""

    functions: NumpyFunctions | None = None


_mine = _FunctionsOfThread()


def _call(number: Any, ufunc: Any, method: str, *operands: Any, **options: Any) -> Any:
    """``__array_ufunc__`` of symbolic numbers. Those of other tracers are objects to numpy, as they always are."""
    if _mine.functions is not None and _mine.functions.knows(number):
        return _mine.functions.call(ufunc, method, operands, options)
    array = sys.modules["numpy"].asarray
    objects = [array(each, dtype=object) if isinstance(each, _SYMBOLIC) else each for each in operands]
    return getattr(ufunc, method)(*objects, **options)


def _call_function(number: Any, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """``__array_function__`` of symbolic numbers: ``np.clip`` is a ufunc, and ``np.round`` of a float is one."""
    numpy = sys.modules["numpy"]
    ufunc = None
    if function is numpy.clip and len(args) == 3 and not kwargs and None not in args:
        ufunc = numpy._core.umath.clip
    elif function is numpy.round and len(args) == 1 and not kwargs and isinstance(number, torch.SymFloat):
        ufunc = numpy.rint
    found = NotImplemented if ufunc is None else _call(number, ufunc, "__call__", *args)
    if found is not NotImplemented:
        return found
    return function._implementation(*args, **kwargs)


def _asked_by_user() -> bool:
    """Whether the user's code calls the function, and not torch's: an optimizer multiplies a rate by a weight decay."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("weft."):
        frame = frame.f_back
    return frame is not None and is_user_file(frame.f_code.co_filename)


def _sample(operand: Any) -> Any:
    """A number of the same type, to see what type of result it gives."""
    return {torch.SymFloat: 1.0, torch.SymInt: 1}.get(type(operand), operand)
