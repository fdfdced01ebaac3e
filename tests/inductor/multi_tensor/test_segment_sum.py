"""Sums of rows by index: the kernels, interpreted, against sums in float64, and which operations become them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exploration import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from multi_tensor_kernels import interpret
from weft.capture.graph import StepGraph
from weft.capture.record.aot import Source, step_graph
from weft.capture.step_interface import Role
from weft.inductor.lowering.lower import lower
from weft.inductor.multi_tensor import packed_sort, segment_sum
from weft.inductor.multi_tensor.segment_sum import _PAST, SegmentSum, _SegmentLayout
from weft.inductor.passes import sum_segments as passes
from weft.inductor.passes.sum_segments import sum_segments
from weft.inductor.runtime.aten import compile_aten
from weft.inductor.runtime.kernels import inspect_kernel
from weft.inductor.runtime.multi_tensor import use_kernels

Tensor = torch.Tensor
aten = torch.ops.aten

CHUNK = 16  # so that few rows are many chunks


def by_kernels(call: SegmentSum, rows: Tensor, index: Tensor, base: Tensor | None = None) -> Tensor:
    """Of sorted indices and, the same bits, of those as they are."""
    keys, order = torch.sort(index.int(), stable=True)
    if len(index) % 2:
        order = order.int()
    based = [] if base is None else [base]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_sum, "_CHUNK", CHUNK)
        patch.setattr(packed_sort, "_MOST_IN_BLOCK", 64)  # the interpreter takes a second to sort a whole block
        (found,) = interpret(call, [[rows], [keys, order], based])
        (again,) = interpret(call, [[rows], [index], based])
    assert torch.equal(found, again)
    return found


def in_float64(call: SegmentSum, rows: Tensor, index: Tensor, base: Tensor | None = None) -> Tensor:
    sums = torch.zeros(call.size, rows.shape[1], dtype=torch.float64)
    for at, key in enumerate(index.tolist()):
        if 0 <= key < call.size and key != call.skipped:
            sums[key] += call.scale * rows[at].double()
    return sums if base is None else sums + base.double()


def near(found: Tensor, wanted: Tensor, index: Tensor, base: Tensor | None = None) -> None:
    """Within what rounding each addition in float32 and the result in its dtype gives."""
    terms = 1 + (index.bincount().max().item() if len(index) else 0)
    eps = max(torch.finfo(found.dtype).eps, 2 * terms * torch.finfo(torch.float32).eps)
    assert not found.isnan().any()
    torch.testing.assert_close(found.double(), wanted, rtol=eps, atol=4 * eps * terms**0.5)


# ---- the kernels


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_values_of_the_padding_index_reach_no_row(bad: float) -> None:
    index = torch.tensor([0, 2, 3, 2, 0])
    rows = torch.ones(5, 16)
    rows[index == 2] = bad
    call = SegmentSum(4, skipped=2)
    wanted = aten.embedding_dense_backward(rows, index, 4, 2, False)
    assert torch.equal(by_kernels(call, rows, index), wanted)
    keys, order = torch.sort(index.int(), stable=True)
    for indices in ([keys, order], [index]):
        ((found,),) = call([rows], indices, [])
        assert torch.equal(found, wanted)


@settings(max_examples=examples(ci=8, exploring=250))
@given(
    st.integers(0, 2**20),
    st.integers(1, 60),
    st.integers(1, 400),
    st.sampled_from([1, 16, 33, 200]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([0.0, 0.5, 0.95]),
)
def test_random_sums_equal_the_reference(
    seed: int, size: int, count: int, columns: int, dtype: torch.dtype, heavy: float
) -> None:
    """`heavy`: the part of the rows that one index has."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(0, size, (count,), generator=generator)
    index[torch.rand(count, generator=generator) < heavy] = size // 2
    rows = torch.randn(count, columns, generator=generator).to(dtype)
    base = torch.randn(size, columns, generator=generator).to(dtype) if seed % 2 else None
    call = SegmentSum(size, skipped=seed % (size + 1) - 1, scale=1.0 if seed % 3 else -0.5)
    near(by_kernels(call, rows, index, base), in_float64(call, rows, index, base), index)
    keys, order = torch.sort(index.int(), stable=True)
    for indices in ([keys, order], [index]):
        ((found,),) = call([rows], indices, [base] if base is not None else [])
        near(found, in_float64(call, rows, index, base), index)


def test_a_short_segment_is_summed_in_the_order_of_its_rows() -> None:
    """But where a chunk ends, if many more come: what is before and what is after are summed apart."""
    rows = torch.randn(300, 48) * torch.logspace(-4, 4, 300)[:, None]
    index = torch.arange(300) % 20
    found = by_kernels(SegmentSum(20), rows, index)
    for key in range(20):
        total, parts = torch.zeros(48), []
        for at, row in enumerate(rows[key::20], start=15 * key):
            if at % CHUNK == 0 and 15 * (key + 1) - at > _PAST:
                parts, total = [total], torch.zeros(48)
            total = total + row
        assert torch.equal(found[key], sum(parts, torch.zeros(48)) + total)


def test_long_segments_begin_and_end_anywhere() -> None:
    """Segments of all lengths round those of a chunk and of a group: heads, groups and tails of all sizes come."""
    count = 2800
    group = _SegmentLayout(count, 32, 1, torch.float32, False).group * CHUNK
    assert group == 16 * CHUNK
    lengths = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3, CHUNK + _PAST, CHUNK + _PAST + 1, 2 * CHUNK, 5 * CHUNK + 7, 600]
    lengths += [0, 2, 9, group - 1, group, group + 1, group + _PAST, 0, 2 * group + 3]
    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    index = torch.cat([index, torch.full((count - len(index),), len(lengths))])
    assert index.bincount()[-1] > group
    rows = torch.randn(count, 32)
    for first in (0, 5):  # where segments of the same lengths lie otherwise
        call = SegmentSum(len(lengths) + 2)
        near(by_kernels(call, rows[first:], index[first:]), in_float64(call, rows[first:], index[first:]), index)


@pytest.mark.parametrize("count", [511, 512, 513])
def test_one_index_has_all_rows(count: int) -> None:
    rows, index = torch.randn(count, 40), torch.full((count,), 3)
    calls = (SegmentSum(5), SegmentSum(4), SegmentSum(5, skipped=3), SegmentSum(3))
    for call in calls if count == 512 else calls[:1]:
        near(by_kernels(call, rows, index), in_float64(call, rows, index), index)


def test_rows_wider_than_a_program_sums() -> None:
    rows, index, base = torch.randn(75, 2100), torch.tensor([0, 2, 2] * 25), torch.randn(4, 2100)
    near(by_kernels(SegmentSum(4), rows, index, base), in_float64(SegmentSum(4), rows, index, base), index)


def test_rows_of_skipped_indices_do_not_matter() -> None:
    """Two in three lie outside the table, whole chunks of them and parts of one."""
    rows, index = torch.randn(150, 32), torch.tensor([2, 5, 5] * 50)
    rows[index == 5] = torch.nan
    call = SegmentSum(4)
    near(by_kernels(call, rows, index), in_float64(call, rows, index), index)
    index[index == 5] = 1
    call = SegmentSum(4, skipped=1)
    near(by_kernels(call, rows, index), in_float64(call, rows, index), index)


def test_few_programs_add_up_the_sums_of_one_index() -> None:
    """Of all lengths: no program adds more than a few square roots of the chunks."""
    for count in (100, 32768, 2**20, 2**24):
        layout = _SegmentLayout(count, 64, 10, torch.float32, False)
        most = 2 * (layout.group - 1) + layout.groups
        assert most <= max(4 * layout.chunks**0.5, 2 * 16)


def test_segment_sums_are_deterministic_at_any_alignment() -> None:
    index = torch.randint(0, 5, (500,))
    store = torch.empty(500 * 24 + 1)
    rows = torch.randn(500, 24)
    unaligned = store[1:].view(500, 24).copy_(rows)
    call = SegmentSum(6)
    assert torch.equal(by_kernels(call, rows, index), by_kernels(call, unaligned, index))


def test_keys_outside_the_table_are_left_out() -> None:
    index, rows = torch.tensor([-3, 2, 7, 2, 9]), torch.ones(5, 32)
    assert by_kernels(SegmentSum(4), rows, index)[:, 0].tolist() == [0, 0, 2, 0]


@pytest.mark.parametrize(
    ("columns", "unsorted", "dtype"),
    [
        (64, True, torch.float32),
        (1000, False, torch.bfloat16),
        (2048, True, torch.bfloat16),
        (4096, False, torch.float32),
    ],
)
def test_kernels_for_hopper_spill_nothing_and_load_16_bytes(dtype: torch.dtype, columns: int, unsorted: bool) -> None:
    def empty(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(*sizes, dtype=dtype, device="meta")

    count, size = 16384, 128256
    keys, order = empty(count, dtype=torch.int32), empty(count, dtype=torch.int64)
    indices, sorts = ([order], ["sorted_blocks", "sorted_places"]) if unsorted else ([keys, order], [])
    plan = SegmentSum(size, 0).plan([[empty(count, columns)], indices, [empty(size, columns)]])
    names = ["segment_marks", *sorts, "segment_sums", "group_sums", "joined_sums"]
    assert [launch.kernel.name for launch in plan.launches] == names
    for launch in plan.launches:
        resources = inspect_kernel(launch.kernel)
        assert resources.spills == 0
        assert resources.registers <= 128  # four programs a multiprocessor
        if columns >= 1000 and launch.kernel.name.endswith("_sums"):
            assert resources.vector_loads >= 8
    assert sum(scratch * 4 for scratch, _ in plan.scratch.values()) < 0.07 * count * columns * 4 + 8 * size + 12 * count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_not_aligned_are_not_loaded_16_bytes_at_a_time(dtype: torch.dtype) -> None:
    rows = torch.empty(4096, 2048, dtype=dtype, device="meta")
    keys = torch.empty(4096, dtype=torch.int32, device="meta")
    launches = SegmentSum(9999).plan([[rows], [keys, keys], []]).launches
    (walks,) = [launch.kernel for launch in launches if launch.kernel.name == "segment_sums"]
    # Of the 256 bytes that a thread has in flight; where segments begin is aligned in both branches.
    assert 16 <= inspect_kernel(walks).vector_loads <= 16 + 2 * 4


# ---- the pass


def graph_of(function: Callable[..., Any], *inputs: Tensor) -> StepGraph:
    module = make_fx(lambda *given: (function(*given),), tracing_mode="fake")(*inputs)
    return step_graph(module, [Source(f"x{at}", Role.BATCH) for at in range(len(inputs))])[0]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of tests are those of many places."""
    monkeypatch.setattr(passes, "few_places", lambda places, elements: False)


ROWS, IDS = torch.randn(3, 50, 40), torch.randint(0, 30, (3, 50))
TABLE = torch.randn(30, 40)

SUMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "an embedding": lambda g, i, t: aten.embedding_dense_backward(g, i, 30, -1, False),
    "with padding": lambda g, i, t: aten.embedding_dense_backward(g, i, 30, 4, False),
    "index_add": lambda g, i, t: t.index_add(0, i[0], g[0]),
    "index_add of parts": lambda g, i, t: torch.zeros(30, 4, 10, dtype=g.dtype).index_add(
        0, i[0], g[0].view(50, 4, 10), alpha=-2
    ),
    "index_put": lambda g, i, t: t.index_put([i - 15], g, accumulate=True),
    "scatter_add": lambda g, i, t: t.scatter_add(0, i[1][:, None].expand(-1, 40), g[1]),
    "the gradient of picked rows": lambda g, i, t: torch.zeros_like(t).index_put([i[2]], g[2], accumulate=True),
}
OTHERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "counts": lambda g, i, t: aten.embedding_dense_backward(g, i, 30, -1, True),
    "other dimensions": lambda g, i, t: t.index_add(1, i[0][:10] % 40, g[0, :30, :10]),
    "places of each element": lambda g, i, t: t.scatter_add(0, (i[0, :40] + i[0][:, None]) % 30, g[0]),
    "replaced rows": lambda g, i, t: t.index_put([i[0]], g[0]),
    "one value for all": lambda g, i, t: t.index_put([i[0]], g[0, :1], accumulate=True),
    "two indices": lambda g, i, t: t.index_put([i[0], i[1]], g[0, :, 0], accumulate=True),
    "narrow rows": lambda g, i, t: t[:, :8].contiguous().index_add(0, i[0], g[0, :, :8].contiguous()),
    "whole numbers": lambda g, i, t: t.long().index_add(0, i[0], g[0].long()),
    "rows that do not lie together": lambda g, i, t: t.index_add(0, i[0, :40], g[0, :40].t()),
}


@pytest.mark.parametrize("name", SUMS)
def test_operations_that_become_segment_sums(name: str) -> None:
    inputs = ROWS, IDS, TABLE
    step = sum_segments(graph_of(SUMS[name], *inputs)).check()
    (call,) = [node for node in step.graph.nodes if isinstance(node.target, SegmentSum)]
    assert isinstance(call.args[1], list)
    assert len(call.args[1]) == 1
    # Zeros are not read.
    assert bool(call.args[2]) == (name in ("index_add", "index_put", "scatter_add"))
    wanted = SUMS[name](*(t.double() if t.is_floating_point() else t for t in inputs))
    for program in (compile_aten(step), compile_aten(use_kernels(step))):
        (found,) = program(*inputs)
        torch.testing.assert_close(found.double(), wanted.double(), rtol=1e-5, atol=1e-5)
        assert found.shape == wanted.shape
        assert found.dtype == torch.float32


@pytest.mark.parametrize("name", ["an embedding", "index_put"])
def test_many_indices_are_sorted_by_aten(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "fits_packed_sort", lambda count, size: False)
    step = sum_segments(graph_of(SUMS[name], ROWS, IDS, TABLE)).check()
    targets = [node.target for node in step.graph.nodes]
    assert aten.sort.stable in targets
    for program in (compile_aten(step), compile_aten(use_kernels(step))):
        (found,) = program(ROWS, IDS, TABLE)
        torch.testing.assert_close(found, SUMS[name](ROWS, IDS, TABLE), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_unsupported_operations_are_left_alone(name: str) -> None:
    step = sum_segments(graph_of(OTHERS[name], ROWS, IDS, TABLE))
    assert not any(isinstance(node.target, SegmentSum) for node in step.graph.nodes)


def test_few_places_are_left_to_the_lowering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    step = sum_segments(graph_of(SUMS["an embedding"], ROWS, IDS, TABLE))
    assert not any(isinstance(node.target, SegmentSum) for node in step.graph.nodes)


def test_a_base_that_is_updated_in_place() -> None:
    def function(g: Tensor, i: Tensor, t: Tensor) -> Tensor:
        t.copy_(t.index_add(0, i[0], g[0]))
        return t.sum()

    table = TABLE.clone()
    compile_aten(use_kernels(sum_segments(graph_of(function, ROWS, IDS, TABLE))))(ROWS, IDS, table)
    torch.testing.assert_close(table, TABLE.index_add(0, IDS[0], ROWS[0]))


def test_what_reads_the_sums_is_ordered_after_them() -> None:
    """The call returns a list of lists, which has no buffer of its own."""
    step = sum_segments(graph_of(lambda g, i, t: t.index_add(0, i[0], g[0]).sin(), ROWS, IDS, TABLE))
    lowered = lower(step, list(step.graph.nodes))
    (at,) = [at for at, found in enumerate(lowered.operations) if isinstance(found.node.target, SegmentSum)]
    call, picked = lowered.operations[at : at + 2]
    assert call.writes & picked.reads
