"""Assignment problems: scipy's results in a step, one graph for all numbers of objects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import weft
from both_ways import assert_equal, detached

linear_sum_assignment = pytest.importorskip("scipy.optimize").linear_sum_assignment
QUERIES, CALLS = 6, 6


def costs(at: int, *sizes: int) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(at))


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("make", [lambda c: c, lambda c: c.numpy(), lambda c: c.numpy().T, lambda c: c[1:].double()])
def test_the_results_are_scipys(make: Any, maximize: bool) -> None:
    def step(cost: torch.Tensor) -> Any:
        rows, columns = linear_sum_assignment(make(cost * 2), maximize)
        return torch.as_tensor(rows), torch.as_tensor(columns) + 1

    compiled = weft.compile(step)
    for at in range(3):
        assert_equal(compiled(costs(at, 5, 3 + at)), step(costs(at, 5, 3 + at)))
    assert len(compiled.captures) <= 3  # a view of an array has plain sizes


def test_predictions_are_matched_with_varying_numbers_of_objects() -> None:
    """As in the loss of DETR: one matrix of costs for a batch, of which each image has some columns."""

    def make() -> Any:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())

        def step(x: torch.Tensor, boxes: list[torch.Tensor]) -> Any:
            found = model(x)
            with torch.no_grad():
                cost = torch.cdist(found.flatten(0, 1), torch.cat(boxes)).view(len(boxes), QUERIES, -1).cpu()
                parts = cost.split([len(each) for each in boxes], -1)
                pairs = [linear_sum_assignment(part[image]) for image, part in enumerate(parts)]
            pairs = [tuple(torch.as_tensor(each, dtype=torch.int64) for each in pair) for pair in pairs]
            image = torch.cat([torch.full_like(rows, at) for at, (rows, _) in enumerate(pairs)])
            wanted = torch.cat([each[columns] for each, (_, columns) in zip(boxes, pairs, strict=True)])
            loss = (found[image, torch.cat([rows for rows, _ in pairs])] - wanted).abs().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach(), pairs

        return step, model

    (plain, theirs), (step, ours) = make(), make()
    compiled = weft.compile(step)
    for at in range(CALLS):
        x, boxes = costs(at, 2, QUERIES, 4), [costs(at, 1 + at, 4), costs(at + 50, 8 - at, 4)]
        assert_equal(detached(compiled(x, boxes)), detached(plain(x, boxes)))
        assert_equal(detached([*ours.parameters()]), detached([*theirs.parameters()]))
    assert len(compiled.captures) <= 4, compiled.captures  # without objects or with one, symbols are numbers


def test_costs_outside_the_step_are_as_they_were() -> None:
    table = np.random.default_rng(0).random((3, 3))

    @weft.compile
    def step(x: torch.Tensor) -> Any:
        return x[linear_sum_assignment(table)[1]] * 2

    assert torch.equal(step(torch.arange(3.0)), torch.arange(3.0)[linear_sum_assignment(table)[1]] * 2)


@pytest.mark.parametrize("cost", [torch.ones(3), torch.full((2, 2), float("nan"))], ids=["a vector", "nan"])
def test_errors_are_scipys(cost: torch.Tensor) -> None:
    def step(cost: torch.Tensor) -> Any:
        return torch.as_tensor(linear_sum_assignment(cost * 1)[0])

    with pytest.raises(ValueError) as eager:  # noqa: PT011 - the text is compared
        step(cost)
    with pytest.raises(Exception) as ours:  # noqa: PT011
        weft.compile(step)(cost)
    assert str(eager.value) in str(ours.value)
