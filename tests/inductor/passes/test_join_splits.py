"""Concatenations of all parts of a split become transposed copies; others stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pass_runs import Run, same_bits, targets
from weft.inductor.passes.fold_casts import fold_casts
from weft.inductor.passes.join_splits import join_splits


def after(step: Callable[..., object], *args: Tensor) -> dict[str, int]:
    """The operations after the passes; the bits are those of the captured graph."""
    run = Run(step, args, [join_splits, fold_casts])
    assert same_bits(run, Run(step, args, []))
    return targets(run.graph)


SHAPES = [(6, 4), (6, 1, 4), (2, 6, 5, 3)]
CASES = [
    (shape, split, join)
    for shape in SHAPES
    for split in range(len(shape))
    for join in range(-len(shape), len(shape))
    if shape[split] > 1
]


@pytest.mark.parametrize(("shape", "split", "join"), CASES)
def test_all_equal_parts_in_order_are_one_copy(shape: tuple[int, ...], split: int, join: int) -> None:
    size = 1 if shape[split] in (3, 5) else 2
    left = after(lambda x: torch.cat(x.split(size, split), join) * 2, torch.randn(shape))
    assert left["aten.cat.default"] == left["aten.split.Tensor"] == 0


def test_no_data_moves_where_the_dimensions_between_have_size_1() -> None:
    left = after(lambda x: torch.cat(x.chunk(4), 1) * 2, torch.randn(4, 8, 16))
    assert left == {"aten.view.default": 1, "aten.mul.Tensor": 1}


def test_a_returned_tensor_keeps_memory_of_its_own() -> None:
    left = after(lambda x: torch.cat(x.chunk(4), 1), torch.randn(4, 8, 16))
    assert left["aten.clone.default"] == 1


@pytest.mark.parametrize(
    "step",
    [
        lambda x: torch.cat(x.split(2)[::-1], 1) * 2,
        lambda x: torch.cat(x.split(2)[:2], 1) * 2,
        lambda x: torch.cat([x.split(2)[0], *x.split(2)[:2]], 1) * 2,
        lambda x: torch.cat(x.split(4), 0) * 2,
        lambda x: torch.cat([*x.split(2), x], 0) * 2,
    ],
    ids=["reversed", "not all", "one twice", "of two sizes", "and another tensor"],
)
def test_other_concatenations_stay(step: Callable[[Tensor], Tensor]) -> None:
    assert after(step, torch.randn(6, 4))["aten.cat.default"] == 1


def test_channels_last_parts_give_a_channels_last_tensor() -> None:
    x = torch.randn(2, 4, 6, 6).to(memory_format=torch.channels_last)
    run = Run(lambda x: torch.cat(x.split(2, 1), 0) * 2, [x], [join_splits])
    assert run.outcome[0].is_contiguous(memory_format=torch.channels_last)


def test_parts_of_a_tensor_that_is_not_contiguous() -> None:
    left = after(lambda x: torch.cat(x.t().split(2, 1), 0) * 2, torch.randn(6, 4))
    assert left["aten.split.Tensor"] == 0
