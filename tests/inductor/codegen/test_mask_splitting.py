"""Rows in pieces: one computation of each piece, in Triton's interpreter and compiled, against what the nests mean."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nest_check import SEARCH, check, tensors
from nests import load, op, store

from weft import knobs
from weft.inductor.codegen.canonical import canonical
from weft.inductor.codegen.kernel import GeneratedKernel, generate
from weft.inductor.codegen.mask_splitting import split_at_mask_boundaries
from weft.inductor.loop_ir.ir import Call, Const, Index, Load, Nest, Position, Reduce, Store, Value
from weft.inductor.runtime import compile_pool

f32, i64, bool_, bf16 = torch.float32, torch.int64, torch.bool, torch.bfloat16


def compare(kind: str, axis: int, number: int, offset: int = 0) -> Call:
    place: Value = Position(axis)
    if offset:
        place = op("add", place, Const(offset, i64), dtype=i64)
    return op(kind, place, Const(number, i64), dtype=bool_)


def between(axis: int, low: int, high: int) -> Call:
    return op("and", compare("ge", axis, low), compare("lt", axis, high), dtype=bool_)


def rotary(rows: int, heads: int, size: int) -> Nest:
    """``x * cos + cat(-x[half:], x[:half]) * sin``, as it is lowered."""
    half, row = size // 2, heads * size
    first, second = between(2, 0, half), between(2, half, size)
    x, cos, sin = load("x", row, size, 1), load("cos", size, 0, 1), load("sin", size, 0, 1)
    ahead = Load("x", Index([(0, row), (1, size), (2, 1)], half), f32, first)
    behind = Load("x", Index([(0, row), (1, size), (2, 1)], -half), f32, second)
    turned = op("where", first, op("where", first, op("neg", ahead), Const(0.0, f32)), behind)
    return Nest((rows, heads, size), (store("y", op("add", op("mul", x, cos), op("mul", turned, sin)), row, size, 1),))


def joined(rows: int, widths: list[int]) -> Nest:
    """Tensors side by side."""
    total, start, value = sum(widths), 0, Const(0.0, f32)
    for at, width in enumerate(widths):
        here = between(1, start, start + width)
        part = Load(f"x{at}", Index([(0, width), (1, 1)], -start), f32, here)
        value, start = op("where", here, part, value), start + width
    return Nest((rows, total), (store("y", value, total, 1),))


def pieces(nest: Nest) -> int:
    return len(split_at_mask_boundaries(canonical(nest).nest).stores) // len(nest.stores)


def run(nest: Nest) -> GeneratedKernel:
    """Check a nest over buffers that are as long as it reaches."""
    lengths: dict[str, int] = {}
    for buffer, index in [*((r.buffer, r.index) for r in nest.reads), *((s.buffer, s.index) for s in nest.stores)]:
        reach = index.offset + sum(stride * (nest.sizes[axis] - 1) for axis, stride in index.strides)
        lengths[buffer] = max(lengths.get(buffer, 0), reach + 1)
    return check(nest, tensors(**lengths))


def test_a_rotary_embedding_reads_everything_once() -> None:
    text = run(rotary(5, 3, 64)).source.text
    assert text.count("tl.load(") == 6, "two halves of x, cos and sin"
    assert text.count("tl.store(") == 2
    assert "where" not in text
    assert ">=" not in text


def test_a_rotary_embedding_loads_16_bytes_at_once_and_nothing_twice(tmp_path: Path) -> None:
    source = generate(rotary(4096, 32, 128), dict.fromkeys(["x", "cos", "sin", "y"], bf16)).source
    with knobs.override(cache_dir=str(tmp_path)):
        needs = compile_pool.build([source], 90, workers=0)[0].resources
    values = source.constants["XBLOCK"] // (source.num_warps * 32)
    assert needs.vector_loads == 6 * values // 8
    assert needs.spills == 0
    assert needs.registers <= 64, "four of its programs of 64 threads leave room for more"


@pytest.mark.parametrize(
    ("widths", "count"), [([32, 32], 2), ([16, 48], 4), ([16, 16, 16], 3), ([64, 16], 1), ([33, 31], 1), ([8, 8], 1)]
)
def test_tensors_side_by_side_are_cut_where_pieces_are_few_and_even(widths: list[int], count: int) -> None:
    nest = joined(5, widths)
    assert pieces(nest) == count
    text = run(nest).source.text
    assert ("where" in text) == (count == 1)
    assert text.count("tl.store(") == count


def test_what_is_stored_for_one_piece_only_is_stored_without_a_mask() -> None:
    x = load("x", 64, 1)
    nest = Nest((5, 64), (Store("y", Index([(0, 64), (1, 1)]), x, compare("lt", 1, 32)),))
    cut = split_at_mask_boundaries(canonical(nest).nest)
    assert [(s.mask, s.index.offset) for s in cut.stores] == [(None, 0)]
    run(nest)


def test_rows_are_not_cut_where_nothing_is_gained() -> None:
    x = load("x", 64, 1)
    here = compare("lt", 1, 32)
    whole = op("where", here, x, op("neg", x))
    assert pieces(Nest((5, 64), (store("y", whole, 64, 1),))) == 1, "as many loads as before"
    slow = compare("lt", 0, 32)
    masked = Load("x", Index([(0, 64), (1, 1)]), f32, slow)
    assert pieces(Nest((64, 64), (store("y", masked, 64, 1),))) == 1, "the mask is the same for all of a row"
    masked = Load("x", Index([(0, 64), (1, 1)]), f32, here)
    total = Reduce("sum", (masked,), [1], f32)
    assert pieces(Nest((5, 64), (store("y", op("mul", masked, total), 64, 1),))) == 1, "rows are reduced whole"


@st.composite
def any_pieces(draw: st.DrawFn) -> Nest:
    """Comparisons of any kind with any numbers, joined in any way, as masks of loads and to choose between values."""
    size = draw(st.sampled_from([32, 48, 64]))

    def condition(depth: int) -> Value:
        kind = draw(
            st.sampled_from(["lt", "le", "gt", "ge", "lt", "ge", "not", "and", "or"] if depth else ["lt", "ge"])
        )
        if kind == "not":
            return op("not", condition(depth - 1), dtype=bool_)
        if kind in ("and", "or"):
            return op(kind, condition(depth - 1), condition(depth - 1), dtype=bool_)
        shift = draw(st.sampled_from([0, 0, 5, -7]))
        change = {"le": -1, "gt": -1}.get(kind, 0)
        return compare(
            kind, 1, 16 * draw(st.integers(-1, 5)) + shift + change + draw(st.sampled_from([0] * 9 + [1])), shift
        )

    def read(name: str) -> Value:
        index = Index([(0, size), (1, 1)], draw(st.sampled_from([0, 16])))
        return Load(name, index, f32, condition(2), draw(st.sampled_from([0.0, 2.0])))

    values: list[Value] = [read("x0"), read("x1"), load("x0", size, 1), Const(1.5, f32)]
    for _ in range(3):
        a, b = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        values.append(op("where", condition(2), a, b) if draw(st.booleans()) else op("add", a, op("mul", a, b)))
    mask = condition(2) if draw(st.integers(0, 3)) == 0 else None
    return Nest((3, size), (Store("y", Index([(0, size), (1, 1)]), op("add", values[-1], values[-2]), mask),))


@given(any_pieces())
@settings(SEARCH, max_examples=80)
def test_any_pieces_give_what_they_mean(nest: Nest) -> None:
    run(nest)
