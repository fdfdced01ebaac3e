"""Functions of torch's that a program has replaced by its own, which call the original, run once as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function, has_torch_function

import weft

CASES: dict[str, tuple[Any, str, Callable[[torch.Tensor], Any]]] = {
    "method in C": (torch.Tensor, "exp", lambda x: x.exp() + torch.exp(x)),
    "operator": (torch.Tensor, "__mul__", lambda x: x * 3),
    "item": (torch.Tensor, "item", lambda x: x * x.sum().item()),
    "method in Python": (torch.Tensor, "norm", lambda x: x.norm(2)),
    "function in Python": (F, "relu", lambda x: F.relu(x) + torch.nn.ReLU()(x)),
    "loss": (F, "cross_entropy", lambda x: F.cross_entropy(x, torch.arange(4))),
    "function in C": (F, "linear", lambda x: F.linear(x, x)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_replaced_function_calls_the_original_once(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, step = CASES[case]
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: original(*args, **kwargs) + 1)
    compiled = weft.compile(step)
    for _ in range(3):
        x = torch.randn(4, 4)
        assert torch.equal(compiled(x), step(x))
    assert len(compiled.captures) == 1


def own(x: torch.Tensor) -> torch.Tensor:
    return handle_torch_function(own, (x,), x) if has_torch_function((x,)) else x * 2


def test_functions_of_the_users_that_ask_modes_run() -> None:
    x = torch.randn(4)
    assert torch.equal(weft.compile(own)(x), x * 2)
