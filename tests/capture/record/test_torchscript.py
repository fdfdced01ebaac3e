"""Functions compiled by torch.jit.script are captured as they were written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weft
from weft.errors import ScriptedModule

aten = torch.ops.aten


@torch.jit.script
def scaled(x: torch.Tensor, by: int) -> torch.Tensor:
    return x.tanh() * by


@torch.jit.script
def twice(x: torch.Tensor) -> torch.Tensor:
    return scaled(x, 2)


def test_the_python_function_is_recorded_and_the_scripted_one_stays() -> None:
    inside: list[bool] = []

    def written(x: torch.Tensor) -> torch.Tensor:
        inside.append(True)
        return x.sin()

    function = torch.jit.script(lambda_free)
    function._torchdynamo_inline = written  # type: ignore[attr-defined]

    def step(x: torch.Tensor) -> torch.Tensor:
        return function(x)

    graph = weft.capture(step, torch.randn(4))
    targets = [node.target for node in graph.graph.nodes]
    assert inside
    assert aten.sin.default in targets
    assert aten.cos.default not in targets
    x = torch.randn(4)
    assert torch.equal(function(x), x.cos())  # outside a capture it is the compiled one again


def lambda_free(x: torch.Tensor) -> torch.Tensor:
    return x.cos()


def test_a_step_with_scripted_helpers_gives_what_it_gives_uncompiled() -> None:
    weight = torch.randn(4, requires_grad=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = twice(x * weight).square().sum()
        loss.backward()
        return loss

    x = torch.randn(4)
    for _ in range(4):  # the profiling executor has specialised the function by now
        wanted = step(x)
    assert weight.grad is not None
    gradient = weight.grad / 4
    weight.grad = None
    found = weft.compile(step)(x)
    assert torch.equal(found, wanted)
    torch.testing.assert_close(weight.grad, gradient)


@pytest.mark.parametrize("compiled", [torch.jit.script, lambda module: torch.jit.trace(module, torch.randn(2, 4))])
def test_a_scripted_module_is_refused_by_name(compiled: Callable[[nn.Module], Any]) -> None:
    module = compiled(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))

    def step(x: torch.Tensor) -> torch.Tensor:
        return module(x).sum()

    with pytest.raises(ScriptedModule, match=r"Sequential.*test_torchscript.py"):
        weft.compile(step)(torch.randn(2, 4))
    assert torch.equal(weft.compile(step, fallback="eager")(torch.ones(2, 4)), step(torch.ones(2, 4)))


def test_why_scripted_modules_are_refused_their_gradients_depend_on_how_often_they_were_called() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    module: Any = torch.jit.script(plain)
    x = torch.randn(5, 8)
    gradients = []
    for _ in range(4):
        given = x.clone().requires_grad_()
        module(given).sin().sum().backward()
        gradients.append(given.grad)
    given = x.clone().requires_grad_()
    plain(given).sin().sum().backward()
    # Where this fails, torch's executor takes autograd's gradients: look whether its operations can be captured then.
    assert torch.equal(gradients[0], given.grad)  # type: ignore[arg-type]
    assert not torch.equal(gradients[0], gradients[3])  # type: ignore[arg-type]
    torch.testing.assert_close(gradients[0], gradients[3])


def test_a_scripted_module_that_is_not_called_does_not_matter() -> None:
    module = torch.jit.script(nn.Linear(4, 4))

    def step(x: torch.Tensor) -> torch.Tensor:
        return x.sin() if isinstance(module, nn.Module) else x

    assert torch.equal(weft.compile(step)(torch.ones(3)), torch.ones(3).sin())
