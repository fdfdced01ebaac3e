"""The Triton text of each operation of the loop IR.

A text carries the precedence of its outermost operator, so that parentheses are written only where they are needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from weft.inductor.codegen.triton_text import dtype_name, literal_text
from weft.inductor.loop_ir.ir import Call, Const, Reduce, ReductionResult, Value

# Python's order of precedence, weakest first: a kernel's text is parsed as Python before Triton compiles it.
COMPARE, OR, XOR, AND, SHIFT, SUM, PRODUCT, UNARY, ATOM = range(9)


@dataclass(frozen=True)
class Text:
    """An expression.

    Attributes:
        level: how tightly its outermost operator binds.
        narrow: for an int64 value, whether the text has type int32 (all its values fit).
    """

    code: str
    level: int = ATOM
    narrow: bool = False

    def at(self, level: int) -> str:
        """The expression where an operator of ``level`` is around it."""
        # Parentheses also fix the order of float operations, so leaving out one too many would change results.
        return self.code if self.level >= level else f"({self.code})"

    def __str__(self) -> str:
        return self.code


def infix(operator: str, level: int, left: Text, right: Text) -> Text:
    """``left operator right``."""
    outer = level + 1 if level == COMPARE else level  # Python chains comparisons: a < b < c
    # The right side one level up: operators group to the left, and `a - (b - c)` needs its parentheses.
    return Text(f"{left.at(outer)} {operator} {right.at(level + 1)}", level)


def call(function: str, *args: Text | str) -> Text:
    """``function(args)``."""
    return Text(f"{function}({', '.join(map(str, args))})")


def cast(text: Text, dtype: torch.dtype) -> Text:
    """``text`` as ``dtype``."""
    # Without a level argument: the method call binds as tightly as an atom.
    return Text(f"{text.at(ATOM)}.to({dtype_name(dtype)})")


def literal(value: float, dtype: torch.dtype) -> Text:
    """A number as it is written next to an operand of the same type."""
    text = literal_text(value, dtype)
    if dtype == torch.bool:
        return Text(text)
    # `-1.0.to(...)` would apply the method to 1.0.
    level = UNARY if text.startswith("-") else ATOM
    return Text(text, level, narrow=not dtype.is_floating_point and abs(value) < 2**31)


def typed(value: float, dtype: torch.dtype) -> Text:
    """A number as a value of its own."""
    # A bare literal has no dtype: as a value of its own it is int32 or float32 to Triton, whatever the IR says.
    return call("tl.full", "[]", literal(value, dtype), dtype_name(dtype))


def write(value: Call, operands: Sequence[Text]) -> Text:
    """A call over the texts of its operands. Functions without ``tl.`` are those of codegen/device_functions.py."""
    return _WRITE[value.op](value, *operands)


Write = Callable[..., Text]


def _operator(sign: str, level: int) -> Write:
    return lambda value, a, b: infix(sign, level, a, b)


def _function(name: str) -> Write:
    return lambda value, *args: call(name, *args)


def _helper(name: str) -> Write:
    """A call of a function of codegen/device_functions.py, to which a number without a type is no value."""

    def write(value: Call, *texts: Text) -> Text:
        pairs = zip(value.args, texts, strict=True)
        # A function asks for `x.dtype` and calls methods of x; a Python number has neither.
        return call(name, *(typed(arg.value, arg.dtype) if isinstance(arg, Const) else text for arg, text in pairs))

    return write


def _by_kind(floats: Write, integers: Write) -> Write:
    # By the operand, not the result: comparisons and casts have another dtype than what they take.
    return lambda value, *args: (floats if value.args[0].dtype.is_floating_point else integers)(value, *args)


def _negative(value: Call, a: Text) -> Text:
    """Triton 3.6 computes ``-a`` as ``0 - a``, which gives 0.0 for 0.0; a product with -1 keeps the sign of zeros."""
    if value.dtype.is_floating_point:
        return infix("*", PRODUCT, a, Text("-1.0", UNARY))
    return Text(f"-{a.at(UNARY)}", UNARY)


def _division(value: Call, a: Text, b: Text) -> Text:
    """Correctly rounded, as in ATen. Division by a softmax's sum is approximate (2 ulp), which takes half the
    instructions: the bits of such a sum depend on its order in eager too.

    A divisor that is a power of two becomes an exact product where its reciprocal is a normal number of float32.
    """
    # `/` of Triton is approximate in float32: -110 / -110 is 0.99999994, and its floor 0.
    divisor = value.args[1]
    if isinstance(divisor, Const) and _is_power_of_two(divisor.value):
        # Exact in binary, so it has the same bits as the quotient, in one instruction.
        return infix("*", PRODUCT, a, literal(1.0 / divisor.value, value.dtype))
    if value.dtype != torch.float32 or _is_sum_of_exponentials(divisor):
        return infix("/", PRODUCT, a, b)
    return call("tl.div_rn", a, b)


_EXPONENTIALS = frozenset({"exp", "exp2"})


def _is_sum_of_exponentials(divisor: Value) -> bool:
    if isinstance(divisor, ReductionResult) and isinstance(divisor.reduce, Reduce):
        return divisor.reduce.kind == "online_softmax"
    terms = divisor.args if isinstance(divisor, Reduce) else ()
    return any(isinstance(term, Call) and term.op in _EXPONENTIALS for term in terms)


def _is_power_of_two(value: float) -> bool:
    """Whether a number is a power of two, with a reciprocal that float32 holds exactly."""
    # Below 2**-127 the reciprocal would be infinite in float32, above 2**126 subnormal, which GPUs may flush to zero.
    return 2.0**-100 < abs(value) < 2.0**100 and abs(math.frexp(value)[0]) == 0.5


def _square_root(value: Call, a: Text) -> Text:
    # `tl.sqrt` of float32 is approximate, of float64 correctly rounded.
    return call("tl.sqrt_rn" if value.dtype == torch.float32 else "tl.sqrt", a)


def _reciprocal(value: Call, a: Text) -> Text:
    return call("tl.div_rn", "1.0", a) if value.dtype == torch.float32 else infix("/", PRODUCT, Text("1.0"), a)


def exponential(a: Text, dtype: torch.dtype) -> Text:
    """e**a. In float32, as 2**(x * log2(e)): as exact as ``tl.exp``, which scales its argument where the result has no
    exponent left (three instructions more); here such results are 0."""
    if dtype != torch.float32:
        return call("tl.exp", a)
    # The GPU has an instruction for 2**x only.
    return call("tl.exp2", infix("*", PRODUCT, a, Text(repr(math.log2(math.e)))))


def _extremum(name: str, boolean: str, level: int) -> Write:
    def write(value: Call, a: Text, b: Text) -> Text:
        if value.dtype == torch.bool:
            # Of bools, the minimum is "and", the maximum "or".
            return infix(boolean, level, a, b)
        if value.dtype.is_floating_point:
            # Triton's default, like C's fmin, prefers the number; torch's extremes let NaN win.
            return call(f"tl.{name}", a, b, "propagate_nan=tl.PropagateNan.ALL")
        return call(f"tl.{name}", a, b)

    return write


def _logical(sign: str, level: int) -> Write:
    def write(value: Call, a: Text, b: Text) -> Text:
        # Triton's `&` of integers works on bits: 1 & 2 is 0, although both are true.
        a, b = (truth(text, arg.dtype) for text, arg in zip((a, b), value.args, strict=True))
        return infix(sign, level, a, b)

    return write


def truth(text: Text, dtype: torch.dtype) -> Text:
    """A number as a bool."""
    return text if dtype == torch.bool else infix("!=", COMPARE, text, Text("0"))


def _not(value: Call, a: Text) -> Text:
    if value.dtype == torch.uint8:
        return infix("^", XOR, a, Text("255"))  # 3.6 writes ~a as a ^ -1, which its interpreter refuses
    # `~` of an int1 is its negation.
    if value.args[0].dtype == torch.bool or value.op == "bitwise_not":
        return Text(f"~{a.at(UNARY)}", UNARY)
    return infix("==", COMPARE, a, Text("0"))


def _to(value: Call, a: Text) -> Text:
    source = value.args[0].dtype
    if value.dtype == torch.bool:
        return truth(a, source)
    # Halves count as float32 here: rounding is the store's, or `round_bfloat16`'s.
    if value.dtype == source or (a.narrow and value.dtype == torch.int32):
        return a
    return cast(a, value.dtype)


def _rounded(half: str) -> Write:
    # Two casts that a compiler must not cancel, since the first one rounds.
    return lambda value, a: Text(f"{a.at(ATOM)}.to({half}).to(tl.float32)")


_WRITE: dict[str, Write] = {
    "checked_index": lambda value, position, *checked: position,  # `ValueWriter` writes the assertion
    "add": _operator("+", SUM),
    "sub": _operator("-", SUM),
    "mul": _operator("*", PRODUCT),
    "neg": _negative,
    "abs": _function("tl.abs"),
    "sign": _helper("sign"),
    "minimum": _extremum("minimum", "&", AND),
    "maximum": _extremum("maximum", "|", OR),
    "div": _division,
    "fma": _function("tl.fma"),
    "sqrt": _square_root,
    "rsqrt": _function("tl.rsqrt"),
    "reciprocal": _reciprocal,
    "exp": lambda value, a: exponential(a, value.dtype),
    "exp2": _function("tl.exp2"),
    "expm1": _helper("expm1"),
    "log": _function("tl.log"),
    "log2": _function("tl.log2"),
    "log1p": _helper("log1p"),
    "sin": _function("tl.sin"),
    "cos": _function("tl.cos"),
    "tanh": _helper("tanh"),
    "sigmoid": _helper("sigmoid"),
    "erf": _function("tl.erf"),
    "normal_cdf": _helper("normal_cdf"),
    "pow": _by_kind(_helper("power"), _helper("integer_power")),
    "floor": _by_kind(_function("tl.floor"), lambda value, a: a),
    "ceil": _by_kind(_function("tl.ceil"), lambda value, a: a),
    "trunc": _by_kind(_helper("truncate"), lambda value, a: a),
    "round": _by_kind(_helper("nearest_even"), lambda value, a: a),
    "isnan": lambda value, a: infix("!=", COMPARE, a, a),
    # Comparisons instead of functions of libdevice, which the interpreter has not.
    "isinf": lambda value, a: infix("==", COMPARE, call("tl.abs", a), Text('float("inf")')),
    # Triton's // and % of integers are those of C.
    "truncdiv": _operator("//", PRODUCT),
    "fmod": _by_kind(_helper("remainder"), _operator("%", PRODUCT)),
    "floordiv": _helper("floor_divide"),
    "mod": _by_kind(_helper("modulo"), _helper("modulo_integer")),
    "bitwise_and": _operator("&", AND),
    "bitwise_or": _operator("|", OR),
    "bitwise_xor": _operator("^", XOR),
    "bitwise_not": _not,
    "shift_left": _operator("<<", SHIFT),
    "shift_right": _operator(">>", SHIFT),
    "eq": _operator("==", COMPARE),
    "ne": _operator("!=", COMPARE),
    "lt": _operator("<", COMPARE),
    "le": _operator("<=", COMPARE),
    "gt": _operator(">", COMPARE),
    "ge": _operator(">=", COMPARE),
    "and": _logical("&", AND),
    "or": _logical("|", OR),
    "not": _not,
    "where": _function("tl.where"),
    "to": _to,
    "round_bfloat16": _rounded("tl.bfloat16"),
    "round_float16": _rounded("tl.float16"),
    "rand": _helper("uniform"),
    "randn": _helper("normal"),
}

# Operations whose operands stand side by side, so that a number among them takes the other operand's type.
INFIX = frozenset({"add", "sub", "mul", "div", "shift_left", "shift_right", "eq", "ne", "lt", "le", "gt", "ge"}) | {
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
}
# Operands that are written more than once.
REPEATS = frozenset({"isnan", "checked_index"})
