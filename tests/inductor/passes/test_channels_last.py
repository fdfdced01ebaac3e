"""Convolutions in channels-last: same numbers, layouts as asked, inputs and results of the step as they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import weft
from weft.inductor.passes.channels_last import channels_last
from weft.inductor.passes.pipeline import run_passes
from weft.inductor.runtime.aten import compile_aten

aten = torch.ops.aten


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(32)
        self.block = nn.Conv2d(32, 32, 3, padding=1)
        self.norm2 = nn.LayerNorm(32)
        self.head = nn.Linear(32 * 4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = x + torch.relu(self.block(x))
        x = self.norm2(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        x = nn.functional.max_pool2d(x, 4)
        return self.head(torch.flatten(x, 1))


def test_a_convolution_network_trains_the_same_in_channels_last() -> None:
    torch.manual_seed(0)
    net = Net().bfloat16()

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = net(x).square().mean()
        loss.backward()
        return loss

    x = torch.randn(4, 16, 16, 16, dtype=torch.bfloat16)
    graph = weft.capture(step, x)
    changed = run_passes(graph, [channels_last])
    convolutions = [n for n in changed.graph.nodes if n.target is aten.convolution.default]
    assert convolutions
    for node in convolutions:
        for source in node.args[:2]:
            assert source.meta["val"].is_contiguous(memory_format=torch.channels_last)
    images = [n for n in changed.graph.nodes if n.target is aten.relu.default]
    assert all(n.meta["val"].is_contiguous(memory_format=torch.channels_last) for n in images)
    for before, after in zip(graph.results, changed.results, strict=True):
        assert before.meta["val"].stride() == after.meta["val"].stride()
    state = dict(net.named_parameters()) | dict(net.named_buffers())
    inputs = [x if entry.path.startswith("args") else None for entry in graph.inputs]
    by_suffix = {name: value.detach() for name, value in state.items()}
    for at, entry in enumerate(graph.inputs):
        if inputs[at] is None:
            inputs[at] = next(value for name, value in by_suffix.items() if entry.path.endswith("net." + name)).clone()
    wanted = compile_aten(graph)(*(value.clone() for value in inputs))
    found = compile_aten(changed)(*(value.clone() for value in inputs))
    for a, b in zip(wanted, found, strict=True):
        assert a.stride() == b.stride()
        error = (a.double() - b.double()).norm() / a.double().norm()
        assert error < 0.03


def test_a_network_of_float32_keeps_its_layout() -> None:
    conv = nn.Conv2d(16, 32, 3)
    graph = weft.capture(lambda x: conv(x), torch.randn(2, 16, 8, 8))
    assert str(run_passes(graph, [channels_last])) == str(run_passes(graph, []))


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Hardswish, nn.Hardsigmoid, nn.LeakyReLU, nn.Mish, nn.SiLU, nn.ELU])
def test_gradients_of_activations_keep_channels_innermost(activation: Callable[[], nn.Module]) -> None:
    net = nn.Sequential(nn.Conv2d(16, 32, 3), activation(), nn.Conv2d(32, 16, 3)).bfloat16()

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = net(x).square().mean()
        loss.backward()
        return loss

    changed = run_passes(weft.capture(step, torch.randn(2, 16, 9, 9, dtype=torch.bfloat16)), [channels_last])
    gradients = [n for n in changed.graph.nodes if "backward" in n.name and "convolution" not in n.name]
    assert gradients
    assert all(n.meta["val"].is_contiguous(memory_format=torch.channels_last) for n in gradients)
