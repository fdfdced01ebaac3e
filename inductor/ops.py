"""The pointwise operations and reductions of loop nests: their names, how many values they take, what they mean.

A lowering builds values from these names and nothing else; code generation prints each of them. The meaning given here
is torch's: ``eager`` is the function that a test compares a generated kernel with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Op:
    """A pointwise operation on ``arity`` values.

    Attributes:
        eager: the same on tensors, for tests.
        cost: rough count of instructions, for deciding what is cheap to compute twice.
    """

    arity: int
    eager: Callable[..., Any]
    cost: int = 1


@dataclass(frozen=True)
class Reduction:
    """A reduction over ``arity`` values at each point, with ``results`` results.

    Attributes:
        identity: what an element that is left out counts as, by result (floats; integers take their type's bounds).
    """

    arity: int
    results: int
    identity: tuple[float, ...]


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
    # floats
    "div": Op(2, torch.true_divide, 4),
    "fma": Op(3, lambda a, b, c: a * b + c),
    "sqrt": Op(1, torch.sqrt, 4),
    "rsqrt": Op(1, torch.rsqrt, 4),
    "reciprocal": Op(1, torch.reciprocal, 4),
    "exp": Op(1, torch.exp, 4),
    "exp2": Op(1, torch.exp2, 2),
    "expm1": Op(1, torch.expm1, 8),
    "log": Op(1, torch.log, 4),
    "log2": Op(1, torch.log2, 4),
    "log1p": Op(1, torch.log1p, 8),
    "sin": Op(1, torch.sin, 16),
    "cos": Op(1, torch.cos, 16),
    "tanh": Op(1, torch.tanh, 8),
    "sigmoid": Op(1, torch.sigmoid, 6),
    "erf": Op(1, torch.erf, 16),
    "normal_cdf": Op(1, torch.special.ndtr, 16),  # in float32 within 5e-8 of 1: its lower tail is not exact
    "pow": Op(2, torch.pow, 16),
    "floor": Op(1, torch.floor),
    "ceil": Op(1, torch.ceil),
    "trunc": Op(1, torch.trunc),
    "round": Op(1, torch.round, 4),  # half to even
    "isnan": Op(1, torch.isnan),
    "isinf": Op(1, torch.isinf),
    # integers
    "floordiv": Op(2, lambda a, b: torch.div(a, b, rounding_mode="floor"), 8),
    "truncdiv": Op(2, lambda a, b: torch.div(a, b, rounding_mode="trunc"), 8),
    "mod": Op(2, torch.remainder, 8),  # the sign of the divisor, also for floats
    "fmod": Op(2, torch.fmod, 8),  # the sign of the dividend
    "bitwise_and": Op(2, torch.bitwise_and),
    "bitwise_or": Op(2, torch.bitwise_or),
    "bitwise_xor": Op(2, torch.bitwise_xor),
    "bitwise_not": Op(1, torch.bitwise_not),
    "shift_left": Op(2, torch.bitwise_left_shift),
    "shift_right": Op(2, torch.bitwise_right_shift),
    # comparisons and booleans; results are bool
    "eq": Op(2, torch.eq),
    "ne": Op(2, torch.ne),
    "lt": Op(2, torch.lt),
    "le": Op(2, torch.le),
    "gt": Op(2, torch.gt),
    "ge": Op(2, torch.ge),
    "and": Op(2, torch.logical_and),
    "or": Op(2, torch.logical_or),
    "not": Op(1, torch.logical_not),
    "where": Op(3, torch.where),
    # types: to the call's own dtype; `round_bfloat16`, `round_float16`: a float32 rounded to what the type can hold
    "to": Op(1, lambda a: a),
    "round_bfloat16": Op(1, lambda a: a.to(torch.bfloat16).float()),
    "round_float16": Op(1, lambda a: a.to(torch.float16).float()),
    # Philox: (seed, position) -> uniform in [0, 1), normal
    "rand": Op(2, lambda seed, at: torch.rand(at.shape), 40),
    "randn": Op(2, lambda seed, at: torch.randn(at.shape), 60),
}

REDUCTIONS: dict[str, Reduction] = {
    "sum": Reduction(1, 1, (0.0,)),
    "prod": Reduction(1, 1, (1.0,)),
    "max": Reduction(1, 1, (-math.inf,)),  # NaN wins
    "min": Reduction(1, 1, (math.inf,)),  # NaN wins
    "any": Reduction(1, 1, (0.0,)),
    "all": Reduction(1, 1, (1.0,)),
    # value, position (int64) -> the greatest value, the first position of it
    "argmax": Reduction(2, 2, (-math.inf, 0.0)),
    "argmin": Reduction(2, 2, (math.inf, 0.0)),
    # value -> mean, sum of squared deviations, count
    "welford": Reduction(1, 3, (0.0, 0.0, 0.0)),
    # value -> greatest value m, sum of exp(value - m)
    "online_softmax": Reduction(1, 2, (-math.inf, 0.0)),
}
