"""Arrays and tensors that a step makes of lists of numbers: other numbers, and lists of another length, are no forms of
their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from twenty_calls import twenty_calls

import weft
from weft.errors import UncapturableDraw


def ints(at: int, count: int) -> list[int]:
    return [(at * 37 + each * 11) % 50 - 20 for each in range(count)]


def floats(at: int, count: int) -> list[float]:
    return [each / 7 for each in ints(at, count)]


def _normalised(n: list[int], x: list[float]) -> Any:
    a = np.asarray(x, dtype=np.float32)
    a = (a - a.mean()) / (a.std() + 1e-6)
    return torch.tensor(a) * 2, len(n)


TABLE = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
OF_LISTS: dict[str, Callable[[list[int], list[float]], Any]] = {
    "integers": lambda n, x: torch.from_numpy(np.array(n)) * 2,
    "floats": lambda n, x: torch.from_numpy(np.array(x, dtype=np.float32)) * 2,
    "normalised": _normalised,
    "doubles of integers": lambda n, x: torch.as_tensor(np.asarray(n, np.float64)) + torch.tensor(n),
    "positions": lambda n, x: TABLE[np.abs(np.array(n))] * 2,
    "means": lambda n, x: (float(np.array(x).mean()), np.array(n).max().item()),
}


@pytest.mark.parametrize("name", OF_LISTS)
def test_arrays_of_lists_are_captured_once(name: str) -> None:
    lists = lambda at: (ints(at, 3 + at * 5 % 7), floats(at, 3 + at * 5 % 7))
    twenty_calls(lambda: OF_LISTS[name], lists, 2)
    twenty_calls(lambda: OF_LISTS[name], lambda at: (ints(at, 4), floats(at, 4)), 2)


def test_nested_lists_and_lists_of_both_kinds() -> None:
    def step(rows: list[list[float]], n: int, x: float, both: list[Any]) -> Any:
        made = np.array([n, x, n * 2, 1 - x, 3, 1.5])
        return (
            torch.from_numpy(np.array(rows)) * 2,
            torch.from_numpy(made) * 2,
            np.array([[n], [n + 1]]),
            np.array(both),
        )

    call = lambda at: ([floats(at + k, 3) for k in range(2 + at % 3)], at, at / 7, [at, at / 3])
    twenty_calls(lambda: step, call, 3)


def test_arrays_of_lists_belong_to_the_step() -> None:
    def step(n: list[int], m: list[int]) -> Any:
        a, b = np.array(n), np.asarray(m)
        a[0] = 7
        b += 1
        torch.from_numpy(a).mul_(2)
        return a.copy(), b, n, m

    twenty_calls(lambda: step, lambda at: (ints(at, 4), ints(at, 2 + at % 2)), 5)


def test_integers_are_rounded_as_those_of_a_list() -> None:
    step = lambda n: (np.array(n, dtype=np.float32), np.asarray(n, np.float64))
    twenty_calls(lambda: step, lambda at: ([2**53 + at, 2**60 + at * 3 + 1, -(2**24) - 1],), 2)
    twenty_calls(lambda: step, lambda at: ([2**53 + at + k * 2**54 for k in range(2 + at % 2)],), 4)


def test_numbers_of_a_list_that_do_not_fit_raise_the_error_of_eager() -> None:
    step = lambda n: np.array(n, dtype=np.uint8)
    for lists in ([[1, 2], [3, 4], [5, 6], [7, 300]], [[1, 2], [3, 4, 5], [5, 6], [7, -1]]):
        compiled = weft.compile(step)
        for each in lists[:-1]:
            assert compiled(each).tolist() == each
        with pytest.raises(OverflowError, match="out of bounds for uint8"):
            compiled(lists[-1])


def test_numbers_of_data_in_an_array() -> None:
    def step(x: torch.Tensor) -> Any:
        found = np.array([x.sum().item(), x.argmax().item()])
        return found * 2, float(found.mean())

    twenty_calls(lambda: step, lambda at: (torch.randn(4, generator=torch.Generator().manual_seed(at)),), 2)


def _filled(x: torch.Tensor) -> Any:
    a = np.zeros(3, dtype=np.float32)
    torch.from_numpy(a).copy_(x)
    return float(a.sum()), a.copy()


def _added_up(x: torch.Tensor) -> Any:
    made = torch.from_numpy(np.zeros(3, dtype=np.float32))
    made.add_(x)
    return made * 2


def _written_between(x: torch.Tensor) -> Any:
    a = np.zeros(3, dtype=np.float32)
    shared = torch.from_numpy(a)
    before = shared + x
    a[0] = 5
    return before, shared * 2


def _set_by_index(x: torch.Tensor) -> Any:
    a = np.array([1.0, 2.0, 3.0], dtype=np.float32)
    shared = torch.as_tensor(a)
    shared[1] = x.sum()
    if shared[1] > 2:
        shared.mul_(2)
    return shared * 2, a.sum()


@pytest.mark.parametrize("step", [_filled, _added_up, _written_between, _set_by_index])
def test_tensors_in_the_memory_of_arrays_of_the_step_are_made_anew(step: Callable[..., Any]) -> None:
    twenty_calls(lambda: step, lambda at: (torch.full((3,), at / 10),), 3)


def test_an_array_and_a_tensor_in_its_memory_that_both_leave_the_step_are_refused() -> None:
    def step(x: torch.Tensor) -> Any:
        a = np.zeros(3, dtype=np.float32)
        shared = torch.from_numpy(a)
        shared.add_(x)
        return a, shared

    with pytest.raises(UncapturableDraw, match="one memory"):
        weft.compile(step)(torch.ones(3))


def _reduced(x: torch.Tensor) -> Any:
    losses: list[float] = []
    for scale in (1, 2, 3):
        losses += [(x * scale).exp().mean().item()]
    rows = [(loss, 2.0) for loss in losses]
    return np.mean(losses), float(np.std(losses)), np.median(losses), np.max(losses), np.mean(rows, axis=0)


def test_functions_that_reduce_a_list_of_numbers_of_the_step() -> None:
    """``np.mean(losses)``: what makes an array of a list first."""
    twenty_calls(lambda: _reduced, lambda at: (torch.full((3,), at / 10),), 1)


def test_functions_of_a_deque_of_numbers_of_the_step() -> None:
    def make() -> Callable[[torch.Tensor], Any]:
        recent: deque[float] = deque(maxlen=2)

        def step(x: torch.Tensor) -> Any:
            recent.append(x.exp().mean().item())
            return np.mean(recent), np.max(recent), np.array(recent)

        return step

    twenty_calls(make, lambda at: (torch.full((3,), at / 10),), 4)
