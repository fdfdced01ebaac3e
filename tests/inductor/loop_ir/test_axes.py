"""The algebra of axes against enumeration: every index is written out, point by point."""

from __future__ import annotations

import itertools
import math

import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nest_eval import evaluate

from weft.inductor.loop_ir.axes import (
    AxisExpression,
    Factor,
    align,
    integer,
    merge,
    solve_access,
    split_axes,
    squeeze,
    squeeze_and_merge,
    substitute,
    substitute_stores,
)
from weft.inductor.loop_ir.ir import Call, Index, Load, Nest, Position, Reduce, Store, Value


def elements(index: Index, sizes: list[int]) -> list[int]:
    """The elements of an access, its own axes in order."""
    axes = [axis for axis, _ in index.strides]
    return [
        index.offset + sum(stride * point[k] for k, (_, stride) in enumerate(index.strides))
        for point in itertools.product(*(range(sizes[axis]) for axis in axes))
    ]


def value_at(index: Index, point: dict[int, int]) -> int:
    return index.offset + sum(stride * point[axis] for axis, stride in index.strides)


def contiguous(sizes: list[int], order: list[int]) -> Index:
    """A dense access that walks memory along the axes in ``order``, innermost last."""
    strides, step = {}, 1
    for axis in reversed(order):
        strides[axis] = step
        step *= sizes[axis]
    return Index([(axis, stride) for axis, stride in strides.items() if sizes[axis] != 1])


factorings = st.sampled_from(
    [[24], [2, 12], [12, 2], [4, 6], [6, 4], [2, 3, 4], [3, 8], [4, 3, 2], [2, 2, 2, 3], [1, 24], [3, 1, 8]]
)


@settings(max_examples=150, deadline=None)
@given(factorings, factorings, st.randoms(use_true_random=False))
def test_aligned_loops_visit_the_same_elements(left, right, random) -> None:
    orders = [random.sample(range(len(sizes)), len(sizes)) for sizes in (left, right)]
    a, b = contiguous(left, orders[0]), contiguous(right, orders[1])
    factors = align(a, left, b, right)
    if factors is None:
        boundaries = [
            set(itertools.accumulate([s[k] for k in reversed(o)], initial=1, func=lambda x, y: x * y))
            for s, o in zip((left, right), orders, strict=True)
        ]
        merged = sorted(boundaries[0] | boundaries[1])
        assert any(big % small for small, big in itertools.pairwise(merged)), "these loops do have common pieces"
        return
    sizes = [factor.size for factor in factors]
    one = substitute(a, split_axes([(f.left, k, f.size) for k, f in enumerate(factors)], left))
    two = substitute(b, split_axes([(f.right, k, f.size) for k, f in enumerate(factors)], right))
    assert one == two
    assert sorted(elements(one, sizes)) == sorted(elements(a, left)) == list(range(24))


def test_accesses_of_different_elements_do_not_align() -> None:
    assert align(Index([(0, 1)]), [8], Index([(0, 2)]), [8]) is None
    assert align(Index([(0, 1)]), [8], Index([(0, 1)], 8), [8]) is None
    assert align(Index([(0, 1)]), [8], Index([(0, 1)]), [4]) is None


def test_symbolic_sizes_align() -> None:
    n = sympy.Symbol("n", integer=True, positive=True)
    rows = Index([(0, 64), (1, 1)])
    assert align(rows, [n, 64], Index([(0, 1)]), [64 * n]) == [Factor(1, 0, 64), Factor(0, 0, n)]
    assert align(rows, [n, 64], Index([(0, 64), (1, 1)]), [n + 1, 64]) is None
    assert align(Index([(0, n), (1, 1)]), [8, n], Index([(0, 1)]), [8 * n]) == [Factor(1, 0, n), Factor(0, 0, 8)]


@settings(max_examples=200, deadline=None)
@given(factorings, st.data())
def test_a_windowed_read_finds_the_point_that_wrote_it(sizes, data) -> None:
    """solve() against enumeration: at every point of the reader the writer's point is the one of that element."""
    order = data.draw(st.permutations(range(len(sizes))))
    write = contiguous(sizes, order)
    shape = [sizes[axis] for axis in order]
    window = torch.arange(24).reshape(shape)
    for dim in range(len(shape)):
        start = data.draw(st.integers(0, shape[dim] - 1))
        step = data.draw(st.integers(1, 2))
        window = window.narrow(dim, start, shape[dim] - start)[(slice(None),) * dim + (slice(None, None, step),)]
    if data.draw(st.booleans()) and window.dim() > 1:
        window = window.transpose(0, -1)
    read_sizes = list(window.shape)
    read = Index([(k, s) for k, s in enumerate(window.stride()) if read_sizes[k] != 1], window.storage_offset())
    found = solve_access(write, sizes, read, read_sizes)
    assert found is not None, "a slice with steps is affine"
    moved = substitute(read, split_axes(found.factors, read_sizes))
    for values in itertools.product(*(range(n) for n in found.sizes)):
        point = dict(enumerate(values))
        there = {
            axis: place.constant + sum(factor * point[new] for new, factor in place.terms)
            for axis, place in found.substitution.items()
        }
        assert all(0 <= there[axis] < sizes[axis] for axis in there)
        assert value_at(write, there) == value_at(moved, point)


def _row_softmax(sizes: tuple[int, ...], over: tuple[int, ...]) -> Nest:
    steps = [math.prod(sizes[k + 1 :]) for k in range(len(sizes))]
    at = Index(enumerate(steps))
    load = Load("x", at, torch.float32)
    greatest = Reduce("max", (load,), over, torch.float32)
    return Nest(sizes, (Store("out", at, Call("sub", (load, greatest), torch.float32)),))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_merge_and_squeeze_preserve_results(sizes, data) -> None:
    over = tuple(k for k in range(len(sizes)) if data.draw(st.booleans()))
    nest = _row_softmax(tuple(sizes), over)
    x = torch.randn(math.prod(sizes))
    expected, merged = ({"x": x, "out": torch.zeros_like(x)} for _ in range(2))
    evaluate(nest, expected)
    small = merge(squeeze(nest))
    assert squeeze_and_merge(nest) == small
    evaluate(small, merged)
    assert torch.equal(expected["out"], merged["out"])
    assert len(small.sizes) <= len(over) + len(sizes) - len(over)
    if not over:
        assert len(small.sizes) == (1 if math.prod(sizes) > 1 else 0)


def test_substituting_axes_of_a_store_reaches_loads_and_reductions() -> None:
    nest = _row_softmax((6, 4), (1,))
    substitution = {0: AxisExpression(((0, 2), (1, 1))), 1: AxisExpression(((2, 1),))}
    moved = Nest((3, 2, 4), tuple(substitute_stores(nest.stores, substitution)))
    assert [reduce.over for reduce in moved.reduces] == [(2,)]
    x = torch.randn(24)
    expected, got = ({"x": x, "out": torch.zeros_like(x)} for _ in range(2))
    evaluate(nest, expected)
    evaluate(moved, got)
    assert torch.equal(expected["out"], got["out"])


def test_an_indirect_index_follows_one_axis_of_the_writer() -> None:
    label = Load("labels", Index([(0, 1)]), torch.int64)
    found = solve_access(Index([(0, 50), (1, 1)]), [8, 50], Index([(0, 50)], 0, [(label, 1)]), [8])
    assert found is not None
    assert found.gathered == {1: 0}
    # Sixteen rows by position, written as four by four.
    written = Index([(0, 64), (1, 16), (2, 1)])
    assert solve_access(written, [4, 4, 16], Index([(1, 1)], 0, [(label, 16)]), [16, 16]) is None


def within(axis: int, low: int, end: int) -> Value:
    """A mask: ``low <= axis < end``."""
    at = Position(axis)
    above, below = Call("ge", (at, integer(low)), torch.bool), Call("lt", (at, integer(end)), torch.bool)
    return Call("and", (above, below), torch.bool)


def test_a_masked_read_is_shifted_along_the_axis_that_its_mask_bounds() -> None:
    """The second half of a join, read along an axis twice as long, where heads lie as far apart as the shift is."""
    written, sizes = Index([(0, 8), (1, 16), (2, 1)]), [2, 32, 8]
    read = Index([(0, 8), (1, 16), (2, 1)], -8)
    found = solve_access(written, sizes, read, [2, 32, 16], within(2, 8, 16))
    assert found is not None
    assert {axis: place.constant for axis, place in found.substitution.items()} == {0: 0, 1: 0, 2: -8}
    assert solve_access(written, sizes, read, [2, 32, 16], within(2, 7, 16)) is None
    assert solve_access(written, sizes, read, [2, 32, 8]) is None


def test_the_mask_decides_along_which_axis_an_offset_shifts() -> None:
    """Eight elements further: in the row where there is room for that, or in the next row, eight elements back."""
    written, read = Index([(0, 16), (1, 1)]), Index([(0, 16), (1, 1)], 8)
    ahead = solve_access(written, [4, 16], read, [4, 16], within(1, 0, 8))
    assert ahead is not None
    assert [place.constant for place in ahead.substitution.values()] == [0, 8]
    back = solve_access(written, [4, 16], read, [3, 16], within(1, 8, 16))
    assert back is not None
    assert [place.constant for place in back.substitution.values()] == [1, -8]
    assert solve_access(written, [4, 16], read, [4, 16], within(1, 0, 9)) is None


def test_a_mask_over_a_split_axis_bounds_the_read() -> None:
    """Parts of five of an axis of 13: the last part is shorter."""
    at = Call("add", (Call("mul", (Position(0), integer(5)), torch.int64), Position(1)), torch.int64)
    mask = Call("lt", (at, integer(13)), torch.bool)
    read = Index([(0, 5), (1, 1)])
    found = solve_access(Index([(0, 1)]), [13], read, [3, 5], mask)
    assert found is not None
    assert found.substitution == {0: AxisExpression(((0, 5), (1, 1)))}
    assert solve_access(Index([(0, 1)]), [12], read, [3, 5], mask) is None


def test_a_mask_of_one_axis_bounds_a_read_along_two() -> None:
    """The second halves of rows of 16, where the writer walked all rows as one loop."""
    written, read = Index([(0, 1)]), Index([(0, 16), (1, 1)], 8)
    found = solve_access(written, [64], read, [4, 16], within(1, 0, 8))
    assert found is not None
    assert found.substitution == {0: AxisExpression(((0, 16), (1, 1)), 8)}
    assert solve_access(written, [64], read, [4, 16], within(1, 0, 9)) is None
