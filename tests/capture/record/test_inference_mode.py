"""Steps in inference mode: the same numbers as in eager, and inference tensors exactly where eager makes them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import weft
from both_ways import assert_equal, detached
from weft.errors import UncapturableMutation

Step = Callable[..., Any]


def with_kinds(value: Any) -> Any:
    """A copy of a value, with whether each tensor in it is an inference tensor."""
    return tree_map_only(Tensor, lambda tensor: (tensor.is_inference(), tensor.detach().clone()), value)


def inside(step: Step) -> Step:
    def run(*args: Any) -> Any:
        with torch.inference_mode():
            return step(*args)

    return run


def in_part(step: Step) -> Step:
    """Ordinary, then in inference mode, then ordinary within that mode, on the same state."""

    def run(*args: Any) -> Any:
        with torch.no_grad():
            first = step(*args)
        with torch.inference_mode():
            second = step(*args)
            with torch.inference_mode(False), torch.no_grad():
                return first, second, step(*args)

    return run


WAYS: dict[str, tuple[Callable[[Step], Step], Callable[[], Any]]] = {
    "inside": (inside, contextlib.nullcontext),
    "around": (lambda step: step, torch.inference_mode),
    "as a decorator": (lambda step: torch.inference_mode()(step), contextlib.nullcontext),
    "in part": (in_part, contextlib.nullcontext),
}
STEPS: dict[str, Callable[[], tuple[Step, list[Any]]]] = {}


def case(make: Callable[[], tuple[Step, list[Any]]]) -> Callable[[], tuple[Step, list[Any]]]:
    STEPS[make.__name__] = make
    return make


@case
def views_of_ordinary_tensors() -> tuple[Step, list[Any]]:
    state = torch.randn(4, 6)

    def step(x: Tensor) -> Any:
        state[0].add_(x[0])
        state.view(-1)[2:5].mul_(2)
        return state[1], state.T, state.detach(), x.expand(2, 4, 6), (x * 2)[0]

    return step, [state]


@case
def out() -> tuple[Step, list[Any]]:
    state = torch.zeros(4, 6)

    def step(x: Tensor) -> Any:
        torch.add(x[0], 1, out=state[0])
        return torch.mm(x, x.T, out=torch.empty(4, 4)), torch.add(x, 1, out=state)

    return step, [state]


@case
def layers_with_bias() -> tuple[Step, list[Any]]:
    weight, bias, size = torch.randn(5, 6), torch.randn(5), torch.randn(5, 1)

    def step(x: Tensor) -> Any:
        return F.linear(x, weight, bias), torch.kron(x, x), F.linear(x, torch._weight_norm(weight, size))

    return step, [weight]


@case
def writes_to_what_an_operation_returned_as_it_was() -> tuple[Step, list[Any]]:
    state = torch.randn(4, 6)

    def step(x: Tensor) -> Any:
        F.dropout(state, 0.5, training=False).add_(x)
        F.dropout(x, 0.5, training=False).mul_(2)
        torch.einsum("ij->ji", state).add_(1)
        return torch.meshgrid(x[0], x[1], indexing="ij"), torch.broadcast_tensors(state, x[:1]), torch.atleast_1d(x)

    return step, [state]


@case
def a_branch_on_a_value() -> tuple[Step, list[Any]]:
    def step(x: Tensor) -> Any:
        return x * 2 if x.sum() > 1e9 else x * 3

    return step, []


@case
def state_that_becomes_an_inference_tensor() -> tuple[Step, list[Any]]:
    state = {"last": torch.zeros(4, 6)}

    def step(x: Tensor) -> Any:
        before = state["last"]
        state["last"] = x * 2
        return before[0]

    return step, [state]


@case
def batch_norm_and_moving_averages() -> tuple[Step, list[Any]]:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Dropout(0.3))
    average = nn.Linear(6, 6)

    def step(x: Tensor) -> Any:
        for mine, theirs in zip(average.parameters(), model[0].parameters(), strict=True):
            mine.data.lerp_(theirs, 0.1)
        return model(x), average(x), model[0].weight[0], model[1].running_mean

    return step, [model, average]


@case
def attention_and_recurrent_layers() -> tuple[Step, list[Any]]:
    cell, layers = nn.GRUCell(6, 6), nn.LSTM(6, 5, 2, dropout=0.4)
    project, mask = nn.Linear(6, 18), torch.ones(4, 4).tril().bool()

    def step(x: Tensor) -> Any:
        query, key, value = project(cell(x, x)).chunk(3, -1)
        scores = (query @ key.T).masked_fill(~mask, float("-inf")).softmax(-1)
        return layers((F.dropout(scores, 0.1) @ value)[None])

    return step, [cell, layers, project]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", STEPS)
def test_results_and_state_are_those_of_eager(name: str, way: str) -> None:
    wrap, around = WAYS[way]
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        step, state = STEPS[name]()
        run = weft.compile(wrap(step)) if compiled else wrap(step)
        results = []
        for at in range(4):
            x = torch.linspace(-1, 1, 24).reshape(4, 6) + at
            with around():
                result = run(x)
            tensors = [[*each.state_dict().values()] if isinstance(each, nn.Module) else each for each in state]
            results.append(with_kinds([result, x, tensors]))
        found.append(results)
    assert_equal(found[1], found[0])


def test_an_inference_tensor_is_written_by_a_step_that_is_called_outside_of_the_mode() -> None:
    with torch.inference_mode():
        state = torch.zeros(3)

    def step(x: Tensor) -> Tensor:
        with torch.inference_mode():
            state.add_(x)
        return x * 2

    run = weft.compile(step)
    results = [run(torch.ones(3)) for _ in range(3)]
    assert state.tolist() == [3, 3, 3]
    assert not any(result.is_inference() for result in results)


def test_a_form_serves_only_tensors_of_its_kind() -> None:
    with torch.inference_mode():
        inference = torch.ones(3)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x[1:]

    arguments = [inference, torch.ones(3), inference, torch.ones(3)]
    found = []
    for run in (step, compiled := weft.compile(step)):
        with torch.no_grad():
            found.append([with_kinds(run(x)) for x in arguments])
    assert_equal(detached(found[1]), detached(found[0]))
    assert len(compiled.captures) == 2
    assert "inference" in compiled.captures[1]


def test_errors_of_inference_tensors_are_those_of_eager() -> None:
    def step(x: Tensor) -> Tensor:
        with torch.inference_mode():
            y = x * 2
        return y.add_(1)

    with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode"):
        weft.compile(step)(torch.ones(3))


def test_data_that_would_make_an_inference_tensor_of_a_state_is_refused_with_remedies_that_work() -> None:
    state = torch.zeros(3)

    def assigned(x: Tensor) -> None:
        state.data = x * 2

    def copied(x: Tensor) -> None:
        state.copy_(x * 2)

    with torch.inference_mode():
        with pytest.raises(UncapturableMutation, match="with an inference tensor"):
            weft.compile(assigned)(torch.ones(3))
        weft.compile(copied)(torch.ones(3))
    assert state.tolist() == [2, 2, 2]
    with torch.no_grad():
        weft.compile(assigned)(torch.ones(3) * 2)
    assert state.tolist() == [4, 4, 4]
    assert not state.is_inference()
