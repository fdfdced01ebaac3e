"""Steps that cannot be captured, or that fail: the message names the value by the user's expression and line."""

from __future__ import annotations

import importlib.util
import inspect
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import distributions, nn

import weft
from clear_errors import faults_of_message
from weft.errors import CannotCapture, WeftError

model = nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
lbfgs = torch.optim.LBFGS(model.parameters())
scaler = torch.amp.GradScaler("cpu")


def branch(x: torch.Tensor) -> Any:
    return x * 2 if x.sum() > 1 else x  # `x.sum() > 1`


def item(x: torch.Tensor) -> Any:
    number = x.sum().item()  # `x.sum().item()` at
    return x * 2 if number > 2 else x


def whole(x: torch.Tensor) -> Any:
    return [x] * int(x.max())  # `int(x.max())`


def counted(x: torch.Tensor) -> Any:
    count = x.sum().int().item()  # `x.sum().int().item()` at
    return sum(x * at for at in range(count))


def equal(x: torch.Tensor) -> Any:
    count = (x > 0).sum().item()  # `(x > 0).sum().item()` at
    return x if count == 3 else x * 2


def two_numbers(x: torch.Tensor) -> Any:
    low, high = x.min().item(), x.max().item()  # `x.min().item()` at
    return x if high - low > 1 else x * 2


def length(x: torch.Tensor) -> Any:
    found = x.nonzero()  # a size of `x.nonzero()` at
    return x if len(found) > 3 else x * 2


def unique(x: torch.Tensor) -> Any:
    found = x.unique()  # a size of `x.unique()` at
    return x if found.shape[0] == 1 else x * 2


def listed(x: torch.Tensor) -> Any:
    return [int(value) for value in (x > 0).sum(1).tolist()]  # `(x > 0).sum(1).tolist()`


def asserted(x: torch.Tensor) -> Any:
    assert x.isfinite().all(), "bad"  # x.isfinite().all()
    return x


def loop(x: torch.Tensor) -> Any:
    while x.norm() > 1:  # `x.norm() > 1`
        x = x / 2
    return x


def float_of(x: torch.Tensor) -> Any:
    return float(x.mean()) + 1.0  # `float(x.mean())`


def not_a_number(x: torch.Tensor) -> Any:
    return x if math.isnan(x.sum().item()) else x * 2  # `x.sum().item()`


def equal_tensors(x: torch.Tensor) -> Any:
    return x if torch.equal(x, x) else x * 2  # aten.equal


def indexed(x: torch.Tensor) -> Any:
    at = x.argmax().item()
    return x.flatten()[at]  # Index with a tensor


def classes(x: torch.Tensor) -> Any:
    return F.one_hot(x.long())  # `F.one_hot(x.long())`


def normal(x: torch.Tensor) -> Any:
    return distributions.Normal(x, x + 1).log_prob(x)  # `distributions.Normal(x, x + 1)`


def categorical(x: torch.Tensor) -> Any:
    return distributions.Categorical(logits=x).sample()  # validate_args=False


def clipped(x: torch.Tensor) -> Any:
    model(x).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)  # error_if_nonfinite=False


def scaled(x: torch.Tensor) -> Any:
    scaler.scale(model(x).sum()).backward()
    scaler.step(optimizer)  # bfloat16


def closure(x: torch.Tensor) -> Any:
    lbfgs.step(lambda: model(x).sum())  # outside the step


def numpy(x: torch.Tensor) -> Any:
    return x.numpy()  # opaque


def sparse(x: torch.Tensor) -> Any:
    return x.to_sparse()  # .to_dense()


CANNOT = [
    *(branch, item, whole, counted, equal, two_numbers, length, unique, listed, asserted, loop, float_of, not_a_number),
    *(equal_tensors, indexed, classes, normal, categorical, clipped, scaled, closure, numpy, sparse),
]


def said_line(function: Callable[..., Any]) -> tuple[str, int]:
    """The comment in a function, and its line: what the message must say."""
    lines, first = inspect.getsourcelines(function)
    at = next(at for at, line in enumerate(lines) if "  # " in line)
    return lines[at].partition("  # ")[2].strip(), first + at


@pytest.fixture
def checked_distributions() -> Iterator[None]:
    """Distributions check their parameters, as they do by default; torch.compile switches that off in the process."""
    before = distributions.Distribution._validate_args
    distributions.Distribution.set_default_validate_args(True)
    yield
    distributions.Distribution.set_default_validate_args(before)


@pytest.mark.usefixtures("checked_distributions")
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
        "    return x * 2 if x.sum() > 0 else x\n\n\n"
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
