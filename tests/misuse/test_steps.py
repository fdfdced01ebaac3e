"""Steps that cannot be captured, or that fail: the message names the value by the user's expression and line."""

from __future__ import annotations

import importlib.util
import inspect
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import weft
from clear_errors import faults_of_message
from weft.errors import CannotCapture, WeftError

model = nn.Linear(3, 3)
lbfgs = torch.optim.LBFGS(model.parameters())


def number(x: torch.Tensor) -> Any:
    return x * math.fsum([x.sum().item()])  # `x.sum().item()`


def closure(x: torch.Tensor) -> Any:
    lbfgs.step(lambda: model(x).sum())  # outside the step


def norm(x: torch.Tensor) -> Any:
    return np.linalg.norm(x)  # opaque


def sparse(x: torch.Tensor) -> Any:
    return x.to_sparse()  # .to_dense()


CANNOT = [number, closure, norm, sparse]


def said_line(function: Callable[..., Any]) -> tuple[str, int]:
    """The comment in a function, and its line: what the message must say."""
    lines, first = inspect.getsourcelines(function)
    at = next(at for at, line in enumerate(lines) if "  # " in line)
    return lines[at].partition("  # ")[2].strip(), first + at


@pytest.mark.parametrize("step", CANNOT)
def test_a_value_is_named_by_the_expression_that_read_it(step: Callable[..., Any]) -> None:
    with pytest.raises(WeftError) as caught:
        weft.compile(step)(torch.ones(4, 3))
    message = str(caught.value)
    assert not faults_of_message(message), message
    words, line = said_line(step)
    assert words in message
    assert f"{Path(__file__).name}:{line}" in message


# ---- lines of libraries


@pytest.fixture
def library(tmp_path: Path) -> ModuleType:
    """An installed package whose functions call each other six deep."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "layers.py").write_text(
        "def forward(x, depth=6):\n"
        "    if depth:\n"
        "        return forward(x, depth - 1)\n"
        "    return x * float(x.sum())\n\n\n"
        "def look_up(table, ids, depth=6):\n"
        "    return look_up(table, ids, depth - 1) if depth else table[ids]\n"
    )
    spec = importlib.util.spec_from_file_location("layers", folder / "layers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_refusal_in_a_library_names_the_line_that_called_it(library: ModuleType) -> None:
    def step(x: torch.Tensor) -> Any:
        return library.forward(x)  # called from

    with pytest.raises(CannotCapture) as caught:
        weft.compile(step)(torch.ones(3))
    line = said_line(step)[1]
    assert re.search(rf"layers\.py:4 in forward.*called from \S*test_steps\.py:{line} in step", str(caught.value))


def test_an_operation_that_fails_in_a_library_names_the_line_that_called_it(library: ModuleType) -> None:
    def step(table: torch.Tensor, ids: torch.Tensor) -> Any:
        return library.look_up(table, ids)  # here

    with pytest.raises(WeftError) as caught:
        weft.compile(step)(torch.ones(3, 2), torch.tensor([0, 7]))
    assert f"test_steps.py:{said_line(step)[1]} in step" in str(caught.value)


# ---- numbers that do not fit


def test_a_size_that_does_not_fit_is_named_by_the_call_that_read_it() -> None:
    def step(x: torch.Tensor) -> Any:
        count = (x > 0).sum().item()
        return torch.ones(count).view(3, -1)  # here

    compiled = weft.compile(step)
    assert compiled(torch.ones(4, 3)).shape == (3, 4)
    with pytest.raises(WeftError) as caught:
        compiled(torch.arange(12.0).view(4, 3))
    message = str(caught.value)
    assert not faults_of_message(message), message
    assert "`(x > 0).sum().item()` = 11" in message
    assert f"test_steps.py:{said_line(step)[1]} in step" in message
