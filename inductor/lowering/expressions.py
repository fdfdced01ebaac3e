"""Values of the loop IR with Python's operators, so that a lowering reads like the formula that it computes.

Numbers next to an expression take its type, as Python numbers next to a tensor do; two expressions must have one type.
Booleans have logic where numbers have arithmetic: a sum of two is ``or``, a product ``and``, as in torch.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from weft.inductor.loop_ir.axes import integer
from weft.inductor.loop_ir.ir import Call, Const, Int, Value
from weft.inductor.lowering.registry import convert, literal, number

# Everything else has the dtype of its operands, which :func:`call` has made equal.
_BOOL_RESULTS = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "isnan", "isinf"})
# Torch's meaning of these operations on bool tensors. Arithmetic on Triton's int1 wraps: True + True is False there.
_ON_BOOLEANS = {
    "add": "or",
    "mul": "and",
    "minimum": "and",
    "maximum": "or",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_xor": "ne",
    "bitwise_not": "not",
}
_ORDERED = frozenset({"lt", "le", "gt", "ge"})


class Expression:
    """A value under construction."""

    __slots__ = ("value",)
    # `==` builds a comparison, so an Expression in a set or as a key would call it and find every object equal.
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Value) -> None:
        self.value = value

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in a register."""
        return self.value.dtype

    @property
    def is_float(self) -> bool:
        """Whether the dtype is a floating-point one."""
        return self.dtype.is_floating_point

    def to(self, dtype: torch.dtype) -> Expression:
        """In the register type of ``dtype``; a number is true where it is not zero."""
        # As a comparison: the IR's `to` changes a register's type, and 0.5 is true although its integer is 0.
        if dtype == torch.bool and self.dtype != torch.bool and not isinstance(self.value, Const):
            return self != 0
        return Expression(convert(self.value, dtype))

    def __add__(self, other: Any) -> Expression:
        return call("add", self, other)

    def __radd__(self, other: Any) -> Expression:
        return call("add", self.coerce(other), self)

    def __sub__(self, other: Any) -> Expression:
        return call("sub", self, other)

    def __rsub__(self, other: Any) -> Expression:
        return call("sub", self.coerce(other), self)

    def __mul__(self, other: Any) -> Expression:
        # Formulas have factors that are mostly 1 (`alpha`, `scale`); x * 1 is x to the bit, NaN and -0.0 included. x
        # + 0 is not (-0.0 + 0 is 0.0), so sums have no such rule.
        return self if _is_one(other) else call("mul", self, other)

    # IEEE multiplication commutes to the bit, so equal products written either way are one value.
    def __rmul__(self, other: Any) -> Expression:
        return self * other

    def __truediv__(self, other: Any) -> Expression:
        return self if _is_one(other) else call("div", self, other)

    def __rtruediv__(self, other: Any) -> Expression:
        return call("div", self.coerce(other), self)

    def __neg__(self) -> Expression:
        return call("neg", self)

    def __abs__(self) -> Expression:
        return call("abs", self)

    def __lt__(self, other: Any) -> Expression:
        return call("lt", self, other)

    def __le__(self, other: Any) -> Expression:
        return call("le", self, other)

    def __gt__(self, other: Any) -> Expression:
        return call("gt", self, other)

    def __ge__(self, other: Any) -> Expression:
        return call("ge", self, other)

    def __eq__(self, other: Any) -> Expression:  # type: ignore[override]
        return call("eq", self, other)

    def __ne__(self, other: Any) -> Expression:  # type: ignore[override]
        return call("ne", self, other)

    def __and__(self, other: Any) -> Expression:
        return call("bitwise_and", self, other)

    def __or__(self, other: Any) -> Expression:
        return call("bitwise_or", self, other)

    def __invert__(self) -> Expression:
        return call("bitwise_not", self)

    def coerce(self, other: Any) -> Expression:
        """``other`` (an expression, a number or a number node) in this expression's type."""
        return other if isinstance(other, Expression) else Expression(number_of(other, self.dtype))


def call(op: str, *args: Any) -> Expression:
    """An operation of :data:`weft.inductor.loop_ir.ops.OPS`; numbers take the type of the last argument that has
    one."""
    # The last, since the first operand of `where` is its condition.
    typed = [arg for arg in args if isinstance(arg, Expression)][-1]
    operands = [typed.coerce(arg) for arg in args]
    dtype = operands[-1].dtype
    if dtype == torch.bool:
        op = _ON_BOOLEANS.get(op, op)
        # As integers, so that False < True does not depend on how a backend signs a single bit.
        if op in _ORDERED:
            operands = [operand.to(torch.int32) for operand in operands]
    # An implicit promotion here would be Triton's, not torch's: a lowering converts, or it is wrong.
    assert op == "where" or all(o.dtype == operands[0].dtype for o in operands), (op, [o.dtype for o in operands])
    result = torch.bool if op in _BOOL_RESULTS else dtype
    return Expression(Call(op, tuple(operand.value for operand in operands), result))


def checked_index(position: Value, size: Int, condition: Value | None = None) -> Value:
    """A position (int64) that the data decides, of a dimension of ``size``. Kernels assert that it is in
    ``range(size)`` where ``condition`` holds, as eager's kernels do: without the assertion, a load would read another
    element or beyond the tensor."""
    condition = literal(True, torch.bool) if condition is None else condition
    return Call("checked_index", (position, integer(size), condition), torch.int64)


def where(condition: Expression, yes: Any, no: Any) -> Expression:
    """``yes`` where the condition holds, ``no`` elsewhere; one of the two may be a number."""
    # A number takes the type of the other branch, not of the condition.
    if not isinstance(yes, Expression):
        yes = no.coerce(yes)
    return call("where", condition, yes, yes.coerce(no))


def logical_and(a: Expression, b: Expression) -> Expression:
    """The conjunction of two booleans."""
    return call("and", a, b)


def within(position: Expression, size: Int) -> Expression:
    """Whether a position is in ``range(size)``."""
    return logical_and(position >= 0, position < Expression(integer(size)))


def number_of(arg: Any, dtype: torch.dtype) -> Value:
    """A number or number node as a value of register type ``dtype``."""
    # With the type in the message: `int(arg)` further down would say less. Eager raises at such a number too.
    if isinstance(arg, float) and not dtype.is_floating_point and not math.isfinite(arg):
        raise OverflowError(f"{arg} has no {dtype}")
    return convert(number(arg, dtype), dtype)


def constant(value: bool | int | float, dtype: torch.dtype) -> Expression:
    """A number as a tensor of ``dtype`` holds it: a half keeps the bits that it has, integers wrap."""
    # By torch itself: its casts define what a filled tensor holds.
    rounded = torch.tensor(value).to(dtype).item()
    return Expression(convert(Const(rounded, _exact(rounded)), dtype))


def _exact(value: bool | int | float) -> torch.dtype:
    # The widest type of the kind: the constant has been rounded, and converting it to the register's type loses
    # nothing.
    return torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float64


def _is_one(other: Any) -> bool:
    # Without bool: `x * True` promotes, where x is a bool too.
    return isinstance(other, (int, float)) and not isinstance(other, bool) and other == 1
