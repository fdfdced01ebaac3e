"""Scattered sums whose index many lines share: the kernel, interpreted, against sums in float64; what becomes it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multi_tensor_kernels import interpret
from pass_runs import Run, close
from weft.inductor.multi_tensor.shared_scatter import SharedScatter
from weft.inductor.passes import shared_index
from weft.inductor.passes.sum_segments import sum_segments
from weft.inductor.runtime.aten import compile_aten
from weft.inductor.runtime.bound_plan import BoundLaunches
from weft.inductor.runtime.kernels import inspect_kernel
from weft.inductor.runtime.multi_tensor import use_kernels

Tensor = torch.Tensor


def in_float64(size: int, values: Tensor, index: Tensor) -> Tensor:
    sums = torch.zeros(*values.shape[:2], size, dtype=torch.float64)
    for row, keys in enumerate(index.tolist()):
        for at, key in enumerate(keys):
            if 0 <= key < size:
                sums[:, row, key] += values[:, row, at].double()
    return sums


def distances(rows: int, count: int, size: int) -> Tensor:
    """Places of pairs of positions by their distance, the far ones at the ends."""
    return (torch.arange(count)[None, :] - torch.arange(rows)[:, None] + size // 2).clamp(0, size - 1)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**20),
    st.tuples(st.integers(1, 40), st.integers(1, 5), st.integers(1, 150), st.integers(1, 300)),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_random_sums_equal_the_reference(
    seed: int, sizes: tuple[int, int, int, int], dtype: torch.dtype, whole: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    lines, rows, count, size = sizes
    index = torch.randint(-1, size + 1, (rows, count), generator=generator)
    index = (distances(rows, count, size) if seed % 2 else index).to(whole)
    values = torch.randn(lines, rows, count, generator=generator).to(dtype)
    values = values if seed % 3 else values.transpose(0, 1).contiguous().transpose(0, 1)
    wanted = in_float64(size, values, index)
    eps = max(torch.finfo(dtype).eps, 4 * count * torch.finfo(torch.float32).eps)
    call = SharedScatter(size)
    for found in (interpret(call, [[values], index])[0], call([values], index)[0][0]):
        assert found.dtype == dtype
        assert found.is_contiguous()
        torch.testing.assert_close(found.double(), wanted, rtol=eps, atol=2 * eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_infinities_and_nan_reach_their_own_places_only(dtype: torch.dtype) -> None:
    values = torch.ones(3, 1, 200, dtype=dtype)
    index = (torch.arange(200) % 7)[None]
    values[0, 0, 3], values[1, 0, 4], values[1, 0, 4 + 7], values[2, 0, 5] = math.inf, math.inf, -math.inf, math.nan
    values[0, 0, 6] = -math.inf
    found = interpret(SharedScatter(7), [[values], index])[0]
    wanted = torch.zeros(3, 1, 7, dtype=dtype).scatter_add_(2, index.expand(3, 1, 200), values)
    assert wanted.isnan().sum() == 2
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_for_hopper_spills_nothing(dtype: torch.dtype) -> None:
    values = torch.empty(96, 512, 512, dtype=dtype, device="meta")
    plan = SharedScatter(512).plan([[values], torch.empty(512, 512, dtype=torch.int64, device="meta")])
    (launch,) = plan.launches
    assert launch.grid == 512 * 3 * 8
    assert inspect_kernel(launch.kernel).spills == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensor_cores_are_as_precise(dtype: torch.dtype) -> None:
    gpu = torch.device("cuda", torch.cuda.current_device())
    index = distances(512, 512, 512).to(gpu)
    values = torch.randn(96, 512, 512, device=gpu).to(dtype)
    call, sums = SharedScatter(512), torch.full((96, 512, 512), torch.nan, device=gpu, dtype=dtype)
    bound = BoundLaunches(call.plan([[values], index]), gpu)
    bound.bind([[values], index], [[sums]], torch.cuda.current_stream().cuda_stream)
    bound.launch(torch.cuda.current_stream().cuda_stream)
    wanted = torch.zeros(96, 512, 512, dtype=torch.float64, device=gpu)
    wanted.scatter_add_(2, index.expand(96, 512, 512), values.double())
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(sums.double(), wanted, rtol=max(eps, 1e-6), atol=max(eps, 2e-5))


# ---- the pass


def looked_up(scores: Tensor, index: Tensor) -> Tensor:
    """The gradient of scores that are looked up by distance, by heads and samples alike."""
    leaf = scores.detach().requires_grad_()
    torch.gather(leaf, -1, index.expand(*leaf.shape[:-2], *index.shape)).square().sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def looked_up_transposed(scores: Tensor, index: Tensor) -> Tensor:
    leaf = scores.detach().requires_grad_()
    torch.gather(leaf, -1, index.expand(*leaf.shape[:-2], *index.shape)).transpose(-1, -2).square().sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def calls(run: Run) -> list[SharedScatter]:
    return [node.target for node in run.graph.graph.nodes if isinstance(node.target, SharedScatter)]


@pytest.mark.parametrize("function", [looked_up, looked_up_transposed])
@pytest.mark.parametrize("leading", [(16,), (4, 5)])
def test_the_gradient_of_an_expanded_gather_is_one_call(leading: tuple[int, ...], function: object) -> None:
    given_ = torch.randn(*leading, 9, 20), torch.randint(0, 20, (9, 11))
    run, plain = Run(function, given_, [sum_segments]), Run(function, given_, [])  # type: ignore[bad-argument-type]
    assert calls(run) == [SharedScatter(20)]
    close(run, plain, rtol=1e-5, atol=1e-5)
    (found,) = compile_aten(use_kernels(run.graph))(*given_)
    torch.testing.assert_close(found, looked_up(*given_), rtol=1e-5, atol=1e-5)


def test_few_lines_many_places_and_own_indices_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    few = torch.randn(15, 9, 20), torch.randint(0, 20, (9, 11))
    assert not calls(Run(looked_up, few, [sum_segments]))
    own = torch.randn(16, 9, 20), torch.randint(0, 20, (16, 9, 11))
    gradient = lambda scores, index: torch.zeros_like(scores).scatter_add(-1, index, scores[..., :11] * 2)
    assert not calls(Run(gradient, own, [sum_segments]))
    monkeypatch.setattr(shared_index, "_MOST_PLACES", 19)
    assert not calls(Run(looked_up, (torch.randn(16, 9, 20), few[1]), [sum_segments]))


def test_sums_that_are_added_to_values_are_left_alone() -> None:
    added = lambda values, index: values.scatter_add(-1, index.expand(16, 9, 11), values[..., :11] * 2)
    given_ = torch.randn(16, 9, 20), torch.randint(0, 20, (9, 11))
    assert not calls(Run(added, given_, [sum_segments]))
