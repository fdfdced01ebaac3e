"""Tensors of the state and arguments that overlap otherwise than in the captured call: results of eager, each time."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn

import weft
from weft.capture.strided_overlap import offset_within, overlapping
from weft.compile import CompiledStep


class Case(NamedTuple):
    """A step without arguments, what happens between its calls, and the tensors to compare after each."""

    step: Callable[[], object]
    between: list[Callable[[], object]]
    shown: Callable[[], list[torch.Tensor]]


def parameter(value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.full((4,), value))


def gradient_leaves_a_flat_tensor() -> Case:
    flat, p = torch.zeros(8), parameter()
    p.grad = flat[:4]

    def step() -> None:
        assert p.grad is not None
        p.grad.add_(1)
        flat.mul_(2)

    def alone() -> None:
        p.grad = torch.zeros(4)

    def elsewhere() -> None:
        p.grad = flat[4:]

    return Case(step, [alone, elsewhere], lambda: [flat, p.grad])


def two_gradients_become_two() -> Case:
    p, q = parameter(), parameter()
    p.grad = q.grad = torch.zeros(4)

    def step() -> None:
        p.grad.add_(1)
        q.grad.add_(2)

    def apart() -> None:
        q.grad = torch.zeros(4)

    return Case(step, [apart], lambda: [p.grad, q.grad])


def two_gradients_become_one() -> Case:
    p, q = parameter(), parameter()
    p.grad, q.grad = torch.zeros(4), torch.zeros(4)

    def step() -> None:
        p.grad.add_(1)
        q.grad.add_(p.grad)

    def together() -> None:
        q.grad = p.grad

    return Case(step, [together], lambda: [p.grad, q.grad])


def parameter_leaves_a_flat_tensor() -> Case:
    flat = torch.zeros(8)
    p = nn.Parameter(flat[:4])

    def step() -> None:
        with torch.no_grad():
            p.add_(1)
            flat.mul_(2)

    def alone() -> None:
        p.data = torch.zeros(4)

    return Case(step, [alone], lambda: [flat, p])


def parameters_are_tied_by_data() -> Case:
    p, q = parameter(1.0), parameter(2.0)

    def step() -> None:
        with torch.no_grad():
            p.add_(1)
            q.mul_(p)

    def tie() -> None:
        q.data = p.data

    def untie() -> None:
        q.data = q.data.clone()

    return Case(step, [tie, untie], lambda: [p, q])


def state_in_tuples() -> Case:
    state = SimpleNamespace(pair=(torch.ones(4), torch.ones(4)))

    def step() -> None:
        state.pair[0].add_(1)
        state.pair[1].add_(state.pair[0])

    def together() -> None:
        state.pair = (state.pair[0], state.pair[0])

    return Case(step, [together], lambda: list(state.pair))


def state_in_lists_that_each_call_replaces() -> Case:
    state = SimpleNamespace(pair=[torch.ones(4), torch.ones(4)])

    def step() -> None:
        first, second = state.pair
        first.add_(1)
        state.pair = [first * 2, second + first]

    def together() -> None:
        state.pair = [state.pair[0], state.pair[0]]

    return Case(step, [together, together], lambda: list(state.pair))


def overlap_at_another_distance() -> Case:
    flat = torch.arange(8.0)
    state = {"part": flat[1:5]}

    def step() -> None:
        state["part"].mul_(2)
        flat.add_(1)

    def move() -> None:
        state["part"] = flat[3:7]

    return Case(step, [move], lambda: [flat, state["part"]])


CASES = [
    gradient_leaves_a_flat_tensor,
    two_gradients_become_two,
    two_gradients_become_one,
    parameter_leaves_a_flat_tensor,
    parameters_are_tied_by_data,
    state_in_tuples,
    state_in_lists_that_each_call_replaces,
    overlap_at_another_distance,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_other_overlaps_in_the_state_give_eagers_values(case: Callable[[], Case]) -> None:
    def run(compiled: bool) -> list[list[torch.Tensor]]:
        step, between, shown = case()
        step = weft.compile(step) if compiled else step
        found = []
        for change in (None, None, *between):
            if change is not None:
                change()
            step()
            found.append([tensor.detach().clone() for tensor in shown()])
        return found

    for eager, compiled in zip(run(False), run(True), strict=True):
        assert all(map(torch.equal, eager, compiled)), (eager, compiled)


def test_an_argument_that_is_a_tensor_of_the_state() -> None:
    def run(compiled: bool) -> list[torch.Tensor]:
        kept = torch.zeros(4)

        def step(x: torch.Tensor) -> torch.Tensor:
            kept.add_(1)
            return x * 2

        called = weft.compile(step) if compiled else step
        return [called(x).clone() for x in (torch.ones(4), kept, kept[:], torch.ones(4), torch.ones(4), kept)]

    assert all(map(torch.equal, run(False), run(True)))


def test_the_gradient_of_an_argument_in_memory_of_the_state() -> None:
    def run(compiled: bool) -> list[torch.Tensor]:
        kept, found = torch.zeros(4), []

        def step(x: torch.Tensor) -> None:
            assert x.grad is not None
            x.grad.add_(1)
            kept.mul_(2)

        called = weft.compile(step) if compiled else step
        for gradient in (torch.ones(4), kept, torch.ones(4)):
            x = torch.ones(4, requires_grad=True)
            x.grad = gradient
            called(x)
            found += [x.grad.clone(), kept.clone()]
        return found

    assert all(map(torch.equal, run(False), run(True)))


def captures(step: Callable[[], object], *between: Callable[[], object]) -> int:
    compiled = weft.compile(step)
    assert isinstance(compiled, CompiledStep)
    compiled()
    for change in between:
        change()
        compiled()
    return len(compiled.captures)


def test_parts_of_one_storage_that_do_not_overlap_may_move_apart() -> None:
    flat = torch.zeros(8)
    p, q = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])

    def step() -> None:
        with torch.no_grad():
            p.add_(1)
            q.add_(2)

    def alone() -> None:
        p.data = torch.zeros(4)

    assert captures(step, alone) == 1
    assert p.tolist() == [1.0] * 4
    assert q.tolist() == [4.0] * 4


def test_new_memory_for_all_tensors_needs_no_capture() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def move() -> None:
        for p in model.parameters():
            p.data = p.data.clone()

    assert captures(step, move, move) == 1


def test_the_reason_of_a_new_capture_names_both_tensors() -> None:
    p, q = parameter(), parameter()
    p.grad, q.grad = torch.zeros(4), torch.zeros(4)

    @weft.compile
    def step() -> None:
        p.grad.add_(1)
        q.grad.add_(1)

    step()
    q.grad = p.grad
    step()
    assert "grad shares memory with" in step.captures[-1]
    assert "now" in step.captures[-1]


def test_overlapping_groups_and_distances() -> None:
    flat, other = torch.zeros(16), torch.zeros(4)
    tensors = [flat[4:8], other, flat[6:10], flat[0:4], flat[8:12].view(torch.int32), flat[12:], flat[:0], other]
    assert overlapping(tensors) == {2: (0, 8), 4: (0, 16), 7: (1, 0)}


def test_a_tensor_between_the_elements_of_another_one_is_no_part_of_it() -> None:
    flat = torch.arange(8.0)
    even = flat[::2]
    assert offset_within(flat[2:3], even) == 2
    assert offset_within(even[1:3], even) == 2
    assert offset_within(flat[1:4], even) is None
    assert offset_within(flat[1:4], flat) == 1
    assert offset_within(flat[6:], flat[:7]) is None
    wide = torch.zeros(400, 400)[:, :300]  # too many elements to enumerate
    assert offset_within(wide[3:, 1:], wide) == 1201
    assert offset_within(wide[3:, 1:].t(), wide) is None
    assert offset_within(wide.as_strided((2, 300), (400, 1), 350), wide) is None


def test_a_write_to_a_part_of_a_tensor_with_gaps() -> None:
    def run(compiled: bool) -> list[torch.Tensor]:
        flat = torch.arange(8.0)
        even, second = flat[::2], flat[2:3]

        def step() -> torch.Tensor:
            even.add_(1)
            second.mul_(3)
            return even * 2

        called = weft.compile(step) if compiled else step
        return [called().clone(), called().clone(), flat]

    assert all(map(torch.equal, run(False), run(True)))
