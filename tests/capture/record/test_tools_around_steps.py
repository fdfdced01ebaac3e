"""Debugging tools and modes of torch that are active around the first call, or around later calls, of a step."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import weft
from both_ways import assert_equal, snapshot
from weft.errors import AnomalyModeAround, FunctionModeAround


class Doubles(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.ops.aten.tanh.default else out


class DoublesFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.tanh else out


@contextmanager
def warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextmanager
def line_trace() -> Iterator[None]:
    before = sys.gettrace()

    def trace(frame: Any, event: str, argument: Any) -> Any:
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def profile() -> Any:
    activities = [torch.profiler.ProfilerActivity.CPU]
    return torch.profiler.profile(activities=activities, with_stack=True, record_shapes=True, profile_memory=True)


def doubled() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor * 2, lambda tensor: tensor)


TOOLS = [
    lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    profile,
    lambda: torch.autograd.profiler.record_function("step"),
    warnings_are_errors,
    line_trace,
    lambda: FlopCounterMode(display=False),
    Doubles,
    lambda: torch.device("cpu"),
    doubled,
    torch.autograd.graph.save_on_cpu,
]


def train(wrap: Callable[..., Any], tool: Callable[[], Any], calls: set[int]) -> Any:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(4, 8)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = torch.tanh(model(x)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = wrap(step)
    losses = []
    for at in range(3):
        if at in calls:
            with tool():
                losses.append(step(x))
        else:
            losses.append(step(x))
    return copy.deepcopy([loss.item() for loss in losses]), snapshot(model)


@pytest.mark.parametrize("calls", [{0}, {1, 2}], ids=["first", "later"])
@pytest.mark.parametrize("tool", TOOLS, ids=range(len(TOOLS)))
def test_numbers_are_eagers(tool: Any, calls: set[int]) -> None:
    assert_equal(train(weft.compile, tool, calls), train(lambda step: step, tool, calls))


REFUSED = [
    (DoublesFunctions, FunctionModeAround, "DoublesFunctions"),
    (lambda: torch.autograd.set_detect_anomaly(True), AnomalyModeAround, "check_nan=False"),
]


@pytest.mark.parametrize("calls", [{0}, {1, 2}], ids=["first", "later"])
@pytest.mark.parametrize(("tool", "error", "named"), REFUSED)
def test_tools_that_a_program_would_not_serve_are_errors_or_the_step_runs_eagerly(
    tool: Any, error: type[Exception], named: str, calls: set[int]
) -> None:
    with pytest.raises(error, match=named):
        train(weft.compile, tool, calls)
    eager = train(lambda step: step, tool, calls)
    assert_equal(train(lambda step: weft.compile(step, fallback="eager"), tool, calls), eager)
