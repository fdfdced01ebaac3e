"""Correctly rounded (IEEE 754) square roots and quotients of float32, without a branch.

``tl.sqrt_rn`` and ``tl.div_rn`` test each operand and call a function for special ones. The branches keep the compiler
from interleaving elements; here all elements are computed side by side, and special values are selected at the end. An
approximate result is corrected by its remainder, which a fused multiply-add gives exactly (Markstein, "Computation of
elementary functions on the IBM RISC System/6000 processor", 1990); the steps are those that compilers of CUDA take for
usual operands.
"""

from __future__ import annotations

_UP, _DOWN = repr(2.0**64), repr(2.0**-32)  # below the former, remainders of roots would not be exact


def square_root_lines(result: str, x: str) -> list[str]:
    """Lines for ``result = sqrt(x)``, of any ``x``."""
    return [
        # The residual of a root is about 2**-24 of its operand, and is exact only while that is a normal number.
        f"small = {x} < {2.0**-64!r}",
        f"scaled = tl.where(small, {x} * {_UP}, {x})",
        "inverse = tl.rsqrt(scaled)",
        "near = scaled * inverse",
        # One Newton step, with the residual of the rounded root from a fused multiply-add.
        "near = tl.fma(tl.fma(-near, near, scaled), inverse * 0.5, near)",
        # rsqrt gives infinity and 0 for these, and their product NaN. NaN and negative numbers come out as NaN by
        # themselves.
        f"{result} = tl.where(({x} == 0.0) | ({x} == float('inf')), {x}, tl.where(small, near * {_DOWN}, near))",
    ]


def reciprocal_lines(result: str, x: str) -> list[str]:
    """Lines for ``result``, ``1 / x`` but for its last bit, of normal ``x > 0`` whose reciprocal is normal; zero and
    infinity give each other."""
    return [
        f"inverse = tl.rsqrt({x})",
        # 1 / x as the square of 1 / sqrt(x): `rsqrt` is one instruction, a division is not.
        "inverse = inverse * inverse",
        f"near = tl.fma(tl.fma(-{x}, inverse, 1.0), inverse, inverse)",
        # For 0 and infinity the correction is NaN, and the first estimate the answer.
        f"{result} = tl.where(near == near, near, inverse)",
    ]


def quotient_lines(result: str, a: str, b: str, inverse: str) -> list[str]:
    """Lines for ``result = a / b`` where ``b >= 0`` and ``inverse`` is its :func:`reciprocal_lines` or one rounded as
    IEEE asks. Not zero or infinite, ``a`` has to be at least 2**-102, and the quotient to be normal."""
    return [
        f"near = {a} * {inverse}",
        # The first correction brings the quotient within an ulp, the second rounds it correctly.
        f"nearer = tl.fma(tl.fma(-{b}, near, {a}), {inverse}, near)",
        f"nearer = tl.fma(tl.fma(-{b}, nearer, {a}), {inverse}, nearer)",
        # A zero has lost its sign to the remainder's, and infinities have none.
        f"{result} = tl.where(tl.abs(nearer) > 0.0, nearer, near)",
    ]
