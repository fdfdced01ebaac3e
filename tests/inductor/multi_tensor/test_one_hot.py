"""Sums of narrow rows by index as products: the kernels, interpreted, against sums in float64; what becomes them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multi_tensor_kernels import interpret
from pass_runs import Run, close
from weft.inductor.multi_tensor.one_hot import MAX_COLUMNS, OneHotSum
from weft.inductor.passes import sum_segments as passes
from weft.inductor.passes.sum_segments import sum_segments
from weft.inductor.runtime.aten import compile_aten
from weft.inductor.runtime.bound_plan import BoundLaunches
from weft.inductor.runtime.kernels import inspect_kernel
from weft.inductor.runtime.multi_tensor import use_kernels

Tensor = torch.Tensor


def by_kernels(call: OneHotSum, rows: Tensor, index: Tensor, base: Tensor | None = None) -> Tensor:
    return interpret(call, [[rows], index, [] if base is None else [base]])[0]


def in_float64(call: OneHotSum, rows: Tensor, index: Tensor, base: Tensor | None = None) -> Tensor:
    sums = torch.zeros(call.size, rows.shape[1], dtype=torch.float64)
    for at, key in enumerate(index.tolist()):
        key = key + call.size if call.wraps and key < 0 else key
        if 0 <= key < call.size and key != call.skipped:
            sums[key] += call.scale * rows[at].double()
    return sums if base is None else sums + base.double()


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**20),
    st.integers(1, 200),
    st.integers(1, 700),
    st.sampled_from([1, 12, 17, MAX_COLUMNS]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_random_sums_equal_the_reference(
    seed: int, size: int, count: int, columns: int, dtype: torch.dtype, whole: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    wraps = bool(seed % 2)
    index = torch.randint(-size if wraps else 0, size, (count,), generator=generator, dtype=whole)
    rows = torch.randn(count, columns, generator=generator).to(dtype)
    rows = rows if seed % 7 else rows.t().contiguous().t()
    base = torch.randn(size, columns, generator=generator).to(dtype) if seed % 3 else None
    call = OneHotSum(size, seed % (size + 1) - 1, 1.0 if seed % 5 else -0.5, wraps)
    wanted = in_float64(call, rows, index, base)
    eps = max(torch.finfo(dtype).eps, 4 * count * torch.finfo(torch.float32).eps)
    for found in (by_kernels(call, rows, index, base), call([rows], index, [] if base is None else [base])[0][0]):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted, rtol=eps, atol=2 * eps)


def test_infinities_and_nan_reach_their_own_rows_only() -> None:
    """Zero times infinity is no number: a plain product would spread it over the table."""
    rows = torch.ones(200, 3)
    index = torch.arange(200) % 7
    rows[3, 0], rows[4, 1], rows[4 + 7, 1], rows[5, 2] = math.inf, math.inf, -math.inf, math.nan
    rows[6, 0] = -math.inf
    found = by_kernels(OneHotSum(7), rows, index)
    wanted = torch.zeros(7, 3).index_add_(0, index, rows)
    assert wanted.isnan().sum() == 2
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_indices_outside_the_table_are_left_out() -> None:
    index = torch.tensor([-3, 2, 7, 2, 9, -1])
    rows = torch.ones(6, 5)
    assert by_kernels(OneHotSum(4), rows, index)[:, 0].tolist() == [0, 0, 2, 0]
    assert by_kernels(OneHotSum(4, wraps=True), rows, index)[:, 0].tolist() == [0, 1, 2, 1]


@pytest.mark.parametrize(("columns", "dtype"), [(12, torch.float32), (MAX_COLUMNS, torch.float32), (3, torch.bfloat16)])
def test_kernels_for_hopper_use_tensor_cores_and_spill_nothing(columns: int, dtype: torch.dtype) -> None:
    rows = torch.empty(197 * 197, columns, dtype=dtype, device="meta")
    index = torch.empty(197 * 197, dtype=torch.int64, device="meta")
    plan = OneHotSum(732, wraps=True).plan([[rows], index, []])
    assert [launch.kernel.name for launch in plan.launches] == ["one_hot_products", "one_hot_sums"]
    assert all(inspect_kernel(launch.kernel).spills == 0 for launch in plan.launches)
    assert plan.launches[0].grid >= 4 * 132  # four programs a multiprocessor


@pytest.mark.gpu
def test_tensor_cores_are_as_precise() -> None:
    """22 bits of a value, sums in float32."""
    gpu = torch.device("cuda", torch.cuda.current_device())
    index = torch.randint(-732, 732, (197 * 197,), device=gpu)
    rows = torch.randn(12, 197 * 197, device=gpu).t()
    call = OneHotSum(732, wraps=True)
    table = torch.full((732, 12), torch.nan, device=gpu)
    bound = BoundLaunches(call.plan([[rows], index, []]), gpu)
    bound.bind([[rows], index, []], [[table]], torch.cuda.current_stream().cuda_stream)
    bound.launch(torch.cuda.current_stream().cuda_stream)
    wanted = torch.zeros(732, 12, dtype=torch.float64, device=gpu)
    wanted.index_add_(0, index % 732, rows.double())
    torch.testing.assert_close(table.double(), wanted, rtol=1e-6, atol=2e-5)


# ---- the pass


def biased(table: Tensor, index: Tensor, scores: Tensor) -> Tensor:
    """The gradient of position biases: their rows come transposed."""
    leaf = table.detach().requires_grad_()
    bias = leaf[index.view(-1)].view(9, 9, -1).permute(2, 0, 1).contiguous()
    (scores + bias).square().sum().backward()
    assert leaf.grad is not None
    return leaf.grad


GIVEN = torch.randn(25, 6), torch.randint(-25, 25, (9, 9)), torch.randn(2, 6, 9, 9)


def calls(run: Run) -> list[OneHotSum]:
    return [node.target for node in run.graph.graph.nodes if isinstance(node.target, OneHotSum)]


def test_the_gradient_of_position_biases_is_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "few_places", lambda places, elements: False)
    run, plain = Run(biased, GIVEN, [sum_segments]), Run(biased, GIVEN, [])
    assert calls(run) == [OneHotSum(25, wraps=True)]
    close(run, plain, rtol=1e-5, atol=1e-5)
    (found,) = compile_aten(use_kernels(run.graph))(*GIVEN)
    torch.testing.assert_close(found, biased(*GIVEN), rtol=1e-5, atol=1e-5)


def test_rows_of_two_dimensions_of_indices_may_be_transposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As T5's gradients of buckets of distances are."""

    def buckets(table: Tensor, index: Tensor, scores: Tensor) -> Tensor:
        leaf = table.detach().requires_grad_()
        (scores + torch.nn.functional.embedding(index % 25, leaf).permute(2, 0, 1)).square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    monkeypatch.setattr(passes, "few_places", lambda places, elements: False)
    run, plain = Run(buckets, GIVEN, [sum_segments]), Run(buckets, GIVEN, [])
    assert calls(run) == [OneHotSum(25)]
    close(run, plain, rtol=1e-5, atol=1e-5)


def test_few_places_and_very_many_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not calls(Run(biased, GIVEN, [sum_segments]))
    monkeypatch.setattr(passes, "few_places", lambda places, elements: False)
    monkeypatch.setattr(passes, "_MOST_COMPARED", 25 * 81 - 1)
    assert not calls(Run(biased, GIVEN, [sum_segments]))


def test_rows_worth_a_sort_are_sorted_where_there_are_many_places(monkeypatch: pytest.MonkeyPatch) -> None:
    given = torch.randn(25, 32), GIVEN[1], torch.randn(2, 32, 9, 9)
    add = lambda table, index, scores: table.index_put(
        (index.view(-1),), scores[0].permute(1, 2, 0).reshape(81, 32).contiguous(), accumulate=True
    )
    monkeypatch.setattr(passes, "few_places", lambda places, elements: False)
    targets = lambda: [type(node.target).__name__ for node in Run(add, given, [sum_segments]).graph.graph.nodes]
    assert "OneHotSum" in targets()
    monkeypatch.setattr(passes, "_MOST_COMPARED", 25 * 81 - 1)
    assert "SegmentSum" in targets()
