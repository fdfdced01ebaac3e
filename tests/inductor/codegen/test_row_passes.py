"""Rows that registers cannot hold from one of their reductions to the next, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nest_check import SEARCH, check, planned_with, tensors
from nests import layer_norm_backward_past_a_residual, load, op, store

from weft.inductor.codegen import kernel_plan
from weft.inductor.codegen.kernel import supports
from weft.inductor.loop_ir.ir import Const, Nest, Position, Reduce, ReductionResult, Store, Value

f32, i64 = torch.float32, torch.int64


@pytest.fixture
def few_registers() -> Iterator[None]:
    """For rows of 33 to 64 elements: the sums of two columns, and one value of each position."""
    with planned_with(_REGISTERS=3 * 64):
        yield


@pytest.mark.usefixtures("few_registers")
@pytest.mark.parametrize("width", [40, 64])
def test_rows_that_exceed_registers_are_reloaded_after_each_reduction(width: int) -> None:
    """Mean and sum of gradients share a pass; so do variance and correlation, without the deviation, their factor."""
    nest = layer_norm_backward_past_a_residual(2, 5, width)
    whole = 10 * width
    sizes = {"x": whole, "dy": whole, "past": whole, "w": width, "dx": whole}
    made = check(nest, tensors(**sizes, dw=2 * width, db=2 * width, rstd=10), tolerance=2e-4)
    parts = made.source.text.split("tl.debug_barrier()")
    parts[-1] = parts[-1].partition("\n    sum")[0]  # behind the loop, columns are summed over its tile
    assert [part.count("tl.sum(") for part in parts] == [2, 2, 0]
    assert [part.count("tl.load(") for part in parts] == [4, 3, 3], "what waits for memory is asked for first"
    assert [part.count("acc") for part in parts[1:]] == [0, 2], "sums of columns are made where rows are loaded"
    assert made.source.registers == min(255, 65536 // (32 * made.source.num_warps))


@pytest.mark.usefixtures("few_registers")
@pytest.mark.parametrize(("width", "asked"), [(40, 3), (64, 3), (33, 0)])
def test_the_next_row_is_prefetched_where_its_size_is_a_multiple_of_16_bytes(
    width: int, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_plan, "tile_of_rows", lambda c: (64, 4, True))
    whole = 10 * width
    sizes = {"x": whole, "dy": whole, "past": whole, "w": width, "dx": whole, "dw": 2 * width, "db": 2 * width}
    made = check(layer_norm_backward_past_a_residual(2, 5, width), tensors(**sizes, rstd=10), tolerance=2e-4)
    _, _, kernel_text = made.source.text.rpartition("@triton.jit")
    assert kernel_text.count("prefetch(") == asked
    assert kernel_text.count(f"(tl.minimum(n + 1, 4) - n) * {width}") == asked, "but for the last row"


@pytest.mark.usefixtures("few_registers")
def test_rows_that_are_loaded_again_can_be_overwritten() -> None:
    nest = layer_norm_backward_past_a_residual(2, 5, 40)
    for buffer in ("x", "dy", "past"):
        stores = (Store(buffer, nest.stores[0].index, nest.stores[0].value), *nest.stores[1:])
        sizes = {"x": 400, "dy": 400, "past": 400, "w": 40, "dw": 80, "db": 80, "rstd": 10}
        assert "tl.debug_barrier()" in check(Nest(nest.sizes, stores), tensors(**sizes), tolerance=2e-4).source.text


@pytest.mark.usefixtures("few_registers")
def test_sums_of_more_columns_than_registers_hold_are_refused() -> None:
    nest = layer_norm_backward_past_a_residual(2, 5, 64)
    third = Reduce("sum", (load("x", 320, 64, 1),), [1], f32)
    assert supports(nest) is None
    assert "fit into registers" in (supports(Nest(nest.sizes, (*nest.stores, store("third", third, 64, 0, 1)))) or "")


@st.composite
def any_rows(draw: st.DrawFn) -> tuple[Nest, dict[str, int]]:
    """Reductions of rows of reductions of rows, sums of columns of all that, and the lengths of the buffers."""
    parts, rows, width = draw(st.integers(1, 2)), draw(st.integers(1, 5)), draw(st.sampled_from([33, 40, 64]))
    whole = parts * rows * width
    strides = [rows * width, width, 1]
    buffers = {"x0": whole, "x1": whole, "x2": whole, "w": width}
    known: list[Value] = [load("x0", *strides), load("x1", *strides), load("x2", *strides), load("w", 0, 0, 1)]

    def grown(count: int) -> None:
        for _ in range(count):
            a, b = draw(st.sampled_from(known)), draw(st.sampled_from(known))
            known.append(op(draw(st.sampled_from(["add", "sub", "mul", "maximum"])), a, op("tanh", b)))

    def reduced(value: Value, kind: str) -> Value:
        if kind == "argmax":
            return op("to", ReductionResult(Reduce(kind, (value, Position(2)), [2], f32), 1, i64))
        if kind == "welford":
            return ReductionResult(Reduce(kind, (value,), [2], f32), draw(st.integers(0, 1)), f32)
        return Reduce(kind, (value,), [2], f32)

    for kind in draw(st.lists(st.sampled_from(["sum", "max", "argmax", "welford"]), min_size=1, max_size=3)):
        grown(2)
        wide = [value for value in known if 2 in value.axes]
        known.append(op("mul", reduced(draw(st.sampled_from(wide)), kind), Const(0.25, f32)))
    grown(4)
    stores: list[Store] = []
    rowwise = [value for value in known if value.axes == {0, 1, 2}]
    for value in [known[-1], *draw(st.lists(st.sampled_from(known), max_size=2))]:
        place = [stride for axis, stride in enumerate([rows, 1]) if axis in value.axes]
        to = strides if 2 in value.axes else place
        name = draw(st.sampled_from(["x0", f"y{len(stores)}"])) if value.axes == {0, 1, 2} else f"y{len(stores)}"
        if name not in {store.buffer for store in stores}:
            stores.append(store(name, value, *to))
            buffers.setdefault(name, whole)
    for _ in range(draw(st.integers(1, 2))):
        total = Reduce("sum", (draw(st.sampled_from(rowwise)),), [1], f32)
        stores.append(store(f"y{len(stores)}", total, width, 0, 1))
        buffers[stores[-1].buffer] = parts * width
    return Nest((parts, rows, width), tuple(stores)), buffers


@given(any_rows())
@settings(SEARCH, max_examples=60)
def test_random_multi_pass_kernels_equal_the_reference(case: tuple[Nest, dict[str, int]]) -> None:
    nest, lengths = case
    with planned_with(_REGISTERS=3 * 64, live_across_reductions=lambda *given: 4):
        if supports(nest) is None:
            check(nest, tensors(**lengths), tolerance=1e-3)
