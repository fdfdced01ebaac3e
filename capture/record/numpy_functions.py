"""numpy's functions of single numbers, such as ``np.isfinite(loss.item())``, and operators with a number of numpy's.

numpy knows no symbolic numbers. It hands a function of which one is an argument to the ``__array_ufunc__`` of that
argument's class. In eager the result is a number of numpy's (``np.float64``, which divides by zero without an error),
and the user's code may depend on its type. What becomes of a call in the user's code:

- With a number that only the step's data decides, the result is a
  :class:`~weft.capture.record.host_arrays.HostArray`, which has numpy's type and methods.
- A result that is one ``numpy.float64`` is a node, and a :class:`~weft.capture.record.plain_numbers.NumpyFloat`.
- Otherwise all values are known in the captured call. They become guards, and numpy computes the result.
- Operators for which numpy gives the same bits as Python (``+ - *``, division by a number that is not 0) stay
  symbolic: their result is a :class:`~weft.capture.record.plain_numbers.NumpyFloat`.

Torch's own code does not depend on numpy's types. There, a call is a node whose result is a symbolic number.
"""

from __future__ import annotations

import contextlib
import dis
import math
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from weft.capture.record.array_calls import map_leaves
from weft.capture.record.array_recorder import ArrayRecorder
from weft.capture.record.float_arithmetic import FloatArithmetic, NumpyFunction
from weft.capture.record.plain_numbers import NumpyFloat, numpy_float, plain_number
from weft.source_files import is_user_file
from weft.thread_patches import present, replaced, stand_in


def _swapped(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: function(b, a)


_SYMBOLIC = (torch.SymInt, torch.SymFloat)
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift")
_OTHERS = ("lt", "le", "eq", "ne", "gt", "ge", "neg", "pos", "abs")
# Of numbers of 64 bits numpy makes of these what Python makes of them.
_EXACT = frozenset(
    {"__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__neg__", "__pos__", "__abs__"}
)
_DIVISIONS = {"__truediv__": 1, "__rtruediv__": 0}  # with the place of the divisor
_COMPARISONS = frozenset({"__lt__", "__le__", "__eq__", "__ne__", "__gt__", "__ge__"})
# The methods by which Python applies operators, and what applies each to the same operands.
_OPERATORS: dict[str, Callable[..., Any]] = {
    **{f"__{name.strip('_')}__": getattr(operator, name) for name in (*_BINARY, *_OTHERS)},
    **{f"__r{name.strip('_')}__": _swapped(getattr(operator, name)) for name in _BINARY},
    **{"__round__": round, "__trunc__": math.trunc},
}
_REFLECTED = frozenset(f"__r{name.strip('_')}__" for name in _BINARY)
# numpy's functions of two numbers, where Python's operators have other names.
_NAMES = {
    **{"sub": "subtract", "mul": "multiply", "truediv": "true_divide", "floordiv": "floor_divide", "mod": "remainder"},
    **{"pow": "power", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "lshift": "left_shift"},
    **{"rshift": "right_shift", "lt": "less", "le": "less_equal", "eq": "equal", "ne": "not_equal"},
    **{"gt": "greater", "ge": "greater_equal"},
}
_PLAIN = frozenset({bool, int, float})
_DTYPES = {"f": torch.float64, "i": torch.int64, "b": torch.bool}  # by the kind of numpy's dtype


class NumpyFunctions:
    """Follows numpy's functions of the symbolic numbers of one capture.

    Args:
        arithmetic: of the capture.
        followed: gives what records the arrays of the capture; raises where arrays are not followed yet.
    """

    def __init__(self, arithmetic: FloatArithmetic, followed: Callable[[], ArrayRecorder]) -> None:
        self._arithmetic = arithmetic
        self._followed = followed
        self._functions: dict[str, NumpyFunction] = {}

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """While active, calls of this thread are recorded."""
        with contextlib.ExitStack() as stack:
            for kind in _SYMBOLIC:
                stack.enter_context(stand_in(kind, "__array_ufunc__", _call))
                stack.enter_context(stand_in(kind, "__array_function__", _call_function))
                stack.enter_context(stand_in(kind, "__array__", _array))
                for name in _OPERATORS:
                    if hasattr(kind, name):
                        stack.enter_context(replaced(kind, name, _with_numpy(name, present(kind, name))))
            outer, _mine.functions = _mine.functions, self
            try:
                yield
            finally:
                _mine.functions = outer

    def knows(self, number: Any) -> bool:
        """Whether a symbolic number is of this capture."""
        return number.node.shape_env is self._arithmetic.shape_env

    def call(self, ufunc: Any, method: str, operands: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The result of a function of numpy's; NotImplemented makes numpy raise a TypeError that names the class of the
        symbol."""
        # Of numpy's smaller types the result depends on the types of all operands, whoever asks.
        if _asked_by_user() or any(map(_is_small, operands)):
            if self._undecided((operands, options)):
                return self._followed().ufunc(ufunc, method, operands, options)
            by_operator = ufunc.__name__ == "power" and method == "__call__" and _is_operator()
            if self._gives_float64(ufunc, method, operands, options):
                found = self._computed(_power if by_operator else ufunc, operands)
                return NumpyFloat(found) if isinstance(found, torch.SymFloat) else numpy_float(found)
            values, given = self._with_values((operands, options))
            return operator.pow(*values) if by_operator else getattr(ufunc, method)(*values, **given)
        if method != "__call__" or options or ufunc.nout != 1 or not all(map(self._is_number, operands)):
            return NotImplemented
        dtype = ufunc(*map(_sample, operands)).dtype
        if dtype.kind not in _DTYPES or dtype.itemsize not in (1, 8):
            return NotImplemented
        return self._computed(ufunc, operands, _DTYPES[dtype.kind])

    def _gives_float64(self, ufunc: Any, method: str, operands: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Whether the result is one ``numpy.float64``, for whose type to the user's code there is a symbolic number."""
        known = method == "__call__" and not options and ufunc.nout == 1 and all(map(self._is_number, operands))
        return known and ufunc(*map(_sample, operands)).dtype == "float64"

    def _computed(self, function: Any, operands: tuple[Any, ...], dtype: torch.dtype = torch.float64) -> Any:
        target = self._functions.setdefault(function.__name__, NumpyFunction(function))
        return self._arithmetic.computed(target, list(operands), dtype)

    def call_function(self, function: Any, args: Any, kwargs: Any) -> Any:
        """The same of a function that is no ufunc: ``numpy.clip``, ``numpy.interp``."""
        if _asked_by_user():
            if self._undecided((args, kwargs)):
                return self._followed().function(function, args, kwargs)
            args, kwargs = self._with_values((args, kwargs))
            return function(*args, **kwargs)
        return function._implementation(*args, **kwargs)

    def array(self, number: Any, dtype: Any) -> Any:
        """What functions in C make of a number: an array of its value, which is a guard.

        Raises:
            UncapturableDraw: only the step's data decides it.
        """
        value = plain_number(number)
        if value is None:
            why = "code in C asks for the value of a number that only the step's data decides"
            remedy = "make an array of it: numpy.asarray(x), or numpy.asarray(x, dtype=numpy.float32)[()] for a number"
            raise self._followed().refusal("a conversion to a type of numpy's", why, remedy)
        return sys.modules["numpy"].array(value, dtype=dtype)

    def apply(self, name: str, original: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
        """The result of an operator with a number of numpy's among its operands; NotImplemented where Python must ask
        the other operand."""
        function, plain = _OPERATORS[name], [*map(_of_torch, operands)]
        if any(isinstance(each, torch.Tensor) for each in operands):
            return original(*plain)  # torch goes by the values
        if self._undecided(operands):
            ordered = operands[::-1] if name in _REFLECTED else operands
            return self._followed().ufunc(_ufunc(name), "__call__", ordered, {})
        if all(map(_is_float64_or_python, operands)):
            # Numbers of 64 bits: numpy computes as Python does, but for the type, and where Python raises an error.
            if name in _EXACT or (name in _DIVISIONS and bool(plain[_DIVISIONS[name]] != 0)):
                found = original(*plain)
                return NumpyFloat(found) if isinstance(found, torch.SymFloat) else numpy_float(found)
            if name in _COMPARISONS:
                return sys.modules["numpy"].bool_(bool(original(*plain)))
        values = [plain_number(each) if type(each) is NumpyFloat else each for each in operands]
        if all(map(operator.is_, values, operands)):
            return NotImplemented  # Python asks the other operand
        return function(*values)

    def _undecided(self, tree: Any) -> bool:
        """Whether there is a number that only the step's data decides. The others need not be guards then."""
        found: list[Any] = []
        map_leaves(tree, found.append)
        return any(isinstance(each, _SYMBOLIC) and not each.node.has_hint() for each in found)

    def _with_values(self, tree: Any) -> Any:
        """``tree`` with the values of those numbers that have one, which are guards."""

        def leaf(each: Any) -> Any:
            value = plain_number(each) if isinstance(each, _SYMBOLIC) and self.knows(each) else None
            return each if value is None else value

        return map_leaves(tree, leaf)

    def _is_number(self, operand: Any) -> bool:
        if isinstance(operand, _SYMBOLIC):
            return self.knows(operand)
        # Not a scalar of numpy's smaller types: whether it decides the type of the result depends on the others' types.
        return type(operand) in _PLAIN or (isinstance(operand, float) and type(operand).__name__ == "float64")


class _FunctionsOfThread(threading.local):
    """Those of the capture that is going on in the running thread."""

    functions: NumpyFunctions | None = None


_mine = _FunctionsOfThread()


def _functions_of(number: Any) -> NumpyFunctions | None:
    """Those of the capture that a symbolic number is of, if it goes on in this thread."""
    return _mine.functions if _mine.functions is not None and _mine.functions.knows(number) else None


def _call(number: Any, ufunc: Any, method: str, *operands: Any, **options: Any) -> Any:
    """``__array_ufunc__`` of symbolic numbers. Those of other tracers are objects to numpy, as they always are."""
    if (functions := _functions_of(number)) is not None:
        return functions.call(ufunc, method, operands, options)
    objects = [_as_object(each) if isinstance(each, _SYMBOLIC) else each for each in operands]
    return getattr(ufunc, method)(*objects, **options)


def _call_function(number: Any, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """``__array_function__`` of symbolic numbers."""
    if (functions := _functions_of(number)) is not None:
        return functions.call_function(function, args, kwargs)
    return function._implementation(*args, **kwargs)


def _array(number: Any, dtype: Any = None, copy: bool | None = None) -> Any:
    """``__array__`` of symbolic numbers, by which functions in C make an array of one."""
    functions = _functions_of(number)
    return _as_object(number) if functions is None else functions.array(number, dtype)


def _as_object(number: Any) -> Any:
    array = sys.modules["numpy"].empty((), dtype=object)
    array[()] = number
    return array


def _with_numpy(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """An operator of symbolic numbers that leaves it to numpy where an operand is a number of numpy's."""

    def operate(number: Any, *others: Any) -> Any:
        kinds = [*map(type, (number, *others))]
        if NumpyFloat in kinds or kinds[-1].__module__ == "numpy":
            functions = _functions_of(number)
            if functions is not None and _asked_by_user():
                return functions.apply(name, original, (number, *others))
            if functions is not None and name in _EXACT and NumpyFloat in kinds:  # torch's schedulers make rates of it
                found = original(number, *others)
                return NumpyFloat(found) if type(found) is torch.SymFloat else found
        return original(number, *others)

    return operate


def _ufunc(name: str) -> Any:
    """numpy's function for an operator of two numbers, by the name of its method."""
    word = name.strip("_")
    word = word[1:] if name in _REFLECTED else word
    return getattr(sys.modules["numpy"], _NAMES.get(word, word))


def _of_torch(number: Any) -> Any:
    """A number of numpy's as torch computes with it."""
    if type(number) is NumpyFloat:
        return torch.SymFloat(number.node)
    return float(number) if _is_float64(number) else number


def _is_float64(number: Any) -> bool:
    return type(number).__name__ == "float64" and type(number).__module__ == "numpy"


def _is_small(number: Any) -> bool:
    return type(number).__module__ == "numpy" and not _is_float64(number)


def _is_float64_or_python(number: Any) -> bool:
    return type(number) in (NumpyFloat, int, float, *_SYMBOLIC) or _is_float64(number)


def _asked_by_user() -> bool:
    """Whether the user's code calls the function, and not torch's: an optimizer multiplies a rate by a weight decay."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("weft."):
        frame = frame.f_back
    return frame is not None and is_user_file(frame.f_code.co_filename)


def _is_operator() -> bool:
    """Whether the user's code applies an operator, and calls no function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("weft."):
        frame = frame.f_back
    return frame is not None and dis.opname[frame.f_code.co_code[frame.f_lasti]] == "BINARY_OP"


def _power(base: Any, exponent: Any) -> Any:
    """``**`` of numbers of numpy's: ``numpy.power`` computes with vector instructions, and gives other bits."""
    return numpy_float(base) ** exponent


def _sample(operand: Any) -> Any:
    """A number of the same type, to see what type of result it gives."""
    return 1.0 if isinstance(operand, torch.SymFloat) else 1 if isinstance(operand, torch.SymInt) else operand
