"""Arithmetic with symbolic floats, operation by operation as Python does it.

Torch keeps a symbolic number as a sympy expression. Sympy computes with real numbers: it reorders sums, cancels factors
and drops ``* 0``. That is exact for integers. Floats round after every operation, so ``a + 0.1 + 0.2`` differs from
``a + 0.3``, and ``a * 0`` is nan where a is infinite. While a step is captured, the result of each operation that gives
a float is therefore a symbol of its own, computed by a node from the operands of this one operation.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import sympy
import torch
from torch.fx.experimental.sym_node import SymNode, wrap_node
from torch.utils._sympy.numbers import int_oo

from weft import torch_adapter
from weft.capture.record.caught_errors import KINDS, error_of, is_caught, may_raise, raise_example
from weft.capture.record.host_arrays import HostArray
from weft.capture.record.host_draws import GeneratorDraw
from weft.capture.record.plain_numbers import NumpyFloat, plain_number
from weft.capture.record.recorder import recording
from weft.capture.record.symbols import Computed, Symbols
from weft.short_tracebacks import called_for_user
from weft.thread_patches import present, replaced

# Methods of torch's SymNode whose result may be a float, and what computes it from Python numbers.
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "mod": operator.mod,
    "float_truediv": operator.truediv,
    "int_truediv": operator.truediv,
    "float_pow": operator.pow,
    "neg": operator.neg,
    "abs": abs,
    "sym_float": torch.sym_float,
    "sym_sqrt": torch.sym_sqrt,
    "sym_min": torch.sym_min,
    "sym_max": torch.sym_max,
    "sym_ite": torch.sym_ite,
    "round": round,
}
# Those of whole numbers, which torch computes exactly. Python raises an exception for some of their operands.
_OF_WHOLE: dict[str, Callable[..., Any]] = {
    "int_floordiv": operator.floordiv,
    "pow_by_natural": operator.pow,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
    "trunc": math.trunc,
    "floor": math.floor,
    "ceil": math.ceil,
}
_WITH_POWERS = frozenset({"lshift", "rshift", "pow", "pow_by_natural"})
_COMPARISONS: dict[str, Callable[..., Any]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
# Functions of one or two numbers, or tensors of one, whose results are floats. Python would ask for their values.
MATH = (
    *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cos", "cosh", "sin", "sinh", "tan", "tanh"),
    *("cbrt", "erf", "erfc", "exp", "exp2", "expm1", "fabs", "fmod", "gamma", "hypot", "lgamma", "log", "log10"),
    *("log1p", "log2", "pow", "copysign", "degrees", "radians", "remainder", "sqrt"),
)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_finite(number: float) -> float:
    """1.0 for a finite number, 0.0 otherwise."""
    return float(math.isfinite(number))


def is_infinite(number: float) -> float:
    """1.0 for an infinity, 0.0 otherwise."""
    return float(math.isinf(number))


def is_nan(number: float) -> float:
    """1.0 for NaN, 0.0 otherwise."""
    return float(math.isnan(number))


def is_close(a: float, b: float, rel_tol: float = 1e-9, abs_tol: float = 0.0) -> float:
    """1.0 where ``math.isclose`` holds, 0.0 otherwise."""
    return float(math.isclose(a, b, rel_tol=rel_tol, abs_tol=abs_tol))


def sum_of(start: float, *numbers: float) -> float:
    """``sum(numbers, start)`` of plain numbers, as the running Python adds floats."""
    return sum(numbers, start)


def plain_int(number: int) -> int:
    """The number as Python's own type has it, where numpy has made it."""
    return int(number)


def plain_float(number: float) -> float:
    """The same of a float."""
    return float(number)


# Questions about numbers, where Python would ask for their values, too.
_QUESTIONS: dict[str, Callable[..., float]] = {
    "isfinite": is_finite,
    "isinf": is_infinite,
    "isnan": is_nan,
    "isclose": is_close,
}
_TOLERANCES = (("rel_tol", 1e-9), ("abs_tol", 0.0))


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


class FloatArithmetic:
    """Makes the float results of one capture's symbolic arithmetic symbols of their own.

    Args:
        symbols: of the capture; learns each result.
        emit: appends a call to the graph.

    Attributes:
        shape_env: of the capture.
    """

    def __init__(self, symbols: Symbols, emit: Callable[..., torch.fx.Node]) -> None:
        self.shape_env = symbols.shape_env
        self._symbols = symbols
        self._emit = emit
        self._results: dict[Any, Any] = {}

    @contextlib.contextmanager
    def exact(self) -> Iterator[None]:
        """While active, arithmetic of this thread is recorded operation by operation."""
        with contextlib.ExitStack() as stack:
            for name, function in {**_OPERATIONS, **_OF_WHOLE, **_COMPARISONS}.items():
                stack.enter_context(replaced(SymNode, name, self._recorded(name, function)))
            # Torch takes the floor of the quotient, which is another number where the quotient rounds up, wants the
            # base of every power to be positive, and does not round integers to tens.
            for kind, name, method in (
                (torch.SymFloat, "__floordiv__", self._floordiv),
                (torch.SymFloat, "__rfloordiv__", lambda a, b: self._floordiv(b, a)),
                (torch.SymInt, "__floordiv__", self._floordiv),
                (torch.SymInt, "__rfloordiv__", lambda a, b: self._floordiv(b, a)),
                (torch.SymFloat, "__pow__", self._pow),
                (torch.SymInt, "__round__", self._round),
            ):
                stack.enter_context(replaced(kind, name, _or_else(method, present(kind, name))))
            outer, _mine.arithmetic = _mine.arithmetic, self
            try:
                yield
            finally:
                _mine.arithmetic = outer
                self._results.clear()

    def choice(self, function: Callable[..., Any], numbers: Sequence[Any]) -> Any:
        """See :func:`choice`."""
        kinds = {_kind(number) for number in numbers}
        if any(type(number) is NumpyFloat for number in numbers):
            return None  # which of them it is decides the type
        if len(kinds) > 1 or None in kinds or not self._knows(numbers):
            return None
        if len(numbers) == 1:
            return numbers[0]
        if float in kinds:
            return self._result(function, list(numbers), torch.float64)
        return functools.reduce(torch.sym_max if function is max else torch.sym_min, numbers)

    def added(self, numbers: Sequence[Any]) -> Any:
        """See :func:`added`."""
        whole = (bool, torch.SymBool)  # Python's sum takes truth values for integers
        kinds = {int if type(number) in whole else _kind(number) for number in numbers}
        floats = float in kinds and None not in kinds and self._knows(numbers)
        return self._result(sum_of, list(numbers), torch.float64) if floats else None

    def computed(self, function: Callable[..., Any], operands: list[Any], dtype: torch.dtype) -> Any:
        """See :func:`computed`."""
        return self._result(function, operands, dtype) if self._knows(operands) else None

    def plain(self, number: Any) -> Any:
        """See :func:`plain`."""
        if type(number) is not NumpyFloat and not self._is_made_by_numpy(number):
            return number
        if isinstance(number, torch.SymFloat):
            return self._result(plain_float, [number], torch.float64, number.node)
        return self._result(plain_int, [number], torch.int64, number.node)

    def _is_made_by_numpy(self, number: Any) -> bool:
        if not self._is_known(number) or not isinstance(torch_adapter.expression(number), sympy.Symbol):
            return False
        node = self._symbols.node(number)
        return isinstance(node, torch.fx.Node) and isinstance(node.target, (NumpyFunction, GeneratorDraw))

    def asked(self, answer: Callable[..., float], numbers: Sequence[Any], tolerances: dict[str, Any]) -> Any:
        """A question of ``math`` about numbers: a condition; None where no number is symbolic."""
        named = (tolerances.get(name, default) for name, default in _TOLERANCES if tolerances)
        operands = [*map(_number, (*numbers, *named))]
        known = self._knows(operands) and tolerances.keys() <= dict(_TOLERANCES).keys()
        return self._result(answer, operands, torch.float64) != 0 if known else None

    def _knows(self, numbers: Sequence[Any]) -> bool:
        """Whether there is a symbolic number among these, and nothing but numbers of this capture."""
        return any(isinstance(number, _SYMBOLIC) for number in numbers) and all(map(self._is_known, numbers))

    def _is_known(self, number: Any) -> bool:
        if isinstance(number, _SYMBOLIC):
            return torch_adapter.shape_env_of_number(number) is self._symbols.shape_env
        return issubclass(type(number), (int, float))

    def _recorded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        original = present(SymNode, name)

        def method(node: SymNode, *others: Any) -> SymNode:
            if node.shape_env is not self._symbols.shape_env:
                return original(node, *others)
            operands = [wrap_node(each) if isinstance(each, SymNode) else each for each in (node, *others)]
            if any(isinstance(each, _SYMBOLIC) for each in operands):
                self._ask_for_error(function, operands)
            try:
                result = original(node, *others)
                # Torch makes an infinity of a power beyond 64 bits, and knows for certain then what is not so.
                if name in _WITH_POWERS and isinstance(result.expr, sympy.Basic) and result.expr.has(int_oo):
                    raise OverflowError
            except (ArithmeticError, AttributeError, ValueError):  # torch 2.11 cannot shift by symbols: AttributeError
                result = _of_values(function, operands)
                return node.wrap_float(result) if isinstance(result, float) else node.wrap_int(result)
            if not (result.pytype is float or _decided(result)):
                return result
            if name in _COMPARISONS:
                return self._result(function, operands, torch.bool).node if any(map(_may_be_nan, operands)) else result
            if not any(isinstance(each, _SYMBOLIC) for each in operands):
                return node.wrap_float(float(function(*operands)))
            found = self._result(function, operands, torch.float64, result)
            return node.wrap_float(found) if isinstance(found, float) else found.node

        return method

    def _floordiv(self, a: Any, b: Any) -> Any:
        if not _is_float(a) and not _is_float(b):
            return None
        return self._result(operator.floordiv, [a, b], torch.float64)

    def _pow(self, a: Any, b: Any) -> Any:
        """Powers with a whole exponent, which are floats for every base."""
        return self._result(operator.pow, [a, b], torch.float64) if _is_whole(b) else None

    def _round(self, a: Any, digits: Any) -> Any:
        return self._result(round, [a, digits], torch.int64) if isinstance(digits, int) and digits < 0 else None

    def _result(
        self, function: Callable[..., Any], operands: list[Any], dtype: torch.dtype, known: SymNode | None = None
    ) -> Any:
        """The symbol of ``function(*operands)``; equal calls share one.

        Args:
            known: what torch made of the call: its bounds hold, as rounding keeps the order of numbers.
        """
        self._ask_for_error(function, operands)
        key = function, *map(_key, operands)
        if key not in self._results:
            value = self._results[key] = self._symbol(function, operands, dtype, known)
            if isinstance(value, float):
                return value
            self._symbols.define(value, lambda: self._node(value, function, operands))
            self._symbols.computed[torch_adapter.symbol_of(value)] = Computed(function, operands)
            del self._symbols.shape_env.pending_fresh_unbacked_symbols[:]
        return self._results[key]

    def _ask_for_error(self, function: Callable[..., Any], operands: list[Any]) -> None:
        """Ask whether the operation raises an exception, where the user's code catches it; raise it."""
        recorder = recording()
        if recorder is None or recorder.runs_operation or not may_raise(function, operands) or not is_caught():
            return  # an operation that runs has checked its sizes
        code = self._result(error_of(function), operands, torch.float64)
        if code != 0:
            kind = next(kind for number, kind in enumerate(KINDS, 1) if code == number)
            raise_example(function, operands, [*map(_hint, operands)], kind)

    def _symbol(
        self, function: Callable[..., Any], operands: list[Any], dtype: torch.dtype, known: SymNode | None
    ) -> Any:
        shape_env = self._symbols.shape_env
        hints = [_hint(each) for each in operands]
        if dtype is torch.float64 and None not in hints:
            try:
                hint = function(*hints)
            except (ArithmeticError, TypeError, ValueError):
                return _of_values(function, operands)
            # A comparison with a symbol whose value is infinite or NaN adds no guard. Where an operand is infinite or
            # NaN already, so is the result for most values of the others, and it stays a symbol.
            if not math.isfinite(hint) and all(map(math.isfinite, hints)):
                return _of_values(function, operands)
            # Torch takes Python's own floats for hints, and no numpy.float64.
            hint = float(hint) if isinstance(hint, float) else hint
            return torch_adapter.number_symbol(shape_env, hint, f"computed{len(self._results)}")
        value = cast(Any, torch_adapter.fresh_number(shape_env, dtype))
        if known is not None and not any(map(_unbounded, operands)):
            torch_adapter.constrain(value, *_bounds(known))
        return value

    def _node(self, value: Any, function: Callable[..., Any], operands: list[Any]) -> torch.fx.Node:
        nodes = [self._symbols.node(each) if isinstance(each, _SYMBOLIC) else each for each in operands]
        return self._emit(function, *nodes, val=value)


class _ArithmeticOfThread(threading.local):
    """That of the capture that is going on in the running thread."""

    arithmetic: FloatArithmetic | None = None


_mine = _ArithmeticOfThread()


def choice(function: Callable[..., Any], numbers: Sequence[Any]) -> Any:
    """``max(*numbers)`` or ``min(*numbers)`` without a question; None where the result may be of several types, and
    where no number is symbolic."""
    return None if _mine.arithmetic is None else _mine.arithmetic.choice(function, numbers)


def plain(number: Any) -> Any:
    """A symbolic number as ``int`` or ``float`` give it: of Python's own types, also where numpy computes it."""
    return number if _mine.arithmetic is None else _mine.arithmetic.plain(number)


def computed(function: Callable[..., Any], operands: list[Any], dtype: torch.dtype) -> Any:
    """``function(*operands)`` as one operation of Python's, whose result has this dtype; None where no operand is
    symbolic."""
    return None if _mine.arithmetic is None else _mine.arithmetic.computed(function, operands, dtype)


def _of_math(original: Callable[..., float]) -> Callable[..., Any]:
    """A function of ``math``: of symbolic numbers, it gives a symbol that a node computes."""

    @functools.wraps(original)
    def function(*numbers: Any) -> Any:
        found = computed(original, [*map(_number, numbers)], torch.float64)
        return called_for_user(original, *numbers) if found is None else found

    return function


def _asking(original: Callable[..., bool], answer: Callable[..., float]) -> Callable[..., Any]:
    """A question of ``math`` about numbers: of symbolic ones, a condition."""

    @functools.wraps(original)
    def function(*numbers: Any, **tolerances: Any) -> Any:
        found = None if _mine.arithmetic is None else _mine.arithmetic.asked(answer, numbers, tolerances)
        return original(*numbers, **tolerances) if found is None else found

    return function


def math_replacements() -> list[tuple[Any, str, Any]]:
    """(owner, name, replacement) of the functions of ``math``, or of those that a program has put in their place."""
    found: list[tuple[Any, str, Any]] = [(math, name, _of_math(getattr(math, name))) for name in MATH]
    return found + [(math, name, _asking(getattr(math, name), answer)) for name, answer in _QUESTIONS.items()]


def added(start: Any, numbers: Sequence[Any]) -> Any:
    """``sum(numbers, start)`` as one operation of Python's; None where there are no floats among plain numbers, and
    where no number is symbolic."""
    return None if _mine.arithmetic is None else _mine.arithmetic.added([start, *numbers])


def _of_values(function: Callable[..., Any], operands: list[Any]) -> Any:
    """The result for the values of the captured call, which become guards: infinities, NaN and exceptions are no
    symbols."""
    return function(*[plain_number(each) if isinstance(each, _SYMBOLIC) else each for each in operands])


def _kind(number: Any) -> type | None:
    if issubclass(type(number), (float, torch.SymFloat)):
        return float
    return int if type(number) in (int, torch.SymInt) else None


def _or_else(method: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def either(a: Any, *b: Any) -> Any:
        result = method(a, *b) if b and isinstance(b[0], (int, float, *_SYMBOLIC)) else None
        return original(a, *b) if result is None else result

    return either


def _number(operand: Any) -> Any:
    return operand.item() if isinstance(operand, torch.Tensor) or type(operand) is HostArray else operand


def _key(operand: Any) -> Any:
    """The text of a plain number (0.0 equals -0.0, and nan no nan), the expression of a symbolic one."""
    return torch_adapter.expression(operand) if isinstance(operand, _SYMBOLIC) else repr(operand)


def _is_float(number: Any) -> bool:
    return isinstance(number, (float, torch.SymFloat))


def _is_whole(number: Any) -> bool:
    return isinstance(number, (int, float)) and math.isfinite(number) and number == int(number)


def _decided(result: SymNode) -> bool:
    return result.expr in (sympy.true, sympy.false)


def _may_be_nan(operand: Any) -> bool:
    """Whether it is a float that only the data decides and that has no bounds: then ``a == a`` may be false."""
    return _is_float(operand) and _unbounded(operand)


def _unbounded(operand: Any) -> bool:
    """Whether a number may be infinite or nan. What was computed from bounded numbers has bounds too."""
    if not isinstance(operand, _SYMBOLIC):
        return not math.isfinite(operand)
    return _hint(operand) is None and (isinstance(operand, torch.SymBool) or None in _bounds(operand.node))


def _hint(operand: Any) -> Any:
    """The number that a symbolic one is in the captured call; None where only the data decides it."""
    if not isinstance(operand, _SYMBOLIC):
        return operand
    return operand.node.hint if operand.node.has_hint() else None


def _bounds(node: Any) -> tuple[float | None, float | None]:
    known = node.shape_env.bound_sympy(node.expr)
    low, high = float(known.lower), float(known.upper)
    return low if math.isfinite(low) else None, high if math.isfinite(high) else None
