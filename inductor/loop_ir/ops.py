"""The pointwise operations and reductions of the loop IR: names, numbers of operands, dtypes, meaning.

A lowering builds values from these names and nothing else; code generation prints each of them. The semantics are
torch's: ``eager`` is the function that tests compare generated kernels with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch


# Register dtypes only, which is why no promotion appears here: lowerings have converted the operands before they make
# a call, and the verifier refuses a call of mixed dtypes instead of guessing what Triton would promote to.
class Signature(Enum):
    """The register dtypes of an operation: what its operands may be, and what its result is.

    All operands have one dtype, of the kind that is named first; the result has the same, or the one named second.
    """

    NUMBERS = "numbers"
    FLOATS = "floats"
    INTEGERS = "integers"
    BITS = "integers or bools"
    BOOLS = "bools"
    ORDERED = "numbers or bools"
    FLOAT_TEST = "floats -> bool"
    COMPARISON = "numbers or bools -> bool"
    WHERE = "bool, two of one dtype -> that dtype"
    CAST = "anything -> anything"
    ROUNDING = "float32 -> float32"
    RANDOM = "two int64 -> float32"
    POSITION = "two int64 and a bool -> int64"
    SUM = "numbers, or bools that are counted as integers"


@dataclass(frozen=True)
class Op:
    """A pointwise operation on ``arity`` values.

    Attributes:
        eager: the same on tensors, for tests and for the verifier.
        signature: dtypes of operands and result.
        cost: rough count of instructions, for deciding what is cheap to compute twice.
    """

    arity: int
    eager: Callable[..., Any]
    signature: Signature = Signature.NUMBERS
    cost: int = 1


@dataclass(frozen=True)
class Reduction:
    """A reduction over ``arity`` values at each point, with ``results`` results.

    Attributes:
        identity: what an element that is left out counts as, by result (floats; integers take their type's bounds).
        signature: dtypes of the first operand and of the first result; a second operand is a position (int64).
    """

    arity: int
    results: int
    identity: tuple[float, ...]
    signature: Signature = Signature.NUMBERS


NUMBERS, FLOATS, INTEGERS = Signature.NUMBERS, Signature.FLOATS, Signature.INTEGERS
BITS, BOOLS, ORDERED, COMPARISON = Signature.BITS, Signature.BOOLS, Signature.ORDERED, Signature.COMPARISON

OPS: dict[str, Op] = {
    # arithmetic; integers and floats
    "add": Op(2, torch.add),
    "sub": Op(2, torch.sub),
    "mul": Op(2, torch.mul),
    "neg": Op(1, torch.neg),
    "abs": Op(1, torch.abs),
    "sign": Op(1, torch.sign),
    "minimum": Op(2, torch.minimum),  # NaN wins
    "maximum": Op(2, torch.maximum),  # NaN wins
    # Costs only rank operations: 1 is an instruction, 2 to 6 the special function unit with what surrounds it, more a
    # routine of many instructions. They decide what is computed twice (`fusion/inline.py`), and no time is predicted
    # from them.
    "pow": Op(2, torch.pow, NUMBERS, 16),
    "mod": Op(2, torch.remainder, NUMBERS, 8),  # the sign of the divisor
    "fmod": Op(2, torch.fmod, NUMBERS, 8),  # the sign of the dividend
    # floats
    # `fma` rounds once in a kernel. `eager` rounds the product too, so comparisons with it need a tolerance.
    "div": Op(2, torch.true_divide, FLOATS, 4),
    "fma": Op(3, lambda a, b, c: a * b + c, FLOATS),
    "sqrt": Op(1, torch.sqrt, FLOATS, 4),
    "rsqrt": Op(1, torch.rsqrt, FLOATS, 4),
    "reciprocal": Op(1, torch.reciprocal, FLOATS, 4),
    "exp": Op(1, torch.exp, FLOATS, 4),
    "exp2": Op(1, torch.exp2, FLOATS, 2),
    "expm1": Op(1, torch.expm1, FLOATS, 8),
    "log": Op(1, torch.log, FLOATS, 4),
    "log2": Op(1, torch.log2, FLOATS, 4),
    "log1p": Op(1, torch.log1p, FLOATS, 8),
    "sin": Op(1, torch.sin, FLOATS, 16),
    "cos": Op(1, torch.cos, FLOATS, 16),
    "tanh": Op(1, torch.tanh, FLOATS, 8),
    "sigmoid": Op(1, torch.sigmoid, FLOATS, 6),
    "erf": Op(1, torch.erf, FLOATS, 16),
    "normal_cdf": Op(1, torch.special.ndtr, FLOATS, 16),  # in float32 within 5e-8 of 1: the lower tail is not exact
    "floor": Op(1, torch.floor, FLOATS),
    "ceil": Op(1, torch.ceil, FLOATS),
    "trunc": Op(1, torch.trunc, FLOATS),
    "round": Op(1, torch.round, FLOATS, 4),  # half to even
    "isnan": Op(1, torch.isnan, Signature.FLOAT_TEST),
    "isinf": Op(1, torch.isinf, Signature.FLOAT_TEST),
    # integers
    "floordiv": Op(2, lambda a, b: torch.div(a, b, rounding_mode="floor"), INTEGERS, 8),
    "truncdiv": Op(2, lambda a, b: torch.div(a, b, rounding_mode="trunc"), INTEGERS, 8),
    "bitwise_and": Op(2, torch.bitwise_and, BITS),
    "bitwise_or": Op(2, torch.bitwise_or, BITS),
    "bitwise_xor": Op(2, torch.bitwise_xor, BITS),
    "bitwise_not": Op(1, torch.bitwise_not, BITS),
    "shift_left": Op(2, torch.bitwise_left_shift, INTEGERS),
    "shift_right": Op(2, torch.bitwise_right_shift, INTEGERS),
    # comparisons and booleans; results are bool
    "eq": Op(2, torch.eq, COMPARISON),
    "ne": Op(2, torch.ne, COMPARISON),
    "lt": Op(2, torch.lt, COMPARISON),
    "le": Op(2, torch.le, COMPARISON),
    "gt": Op(2, torch.gt, COMPARISON),
    "ge": Op(2, torch.ge, COMPARISON),
    "and": Op(2, torch.logical_and, BOOLS),
    "or": Op(2, torch.logical_or, BOOLS),
    "not": Op(1, torch.logical_not, BOOLS),
    "where": Op(3, torch.where, Signature.WHERE),
    # (position, size, condition) -> position; a kernel asserts that it is in range(size) where the condition holds
    "checked_index": Op(3, lambda position, size, condition: position, Signature.POSITION, 0),
    # types: to the call's own dtype; `round_bfloat16`, `round_float16`: a float32 rounded to what the type can hold
    "to": Op(1, lambda a: a, Signature.CAST),
    "round_bfloat16": Op(1, lambda a: a.to(torch.bfloat16).float(), Signature.ROUNDING),
    "round_float16": Op(1, lambda a: a.to(torch.float16).float(), Signature.ROUNDING),
    # Philox: (seed, position) -> uniform in [0, 1), normal
    # `eager` draws from torch's generator, so nothing may fold or evaluate these two: the numbers would be others.
    "rand": Op(2, lambda seed, at: torch.rand(at.shape), Signature.RANDOM, 40),
    "randn": Op(2, lambda seed, at: torch.randn(at.shape), Signature.RANDOM, 60),
}

# Identities are what masked tails and empty accumulators hold, so they must not change any result: -inf for a
# maximum, not the lowest finite number, as a row of -inf alone has the maximum -inf.
REDUCTIONS: dict[str, Reduction] = {
    "sum": Reduction(1, 1, (0.0,), Signature.SUM),
    "prod": Reduction(1, 1, (1.0,)),
    "max": Reduction(1, 1, (-math.inf,), ORDERED),  # NaN wins
    "min": Reduction(1, 1, (math.inf,), ORDERED),  # NaN wins
    "any": Reduction(1, 1, (0.0,), BOOLS),
    "all": Reduction(1, 1, (1.0,), BOOLS),
    # value, position (int64) -> the greatest value, the first position of it
    # The identity of a position is replaced by the largest int64 where it could win a tie (`lowering/split.py`).
    "argmax": Reduction(2, 2, (-math.inf, 0.0)),
    "argmin": Reduction(2, 2, (math.inf, 0.0)),
    # value -> mean, sum of squared deviations, count
    "welford": Reduction(1, 3, (0.0, 0.0, 0.0), FLOATS),
    # value -> greatest value m, sum of exp(value - m)
    # `welford` and `online_softmax` are made by code generation only (`codegen/reduction_forms.py`). No lowering
    # writes them.
    "online_softmax": Reduction(1, 2, (-math.inf, 0.0), FLOATS),
}


def extreme(kind: float, dtype: torch.dtype) -> float:
    """``kind`` (an infinity or a finite number) as far as ``dtype`` goes."""
    # The identities of :data:`REDUCTIONS` are floats; an integer type has bounds in place of infinities.
    if not math.isinf(kind) or dtype.is_floating_point:
        return kind
    if dtype == torch.bool:
        return kind > 0
    bounds = torch.iinfo(dtype)
    return bounds.max if kind > 0 else bounds.min
