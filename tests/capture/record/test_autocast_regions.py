"""Regions of torch.autocast around, inside and across calls of a compiled step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import weft
from both_ways import assert_equal, snapshot
from weft.errors import StaleAutocastCopy


def region(**options: Any) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, **options)


class Tied(nn.Module):
    """Uses its weight twice, so that it matters whether autocast keeps a copy: gradients add up in bfloat16 then."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Training:
    def __init__(self, model: nn.Module, wrap: Callable[..., Any]) -> None:
        self.model = model
        self.x = torch.linspace(-1, 1, 32).reshape(4, 8)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        self.whole, self.inside, self.uncached, self.backward, self.forward = map(
            wrap, (self.whole_step, self.inside_step, self.uncached_step, self.backward_step, self.forward_step)
        )

    def forward_step(self) -> torch.Tensor:
        return self.model(self.x).float().square().mean()

    def backward_step(self) -> torch.Tensor:
        loss = self.forward_step()
        loss.backward()
        return loss

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole_step(self) -> torch.Tensor:
        loss = self.backward_step()
        self.update()
        return loss

    def inside_step(self) -> torch.Tensor:
        with region():
            loss = self.forward_step()
        loss.backward()  # backward outside of the region
        self.update()
        return loss

    def uncached_step(self) -> torch.Tensor:
        with region(cache_enabled=False):
            return self.whole_step()


def region_inside(t: Training) -> Iterator[Any]:
    for _ in range(3):
        yield t.inside()


def region_inside_without_cache(t: Training) -> Iterator[Any]:
    for _ in range(3):
        yield t.uncached()


def region_around_each_call(t: Training) -> Iterator[Any]:
    for _ in range(3):
        with region():
            yield t.whole()


def nested_regions_around_each_call(t: Training) -> Iterator[Any]:
    for _ in range(3):
        with region(), region(cache_enabled=False), region():
            yield t.whole()


def region_without_cache_around_many_calls(t: Training) -> Iterator[Any]:
    with region(cache_enabled=False):
        for _ in range(3):
            yield t.whole()


def accumulation_in_a_region(t: Training) -> Iterator[Any]:
    for _ in range(2):
        with region():
            for _ in range(3):
                yield t.backward()
        t.update()


def regions_with_and_without_cache(t: Training) -> Iterator[Any]:
    for cache in (True, False, True):
        with region(cache_enabled=cache):
            yield t.backward()


def eager_code_after_an_update_in_the_region(t: Training) -> Iterator[Any]:
    for _ in range(3):
        with region():
            yield t.whole()
            yield t.model(t.x).float().sum()  # eager computes with the copy from before the update here


def eager_code_before_and_after(t: Training) -> Iterator[Any]:
    for _ in range(3):
        with region():
            with torch.no_grad():
                yield t.model(t.x).float().sum()
            yield t.whole()
            yield t.model(t.x).float().sum()


SAME = [
    region_inside,
    region_inside_without_cache,
    region_around_each_call,
    nested_regions_around_each_call,
    region_without_cache_around_many_calls,
    accumulation_in_a_region,
    regions_with_and_without_cache,
    eager_code_after_an_update_in_the_region,
    eager_code_before_and_after,
]


def region_around_many_calls(t: Training) -> Iterator[Any]:
    with region():
        for _ in range(3):
            yield t.whole()


def disabled_region_around_many_calls(t: Training) -> Iterator[Any]:
    with region(enabled=False):  # the copies of the regions inside live as long as this one
        for _ in range(3):
            yield t.inside()


def eager_update_in_the_region(t: Training) -> Iterator[Any]:
    with region():
        for _ in range(2):
            yield t.backward()
            t.update()


def eager_forward_and_update_before_the_first_call(t: Training) -> Iterator[Any]:
    with region():
        t.backward_step()
        t.update()
        yield t.forward()


STALE = [
    region_around_many_calls,
    disabled_region_around_many_calls,
    eager_update_in_the_region,
    eager_forward_and_update_before_the_first_call,
]


def run(schedule: Callable[[Training], Iterator[Any]], model: nn.Module, wrap: Callable[..., Any]) -> Any:
    training = Training(copy.deepcopy(model), wrap)
    return [result.item() for result in schedule(training)], snapshot(training.model)


@pytest.mark.parametrize("model", [Tied, lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))])
@pytest.mark.parametrize("schedule", SAME)
def test_numbers_are_eagers(schedule: Any, model: Any) -> None:
    start = model()
    assert_equal(run(schedule, start, weft.compile), run(schedule, start, lambda step: step))


@pytest.mark.parametrize("schedule", STALE)
def test_a_copy_from_before_an_update_is_an_error_that_names_the_weight(schedule: Any) -> None:
    with pytest.raises(StaleAutocastCopy, match=r"(?s)test_autocast_regions.py.*layer.weight.*cache_enabled=False"):
        run(schedule, Tied(), weft.compile)


@pytest.mark.parametrize("schedule", STALE)
def test_a_step_that_may_fall_back_to_eager_computes_with_that_copy(schedule: Any) -> None:
    start = Tied()
    ours = run(schedule, start, lambda step: weft.compile(step, fallback="eager"))
    assert_equal(ours, run(schedule, start, lambda step: step))


def test_a_first_call_leaves_copies_of_other_weights_in_a_thread_without_autocast() -> None:
    """Autocast's cache is one for all threads."""
    weight = nn.Parameter(torch.ones(4, 4))
    x = torch.ones(4, 4)
    with region():
        old = torch.mm(x, weight)
        weight.data.add_(1)
        torch.autocast_decrement_nesting()  # as in a thread that is in no region
        try:
            weft.compile(lambda x: x + 1)(torch.ones(2))
        finally:
            torch.autocast_increment_nesting()
        assert torch.equal(torch.mm(x, weight), old)
