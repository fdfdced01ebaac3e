"""``torch.cond`` and ``while_loop`` in a step are Python's ``if`` and ``while``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.while_loop import while_loop

import weft
from both_ways import assert_equal, detached
from weft.errors import TooManyPaths


def test_a_loop_runs_as_often_as_its_condition_says() -> None:
    def make() -> Any:
        torch.manual_seed(0)
        net = nn.Linear(3, 3)

        def step(x: torch.Tensor) -> Any:
            count, y = torch.zeros((), dtype=torch.int64), net(x)
            count, y = while_loop(
                lambda count, y: (y.abs().sum() > 1) & (count < 4), lambda count, y: (count + 1, y / 2), (count, y)
            )
            net.zero_grad()
            y.square().sum().backward()
            return count, y.detach()

        return step, net

    def in_python(x: torch.Tensor, net: nn.Linear) -> Any:
        count, y = torch.zeros((), dtype=torch.int64), net(x)
        while y.abs().sum() > 1 and count < 4:
            count, y = count + 1, y / 2
        net.zero_grad()
        y.square().sum().backward()
        return count, y.detach()

    step, ours = make()
    _, theirs = make()
    compiled = weft.compile(step)
    for scale in (0.0, 0.5, 1.0, 2.0, 8.0, 1.0, 0.5):
        x = torch.full((2, 3), scale)
        assert_equal(detached(compiled(x)), detached(in_python(x, theirs)))
        assert_equal(detached([p.grad for p in ours.parameters()]), detached([p.grad for p in theirs.parameters()]))


def test_a_loop_that_ends_at_once_returns_copies() -> None:
    @weft.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        (y,) = while_loop(lambda y: y.sum() > 100, lambda y: (y / 2,), (x,))
        y.add_(1)
        return y

    x = torch.ones(3)
    assert torch.equal(step(x), torch.full((3,), 2.0))
    assert torch.equal(x, torch.ones(3))


BODIES: dict[str, Any] = {
    "one tensor": (lambda y: y.sum() < 9, lambda y: y * 2, (torch.ones(2),)),
    "a list": (lambda y: y.sum() < 9, lambda y: [y * 2], (torch.ones(2),)),
    "a dictionary": (lambda d: d["a"].sum() < 9, lambda d: ({"a": d["a"] * 2},), ({"a": torch.ones(2)},)),
    "a number": (lambda i, y: i < 2, lambda i, y: (i + 1, y * 2), (0, torch.ones(2))),
}


@pytest.mark.parametrize("name", BODIES)
def test_what_a_body_returns_has_the_structure_of_eager(name: str) -> None:
    condition, body, carried = BODIES[name]

    @weft.compile
    def step(scale: torch.Tensor) -> Any:
        return while_loop(condition, body, carried), scale * 2

    found, _ = step(torch.ones(1))
    expected = while_loop(condition, body, carried)
    assert type(found) is type(expected)
    assert_equal(found, expected)


def test_a_body_that_returns_other_values_than_it_takes_is_an_error() -> None:
    def step(x: torch.Tensor) -> Any:
        return while_loop(lambda y, z: y.sum() < 4, lambda y, z: y * 2, (x, x + 1))

    with pytest.raises(Exception, match="same number of outputs"):
        step(torch.ones(2))
    with pytest.raises(Exception, match=r"same number of outputs|takes 2 tensors and numbers, and returned 1"):
        weft.compile(step)(torch.ones(2))


def test_a_loop_of_ever_other_lengths_is_refused_by_name() -> None:
    @weft.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        return while_loop(lambda i, x: i < x.numel(), lambda i, x: (i + x[0], x), (torch.zeros(()), x))[0]

    with weft.knobs.override(path_limit=4):
        for at in (1, 2, 4):
            step(torch.full((8,), 8.0 / at))
        with pytest.raises(TooManyPaths, match="different ways"):
            step(torch.full((8,), 1.0))
