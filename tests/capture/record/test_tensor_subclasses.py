"""Steps over tensor subclasses of a program's own, against the same steps run eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gather_extensions as extensions
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import weft
from weft.errors import UncapturableSubclass


class Layer(nn.Module):
    def __init__(self, kind: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(kind(torch.arange(12.0).view(3, 4) / 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight)


def _both(kind: Callable[[torch.Tensor], Any], step: Callable[[Any, Any, torch.Tensor], Any]) -> list[list[Any]]:
    """What three calls return and leave, eagerly and compiled."""
    found = []
    for compiled in (False, True):
        layer: Any = Layer(kind)
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.1, foreach=True)

        def one(x: torch.Tensor, layer: Any = layer, optimizer: Any = optimizer) -> Any:
            return step(layer, optimizer, x)

        run: Any = weft.compile(one) if compiled else one
        results = [run(torch.full((2, 4), 1.0 + at)) for at in range(3)]
        found.append([*results, layer.weight, layer.weight.grad])
        assert not compiled or len(run.captures) <= 2
    return found


def test_subclasses_around_two_tensors_are_parameters_gradients_and_results() -> None:
    def step(layer: Any, optimizer: Any, x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = layer(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    eager, compiled = _both(lambda weight: TwoTensor(weight, 2 * weight), step)
    for ours, theirs in zip(compiled, eager, strict=True):
        assert type(ours) is TwoTensor
        assert torch.equal(ours.a, theirs.a)
        assert torch.equal(ours.b, theirs.b)


def test_what_a_subclass_is_around_can_be_exchanged_by_a_step() -> None:
    def step(layer: Any, optimizer: Any, x: torch.Tensor) -> Any:
        loss = layer(x).square().sum()
        with torch.no_grad():
            layer.weight.elem = layer.weight.elem * 0.5
        return loss.detach()

    eager, compiled = _both(extensions.HalfWire, step)
    for ours, theirs in zip(compiled[:3], eager[:3], strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(compiled[3].elem, eager[3].elem)


class _Outer(extensions.Wrapped):
    """Around another subclass."""


def test_a_subclass_around_a_subclass_is_an_argument_and_a_result() -> None:
    found = []
    for compiled in (False, True):
        seen: list[Any] = []

        def step(x: Any, seen: list[Any] = seen) -> Any:
            seen.append(type(x.elem))
            return x.clone(), x * 2

        run: Any = weft.compile(step) if compiled else step
        whole, plain = run(_Outer(extensions.HalfWire(torch.arange(4.0))))
        assert set(seen) == {extensions.HalfWire}
        found.append((type(whole), type(whole.elem), whole.elem.elem.tolist(), plain.tolist()))
    assert found[0] == found[1]


def test_a_result_in_several_places_is_one_output() -> None:
    def step(x: torch.Tensor) -> Any:
        y = x * 2
        return y, [y], {"a": y}

    assert len(weft.capture(step, torch.ones(3)).outputs) == 1
    y, (again,), named = weft.compile(step)(torch.ones(3))
    assert y is again is named["a"]


class Tagged(torch.Tensor):
    """Has its data itself."""


@pytest.mark.parametrize("how", ["made of an argument", "found in the state"])
def test_subclasses_that_are_no_wrappers_are_refused_or_run_uncompiled(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")
    state = torch.ones(3).as_subclass(Tagged)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x.as_subclass(Tagged) * 2 if how == "made of an argument" else x * state

    with pytest.raises(UncapturableSubclass, match="a tensor of a subclass"):
        weft.compile(step)(torch.ones(3))
    result = weft.compile(step, fallback="eager")(torch.arange(3.0))
    assert type(result) is Tagged
    assert torch.equal(result, step(torch.arange(3.0)))
