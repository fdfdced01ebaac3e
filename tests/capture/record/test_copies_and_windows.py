"""What training code keeps of the last steps: copies of states, windows over values, groups added to an optimizer."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from twenty_calls import twenty_calls

import weft
from both_ways import mlp
from weft.errors import PythonStateChanged

Step = Callable[..., Any]


def _batch(at: int) -> tuple[torch.Tensor]:
    return (torch.randn(4, 8, generator=torch.Generator().manual_seed(at)),)


def _training(
    keep: Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor, dict[str, Any]], Any],
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> Callable[[], Step]:
    """A usual step that ends with ``keep(model, optimizer, loss, kept)``, whose result it returns."""

    def make() -> Step:
        model, kept = mlp(), {"best": torch.tensor(1e9), "last": []}
        adam = optimizer(model.parameters(), lr=1e-2)

        def step(x: torch.Tensor) -> Any:
            loss = model(x).square().mean()
            loss.backward()
            adam.step()
            adam.zero_grad()
            return loss.detach(), keep(model, adam, loss.detach(), kept)

        return step

    return make


def _best(model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor, kept: dict[str, Any]) -> Any:
    if loss < kept["best"]:
        kept["best"], kept["state"] = loss, copy.deepcopy(model.state_dict())
    return kept["state"]


COPIES: dict[str, Callable[..., Any]] = {
    "model": lambda model, optimizer, loss, kept: kept.update(state=copy.deepcopy(model.state_dict())) or kept["state"],
    "optimizer": lambda model, optimizer, loss, kept: copy.deepcopy(optimizer.state_dict()),
    "loss": lambda model, optimizer, loss, kept: copy.deepcopy({"loss": [loss, loss]}),
    "parameter": lambda model, optimizer, loss, kept: copy.deepcopy(model[0].weight),
    "best": _best,
}


@pytest.mark.parametrize("name", COPIES)
def test_deep_copies_of_tensors_are_eagers(name: str) -> None:
    step = twenty_calls(_training(COPIES[name]), _batch, 4)
    assert step.entries


def test_copies_share_memory_as_their_tensors_do() -> None:
    def make() -> Step:
        base = torch.arange(6.0)
        tensors = [base, base.view(2, 3), base.view(3, 2).t(), torch.ones(3).requires_grad_(), base]
        tensors[3].grad = torch.full((3,), 2.0)

        def step(x: torch.Tensor) -> Any:
            base.add_(x.mean())
            made = copy.deepcopy(tensors)
            made[0].mul_(2)
            same = made[0] is made[4], made[0] is base, made[3].requires_grad, made[3].is_leaf
            return made, made[3].grad, same, [each.stride() for each in made]

        return step

    twenty_calls(make, _batch, 2)


def test_the_copy_of_a_result_that_requires_grad_raises_as_in_eager() -> None:
    def step(x: torch.Tensor) -> Any:
        try:
            return copy.deepcopy(x * torch.ones(8, requires_grad=True))
        except RuntimeError as error:
            return x, str(error)[:40]

    twenty_calls(lambda: step, _batch, 2)


def test_a_copy_of_a_batch_can_be_changed() -> None:
    def step(batch: dict[str, torch.Tensor]) -> Any:
        mine = copy.deepcopy(batch)
        mine["x"].mul_(2)
        return mine, batch

    twenty_calls(lambda: step, lambda at: ({"x": torch.ones(3 + at % 5, 2) * at},), 2)


# ---- windows


def _popped(model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor, kept: dict[str, Any]) -> Any:
    window = kept["last"]
    window.append(loss)
    if len(window) > 4:
        window.pop(0)
    return sum(window) / len(window)


def _deleted(model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor, kept: dict[str, Any]) -> Any:
    window = kept["last"]
    window.append(loss.item())
    if len(window) > 4:
        del window[0]
    return list(window)


def _cleared(model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor, kept: dict[str, Any]) -> Any:
    kept["last"].append(loss)
    if len(kept["last"]) == 3:
        mean = torch.stack(kept["last"]).mean()
        kept["last"].clear()
        return mean
    return len(kept["last"])


@pytest.mark.parametrize("keep", [_popped, _deleted, _cleared])
def test_windows_over_a_list_are_captured_for_each_length(keep: Callable[..., Any]) -> None:
    twenty_calls(_training(keep), _batch, 7)


def test_a_list_that_only_grows_and_is_read_is_refused() -> None:
    def keep(model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor, kept: dict[str, Any]) -> Any:
        kept["last"].append(loss)
        return torch.stack(kept["last"]).mean()

    step = weft.compile(_training(keep)())
    step(*_batch(0))
    with pytest.raises(PythonStateChanged, match="last"):
        step(*_batch(1))


def test_windows_of_deques() -> None:
    def make() -> Step:
        window: collections.deque[torch.Tensor] = collections.deque()

        def step(x: torch.Tensor) -> Any:
            window.append(x.mean())
            if len(window) > 3:
                window.popleft()
            return torch.stack(list(window)).mean()

        return step

    twenty_calls(make, _batch, 5)


# ---- groups of optimizers


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.SGD])
def test_groups_that_a_step_adds_to_its_optimizer(kind: Any) -> None:
    def make() -> Step:
        model, head, calls = mlp(), nn.Linear(8, 8), [0]
        optimizer = kind(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> Any:
            calls[0] += 1
            if calls[0] == 4:
                optimizer.add_param_group({"params": list(head.parameters()), "lr": 0.01})
            loss = (head(model(x))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            groups = [(len(group["params"]), group["lr"]) for group in optimizer.param_groups]
            return loss.detach(), head.weight.detach().clone(), groups

        return step

    twenty_calls(make, _batch, 5)
