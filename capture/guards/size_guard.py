"""The guard on symbolic sizes and numbers: what a capture assumed of them, as one Python expression.

Torch collects the assumptions as sympy expressions while the step runs. They are printed as Python and compiled into
one function, so that a check costs microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import sympy
import torch
from torch.utils._sympy.printers import PythonPrinter

from weft import torch_adapter
from weft.capture.guards.steady_checks import Steady
from weft.capture.record.captured_step import CapturedStep
from weft.capture.record.python_numbers import PythonNumber
from weft.capture.record.symbols import Number
from weft.capture.state.containers import Container

_NAMES = {"math": math, "torch": torch, "isfinite": math.isfinite, "copysign": math.copysign}


class SizeGuard:
    """Guards the symbolic sizes, strides and Python numbers of a call.

    There are four kinds of conditions: comparisons that the step made (``s0 == 10``), the range of each size (from 2,
    because smaller sizes are never symbols), strides that are products of symbolic sizes (``stride == s0*s1``), and the
    type of each number, of which a symbol can stand for no value that behaves unlike its neighbours (NaN).

    Attributes:
        conditions: Python expressions over the names of symbols.
    """

    def __init__(self, captured: CapturedStep) -> None:
        places = captured.arguments.tensors
        printed = PythonPrinter().doprint
        self._values: dict[str, tuple[str, Callable[[], Any]]] = {}
        self._containers = [places[size.leaf].container for size in captured.sizes.sizes]
        self.conditions: list[str] = []
        for size in captured.sizes.sizes:
            place = places[size.leaf]
            self._values[str(size.symbol)] = str(size), lambda place=place, size=size: size.of(place.get())
        for number in captured.numbers:
            self._values[str(number.symbol)] = number.place.path, number.place.get
            self._containers.append(number.place.container)
            self.conditions.append(_kind(number))
            if number.is_guarded:
                self.conditions.append(f"{number.symbol} == {number.value!r}")
        self._kinds = " and ".join(f"({c})" for c in self.conditions) or "True"
        self._computed = _computed(captured, self._values)
        known = {*self._values, *self._computed}
        for guard in torch_adapter.assumptions(captured.shape_env):
            if guard.free_symbols and {str(symbol) for symbol in guard.free_symbols} <= known:
                self.conditions.append(printed(guard))
        for size in captured.sizes.sizes:
            low, high = torch_adapter.range_of(captured.shape_env, size.symbol)
            self.conditions.append(f"{low} <= {size.symbol}" + ("" if high is None else f" <= {high}"))
        own = {(size.leaf, size.dim) for size in captured.sizes.sizes if size.stride}
        for leaf, val in captured.arguments.vals.items():
            for dim, stride in enumerate(val.stride()):
                if isinstance(stride, torch.SymInt) and (leaf, dim) not in own:
                    name, place = f"stride_{leaf}_{dim}", places[leaf]
                    self._containers.append(place.container)
                    self._values[name] = (
                        f"{place.path}.stride({dim})",
                        lambda place=place, dim=dim: place.get().stride(dim),
                    )
                    self.conditions.append(f"{name} == {printed(stride.node.expr)}")
        self.conditions = list(dict.fromkeys(self.conditions))
        self._holds = self._function(" and ".join(f"({c})" for c in self.conditions) or "True")

    def __len__(self) -> int:
        return len(self.conditions)

    def steady(self, watches: Callable[[Container], bool]) -> Steady:
        """What holds only if all conditions do.

        Args:
            watches: whether other checks see that no entry of a container is another object.
        """
        return Steady() if all(map(watches, self._containers)) else Steady(rest=lambda: self.failure() is None)

    def failure(self) -> str | None:
        """The first condition that does not hold for the bound arguments, as text; None where all hold."""
        values = [value() for _, value in self._values.values()]
        if self._holds(*values):
            return None
        broken = next(c for c in self.conditions if not self._function(c)(*values))
        text, where = broken, []
        for name, (function, operands) in reversed(self._computed.items()):
            if name in text:
                where.insert(0, f"{name} = {function.__name__}({operands})")
                text += operands
        for (name, (shown, _)), value in zip(self._values.items(), values, strict=True):
            if name in text:
                where.append(f"{name} = {shown} = {value}")
        return f"{broken} does not hold for {', '.join(where)}"

    def _function(self, condition: str) -> Callable[..., bool]:
        """The condition as a function of the values; where an operation of it fails, it does not hold."""
        functions: dict[str, Any] = dict(_NAMES)
        lines: list[str] = []
        for name, (function, operands) in reversed(self._computed.items()):
            if name in condition or any(name in line for line in lines):
                functions[f"compute_{name}"] = function
                lines.insert(0, f"        {name} = compute_{name}({operands})\n")
        body = [*lines, f"        return {condition}\n"]
        head = f"def holds({', '.join(self._values)}):\n    if not ({self._kinds}):\n        return False\n    try:\n"
        exec("".join([head, *body, "    except (ArithmeticError, ValueError):\n        return False\n"]), functions)
        return functions["holds"]


def _computed(captured: CapturedStep, names: Collection[str]) -> dict[str, tuple[Callable[..., Any], str]]:
    """For each symbol that is computed from ``names``: the function, and its operands as Python text."""
    found: dict[str, tuple[Callable[..., Any], str]] = {}
    for symbol, computed in captured.computed.items():
        exprs = [torch_adapter.expression(each) if isinstance(each, Number) else each for each in computed.operands]
        used = {str(each) for expr in exprs for each in getattr(expr, "free_symbols", ())}
        if used <= {*names, *found}:
            found[str(symbol)] = computed.function, ", ".join(map(_text, exprs))
    return found


def _text(operand: Any) -> str:
    if isinstance(operand, sympy.Basic):
        return PythonPrinter().doprint(operand)
    return repr(operand) if isinstance(operand, int) else f"float('{operand}')"


def _kind(number: PythonNumber) -> str:
    name = str(number.symbol)
    if isinstance(number.value, int):
        return f"type({name}) is int and {-(2**63)} <= {name} < {2**63}"
    kind = type(number.value).__name__  # that of numpy is called float64
    return f"type({name}).__name__ == '{kind}' and isfinite({name}) and ({name} or copysign(1, {name}) > 0)"
