"""Writes through views that the program made before the step, of buffers that the step reads before and after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from both_ways import assert_equal

Step = Callable[[Tensor], Any]


def a_part_of_a_flat_buffer() -> tuple[Step, list[Tensor]]:
    flat = torch.arange(12.0)
    part = flat[4:8]

    def step(x: Tensor) -> Any:
        old = flat.clone()
        part.add_(x)
        return old * 2, part.sum(), flat.sum()

    return step, [flat, part]


def a_part_of_a_part() -> tuple[Step, list[Tensor]]:
    flat = torch.arange(20.0)
    part = flat[2:18]
    inner = part[3:7]

    def step(x: Tensor) -> Any:
        old = part * 1.0
        inner.mul_(x)
        return old, part * 2, inner.sum()

    return step, [flat, part, inner]


def two_parts_of_a_buffer_that_begins_inside_its_storage() -> tuple[Step, list[Tensor]]:
    buffer = torch.arange(30.0)[5:]
    first, second = buffer[4:8], buffer[6:10]

    def step(x: Tensor) -> Any:
        old = buffer.clone()
        first.add_(x)
        second.mul_(2)
        return old + 1, first + second

    return step, [buffer, first, second]


def a_transposed_part_of_a_matrix() -> tuple[Step, list[Tensor]]:
    matrix = torch.arange(24.0).reshape(4, 6)[1:]
    part = matrix[:, 1:3].t()

    def step(x: Tensor) -> Any:
        old = matrix.clone()
        part.add_(x[:3])
        return old.t().contiguous(), matrix * 2, part * 1

    return step, [matrix, part]


def a_window() -> tuple[Step, list[Tensor]]:
    flat = torch.arange(12.0)
    windows = flat[4:].unfold(0, 3, 2)

    def step(x: Tensor) -> Any:
        old = windows.clone()
        windows[1].add_(x[:3])
        return old * 2, windows * 1

    return step, [flat]


def a_position_in_the_storage() -> tuple[Step, list[Tensor]]:
    flat = torch.arange(12.0)
    part = flat[4:]

    def step(x: Tensor) -> Any:
        at = part.as_strided((4,), (1,), 6)
        old = part.clone()
        at.add_(x)
        return old * 2, part * 1, at * 1

    return step, [flat, part]


def gradients_in_one_buffer() -> tuple[Step, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    flat = torch.zeros(30)
    model.weight.grad, model.bias.grad = flat[3:19].view(4, 4), flat[20:24]

    def step(x: Tensor) -> Any:
        old = flat.clone()
        model(x).square().sum().backward()
        return old * 2, flat.clone()

    return step, [flat, model.weight.grad, model.bias.grad]


@pytest.mark.parametrize("mode", ["default", "bitwise"])
@pytest.mark.parametrize(
    "make",
    [
        a_part_of_a_flat_buffer,
        a_part_of_a_part,
        two_parts_of_a_buffer_that_begins_inside_its_storage,
        a_transposed_part_of_a_matrix,
        a_window,
        a_position_in_the_storage,
        gradients_in_one_buffer,
    ],
)
def test_what_was_read_before_a_write_keeps_its_values(
    make: Callable[[], tuple[Step, list[Tensor]]], mode: Any
) -> None:
    """The old value is read after the write, so that the write cannot take place in the memory of the buffer."""
    step, wanted = make()
    ours, found = make()
    compiled = weft.compile(ours, mode=mode)
    for call in range(3):
        x = torch.full((4,), float(call + 1))
        assert_equal(compiled(x), step(x))
        assert_equal(found, wanted)
