"""What a compiled step leaves requires grad as in eager, and a backward that reaches it is a named error.

A constant in its place would lose the gradients of the step's part without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.errors import BackwardOutsideStep, GraphOutsideStep

LENGTH = 3


class Holder:
    """The state of a step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(LENGTH))
        self.total = torch.zeros(LENGTH)
        self.rows = torch.zeros(6, LENGTH)
        self.row = self.rows[2:4]
        self.losses: list[Tensor] = []
        self.outer = nn.Linear(LENGTH, LENGTH)


def batch(call: int) -> Tensor:
    return torch.full((LENGTH,), call + 1.0)


def returned(s: Holder) -> Callable[[Tensor], Any]:
    return lambda x: s.weight * x


def returned_after_its_backward(s: Holder) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> Tensor:
        loss = (s.weight * x).sum()
        loss.backward()
        return loss

    return step


def returned_in_parts(s: Holder) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> Any:
        value = s.weight * x
        return {"value": value, "same": [value], "view": value.view(LENGTH, 1), "detached": value.detach()}

    return step


def assigned(s: Holder) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> None:
        s.total = s.weight * x

    return step


def assigned_and_read(s: Holder) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> None:
        s.total = s.total * 0.5 + s.weight * x

    return step


def written_in_place(s: Holder) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> None:
        s.total.mul_(0.5).add_(s.weight * x)

    return step


def written_through_a_view(s: Holder) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> None:
        s.row.mul_(0.5).add_(s.weight * x)

    return step


def appended(s: Holder) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> None:
        s.losses.append((s.weight * x).sum())

    return step


def with_a_gradient_of_its_own(s: Holder) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> Tensor:
        value = s.weight * x
        value.retain_grad()
        value.square().sum().backward()
        return value

    return step


def gradients_with_a_graph(s: Holder) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> None:
        (s.weight * x).square().sum().backward(create_graph=True)

    return step


def without_grad(s: Holder) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            return s.weight * x

    return step


STEPS = [
    returned,
    returned_after_its_backward,
    returned_in_parts,
    assigned,
    assigned_and_read,
    written_in_place,
    written_through_a_view,
    appended,
    with_a_gradient_of_its_own,
    gradients_with_a_graph,
    without_grad,
]


def shown(result: Any, s: Holder) -> list[tuple[Any, ...]]:
    """Values and part in autograd of all that a call leaves."""
    left, _ = torch.utils._pytree.tree_flatten((result, s.total, s.rows, s.row, s.losses, s.weight.grad))
    return [
        (each.tolist(), each.requires_grad, each.is_leaf, each.grad.tolist() if each.retains_grad else None)
        for each in left
        if each is not None
    ]


@pytest.mark.parametrize("make", STEPS, ids=lambda make: make.__name__)
def test_what_a_call_leaves_requires_grad_as_in_eager(make: Callable[..., Any]) -> None:
    ours, theirs = Holder(), Holder()
    compiled, eager = weft.compile(make(ours), mode="bitwise"), make(theirs)
    for call in range(5):
        assert shown(compiled(batch(call)), ours) == shown(eager(batch(call)), theirs)
    assert len(compiled.captures) <= 2


def outside(make: Callable[..., Any], of: Callable[[Any, Holder], Tensor]) -> None:
    """A backward outside of the step, which goes through what the second call left; a raise, or the gradient of both
    parts, as eager has it."""
    s = Holder()
    step = weft.compile(make(s))
    for call in range(2):
        result = step(batch(call))
    (of(result, s).sum() + s.weight.square().sum()).backward()


@pytest.mark.parametrize(
    ("make", "of"),
    [
        (returned, lambda result, s: result),
        (returned, lambda result, s: result[1:] * 2),
        (returned_after_its_backward, lambda result, s: result),
        (returned_in_parts, lambda result, s: result["view"]),
        (returned_in_parts, lambda result, s: result["same"][0]),
        (assigned, lambda result, s: s.total),
        (assigned_and_read, lambda result, s: s.total),
        (written_in_place, lambda result, s: s.total),
        (written_through_a_view, lambda result, s: s.row),
        (written_through_a_view, lambda result, s: s.rows),
        (appended, lambda result, s: s.losses[-1]),
        (gradients_with_a_graph, lambda result, s: s.weight.grad),
    ],
)
def test_a_backward_outside_of_the_step_is_a_named_error(make: Callable[..., Any], of: Callable[..., Tensor]) -> None:
    with pytest.raises(BackwardOutsideStep, match=r"inside of the compiled step.*\.detach\(\)"):
        outside(make, of)


def test_the_error_names_the_result() -> None:
    with pytest.raises(BackwardOutsideStep, match=r"goes through s\.total"):
        outside(assigned, lambda result, s: s.total)


def test_a_detached_result_is_a_constant_outside() -> None:
    s = Holder()
    result = weft.compile(returned(s))(batch(0))
    (result.detach() * s.weight).sum().backward()
    assert torch.equal(s.weight.grad, result.detach())


def test_results_are_written_in_place_and_added_up_outside() -> None:
    ours, theirs = Holder(), Holder()
    totals = []
    for step in (weft.compile(returned(ours)), returned(theirs)):
        total: Any = 0.0
        for call in range(3):
            result = step(batch(call))
            result /= 4
            total = total + result
        totals.append(total)
    assert torch.equal(*totals)
    assert totals[0].requires_grad


# ---- results, and tensors with a graph, as arguments


def test_a_state_that_each_call_returns_and_the_next_one_takes() -> None:
    ours, theirs = Holder(), Holder()

    def make(s: Holder) -> Callable[..., Any]:
        return lambda x, hidden: torch.tanh(hidden * s.weight + x)

    compiled, eager = weft.compile(make(ours)), make(theirs)
    mine = expected = torch.zeros(LENGTH)
    for call in range(5):
        mine, expected = compiled(batch(call), mine), eager(batch(call), expected)
        assert torch.equal(mine, expected)
        assert mine.requires_grad
    assert len(compiled.captures) == 2  # the first call's argument has no graph


def test_a_cache_among_the_arguments_is_written_in_place() -> None:
    ours, theirs = Holder(), Holder()

    def make(s: Holder) -> Callable[..., Any]:
        def step(x: Tensor, rows: Tensor, at: Tensor) -> Tensor:
            rows.index_copy_(0, at, (s.weight * x)[None])
            return rows.sum()

        return step

    compiled, eager = weft.compile(make(ours)), make(theirs)
    for call in range(4):
        for s, step in ((ours, compiled), (theirs, eager)):
            step(batch(call), s.rows[1:], torch.tensor([call]))
        assert torch.equal(ours.rows, theirs.rows)
        assert ours.rows.requires_grad
    with pytest.raises(BackwardOutsideStep, match=r"goes through args\[1\]"):
        ours.rows.sum().backward()


def test_an_argument_with_a_graph_that_no_backward_reaches() -> None:
    ours, theirs = Holder(), Holder()

    def make(s: Holder) -> Callable[..., Any]:
        return lambda hidden: ((hidden * s.weight).sum(), hidden.mean().detach())

    compiled, eager = weft.compile(make(ours)), make(theirs)
    for call in range(3):
        for mine, expected in zip(compiled(ours.outer(batch(call))), eager(theirs.outer(batch(call))), strict=True):
            assert torch.equal(mine, expected)
            assert mine.requires_grad is expected.requires_grad
    assert len(compiled.captures) == 1


def test_the_gradient_of_an_argument_with_a_graph() -> None:
    ours, theirs = Holder(), Holder()

    def make(s: Holder) -> Callable[..., Any]:
        return lambda hidden: torch.autograd.grad((hidden * s.weight).square().sum(), hidden)[0]

    compiled, eager = weft.compile(make(ours), mode="bitwise"), make(theirs)
    for call in range(3):
        for s, step in ((ours, compiled), (theirs, eager)):
            hidden = s.outer(batch(call))
            hidden.backward(step(hidden))
    assert torch.equal(ours.outer.weight.grad, theirs.outer.weight.grad)


def test_a_backward_in_the_step_through_an_argument_with_a_graph_is_refused() -> None:
    s = Holder()
    step = weft.compile(lambda hidden: (hidden * s.weight).sum().backward())
    with pytest.raises(
        GraphOutsideStep, match=r"args\[0\] has a grad_fn.*test_absent_graphs\.py:\d+.*args\[0\]\.detach"
    ):
        step(s.outer(batch(0)))
    assert s.weight.grad is None


def test_a_write_to_an_argument_with_a_graph_is_refused() -> None:
    s = Holder()
    hidden = s.outer(batch(0))
    before = hidden.detach().clone()
    with pytest.raises(GraphOutsideStep, match=r"args\[0\] has a grad_fn"):
        weft.compile(lambda hidden: hidden.mul_(s.weight))(hidden)
    assert torch.equal(hidden, before)
    with torch.no_grad():
        weft.compile(lambda hidden: hidden.mul_(2))(hidden)
    assert torch.equal(hidden, before * 2)


@pytest.mark.parametrize("argument", [lambda h: (h, h.detach()), lambda h: (h.detach(), h), lambda h: (h, h[1:])])
def test_an_argument_with_a_graph_that_shares_memory_with_another_is_refused(argument: Callable[..., Any]) -> None:
    s = Holder()
    with pytest.raises(GraphOutsideStep, match=r"args\[[01]\] has a grad_fn"):
        weft.compile(lambda one, other: (one.sum() * other.sum() * s.weight).sum())(*argument(s.outer(batch(0))))
