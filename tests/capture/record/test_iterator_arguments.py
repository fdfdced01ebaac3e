"""Steps that take items from iterators among their arguments: eager's bits, and iterators where eager leaves them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import init_device_mesh
from torch.utils.data import DataLoader, Dataset, TensorDataset

import weft
from both_ways import assert_equal
from harness import run_ranks
from weft.errors import UncapturableDraw

F = nn.functional
Case = tuple[Callable[..., Any], Callable[[], Iterator[tuple[Any, ...]]]]


def loader(count: int = 43) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(count, 8, generator=generator), torch.arange(count) % 4)
    return DataLoader(data, batch_size=4, shuffle=True)


def trained(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def accumulating() -> Case:
    """As in torchtitan: gradients of two micro-batches, clipping, an epoch that ends between two of them."""
    model = nn.Linear(8, 4)
    optimizer = trained(model)

    def step(data: Iterator[Any]) -> Any:
        optimizer.zero_grad()
        losses = []
        for _ in range(2):
            x, y = next(data)
            loss = F.cross_entropy(model(x), y) / 2
            loss.backward()
            losses.append(loss.detach())
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return torch.stack(losses).sum(), norm, model.weight.detach().clone()

    return step, lambda: ((batches,) for _ in range(3) for batches in [iter(loader())] for _ in range(6))


def cycling() -> Case:
    """An endless generator over a loader that shuffles, and a random number of the host after the items."""
    model = nn.Linear(8, 4)
    optimizer = trained(model)

    def endless() -> Iterator[Any]:
        while True:
            yield from loader(18)

    def step(*, data: Iterator[Any], scale: float) -> Any:
        items = list(itertools.islice(data, 3))
        loss = sum(F.cross_entropy(F.dropout(model(x), 0.5), y) for x, y in items) * scale * random.random()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    batches = endless()
    return lambda data, scale: step(data=data, scale=scale), lambda: ((batches, at / 7) for at in range(12))


def of_two() -> Case:
    def step(a: Iterator[Any], b: Iterator[Any]) -> Any:
        x, y, z = next(a), next(b), next(a)
        return x["x"] * y + z["x"].sum(), x["n"], x.pop("name"), next(b, None) is None

    a = ({"x": torch.full((3,), float(at)), "n": at, "name": str(at)} for at in itertools.count())
    b = iter([torch.arange(3.0) + at for at in range(11)])
    return step, lambda: ((a, b) for _ in range(6))


def arrays() -> Case:
    items = [{"x": np.full((4 + at % 3, 8), at, "f4"), "n": at} for at in range(20)]

    def step(data: Iterator[Any]) -> Any:
        item = next(data)
        return torch.from_numpy(item["x"]).sum(0) * item["n"], item["n"]

    return step, lambda: ((batches,) for batches in [iter(items)] for _ in items)


def drawing() -> Case:
    def batches() -> Iterator[Any]:
        while True:
            yield torch.randn(4, 8) * random.random() + float(np.random.rand())

    def step(data: Iterator[Any]) -> Any:
        return F.dropout(next(data)).sum() * random.random(), torch.rand(2)

    made = batches()
    return step, lambda: ((made,) for _ in range(8))


def whole() -> Case:
    """A loop over all that is left, and optimizer steps between the items of a list."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    optimizer = trained(model)

    def step(data: Iterator[Any]) -> Any:
        total = 0.0
        for x in data:
            loss = model(x).pow(3).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        return total, model[1].running_mean.clone()

    return step, lambda: ((iter([torch.randn(4, 8) for _ in range(3)]),) for _ in range(3))


def guarded() -> Case:
    model = nn.Linear(8, 4)
    optimizer = trained(model)

    def step(data: Iterator[Any]) -> Any:
        loss = model(next(data)).square().mean()
        if not torch.isfinite(loss):
            return None
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    items = iter([torch.ones(4, 8) * (float("nan") if at == 4 else 1.0) for at in range(12)])
    return step, lambda: ((items,) for _ in range(8))


def stored() -> Case:
    kept: dict[str, Any] = {}

    def step(data: Iterator[Any]) -> Any:
        kept["data"] = data
        return next(data) * 2

    def calls() -> Iterator[Any]:
        for batches in (iter(torch.arange(6.0)), iter(torch.arange(9.0))):
            for _ in range(3):
                yield (batches,)
                assert kept["data"] is batches

    return step, calls


CASES = [accumulating, cycling, of_two, arrays, drawing, whole, guarded]


@pytest.mark.parametrize(("case", "verify"), [(stored, False), *itertools.product(CASES, (False, True))])
def test_a_step_takes_what_eager_takes(case: Callable[[], Case], verify: bool) -> None:
    found = []
    for wrap in (lambda step: step, lambda step: weft.compile(step, verify=verify)):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        step, calls = case()
        step = wrap(step)
        results: list[Any] = []
        for args in calls():
            try:
                results.append(step(*args))
            except StopIteration:
                results.append("ended")
            left = [next(each, "ended") for each in args if isinstance(each, Iterator)] if len(results) == 4 else []
            results.append([torch.rand(1), random.random(), left])
        found.append(results)
    assert_equal(found[1], found[0])
    if case is not whole:
        assert len(step.captures) <= 4, step.captures


def test_an_iterator_that_raises() -> None:
    def batches() -> Iterator[Any]:
        yield from (torch.ones(2), torch.ones(2))
        raise OSError("no such file")

    made = batches()
    step = weft.compile(lambda data: next(data) * 2)
    assert [step(made).sum() for _ in range(2)] == [4, 4]
    with pytest.raises(OSError, match="no such file"):
        step(made)
    with pytest.raises(StopIteration):
        step(made)


def test_another_number_of_items() -> None:
    step = weft.compile(lambda data, count: sum(next(data) for _ in range(count)))
    items = iter(torch.arange(40.0))
    assert [step(items, count) for count in (1, 2, 1, 3)] == [0, 3, 3, 15]
    step = weft.compile(lambda data, count: sum(next(data) for _ in range(count)))
    assert step(items, 2) == 15
    with pytest.raises(UncapturableDraw, match="takes other items than at other calls"):
        step(items, 1)


# ---- what would be other items than eager's

STATE = {"calls": 0}
COUNT = 0


class Reading(Dataset[Any]):
    def __getitem__(self, at: int) -> Any:
        return torch.full((8,), float(STATE["calls"] + at + COUNT))

    def __len__(self) -> int:
        return 40


def reading() -> Iterator[Any]:
    while True:
        yield torch.full((8,), float(STATE["calls"] + COUNT))


def count_first(data: Iterator[Any]) -> Any:
    STATE["calls"] += 1
    return next(data) * 2


def count_in_a_variable_first(data: Iterator[Any]) -> Any:
    global COUNT
    COUNT += 1
    return next(data) * 2


def draw_first(data: Iterator[Any]) -> Any:
    return torch.rand(8) + next(data)


def draw_in_python_first(data: Iterator[Any]) -> Any:
    return random.random() + next(data)


@weft.opaque
def noted(x: torch.Tensor) -> None:
    STATE["calls"] += 1


def call_first(data: Iterator[Any]) -> Any:
    x = next(data)
    noted(x)
    return x + next(data)


def branch_first(data: Iterator[Any]) -> Any:
    x = next(data)
    return x + next(data) if x.sum() > -1000 else x


FIRST = [count_first, count_in_a_variable_first, draw_first, draw_in_python_first, call_first, branch_first]


@pytest.mark.parametrize("make", [lambda: iter(DataLoader(Reading(), 2)), reading, lambda: map(torch.neg, reading())])
@pytest.mark.parametrize("step", FIRST)
def test_an_item_that_may_depend_on_the_step_is_refused(step: Any, make: Callable[[], Any]) -> None:
    with pytest.raises(UncapturableDraw, match="all items are taken when a call begins") as caught:
        weft.compile(step)(make())
    assert "test_iterator_arguments.py" in str(caught.value)
    assert "batches = [next(iterator) for _ in range(n)]" in str(caught.value)


def test_a_list_that_the_step_writes_to_while_it_goes_through_it() -> None:
    queue = [torch.ones(2)]

    def step(data: Iterator[Any]) -> Any:
        x = next(data)
        queue.append(x * 2)
        return next(data)

    with pytest.raises(UncapturableDraw, match="the step changes queue"):
        weft.compile(step)(iter(queue))


def test_an_iterator_that_the_step_leaves_alone() -> None:
    step = weft.compile(lambda x, data: (x * 2, data))
    for at in range(6):
        data = iter([at])
        doubled, same = step(torch.ones(2) * at, data)
        assert same is data
        assert_equal((doubled, next(data)), (torch.ones(2) * at * 2, at))
    assert len(step.captures) == 1


def test_an_iterator_of_the_state_is_refused() -> None:
    data = iter(torch.arange(4.0))
    with pytest.raises(UncapturableDraw, match="pass the iterator as an argument"):
        weft.compile(lambda x: x + next(data))(torch.ones(()))
    assert next(data) == 0


# ---- ranks


def accumulates(rank: int, world: int, compiled: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = weft.fully_shard(nn.Linear(8, 4), mesh=init_device_mesh("cpu", (world,)))
    optimizer = trained(model)

    def step(data: Iterator[Any]) -> torch.Tensor:
        optimizer.zero_grad()
        for _ in range(2):
            x, y = next(data)
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        return model.weight.full_tensor().detach().clone()

    torch.manual_seed(rank)
    step = weft.compile(step) if compiled else step
    found = []
    for _ in range(2):
        data = iter(loader(24))
        found += [step(data) for _ in range(3)]
        with pytest.raises(StopIteration):
            step(data)
    dist.barrier()
    return found


@pytest.mark.gloo
def test_two_ranks_accumulate_over_iterators() -> None:
    eager, compiled = (run_ranks(accumulates, 2, compiled) for compiled in (False, True))
    assert_equal(compiled, eager)


# ---- what takes the items of a call that does not run


def test_explanations_and_plans_take_the_items_of_a_call() -> None:
    step, calls = accumulating()
    ((data,), *_) = calls()
    assert "56 operations" in str(weft.explain(step, data).graph())
    assert len(list(data)) == 9
    with weft.fake_world(8):
        model = weft.fully_shard(nn.Linear(8, 4).to("cuda"), mesh=init_device_mesh("cuda", (8,)))
        plan = weft.plan(lambda data: model(next(data)).sum().backward(), iter([torch.ones(4, 8, device="cuda")]))
        assert plan.step_seconds > 0
        with pytest.raises(UncapturableDraw, match="too few items for a call"):
            weft.plan(lambda data: model(next(data)).sum().backward(), iter([]))
