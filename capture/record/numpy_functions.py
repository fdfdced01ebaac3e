"""numpy's functions of single numbers, such as ``np.isfinite(loss.item())``, as nodes of the graph.

numpy knows no symbolic numbers. It hands a function of which one is an argument to the ``__array_ufunc__`` of that
argument's class. There the call becomes a node, which calls the function with the numbers of the step. So the result
has the type and the value that it has in eager (``np.float64``, which divides by zero without an error). It has the
methods of numpy's numbers while the step is captured.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from weft.capture.record.plain_numbers import plain_number
from weft.capture.record.symbols import Computed
from weft.capture.user_code import user_line
from weft.errors import CannotCapture
from weft.thread_patches import stand_in

_SYMBOLIC = (torch.SymInt, torch.SymFloat)
_PLAIN = frozenset({bool, int, float})
_DTYPES = {"f": torch.float64, "i": torch.int64, "b": torch.bool}  # by the kind of numpy's dtype
# Python's operations whose result is a number of numpy's where an operand is one.
_OPERATORS = frozenset(
    {abs, max, min, *(getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"))}
    | {operator.neg}
)
_OF_ONE_ELEMENT = frozenset({"copy", "max", "mean", "min", "squeeze", "sum"})
_FOLLOWED = _OF_ONE_ELEMENT | {"item", "tolist", "round", "clip", "astype", "dtype", "shape", "ndim", "size"}


class NumpyFunction:
    """The target of a node that calls a function of numpy.

    Args:
        function: makes one number of numbers: a ``numpy.ufunc``, ``numpy.round``, ``numpy.int64``, ...
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self.__name__ = self.__qualname__ = f"numpy_{function.__name__}"
        self.__module__ = __name__

    def __call__(self, *numbers: Any) -> Any:
        return self.function(*numbers)


def interp(x: float, *points: float) -> Any:
    """``numpy.interp`` of a number, with all the points where the function is known and then its values there."""
    half = len(points) // 2
    return sys.modules["numpy"].interp(x, points[:half], points[half:])


class NumpyFunctions:
    """Records numpy's functions of the symbolic numbers of one capture.

    Args:
        shape_env: of the capture.
        computed: makes the symbol of ``function(*operands)``, of a dtype.
        made_of: how a symbolic number is computed; None where it is no result of a function.
        plain: makes a number one of Python's own types.
    """

    def __init__(
        self,
        shape_env: ShapeEnv,
        computed: Callable[[Any, list[Any], torch.dtype], Any],
        made_of: Callable[[Any], Computed | None],
        plain: Callable[[Any], Any],
    ) -> None:
        self._shape_env = shape_env
        self._computed = computed
        self._made_of = made_of
        self._plain = plain
        self._functions: dict[str, NumpyFunction] = {}

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """While active, calls of this thread are recorded."""
        with contextlib.ExitStack() as stack:
            for kind in _SYMBOLIC:
                stack.enter_context(stand_in(kind, "__array_ufunc__", _call))
                stack.enter_context(stand_in(kind, "__array_function__", _call_function))
                stack.enter_context(stand_in(kind, "__getattr__", _attribute))
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
        dtype = ufunc(*map(_sample, operands)).dtype
        if dtype.kind not in _DTYPES or dtype.itemsize not in (1, 8):
            return NotImplemented
        return self._symbol(ufunc, list(operands), _DTYPES[dtype.kind])

    def interpolated(self, x: Any, points: Any, values: Any) -> Any:
        """The symbol of ``numpy.interp``; NotImplemented where its arguments are no numbers and lists of numbers."""
        points, values = (each.tolist() if hasattr(each, "tolist") else each for each in (points, values))
        lists = isinstance(points, (list, tuple)) and isinstance(values, (list, tuple)) and len(points) == len(values)
        operands = [x, *points, *values] if lists else []
        if not operands or not all(map(self._is_number, operands)):
            return NotImplemented
        return self._symbol(interp, operands, torch.float64)

    def attribute(self, number: Any, name: str) -> Any:
        """An attribute of the number that eager has there, of Python or of numpy.

        Raises:
            AttributeError: it has none of that name.
            CannotCapture: the attribute needs a value that only the step's data decides.
        """
        kind: Any = float if isinstance(number, torch.SymFloat) else int
        numpy: Any = sys.modules.get("numpy")
        of_numpy = numpy is not None and self._is_of_numpy(number)
        if of_numpy:
            kind = numpy.float64 if kind is float else numpy.int64
        if not hasattr(kind, name):
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
        value = None if of_numpy and name in _FOLLOWED else plain_number(number)
        if value is not None:
            return getattr(kind(value), name)
        match name if of_numpy else None:
            case "mean" if kind is numpy.int64:
                return lambda: self._converted(number, numpy.dtype("float64"))
            case each if each in _OF_ONE_ELEMENT:
                return lambda: number
            case "item" | "tolist":
                return lambda: self._plain(number)
            case "round":
                return lambda decimals=0: self._symbol(numpy.round, [number, decimals], _DTYPES[numpy.dtype(kind).kind])
            case "clip":
                return functools.partial(numpy.clip, number)
            case "astype":
                return lambda wanted: self._converted(number, numpy.dtype(wanted))
            case "dtype" | "shape" | "ndim" | "size":
                return getattr(kind(), name)
        reason = f"`.{name}` of a number that only the step's data decides needs its value"
        raise CannotCapture(user_line(), reason, "Use functions of math, numpy or torch, or take it out of the step")

    def _symbol(self, function: Any, operands: list[Any], dtype: torch.dtype) -> Any:
        target = self._functions.setdefault(function.__name__, NumpyFunction(function))
        return self._computed(target, operands, dtype)

    def _converted(self, number: Any, dtype: Any) -> Any:
        numpy = sys.modules["numpy"]
        if dtype not in (numpy.float64, numpy.int64):
            reason = f"numbers of dtype {dtype} are not followed"
            raise CannotCapture(user_line(), reason, "Convert it to float or int, or take it out of the step")
        return self._symbol(dtype.type, [number], _DTYPES[dtype.kind])

    def _is_of_numpy(self, number: Any) -> bool:
        """Whether eager has a number of numpy's there."""
        computed = self._made_of(number) if isinstance(number, _SYMBOLIC) else None
        if computed is None:
            return type(number).__module__ == "numpy"
        if isinstance(computed.function, NumpyFunction):
            return True
        return computed.function in _OPERATORS and any(map(self._is_of_numpy, computed.operands))

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
    if function is numpy.interp and len(args) == 3 and not kwargs and _mine.functions is not None:
        found = _mine.functions.interpolated(*args)
    if found is not NotImplemented:
        return found
    return function._implementation(*args, **kwargs)


def _attribute(number: Any, name: str) -> Any:
    """``__getattr__`` of symbolic numbers."""
    if _mine.functions is not None and _mine.functions.knows(number):
        return _mine.functions.attribute(number, name)
    raise AttributeError(f"{type(number).__name__!r} object has no attribute {name!r}")


def _sample(operand: Any) -> Any:
    """A number of the same type, to see what type of result it gives."""
    return {torch.SymFloat: 1.0, torch.SymInt: 1}.get(type(operand), operand)
