"""The sort of row numbers: the kernels, interpreted, against a stable sort of torch's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from multi_tensor_kernels import interpret
from weft.inductor.multi_tensor import packed_sort
from weft.inductor.multi_tensor.launch_plan import CallArgument, CallResult, LaunchPlan, add_jobs
from weft.inductor.multi_tensor.operation import MultiTensor
from weft.inductor.multi_tensor.packed_sort import PackedSort, fits_packed_sort
from weft.inductor.runtime.kernels import inspect_kernel

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True)
class SortCall(MultiTensor):
    """The sort by itself as a graph's call: ``[index]`` to ``[keys]`` and ``[order]``."""

    sort: PackedSort

    def __call__(self, *arguments: Any) -> list[list[Tensor]]:
        return [[result] for result in self.sort.sorted(arguments[0][0])]

    def plan(self, arguments: Sequence[Any]) -> LaunchPlan:
        index = arguments[0][0]
        plan = LaunchPlan()
        plan.scratch["words"] = (self.sort.words(len(index)), torch.int32)
        add_jobs(plan, "sorted_blocks", [self.sort.blocks(index, CallArgument(0, 0))])
        add_jobs(plan, "sorted_places", [self.sort.places(len(index), CallResult(0, 0), CallResult(1, 0))])
        return plan


def check(sort: PackedSort, index: Tensor) -> None:
    call = SortCall(sort)
    inside = torch.where(index < 0, index + sort.size, index) if sort.wraps else index
    inside = torch.where((inside < 0) | (inside >= sort.size), sort.size, inside)
    keys, order = torch.sort(inside, stable=True)
    for found in (interpret(call, [[index]]), [list_[0] for list_ in call([index])]):
        assert [t.dtype for t in found] == [torch.int32, torch.int32]
        assert torch.equal(found[0].long(), keys.long())
        assert torch.equal(found[1].long(), order)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes a second to sort a whole block."""
    monkeypatch.setattr(packed_sort, "_MOST_IN_BLOCK", 64)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 2**20),
    st.integers(1, 700),
    st.sampled_from([1, 2, 50, 4000, 128256, 2**21 - 2]),
    st.booleans(),
    st.sampled_from([torch.int32, torch.int64]),
)
@example(0, 1, 1, False, torch.int64)
@example(1, 64, 2**21 - 2, False, torch.int64)
@example(2, 65, 3, True, torch.int32)
@example(3, 128, 1, False, torch.int32)
@example(4, 33, 5, False, torch.int64)
def test_random_indices_are_sorted_stably(
    small_blocks: None, seed: int, count: int, size: int, wraps: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    outside = max(size // 10, 1) * (seed % 2)
    low = -size if wraps else -outside
    index = torch.randint(low, size + outside, (count,), generator=generator).to(dtype)
    check(PackedSort(size, wraps), index)


def test_equal_keys_keep_their_order_across_blocks() -> None:
    """Equal keys in every block keep their order, and the last block is not whole."""
    index = torch.randint(0, 2**21 - 2, (7,))[torch.randint(0, 7, (2 * 1024 + 5,))]
    check(PackedSort(2**21 - 2), index)


@pytest.mark.parametrize("order", ["rising", "falling", "equal", "last", "outside"])
def test_regular_indices_are_sorted_stably(small_blocks: None, order: str) -> None:
    rising = torch.arange(1000)
    index = {
        "rising": rising,
        "falling": rising.flip(0),
        "equal": rising.clamp(7, 7),
        "last": rising.clamp(999, 999),
        "outside": rising + 1000,
    }[order]
    check(PackedSort(1000), index)


def test_long_lists_and_large_tables_are_left_to_torch() -> None:
    assert fits_packed_sort(2**16, 2**21 - 2)
    assert not fits_packed_sort(2**16 + 1, 100)
    assert not fits_packed_sort(100, 2**21 - 1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [40, 32768, 50000, 2**16])
def test_kernels_for_hopper_spill_nothing(count: int, dtype: torch.dtype) -> None:
    plan = SortCall(PackedSort(128256, wraps=True)).plan([[torch.empty(count, dtype=dtype, device="meta")]])
    assert [launch.kernel.name for launch in plan.launches] == ["sorted_blocks", "sorted_places"]
    for launch in plan.launches:
        resources = inspect_kernel(launch.kernel)
        assert resources.spills == 0
        assert resources.registers <= 64
