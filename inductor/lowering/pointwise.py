"""Arithmetic, comparisons, logic and rounding, one formula an operation.

Formulas compute in registers: float32 for halves, so that a chain rounds once, where its result is stored.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from weft.inductor.loop_ir.ir import Const, Scalar
from weft.inductor.lowering.elementwise import HALVES, elementwise
from weft.inductor.lowering.expressions import Expression, call, logical_and, where

aten = torch.ops.aten


def _unary(op: str, *targets: Any, **options: bool) -> None:
    elementwise(*targets, **options)(lambda x: call(op, x))  # type: ignore[arg-type]


def _binary(op: str, *targets: Any, **options: bool) -> None:
    elementwise(*targets, **options)(lambda x, y: call(op, x, y))  # type: ignore[arg-type]


# ---- arithmetic


# Two roundings, as ATen's `a + alpha * b`; a compiler may contract them to one fused multiply-add in both.
@elementwise(aten.add.Tensor, aten.add.Scalar)
def _add(x: Expression, y: Expression, *, alpha: Any) -> Expression:
    return x + y * alpha


@elementwise(aten.sub.Tensor, aten.sub.Scalar)
def _sub(x: Expression, y: Expression, *, alpha: Any) -> Expression:
    return x - y * alpha


_binary("mul", aten.mul.Tensor, aten.mul.Scalar)
_binary("minimum", aten.minimum.default)
_binary("maximum", aten.maximum.default)
_unary("neg", aten.neg.default)
_unary("reciprocal", aten.reciprocal.default, promote_to_float=True)


@elementwise(aten.div.Tensor, aten.div.Scalar, promote_to_float=True)
def _div(x: Expression, y: Expression) -> Expression:
    return _quotient(x, y)


def _quotient(x: Expression, y: Expression) -> Expression:
    """x / y. Division by a number is multiplication by its rounded reciprocal, as in ATen's CUDA kernels
    (`div_true_kernel_cuda`, `div_trunc_kernel_cuda`). floor(x / 49.0) depends on the last bit."""
    if isinstance(y.value, Scalar):
        return x * call("reciprocal", y)
    if isinstance(y.value, Const):
        return x * (torch.ones((), dtype=x.dtype) / torch.tensor(y.value.value, dtype=x.dtype)).item()
    return x / y


@elementwise(aten.div.Tensor_mode, aten.div.Scalar_mode)
def _div_mode(x: Expression, y: Expression, *, rounding_mode: str | None) -> Expression | None:
    if rounding_mode is None:
        # Without a mode it is true division, whose promotion the registration (shared with the other modes) leaves to
        # us.
        dtype = x.dtype if x.is_float else torch.get_default_dtype()
        return _quotient(x.to(dtype), y.to(dtype))
    return _truncated(x, y) if rounding_mode == "trunc" else _floored(x, y)


@elementwise(aten.floor_divide.default, aten.floor_divide.Scalar)
def _floor_divide(x: Expression, y: Expression) -> Expression:
    return _floored(x, y)


def _truncated(x: Expression, y: Expression) -> Expression:
    return call("trunc", _quotient(x, y)) if x.is_float else call("truncdiv", x, y)


def _floored(x: Expression, y: Expression) -> Expression:
    """Python's floor division. A quotient just below a whole number may round up to it; the remainder tells."""
    if not x.is_float:
        return call("floordiv", x, y)
    # The steps are those of ATen's `div_floor_floating`, and of CPython's `float_floor_div`: floor(x / y) alone gives
    # 10 for 1.0 // 0.1, whose exact quotient lies below 10.
    remainder = call("fmod", x, y)
    quotient = _quotient(x - remainder, y)
    quotient = where(logical_and(remainder != 0, (y < 0) != (remainder < 0)), quotient - 1, quotient)
    # The quotient is a whole number up to rounding; it may have been rounded to just below.
    whole = call("floor", quotient)
    whole = where(quotient - whole > 0.5, whole + 1, whole)
    # x / 0 is an infinity or NaN, as in eager; the steps above give NaN from fmod.
    return where(y == 0, x / y, whole)


# Two remainders: Python's, with the divisor's sign, and C's, with the dividend's.
_binary("mod", aten.remainder.Tensor, aten.remainder.Scalar)
_binary("fmod", aten.fmod.Tensor, aten.fmod.Scalar)


@elementwise(aten.abs.default)
def _abs(x: Expression) -> Expression:
    # The absolute value of int8's least number wraps to itself, in torch too.
    return x if x.dtype in (torch.bool, torch.uint8) else abs(x)


@elementwise(aten.sign.default)
def _sign(x: Expression) -> Expression:
    return x if x.dtype == torch.bool else call("sign", x)


@elementwise(aten.square.default)
def _square(x: Expression) -> Expression:
    return x * x


_MOST_PRODUCTS = 8  # a power up to this is a few products


@elementwise(aten.pow.Tensor_Scalar)
def _pow(x: Expression, *, exponent: Any) -> Expression | None:
    # An exponent that is a node is known only when the step runs, so no form can be chosen for it.
    if not isinstance(exponent, (int, float)):
        return None
    if not x.is_float:
        # Negative powers of integers raise in eager, and large ones wrap: both are left to ATen.
        whole = isinstance(exponent, int) and 0 <= exponent <= _MOST_PRODUCTS and x.dtype != torch.bool
        return _product(x, exponent) if whole else None
    # The special cases of ATen's `pow_tensor_scalar`: sqrt(-0.0) is -0.0 and sqrt(-inf) NaN, while pow gives 0.0 and
    # inf.
    if exponent == 0.5:
        return call("sqrt", x)
    if exponent == -0.5:
        return call("rsqrt", x)
    # Products are exact to an ulp or two where `exp2(y * log2(x))` in float32 is not, and need no float64.
    if abs(exponent) <= _MOST_PRODUCTS and exponent == int(exponent):
        power = _product(x, abs(int(exponent)))
        return call("reciprocal", power) if exponent < 0 else power
    return call("pow", x, exponent)


def _product(x: Expression, count: int) -> Expression:
    """``x`` to the power ``count`` by squaring."""
    if count < 2:
        return x if count else x.coerce(1)
    # The square is one value, so it is computed once (nodes are interned).
    half = _product(x, count // 2)
    return half * half * x if count % 2 else half * half


@elementwise(aten.pow.Tensor_Tensor)
def _pow_tensor(x: Expression, y: Expression) -> Expression | None:
    # Integers to the power of tensors wrap and raise at run time, element by element: ATen's.
    return call("pow", x, y) if x.is_float else None


@elementwise(aten.pow.Scalar)
def _pow_scalar(x: Expression, y: Expression) -> Expression | None:
    return call("pow", x, y) if y.is_float else None


# ---- functions of one number

_unary("sqrt", aten.sqrt.default, promote_to_float=True)
_unary("rsqrt", aten.rsqrt.default, promote_to_float=True)
_unary("exp", aten.exp.default, promote_to_float=True)
_unary("exp2", aten.exp2.default, promote_to_float=True)
_unary("expm1", aten.expm1.default, promote_to_float=True)
_unary("log", aten.log.default, promote_to_float=True)
_unary("log2", aten.log2.default, promote_to_float=True)
_unary("log1p", aten.log1p.default, promote_to_float=True)
_unary("sin", aten.sin.default, promote_to_float=True)
_unary("cos", aten.cos.default, promote_to_float=True)
_unary("tanh", aten.tanh.default, promote_to_float=True)
_unary("sigmoid", aten.sigmoid.default, promote_to_float=True)
_unary("erf", aten.erf.default, promote_to_float=True)


def _rounding(op: str, *targets: Any) -> None:
    # No promotion: eager's rounding functions keep integers as they are.
    elementwise(*targets)(lambda x: call(op, x) if x.is_float else x)


_rounding("floor", aten.floor.default)
_rounding("ceil", aten.ceil.default)
_rounding("trunc", aten.trunc.default)
_rounding("round", aten.round.default)


@elementwise(aten.isnan.default)
def _isnan(x: Expression) -> Expression:
    # False at every element, in the shape of x.
    return call("isnan", x) if x.is_float else (x != x)


@elementwise(aten.isinf.default)
def _isinf(x: Expression) -> Expression:
    return call("isinf", x) if x.is_float else (x != x)


@elementwise(aten.logical_not.default, as_bools=True)
def _logical_not(x: Expression) -> Expression:
    return call("not", x)


# ---- comparisons and logic

# Masks and labels depend on equality to the bit, which is why numbers are rounded to a half first.
_binary("eq", aten.eq.Tensor, aten.eq.Scalar, round_numbers=True)
_binary("ne", aten.ne.Tensor, aten.ne.Scalar, round_numbers=True)
_binary("lt", aten.lt.Tensor, aten.lt.Scalar, round_numbers=True)
_binary("le", aten.le.Tensor, aten.le.Scalar, round_numbers=True)
_binary("gt", aten.gt.Tensor, aten.gt.Scalar, round_numbers=True)
_binary("ge", aten.ge.Tensor, aten.ge.Scalar, round_numbers=True)
_binary("and", aten.logical_and.default, as_bools=True)
_binary("or", aten.logical_or.default, as_bools=True)
_binary("ne", aten.logical_xor.default, as_bools=True)
_binary(
    "bitwise_and",
    *(aten.bitwise_and.Tensor, aten.bitwise_and.Scalar),
    *(aten.__and__.Tensor, aten.__and__.Scalar),
)
_binary(
    "bitwise_or",
    *(aten.bitwise_or.Tensor, aten.bitwise_or.Scalar),
    *(aten.__or__.Tensor, aten.__or__.Scalar),
)
_binary(
    "bitwise_xor",
    *(aten.bitwise_xor.Tensor, aten.bitwise_xor.Scalar),
    *(aten.__xor__.Tensor, aten.__xor__.Scalar),
)
_unary("bitwise_not", aten.bitwise_not.default)

# ---- choices


@elementwise(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar, masks=("condition",))
def _where(condition: Expression, x: Expression, y: Expression) -> Expression:
    return where(condition, x, y)


@elementwise(aten.clamp.default, aten.clamp.Tensor)
def _clamp(x: Expression, low: Expression | None, high: Expression | None) -> Expression:
    # In this order the upper bound wins where the bounds cross, as torch documents.
    at_least = x if low is None else call("maximum", x, low)
    return at_least if high is None else call("minimum", at_least, high)


_binary("maximum", aten.clamp_min.default, aten.clamp_min.Tensor)
_binary("minimum", aten.clamp_max.default, aten.clamp_max.Tensor)


# ---- activations


@elementwise(aten.relu.default)
def _relu(x: Expression) -> Expression:
    # NaN wins in `maximum`, so a NaN passes through as in eager; `where(x > 0, x, 0)` would hide it.
    return call("maximum", x, 0)


@elementwise(aten.leaky_relu.default)
def _leaky_relu(x: Expression, *, negative_slope: Any) -> Expression:
    # NaN > 0 is false, and NaN * slope is NaN.
    return where(x > 0, x, x * negative_slope)


@elementwise(aten.hardtanh.default)
def _hardtanh(x: Expression, *, min_val: Any, max_val: Any) -> Expression:
    return call("minimum", call("maximum", x, min_val), max_val)


@elementwise(aten.elu.default)
def _elu(x: Expression, *, alpha: Any, scale: Any, input_scale: Any) -> Expression:
    # `expm1`, not exp - 1: near 0 the difference of two numbers near 1 would keep few digits.
    return where(x > 0, x * scale, call("expm1", x * input_scale) * alpha * scale)


@elementwise(aten.silu.default)
def _silu(x: Expression) -> Expression:
    return x * call("sigmoid", x)


@elementwise(aten.silu_backward.default)
def _silu_backward(grad: Expression, x: Expression) -> Expression:
    sigmoid = call("sigmoid", x)
    # As ATen writes it. The forward's sigmoid is recomputed: storing it would cost more traffic than its
    # instructions.
    return grad * sigmoid * (1 + x * (1 - sigmoid))


_TANH_SLOPE, _TANH_CUBE = math.sqrt(2 / math.pi), 0.044715


@elementwise(aten.gelu.default)
def _gelu(x: Expression, *, approximate: str, promoted: torch.dtype) -> Expression:
    if approximate == "none":
        # x * 0.5 * (1 + erf(x / sqrt(2))) is this; one function for the share saves the sum and the scaling.
        return x * call("normal_cdf", x)
    if promoted in HALVES:
        return x * _tanh_share(x)
    # The order of ATen's kernel, as float32 keeps the difference.
    return 0.5 * x * (1 + call("tanh", _TANH_SLOPE * (x + _TANH_CUBE * (x * x * x))))


@elementwise(aten.gelu_backward.default)
def _gelu_backward(grad: Expression, x: Expression, *, approximate: str, promoted: torch.dtype) -> Expression:
    square = x * x
    if approximate == "none":
        # exp(-x**2 / 2) as a power of two, whose factor is folded into the constant: the GPU's instruction is `ex2`.
        pdf = call("exp2", (-0.5 * math.log2(math.e)) * square) * (1 / math.sqrt(2 * math.pi))
        return grad * (call("normal_cdf", x) + x * pdf)
    inner = _TANH_SLOPE * (1 + 3 * _TANH_CUBE * square)
    if promoted in HALVES:
        share = _tanh_share(x)
        # In this order nothing overflows before it is multiplied by 0.
        return grad * (share + x * (share - share * share) * (2 * inner))
    tanh = call("tanh", _TANH_SLOPE * (x + _TANH_CUBE * (square * x)))
    return grad * (0.5 * (1 + tanh) + 0.5 * x * ((1 - tanh * tanh) * inner))


def _tanh_share(x: Expression) -> Expression:
    """``(1 + tanh(u)) / 2`` as the sigmoid of ``2 * u``: half the instructions of a tanh, and no result that is rounded
    to a half is further from exact than eager's; float32's would be, by a quarter. Measured on an H200, GELU of a sum
    with a bias takes 65.8 us instead of 86.8, what a copy takes."""
    return call("sigmoid", x * (2 * _TANH_SLOPE * _TANH_CUBE * (x * x) + 2 * _TANH_SLOPE))
