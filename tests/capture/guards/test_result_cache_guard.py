"""A step that goes by remembered results of a function is captured again once the function has forgotten them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft

X = torch.linspace(-1, 1, 4)
CACHES: dict[str, Callable[[Any], Any]] = {
    "bounded": functools.lru_cache,
    "of one result": functools.lru_cache(maxsize=1),
    "unbounded": functools.cache,
}


@pytest.mark.parametrize("name", CACHES)
def test_cleared_results_are_computed_again(name: str, tmp_path: Any) -> None:
    setting = tmp_path / "setting"

    @CACHES[name]
    def factor(path: str) -> float:
        with open(path) as file:
            return float(file.read())

    setting.write_text("2.0")
    factor(str(setting))  # before the first call: the step finds it remembered
    setting.write_text("3.0")
    compiled = weft.compile(lambda x: x * factor(str(setting)))
    for _ in range(2):
        assert torch.equal(compiled(X), X * 2)
    factor.cache_clear()
    factor(str(setting))  # as many calls as before: the function's own counts do not tell
    for _ in range(2):
        assert torch.equal(compiled(X), X * 3)
    assert len(compiled.captures) == 2
    assert "factor has forgotten its results" in compiled.captures[1]


def test_other_results_may_come_and_go() -> None:
    @functools.lru_cache(maxsize=8)
    def factor(key: int) -> float:
        return float(key)

    compiled = weft.compile(lambda x: x * factor(2))
    compiled(X)
    for key in range(3, 40):
        factor(key)
        if key % 3 == 0:
            assert torch.equal(compiled(X), X * 2)
    assert len(compiled.captures) == 1
