"""State that a step leaves with a grad_fn: refused where the next call's backward goes through it, else as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weft
from weft.errors import GraphOutsideStep


class Setting:
    """A parameter, and a state that steps compute from it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4))
        self.hidden = torch.randn(4)
        self.pair = (torch.randn(4), 0)
        self.half = torch.randn(4).bfloat16()
        self.total = torch.zeros(())


def assigned(s: Setting) -> None:
    s.hidden = s.hidden - s.weight
    s.hidden.square().mean().backward()


def in_a_tuple(s: Setting) -> None:
    s.pair = (s.pair[0] - s.weight, s.pair[1])
    s.pair[0].square().mean().backward()


def in_place(s: Setting) -> None:
    s.half.sub_(s.weight)
    s.half.float().square().mean().backward()


def eager_frees_the_graph(s: Setting) -> None:
    s.hidden = torch.tanh(s.hidden * s.weight)
    s.hidden.mean().backward()


@pytest.mark.parametrize(
    "step", [assigned, in_a_tuple, in_place, eager_frees_the_graph], ids=lambda step: step.__name__
)
def test_a_backward_through_the_calls_before_is_refused_and_changes_nothing(step: Callable[..., Any]) -> None:
    s = Setting()
    before = [tensor.clone() for tensor in (s.hidden, s.pair[0], s.half)]
    with pytest.raises(GraphOutsideStep, match=r"s\.(hidden|pair|half).*test_kept_graphs\.py:\d+.*Store it detached"):
        weft.compile(lambda: step(s))()
    after = (s.hidden, s.pair[0], s.half)
    assert all(map(torch.equal, after, before))
    assert not any(tensor.requires_grad for tensor in after)
    assert s.weight.grad is None


def running_total(s: Setting) -> torch.Tensor:
    loss = s.weight.square().sum()
    s.total = s.total + loss
    loss.backward()
    return s.total.detach() * 1


def running_mean(s: Setting) -> torch.Tensor:
    loss = s.weight.square().sum()
    s.total.mul_(0.9).add_(loss * 0.1)
    loss.backward()
    return s.total.detach() * 1


def detached(s: Setting) -> torch.Tensor:
    hidden = torch.tanh(s.hidden * s.weight)
    hidden.mean().backward()
    s.hidden = hidden.detach()
    return s.hidden * 1


@pytest.mark.parametrize("step", [running_total, running_mean, detached], ids=lambda step: step.__name__)
def test_graphs_that_no_backward_goes_through_are_dropped(step: Callable[..., Any]) -> None:
    s, t = Setting(), Setting()
    compiled = weft.compile(lambda: step(s), mode="bitwise")
    for _ in range(4):
        assert torch.equal(compiled(), step(t))
        with torch.no_grad():
            for each in (s, t):
                each.weight.sub_(each.weight.grad)
    assert torch.equal(s.weight.grad, t.weight.grad)
    assert torch.equal(s.total, t.total)
    assert s.total.requires_grad is t.total.requires_grad
    assert s.hidden.requires_grad is t.hidden.requires_grad


def test_a_write_to_what_was_computed_outside_is_refused() -> None:
    s = Setting()
    s.hidden = s.hidden * s.weight

    @weft.compile
    def step() -> None:
        s.hidden.mul_(s.weight)
        s.weight.square().sum().backward()

    with pytest.raises(GraphOutsideStep, match=r"s\.hidden"):
        step()


def scaled(leaf: torch.Tensor) -> torch.Tensor:
    return leaf * 2


def view_of_scaled(leaf: torch.Tensor) -> torch.Tensor:
    return (leaf * 2).view(2, 2)


@pytest.mark.parametrize("compute", [scaled, view_of_scaled], ids=lambda compute: compute.__name__)
@pytest.mark.parametrize("held", [lambda v: v, lambda v: {v}, lambda v: (v,)], ids=["alone", "set", "tuple"])
def test_a_backward_through_what_was_computed_outside_is_refused(
    compute: Callable[[torch.Tensor], torch.Tensor], held: Callable[[torch.Tensor], Any]
) -> None:
    s = Setting()
    leaf = torch.ones(4, requires_grad=True)
    state = held(compute(leaf))

    def step() -> torch.Tensor:
        (value,) = state if isinstance(state, (set, tuple)) else (state,)
        loss = (value.flatten() * s.weight).sum()
        loss.backward()
        return loss.detach()

    with pytest.raises(GraphOutsideStep, match=r"test_kept_graphs\.py:\d+.*to where it was computed"):
        weft.compile(step)()
    assert leaf.grad is None
    assert s.weight.grad is None


def test_a_backward_that_ends_before_what_was_computed_outside_gives_eagers_gradients() -> None:
    def run(wrap: Callable[[Any], Any]) -> tuple[torch.Tensor, torch.Tensor, Any]:
        s = Setting()
        leaf = torch.ones(4, requires_grad=True)
        value = leaf * 2

        @wrap
        def step() -> torch.Tensor:
            loss = (value * s.weight).sum()
            (inner,) = torch.autograd.grad(loss, value, retain_graph=True)
            loss.backward(inputs=[s.weight])
            return inner

        inner = step()
        return inner, s.weight.grad, leaf.grad

    eager, compiled = run(lambda step: step), run(weft.compile)
    assert torch.equal(eager[0], compiled[0])
    assert torch.equal(eager[1], compiled[1])
    assert eager[2] is compiled[2] is None


def test_a_state_that_is_computed_outside_after_the_first_call_is_refused() -> None:
    s = Setting()
    leaf = torch.ones(4, requires_grad=True)

    @weft.compile
    def step() -> torch.Tensor:
        loss = (s.hidden * s.weight).sum()
        loss.backward()
        return loss.detach()

    step()
    s.hidden = leaf + 1
    with pytest.raises(GraphOutsideStep, match=r"s\.hidden has a grad_fn from outside"):
        step()
    assert leaf.grad is None
