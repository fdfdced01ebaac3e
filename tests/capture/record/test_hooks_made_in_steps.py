"""Hooks that a step registers, in steps that are captured in parts or not at all: each call registers them once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weft

KINDS: dict[str, Callable[[nn.Linear], Any]] = {
    "tensor": lambda layer: layer.weight.register_hook(lambda grad: grad * 1.5),
    "accumulated": lambda layer: layer.weight.register_post_accumulate_grad_hook(_scale_gradient),
    "before forward": lambda layer: layer.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,)),
    "after forward": lambda layer: layer.register_forward_hook(lambda module, args, out: out * 1.5),
}


def _scale_gradient(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(1.5)


class Notes:
    """What the step keeps."""

    def __init__(self) -> None:
        self.handles: list[Any] = []
        self.values: list[str] = []


def trained(
    compiled: bool, kind: str, optimizer: type[torch.optim.Optimizer], ends: str, fails: bool
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layer, notes = nn.Linear(3, 3), Notes()
    opt = optimizer(layer.parameters(), lr=0.05)  # type: ignore[call-arg]

    def step(x: torch.Tensor) -> None:
        handle = KINDS[kind](layer)
        if ends == "kept":
            notes.handles.append(handle)
        if fails:
            notes.values.sort(key=lambda text: text + str(x.untyped_storage().data_ptr()))
            x.untyped_storage().tolist()
        layer(x).square().sum().backward()
        opt.step()
        opt.zero_grad()
        if ends == "removed":
            handle.remove()

    run = weft.compile(step, fallback="eager" if fails else None) if compiled else step
    for _ in range(4):
        run(torch.randn(2, 3))
    return [p.detach() for p in layer.parameters()]


@pytest.mark.parametrize("ends", ["left", "kept", "removed"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("optimizer", "fails"),
    [(torch.optim.SGD, False), (torch.optim.RAdam, False), (torch.optim.ASGD, False), (torch.optim.SGD, True)],
    ids=["one part", "branches", "more branches", "refused"],
)
def test_a_call_registers_the_hooks_of_a_step_once(
    optimizer: type[torch.optim.Optimizer], fails: bool, kind: str, ends: str
) -> None:
    """RAdam and ASGD branch on values: the step is captured up to each of them, and run again to go on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager = trained(False, kind, optimizer, ends, fails)
        compiled = trained(True, kind, optimizer, ends, fails)
    for a, b in zip(eager, compiled, strict=True):
        assert torch.equal(a, b)
