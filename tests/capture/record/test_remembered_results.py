"""Functions with functools.lru_cache whose body runs in the captured call: eager runs it once."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft.errors import RememberedFunctionWrites


def counts(s: Any) -> Any:
    @functools.lru_cache
    def factor(n: int) -> int:
        s.count += 1
        return n * 2

    return lambda x: x * factor(3) + s.count


def logs(s: Any) -> Any:
    @functools.lru_cache
    def positions(n: int) -> Tensor:
        s.log.append(n)
        return torch.ones(n).cumsum(0)

    return lambda x: x * positions(x.shape[0])


def state() -> Any:
    return SimpleNamespace(count=0, log=[], calls=0)


@pytest.mark.parametrize(("make", "names"), [(counts, r"s\.count.*factor"), (logs, r"s\.log.*positions")])
def test_a_body_that_changes_the_state_is_refused(make: Any, names: str) -> None:
    s = state()
    with pytest.raises(RememberedFunctionWrites, match=names):
        weft.compile(make(s))(torch.ones(3))
    assert (s.count, s.log) == (0, [])


@pytest.mark.parametrize("make", [counts, logs])
def test_with_a_fallback_the_body_runs_once(make: Any) -> None:
    ours, theirs = state(), state()
    compiled, eager = weft.compile(make(ours), fallback="eager"), make(theirs)
    for size in (3, 3, 4, 3):
        assert torch.equal(compiled(torch.ones(size)), eager(torch.ones(size)))
        assert vars(ours) == vars(theirs)


@pytest.mark.parametrize("make", [counts, logs])
def test_a_body_that_ran_before_the_compiled_step_is_no_matter(make: Any) -> None:
    ours, theirs = state(), state()
    step, eager = make(ours), make(theirs)
    compiled = weft.compile(step)
    step(torch.ones(3))
    eager(torch.ones(3))
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(3)), eager(torch.ones(3)))
        assert vars(ours) == vars(theirs)


def test_a_body_without_changes_beside_a_step_with_some() -> None:
    def make(s: Any) -> Any:
        @functools.lru_cache
        def positions(n: int) -> Tensor:
            return torch.ones(n).cumsum(0)

        def step(x: Tensor) -> Tensor:
            s.calls += 1
            s.log.append(x.sum())
            return x * positions(x.shape[0]) * s.calls

        return step

    ours, theirs = state(), state()
    compiled, eager = weft.compile(make(ours)), make(theirs)
    for size in (3, 3, 4, 5, 3):
        assert torch.equal(compiled(torch.ones(size)), eager(torch.ones(size)))
        assert vars(ours) == vars(theirs)


def test_a_body_that_changes_the_state_before_a_branch_is_refused() -> None:
    s = state()
    factor = counts(s)

    def step(x: Tensor) -> Tensor:
        y = factor(x)
        return y + 1 if y.sum() > 0 else y

    with pytest.raises(RememberedFunctionWrites, match=r"s\.count"):
        weft.compile(step)(torch.ones(3))
