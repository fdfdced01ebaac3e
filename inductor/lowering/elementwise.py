"""Elementwise operations as formulas, with torch's type promotion and broadcasting.

:func:`elementwise` turns a formula over expressions into a lowering. Positional parameters of the formula are the first
arguments of the operation's schema (tensors or numbers), its keyword parameters the other arguments that it looks at,
and ``promoted``, the type that eager computes in, which registers may be wider than.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from weft.inductor.graph.operations import arguments
from weft.inductor.loop_ir.ir import register_dtype
from weft.inductor.lowering.expressions import Expression, constant
from weft.inductor.lowering.registry import Lower, Lowering, Node, register_lowering

Formula = Callable[..., "Expression | None"]

# Types that a formula computes in float32, and that some of eager's results depend on nevertheless.
HALVES = (torch.bfloat16, torch.float16)


def elementwise(
    *targets: Any,
    promote_to_float: bool = False,
    as_bools: bool = False,
    round_numbers: bool = False,
    masks: tuple[str, ...] = (),
) -> Callable[[Formula], Formula]:
    """Register a formula as the lowering of ATen operations.

    Args:
        promote_to_float: integers become floats first.
        as_bools: every operand becomes a boolean first.
        round_numbers: numbers are rounded to the promoted type first, as eager's comparisons do.
        masks: parameters that are booleans and take no part in type promotion.

    The formula returns None where it does not cover a case.
    """

    def register(formula: Formula) -> Formula:
        register_lowering(*targets)(_lowering(formula, promote_to_float, as_bools, round_numbers, masks))
        return formula

    return register


def _lowering(
    formula: Formula, promote_to_float: bool, as_bools: bool, round_numbers: bool, masks: tuple[str, ...]
) -> Lower:
    # Read once, at registration: the names say which arguments are operands (by position, as in the schema) and which
    # are options (keyword only).
    parameters = inspect.signature(formula).parameters.values()
    operands = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    options = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]

    def lower(out: Lowering, node: Node) -> bool:
        args = arguments(node)
        tensors = dict(zip(operands, args.values(), strict=False))
        # Operands only: torch does not let options such as `alpha` take part in type promotion.
        numbers = [tensors[name] for name in operands if name not in masks and tensors[name] is not None]
        # Also an option (`alpha`) may be complex, with real tensors.
        if any(isinstance(number, complex) for number in args.values()):
            return False
        dtype = torch.bool if as_bools else promoted(*numbers)
        if promote_to_float and not dtype.is_floating_point:
            # Eager's rule for true division and transcendental functions of integers.
            dtype = torch.get_default_dtype()
        sizes = out.result().sizes
        values: list[Expression | None] = []
        for name in operands:
            arg, wanted = tensors[name], torch.bool if name in masks else dtype
            # Eager's comparisons cast both sides to the common type: bfloat16 0.1 == 0.1 is True. In float32 it would
            # be False.
            if round_numbers and dtype in HALVES and isinstance(arg, (int, float)):
                values.append(constant(arg, dtype))
            else:
                # Converted here, not by `out.value`: to a bool, a conversion is a comparison with zero.
                values.append(None if arg is None else Expression(out.value(arg, sizes, dtype=None)).to(wanted))
        # Under a name that no schema uses.
        args["promoted"] = dtype
        result = formula(*values, **{name: args[name] for name in options})
        # Nothing was stored so far, so the node may still become an ATen call.
        if result is None:
            return False
        store_result(out, result)
        return True

    return lower


def promoted(*args: Any) -> torch.dtype:
    """The type that torch computes with on tensors and numbers; numbers weigh less than tensors."""
    values = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in args]
    values = [v if isinstance(v, torch.Tensor) else _concrete(v) for v in values]
    # `result_type` takes two; of a tensor alone, its own dtype is the answer.
    if len(values) == 1:
        only = values[0]
        return only.dtype if isinstance(only, torch.Tensor) else torch.result_type(only, only)
    # Between two numbers it gives the default dtype, so three operands can come out wider than eager's. That is
    # harmless: the result is stored in the fake tensor's dtype.
    dtype = torch.result_type(values[0], values[1])
    for i, value in enumerate(values[2:], 2):
        dtype = torch.promote_types(dtype, torch.result_type(values[i - 1], value))
    return dtype


def _concrete(value: Any) -> Any:
    """A number of the same kind: promotion never looks at its value."""
    if isinstance(value, torch.SymInt):
        return 1
    return 1.0 if isinstance(value, torch.SymFloat) else value


def store_result(out: Lowering, value: Expression, result: int = 0) -> None:
    """Store a value at each element of a result, in the result's dtype."""
    # The last conversion: to the register type here, and to the memory's type by the store itself, where halves
    # round.
    out.store(value.to(out.fake(result).dtype).value, result=result)


def load_operand(out: Lowering, arg: Any, dtype: torch.dtype, result: int = 0) -> Expression:
    """An argument at each element of a result, broadcast, in the register type of ``dtype``."""
    return Expression(out.value(arg, out.result(result).sizes)).to(register_dtype(dtype))
