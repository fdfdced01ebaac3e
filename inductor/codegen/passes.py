"""Reductions in the form that suits how they are walked.

In a loop, a reduction that needs another's result costs a second pass over memory, so two that can run together become
one: the greatest value with the sum of exponentials below it (Milakov and Gimelshein, 2018), the mean with the squared
deviations from it (Welford, 1962). In registers the second pass is free and the plain form is shorter and more exact,
so there they are taken apart. Where each reduction costs a pass over the first-level cache (:mod:`.segments`), factors
that all terms of a sum share are multiplied with the sum: it then need not wait for the reductions that they come from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from weft.inductor.codegen.plan import Plan
from weft.inductor.codegen.ranges import Ranges, with_narrow_numbers
from weft.inductor.ir import Call, Const, Nest, Part, Reduce, Value, map_values, ordered, rewrite


def for_plan(nest: Nest, plan: Plan) -> Nest:
    """The nest with each reduction, and each comparison with a number of the row, in the form for its walk."""
    looped = frozenset(plan.loop.axes) if plan.loop else frozenset()
    ranges = Ranges(nest.sizes)
    nest = _changed(nest, lambda value: with_narrow_numbers(_taken_apart(value, nest, looped), plan, ranges))
    if plan.segmented:
        nest = _changed(nest, lambda value: _factored(value, looped))
    while looped:
        pair = next(_pairs(nest, looped), None)
        if pair is None:
            break
        nest = _changed(nest, lambda value, pair=pair: pair.get(value, value))
    return nest


def _changed(nest: Nest, change: Callable[[Value], Value]) -> Nest:
    new = rewrite([root for store in nest.stores for root in store.values()], change)
    return Nest(nest.sizes, tuple(map_values(store, new) for store in nest.stores))


def _taken_apart(value: Value, nest: Nest, looped: frozenset[int]) -> Value:
    if not isinstance(value, Part) or not isinstance(value.reduce, Reduce) or not looped.isdisjoint(value.reduce.over):
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
    """A sum along a row as a sum of less, times what its terms have in common."""
    if not isinstance(value, Reduce) or value.kind != "sum" or not looped.isdisjoint(value.over):
        return value
    factors = _factors(value.args[0], value.dtype)
    common = [factor for factor in factors if factor.axes.isdisjoint(value.over) and _reduced(factor)]
    own = [factor for factor in factors if factor not in common]
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
    """Two reductions along a loop that can be one, as what each of them becomes."""
    reduces = [reduce for reduce in nest.reduces if not looped.isdisjoint(reduce.over)]
    for second in reduces:
        if second.kind != "sum":
            continue
        for first in reduces:
            if first.over != second.over:
                continue
            if first.kind == "max" and second is _sum_exp(first.args[0], first, first.over):
                x = first.args[0]
                both = Reduce("online_softmax", (x,), first.over, x.dtype)
                greatest = Part(both, 0, x.dtype)
                yield {first: greatest, _sum_exp(x, greatest, first.over): Part(both, 1, x.dtype)}
            for mean in _means(nest, first):
                x = first.args[0]
                if second is _sum_squares(x, mean, first.over):
                    both = Reduce("welford", (x,), first.over, x.dtype)
                    center = Part(both, 0, x.dtype)
                    yield {mean: center, _sum_squares(x, center, first.over): Part(both, 1, x.dtype)}


def _means(nest: Nest, total: Reduce) -> Iterator[Value]:
    """The values that are ``total`` over the number of its terms."""
    if total.kind != "sum" or not total.dtype.is_floating_point or total.args[0].dtype != total.dtype:
        return
    count = 1.0
    for axis in total.over:
        size = nest.sizes[axis]
        if not isinstance(size, int):
            return
        count *= size
    one_over = torch.tensor(1.0 / count, dtype=total.dtype).item()
    yield Call("div", (total, Const(count, total.dtype)), total.dtype)
    yield Call("mul", (total, Const(1.0 / count, total.dtype)), total.dtype)
    yield Call("mul", (total, Const(one_over, total.dtype)), total.dtype)
