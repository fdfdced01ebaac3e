"""Tensors and modules behind weak references, in objects of torch's, and in places that no walk sees."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import distributions, nn

import weft
from weft.errors import StepFailed


class Case(NamedTuple):
    """A step, what the program does after each call, and the tensors to compare then, besides the result."""

    step: Callable[[torch.Tensor], Any]
    after: Callable[[int], object] = lambda call: None
    shown: Callable[[], list[Any]] = list


def backward_of(parameters: Callable[[], Any]) -> Callable[[torch.Tensor], None]:
    def step(x: torch.Tensor) -> None:
        for p in parameters():
            (p * x).sum().backward()

    return step


def weak_reference() -> Case:
    p = nn.Parameter(torch.ones(3))
    reference = weakref.ref(p)

    def step(x: torch.Tensor) -> None:
        found = reference()
        assert found is not None
        (found * x).sum().backward()
        assert found.grad is not None
        found.grad.add_(x)

    return Case(step, shown=lambda: [p.grad])


def weak_set() -> Case:
    p = nn.Parameter(torch.ones(3))
    weak = weakref.WeakSet([p])
    return Case(backward_of(lambda: weak), shown=lambda: [p.grad])


def weak_values() -> Case:
    p = nn.Parameter(torch.ones(3))
    weak = weakref.WeakValueDictionary({"p": p})
    return Case(backward_of(lambda: [weak["p"]]), shown=lambda: [p.grad])


def weak_keys() -> Case:
    p = nn.Parameter(torch.ones(3))
    weak = weakref.WeakKeyDictionary({p: 2})
    return Case(backward_of(lambda: [key * value for key, value in weak.items()]), shown=lambda: [p.grad])


def weakly_held_module() -> Case:
    model = nn.Linear(3, 3)
    optimizer, reference = torch.optim.AdamW(model.parameters()), weakref.ref(model)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = reference()(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Case(step, shown=lambda: list(model.parameters()))


def proxied_module() -> Case:
    model = nn.Linear(3, 3)
    proxy = weakref.proxy(model)

    def step(x: torch.Tensor) -> None:
        proxy(x).sum().backward()

    return Case(step, shown=lambda: [model.weight.grad])


def replaced_tensor_of_a_distribution() -> Case:
    normal = distributions.Normal(torch.zeros(3), torch.ones(3))

    def after(call: int) -> None:
        normal.loc = normal.loc + 1

    return Case(lambda x: normal.log_prob(x), after)


def replaced_tensor_inside_a_distribution() -> Case:
    normal = distributions.Normal(torch.zeros(3), torch.ones(3))
    joint = distributions.Independent(normal, 1)

    def after(call: int) -> None:
        normal.scale = normal.scale * 2

    return Case(lambda x: joint.log_prob(x), after)


def trained_distribution() -> Case:
    loc = nn.Parameter(torch.zeros(3))
    normal, optimizer = distributions.Normal(loc, torch.ones(3)), torch.optim.SGD([loc], 0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = -normal.log_prob(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Case(step, shown=lambda: [loc])


def other_parameter_of_a_distribution() -> Case:
    normal = distributions.Normal(nn.Parameter(torch.zeros(3)), torch.ones(3))

    def step(x: torch.Tensor) -> None:
        (normal.mean * x).sum().backward()

    def after(call: int) -> None:
        normal.loc = nn.Parameter(torch.full((3,), float(call)))

    return Case(step, after, lambda: [normal.loc])


def probabilities_that_are_computed_once() -> Case:
    categorical = distributions.Categorical(logits=torch.arange(3.0))
    return Case(lambda x: categorical.probs * x, shown=lambda: [vars(categorical)["probs"]])


def data_set() -> Case:
    data = torch.utils.data.TensorDataset(torch.arange(6.0).view(2, 3))

    def after(call: int) -> None:
        data.tensors = (data.tensors[0] * 2,)

    return Case(lambda x: data[0][0] + x, after)


def future() -> Case:
    pool = ThreadPoolExecutor(1)
    state = {"next": pool.submit(torch.zeros, 3)}

    def after(call: int) -> None:
        state["next"] = pool.submit(torch.full, (3,), float(call))

    return Case(lambda x: state["next"].result() + x, after)


def parameter_of_a_cached_function() -> Case:
    @functools.lru_cache
    def made_once(size: int) -> nn.Parameter:
        return nn.Parameter(torch.ones(size))

    made_once(3)
    return Case(backward_of(lambda: [made_once(3)]), shown=lambda: [made_once(3).grad])


def array_of_parameters() -> Case:
    array = np.empty(1, dtype=object)
    array[0] = nn.Parameter(torch.ones(3))

    def after(call: int) -> None:
        array[0] = nn.Parameter(torch.full((3,), float(call)))

    return Case(backward_of(lambda: [array[0]]), after, lambda: [array[0]])


CASES = [
    weak_reference,
    weak_set,
    weak_values,
    weak_keys,
    weakly_held_module,
    proxied_module,
    replaced_tensor_of_a_distribution,
    replaced_tensor_inside_a_distribution,
    trained_distribution,
    other_parameter_of_a_distribution,
    probabilities_that_are_computed_once,
    data_set,
    future,
    parameter_of_a_cached_function,
    array_of_parameters,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_what_the_step_reaches_there_is_state_of_the_step(case: Callable[[], Case]) -> None:
    def run(compiled: bool) -> list[list[torch.Tensor]]:
        torch.manual_seed(0)
        step, after, shown = case()
        called, found = weft.compile(step) if compiled else step, []
        for call in range(4):
            result = called(torch.ones(3))
            tensors = [*([] if result is None else [result]), *shown()]
            tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
            found.append([tensor.detach().clone() for tensor in tensors])
            after(call)
        return found

    for eager, compiled in zip(run(False), run(True), strict=True):
        assert len(eager) == len(compiled)
        assert all(map(torch.equal, eager, compiled)), (eager, compiled)


def test_an_expanded_gradient_is_not_blamed_on_weft() -> None:
    p = nn.Parameter(torch.ones(4))
    p.grad = torch.zeros(1).expand(4)

    @weft.compile
    def step() -> None:
        assert p.grad is not None
        p.grad.add_(1)

    with pytest.raises(StepFailed, match="Please clone") as caught:
        step()
    assert "this is a fault in weft; please report it. To see" not in str(caught.value)
    assert "without weft.compile" in str(caught.value)
