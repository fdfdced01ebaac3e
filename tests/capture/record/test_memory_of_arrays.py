"""Steps with tensors in the memory of numpy arrays: the answer of eager, or an error that names both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import weft
from weft.errors import UncapturableMutation

Case = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[], list[float]]]


def _array_written() -> Case:
    array = np.zeros(3, dtype=np.float32)
    tensor = torch.from_numpy(array)

    def step(x: torch.Tensor) -> torch.Tensor:
        array[0] += 1
        return x + tensor

    return step, tensor.tolist


def _array_written_backwards() -> Case:
    tensor = torch.zeros(3)
    array = tensor.numpy()[::-1]

    def step(x: torch.Tensor) -> torch.Tensor:
        array[:2] += 1
        return x + tensor

    return step, tensor.tolist


def _tensor_written() -> Case:
    tensor = torch.zeros(3)
    array = tensor.numpy()

    def step(x: torch.Tensor) -> torch.Tensor:
        tensor.add_(x)
        return x * float(array[1])

    return step, tensor.tolist


def _array_written_that_a_tensor_is_made_of() -> Case:
    array = np.zeros(3, dtype=np.float32)

    def step(x: torch.Tensor) -> torch.Tensor:
        array[:] = array + 1
        return x + torch.as_tensor(array)

    return step, array.tolist


def _bytes_written() -> Case:
    content = bytearray(12)
    tensor = torch.frombuffer(content, dtype=torch.float32)

    def step(x: torch.Tensor) -> torch.Tensor:
        content[3] = 64
        return x + tensor

    return step, tensor.tolist


def _parameter_written() -> Case:
    model, array = torch.nn.Linear(3, 3), np.ones(3, dtype=np.float32)
    model.bias.data = torch.from_numpy(array)

    def step(x: torch.Tensor) -> torch.Tensor:
        array[0] += 1
        return x + model.bias.detach()

    return step, array.tolist


def _both_read() -> Case:
    array = np.zeros(3, dtype=np.float32)
    tensor = torch.from_numpy(array)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x + tensor + float(array[0])

    def show() -> list[float]:  # between the calls
        array[:] += 1
        return array.tolist()

    return step, show


def _only_the_tensor_used() -> Case:
    array = np.zeros(3, dtype=np.float32)
    tensor = torch.from_numpy(array)

    def step(x: torch.Tensor) -> torch.Tensor:
        tensor.add_(x)
        return x + tensor

    return step, array.tolist


def _another_array_written() -> Case:
    array, other = np.zeros(6, dtype=np.float32), np.zeros(3, dtype=np.float32)
    tensor = torch.from_numpy(array)

    def step(x: torch.Tensor) -> torch.Tensor:
        other[0] += 1
        tensor.add_(1)
        return x + tensor[:3]

    return step, lambda: [*array.tolist(), *other.tolist()]


REFUSED = [
    _array_written,
    _array_written_backwards,
    _tensor_written,
    _array_written_that_a_tensor_is_made_of,
    _bytes_written,
    _parameter_written,
]


def outcome(case: Any, **options: Any) -> list[Any]:
    step, show = case()
    run = weft.compile(step, **options) if options else step
    return [(run(torch.full((3,), at + 1.0)).tolist(), show()) for at in range(3)]


@pytest.mark.parametrize("case", REFUSED)
def test_writes_to_memory_that_is_an_array_and_a_tensor_are_refused(case: Any) -> None:
    with pytest.raises(UncapturableMutation, match="is in the same memory"):
        outcome(case, mode="default")


@pytest.mark.parametrize("case", REFUSED)
def test_the_step_runs_uncompiled_where_it_may(case: Any) -> None:
    assert outcome(case, fallback="eager") == outcome(case)


@pytest.mark.parametrize("case", [_both_read, _only_the_tensor_used, _another_array_written])
def test_steps_without_such_writes_are_captured(case: Any) -> None:
    assert outcome(case, mode="default") == outcome(case)
