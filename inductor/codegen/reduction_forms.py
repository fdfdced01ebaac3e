"""Chooses the form of each reduction: one pass or two, by whether it runs in a loop or in registers.

In a loop, a reduction that needs the result of another costs a second pass over memory. Two that can run together
become one there: the maximum with the sum of exponentials (online softmax, Milakov and Gimelshein, 2018), the mean with
the squared deviations (Welford, 1962). In registers the second pass is free, and the two-pass form is shorter and more
exact. Where each reduction costs a pass over the L1 cache (:mod:`.row_passes`), factors that all terms of a sum share
are taken out of the sum: it then does not wait for the reductions that the factors come from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from weft.inductor.codegen.kernel_plan import KernelPlan
from weft.inductor.codegen.narrow_comparisons import narrow_comparisons
from weft.inductor.loop_ir.ir import Call, Const, Nest, Reduce, ReductionResult, Value, ordered, rewrite_stores
from weft.inductor.loop_ir.value_ranges import Ranges


def choose_reduction_forms(nest: Nest, plan: KernelPlan) -> Nest:
    """The nest with each reduction, and each comparison with a number of the row, in the form for the plan.

    Taking factors out of sums and Welford's form change the rounding of results; all else keeps it.
    """
    looped = frozenset(plan.loop.axes) if plan.loop else frozenset()
    ranges = Ranges(nest.sizes)
    # Lowerings write the two-pass form. The other direction is for nests that are given in one-pass form.
    nest = _changed(nest, lambda value: narrow_comparisons(_two_pass_form(value, nest, looped), plan, ranges))
    if plan.multi_pass:
        nest = _changed(nest, lambda value: _factored(value, looped))
    # One pair at a time: a replacement changes the values by which other pairs are found.
    while looped:
        pair = next(_pairs(nest, looped), None)
        if pair is None:
            break
        nest = _changed(nest, lambda value, pair=pair: pair.get(value, value))
    return nest


def _changed(nest: Nest, change: Callable[[Value], Value]) -> Nest:
    return Nest(nest.sizes, tuple(rewrite_stores(nest.stores, change)))


def _two_pass_form(value: Value, nest: Nest, looped: frozenset[int]) -> Value:
    if not isinstance(value, ReductionResult) or not isinstance(value.reduce, Reduce):
        return value
    # In a loop the one-pass form is what is wanted.
    if not looped.isdisjoint(value.reduce.over):
        return value
    (x, *_), over, dtype = value.reduce.args, value.reduce.over, value.dtype
    if value.reduce.kind == "online_softmax":
        greatest = Reduce("max", (x,), over, dtype)
        return greatest if value.at == 0 else _sum_exp(x, greatest, over)
    if value.reduce.kind == "welford":
        count = Const(float(_count(nest, over)), dtype)
        if value.at == 2:
            return count
        mean = Call("div", (Reduce("sum", (x,), over, dtype), count), dtype)
        return mean if value.at == 0 else _sum_squares(x, mean, over)
    return value


def _factored(value: Value, looped: frozenset[int]) -> Value:
    """A sum along a row with the factors that all terms share taken out, where these depend on a reduction."""
    if not isinstance(value, Reduce) or value.kind != "sum" or not looped.isdisjoint(value.over):
        return value
    # A product commutes and associates up to rounding, so the order of its factors is free here.
    factors = _factors(value.args[0], value.dtype)
    # Only factors that need a reduction: others cost no pass, and taking them out changes the rounding.
    common = [factor for factor in factors if factor.axes.isdisjoint(value.over) and _reduced(factor)]
    own = [factor for factor in factors if factor not in common]
    # Without a factor of its own the sum would be of a constant, and a sum of integers gains nothing.
    if not common or not own or not value.dtype.is_floating_point:
        return value
    product = lambda a, b: Call("mul", (a, b), value.dtype)
    total = Reduce("sum", (functools.reduce(product, own),), value.over, value.dtype)
    return functools.reduce(product, common, total)


def _reduced(value: Value) -> bool:
    return any(isinstance(part, Reduce) for part in ordered([value]))


def _factors(value: Value, dtype: torch.dtype) -> list[Value]:
    if isinstance(value, Call) and value.op == "mul" and value.dtype == dtype:
        return [factor for arg in value.args for factor in _factors(arg, dtype)]
    return [value]


def _count(nest: Nest, over: tuple[int, ...]) -> int:
    count = 1
    for axis in over:
        size = nest.sizes[axis]
        assert isinstance(size, int), "rows in registers have a known length"
        count *= size
    return count


def _sum_exp(x: Value, greatest: Value, over: tuple[int, ...]) -> Value:
    return Reduce("sum", (Call("exp", (Call("sub", (x, greatest), x.dtype),), x.dtype),), over, x.dtype)


def _sum_squares(x: Value, mean: Value, over: tuple[int, ...]) -> Value:
    apart = Call("sub", (x, mean), x.dtype)
    return Reduce("sum", (Call("mul", (apart, apart), x.dtype),), over, x.dtype)


def _pairs(nest: Nest, looped: frozenset[int]) -> Iterator[dict[Value, Value]]:
    """Pairs of reductions along a loop that one reduction can replace, as what becomes of each of them."""
    # Quadratic in the reductions of one nest, of which there are a few.
    reduces = [reduce for reduce in nest.reduces if not looped.isdisjoint(reduce.over)]
    for second in reduces:
        if second.kind != "sum":
            continue
        for first in reduces:
            if first.over != second.over:
                continue
            # Equal values are one object, so `is` compares whole expressions.
            if first.kind == "max" and second is _sum_exp(first.args[0], first, first.over):
                x = first.args[0]
                both = Reduce("online_softmax", (x,), first.over, x.dtype)
                greatest = ReductionResult(both, 0, x.dtype)
                # `rewrite` replaces operands first: when it reaches the sum, the sum already refers to the new maximum.
                yield {first: greatest, _sum_exp(x, greatest, first.over): ReductionResult(both, 1, x.dtype)}
            # A variance is found by its shape: the squares of what is reduced less its own mean.
            for mean in _means(nest, first):
                x = first.args[0]
                if second is _sum_squares(x, mean, first.over):
                    both = Reduce("welford", (x,), first.over, x.dtype)
                    center = ReductionResult(both, 0, x.dtype)
                    yield {mean: center, _sum_squares(x, center, first.over): ReductionResult(both, 1, x.dtype)}


def _means(nest: Nest, total: Reduce) -> Iterator[Value]:
    """The values that are ``total`` over the number of its terms."""
    if total.kind != "sum" or not total.dtype.is_floating_point or total.args[0].dtype != total.dtype:
        return
    count = 1.0
    for axis in total.over:
        size = nest.sizes[axis]
        # Constants are compared by value, and the count of a symbolic size is not one.
        if not isinstance(size, int):
            return
        count *= size
    # A mean is a quotient or a product with the reciprocal, which may have been rounded to the dtype.
    one_over = torch.tensor(1.0 / count, dtype=total.dtype).item()
    yield Call("div", (total, Const(count, total.dtype)), total.dtype)
    yield Call("mul", (total, Const(1.0 / count, total.dtype)), total.dtype)
    yield Call("mul", (total, Const(one_over, total.dtype)), total.dtype)
