"""Functions that generated kernels call, besides those of ``tl``.

A kernel's text carries the ones that it uses (:func:`sources` cuts them from this file), so that it stands alone.
"""

from __future__ import annotations

import triton
import triton.language as tl


# Triton's own `tl.max` prefers numbers to NaN, so reductions get these two; torch's extremes let NaN win.
@triton.jit
def greatest(a, b):
    """The greater of two; NaN wins."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def least(a, b):
    """The lesser of two; NaN wins."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


# A combine function for `tl.reduce`, which has no product of its own.
@triton.jit
def times(a, b):
    """The product of two."""
    return a * b


@triton.jit
def sign(x):
    """-1, 0 or 1."""
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


# libdevice has some of the functions below, but not in the interpreter, where every kernel is tested.
@triton.jit
def tanh(x):
    """Hyperbolic tangent, within 3 units of the last place."""
    if x.dtype == tl.float64:
        t = expm1(2.0 * tl.minimum(tl.abs(x), 30.0))
        return tl.where((x != x) | (x == 0.0), x, tl.where(x < 0, -t, t) / (t + 2.0))
    # q: the least greatest relative error of x + x**3 * q(x**2) for |x| < 0.625, fitted by Lawson's iteration.
    # The other form, 1 - 2 / (exp(2 * x) + 1), cancels near 0, hence a polynomial there.
    u = x * x
    q = -0.005704986862838268
    q = q * u + 0.02063908614218235
    q = q * u - 0.05373971536755562
    q = q * u + 0.13331441581249237
    q = q * u - 0.3333328068256378
    size = 1.0 - 2.0 / (tl.exp2(tl.abs(x) * 2.8853900817779268) + 1.0)
    # A zero is returned as it is: -0.0 plus the polynomial's 0.0 would be 0.0.
    near = tl.where(x == 0.0, x, x + x * u * q)
    return tl.where(u < 0.390625, near, tl.where(x < 0, -size, size))


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    if x.dtype == tl.float64:
        return 1.0 / (1.0 + tl.exp(-x))
    return 1.0 / (1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def normal_cdf(x):
    """The share of the standard normal distribution below x."""
    if x.dtype == tl.float64:
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    # q: log2 of the share below -|x|, fitted for the least greatest absolute error of exp2(q), 3.3e-8.
    size = tl.abs(x)
    q = -2.727174575056779e-08
    q = q * size + 8.150452117661189e-07
    q = q * size - 1.0462299542268738e-05
    q = q * size + 7.333631219808012e-05
    q = q * size - 0.00026840483769774437
    q = q * size - 2.4207289243349805e-05
    q = q * size + 0.00697727408260107
    q = q * size - 0.05246219411492348
    q = q * size - 0.45921385288238525
    q = q * size - 1.1511050462722778
    q = q * size - 1.0
    below = tl.exp2(q)
    return tl.where(x < 0, below, 1.0 - below)


@triton.jit
def expm1(x):
    """exp(x) - 1, accurate near 0."""
    if x.dtype == tl.float64:
        # Kahan: the errors of u and of log(u) cancel.
        u = tl.exp(x)
        near = (u - 1.0) * x / tl.log(u)
        return tl.where(u == 1.0, x, tl.where((u - 1.0 == -1.0) | (u == float("inf")), u - 1.0, near))
    # Taylor's series: the first term left out is below 1e-9 of the sum for |x| < 0.7.
    # Above the bound exp(x) - 1 has lost at most a bit or two.
    q = 1.0 / 3628800.0
    q = q * x + 1.0 / 362880.0
    q = q * x + 1.0 / 40320.0
    q = q * x + 1.0 / 5040.0
    q = q * x + 1.0 / 720.0
    q = q * x + 1.0 / 120.0
    q = q * x + 1.0 / 24.0
    q = q * x + 1.0 / 6.0
    q = q * x + 0.5
    near = tl.where(x == 0.0, x, x + x * x * q)  # -0.0 keeps its sign
    return tl.where(tl.abs(x) < 0.7, near, tl.exp(x) - 1.0)


@triton.jit
def log1p(x):
    """log(1 + x), accurate near 0 (Kahan: the errors of u and of log(u) cancel)."""
    u = 1.0 + x
    near = tl.log(u) * (x / (u - 1.0))
    return tl.where(u == 1.0, x, tl.where(u == float("inf"), u, near))


@triton.jit
def truncate(x):
    """The integer towards zero."""
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def nearest_even(x):
    """The nearest integer, halves to even: adding 2**23 leaves no bits after the point."""
    # Zeros are returned as they are, and the sign of a small negative number is put back by a product: Triton 3.6
    # computes ``-whole`` as ``0 - whole``, which is 0.0 for what rounds to -0.0.
    size = tl.abs(x)
    if x.dtype == tl.float64:
        whole = (size + 4503599627370496.0) - 4503599627370496.0
        return tl.where((size < 4503599627370496.0) & (size > 0), tl.where(x < 0, whole * -1.0, whole), x)
    whole = (size + 8388608.0) - 8388608.0
    return tl.where((size < 8388608.0) & (size > 0), tl.where(x < 0, whole * -1.0, whole), x)


@triton.jit
def power(x, y):
    """x ** y, in float64: the error of a logarithm grows with the result's exponent."""
    base = x.to(tl.float64)
    exponent = y.to(tl.float64)
    size = tl.exp2(exponent * tl.log2(tl.abs(base)))
    # Special values of C99's pow, in its order: x**0 and 1**y are 1, even for NaN.
    size = tl.where((exponent == 0.0) | (base == 1.0), 1.0, size)
    size = tl.where((tl.abs(base) == 1.0) & (tl.abs(exponent) == float("inf")), 1.0, size)
    whole = tl.floor(exponent) == exponent
    half = exponent * 0.5
    # An odd power keeps the sign of the base, that of zero and infinity included.
    odd = whole & (tl.floor(half) != half)
    finite = tl.abs(base) != float("inf")
    negative = (base < 0) | (1.0 / base == float("-inf"))
    signed = tl.where(negative & odd, size * -1.0, tl.where((base < 0) & finite & ~whole, float("nan"), size))
    return signed.to(x.dtype)


@triton.jit
def integer_power(x, y):
    """x ** y of integers, wrapping around; 0 where the result is a fraction."""
    result = x * 0 + 1
    square = x + y * 0
    left = tl.where(y < 0, 0, y)
    # Square and multiply. Thirty-one steps cover every exponent below 2**31.
    for _ in tl.static_range(0, 31):
        result = tl.where(left & 1 != 0, result * square, result)
        square = square * square
        left = left >> 1
    parity = tl.where(y & 1 != 0, x, x * x)
    fraction = tl.where((x == 1) | (x + 1 == 0), parity, 0)
    return tl.where(y < 0, fraction, result).to(x.dtype)


@triton.jit
def floor_divide(a, b):
    """The quotient of integers, rounded down."""
    # Triton divides integers as C does, towards zero.
    quotient = a // b
    remains = a - quotient * b
    return tl.where((remains != 0) & ((remains < 0) != (b < 0)), quotient - 1, quotient)


@triton.jit
def modulo_integer(a, b):
    """The remainder of integers, with the sign of the divisor."""
    remains = a % b
    return tl.where((remains != 0) & ((remains < 0) != (b < 0)), remains + b, remains)


@triton.jit
def remainder(a, b):
    """The remainder of floats, with the sign of the dividend; exact for quotients below 2**53."""
    dividend = a.to(tl.float64)
    divisor = b.to(tl.float64)
    quotient = truncate(dividend / divisor)
    remains = tl.fma(-quotient, divisor, dividend)
    # The quotient may have been rounded over an integer: one step back.
    step = tl.where((dividend < 0) != (divisor < 0), -divisor, divisor)
    over = (remains != 0) & ((remains < 0) != (dividend < 0))
    remains = tl.where(over, remains + step, remains)
    # A remainder of zero has the dividend's sign.
    remains = tl.where(remains == 0, dividend * 0.0, remains)
    remains = tl.where((tl.abs(divisor) == float("inf")) & (tl.abs(dividend) != float("inf")), dividend, remains)
    return remains.to(a.dtype)


@triton.jit
def modulo(a, b):
    """The remainder of floats, with the sign of the divisor."""
    remains = remainder(a, b)
    return tl.where((remains != 0) & ((remains < 0) != (b < 0)), remains + b, remains)


@triton.jit
def prefetch(pointer, BYTES: tl.constexpr, ARCH: tl.constexpr, ALIGNED: tl.constexpr):
    """Prefetch ``BYTES``, a multiple of 16, into the L2 cache, with one instruction of one thread.

    Does nothing below sm_90, in the interpreter, and for unaligned arguments: the instruction needs addresses that are
    multiples of 16 bytes.
    """
    # Inline text, as Triton has no operation for it. `is_pure=False` keeps the compiler from dropping what gives no
    # result.
    if ARCH >= 90 and ALIGNED:
        tl.inline_asm_elementwise(
            f"{{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;"
            f" @p cp.async.bulk.prefetch.L2.global [$1], {BYTES}; mov.u32 $0, 0; }}",
            "=r,l",
            [pointer],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def load_packed(pointer, COUNT: tl.constexpr, ALIGNED: tl.constexpr):
    """``COUNT`` words of 32 bits from a pointer on; for unaligned arguments the pointer may be in the middle of one."""
    if ALIGNED or pointer.dtype.element_ty.primitive_bitwidth == 32:
        # Read once from memory and then kept in registers, so the line need not stay in the cache.
        at = pointer.to(tl.pointer_type(tl.int32)) + tl.arange(0, COUNT)
        return tl.load(at, eviction_policy="evict_first")
    else:
        low = pointer.to(tl.pointer_type(tl.int16)) + 2 * tl.arange(0, COUNT)
        return (tl.load(low).to(tl.int32) & 0xFFFF) | (tl.load(low + 1).to(tl.int32) << 16)


@triton.jit
def unpack(words, pointer):
    """The elements that are packed in words of 32 bits, in order, in the dtype (16 or 32 bits) of the pointer."""
    if pointer.dtype.element_ty.primitive_bitwidth == 32:
        return words.to(pointer.dtype.element_ty, bitcast=True)
    else:  # Triton compiles what is behind a return too
        low = words.to(tl.int16).to(pointer.dtype.element_ty, bitcast=True)
        high = (words >> 16).to(tl.int16).to(pointer.dtype.element_ty, bitcast=True)
        return tl.reshape(tl.join(low, high), [2 * words.shape[0]])


@triton.jit
def widen_bfloat16(x, ARCH: tl.constexpr):
    """bfloat16 as float32, an even number of elements in each thread, with one instruction for each element.

    Compilers take two: they move the upper element of a register to the lower half first.
    """
    if ARCH > 0:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return x.to(tl.float32)


@triton.jit
def opaque_copy(words, ARCH: tl.constexpr):
    """A copy that compilers cannot see through: they would keep values of an earlier pass in registers otherwise."""
    if ARCH > 0:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [words], dtype=tl.int32, is_pure=False, pack=1)
    else:
        return words


@triton.jit
def philox_words(seed, count):
    """Four words of 32 random bits for each number (Salmon and others, 2011): all bits of both arguments count."""
    # All 64 bits of the position are in the counter: numbers repeat after 2**64 elements, not 2**32.
    low = count.to(tl.int64).to(tl.uint32)
    high = (count.to(tl.int64) >> 32).to(tl.uint32)
    return tl.philox(seed, low, high, low * 0, low * 0)


@triton.jit
def uniform(seed, at):
    """A number in [0, 1) for each position: word ``at % 4`` of counter ``at // 4``."""
    # Word selection by bits, so that a tile of any shape gives the same numbers as one that draws four at a time.
    a, b, c, d = philox_words(seed, at >> 2)
    low = tl.where(at & 1 == 0, a, b)
    high = tl.where(at & 1 == 0, c, d)
    return tl.uint_to_uniform_float(tl.where(at & 2 == 0, low, high))


@triton.jit
def uniform_quads(seed, quad):
    """The numbers of :func:`uniform` for the positions 4 * quad, ..., 4 * quad + 3, along two dimensions more."""
    a, b, c, d = philox_words(seed, quad)
    # `join` adds a last dimension: this order makes the reshaped words a, b, c, d.
    return tl.uint_to_uniform_float(tl.join(tl.join(a, c), tl.join(b, d)))


@triton.jit
def normal(seed, at):
    """A number of the standard normal distribution for each position (Box and Muller, 1958)."""
    a, b, _, _ = philox_words(seed, at)
    sample, _ = tl.pair_uniform_to_normal(tl.uint_to_uniform_float(a), tl.uint_to_uniform_float(b))
    return sample
