"""Changes that a step makes in Python state: buffers, attributes, gradients, returned parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import weft
from both_ways import assert_equal, batches, both_ways, detached, mlp, sgd, snapshot, training


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


# ---- buffers and attributes


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.tensor(0))
        self.last: torch.Tensor | None = None


def test_a_buffer_may_be_written_in_place() -> None:
    class Running(WithBuffer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.net(x)
            with torch.no_grad():
                self.mean.lerp_(y.mean(0), 0.1)
                self.count += 1
            return y + self.mean

    both_ways(training(_loss, Running), batches())


def test_a_buffer_may_be_replaced() -> None:
    class Replaced(WithBuffer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.net(x)
            self.mean = self.mean * 0.9 + y.detach().mean(0) * 0.1
            return y + self.mean

    both_ways(training(_loss, Replaced), batches())


def test_an_attribute_that_holds_an_activation() -> None:
    class Keeps(WithBuffer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.net(x)
            self.last = y.detach()
            return y

    def make() -> tuple[Any, list[Any]]:
        model = Keeps()
        optimizer = sgd(model.parameters())
        seen: dict[str, torch.Tensor] = {}

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = _loss(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert model.last is not None
            seen["last"] = model.last * 2
            return loss

        return step, [model, seen]

    # The attribute and the dictionary's entry exist only after the first call.
    both_ways(make, batches(4), captures=2)


def test_a_nonlocal_tensor_is_carried_from_call_to_call() -> None:
    def make() -> tuple[Any, list[Any]]:
        model = mlp()
        average = torch.zeros(8)

        def step(x: torch.Tensor) -> torch.Tensor:
            nonlocal average
            average = average * 0.5 + model(x).detach().mean(0)
            return average.sum()

        return step, [model]

    both_ways(make, batches(4))


def test_a_list_of_tensors_replaced_by_the_step() -> None:
    def make() -> tuple[Any, list[Any]]:
        model = mlp()
        history = [torch.zeros(8), torch.zeros(8)]

        def step(x: torch.Tensor) -> torch.Tensor:
            history[0] = history[1]
            history[1] = model(x).detach().mean(0)
            return history[0] + history[1]

        return step, [history]

    both_ways(make, batches(4))


# ---- gradients


def test_gradients_accumulate_over_calls() -> None:
    def make() -> tuple[Any, list[Any]]:
        model = mlp()

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = _loss(model, x)
            loss.backward()
            return loss

        return step, [model]

    # Without gradients, then with.
    both_ways(make, batches(4), captures=2)


def test_gradients_set_to_zero_instead_of_none() -> None:
    def make() -> tuple[Any, list[Any]]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=False)
            loss = _loss(model, x)
            loss.backward()
            optimizer.step()
            return loss

        return step, [model, optimizer]

    both_ways(make, batches(4), captures=2)


def test_gradients_dropped_at_the_start_of_the_next_step() -> None:
    def make() -> tuple[Any, list[Any]]:
        model = mlp()
        optimizer = sgd(model.parameters())

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = _loss(model, x)
            loss.backward()
            optimizer.step()
            return loss

        return step, [model]

    both_ways(make, batches(4), captures=2)


def test_gradients_that_the_step_looks_at_are_the_right_ones() -> None:
    def make() -> tuple[Any, list[Any]]:
        model = mlp()
        optimizer = sgd(model.parameters())

        def step(x: torch.Tensor) -> list[torch.Tensor]:
            _loss(model, x).backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
            return grads

        return step, [model]

    both_ways(make, batches())


def test_backward_outside_the_step_finds_the_gradients_of_the_step() -> None:
    results = []
    for wrap in (lambda step: step, weft.compile):
        torch.manual_seed(0)
        model = mlp()

        def step(x: torch.Tensor, model: nn.Module = model) -> None:
            _loss(model, x).backward()

        compiled = wrap(step)
        compiled(batches()[0][0])
        _loss(model, batches()[1][0]).backward()
        compiled(batches()[2][0])
        results.append(snapshot(model))
    assert_equal(results[1], results[0])


def test_an_argument_that_requires_grad_gets_one() -> None:
    torch.manual_seed(0)
    model = mlp()

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = _loss(model, x)
        loss.backward()
        return loss

    compiled = weft.compile(step)
    for (x,) in batches():
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        model.zero_grad()
        compiled(ours)
        model.zero_grad()
        step(theirs)
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)
    assert compiled.captures == ["first call"]


# ---- what is handed back


def test_a_returned_parameter_is_the_parameter() -> None:
    model = mlp()
    optimizer = sgd(model.parameters())

    @weft.compile
    def step(x: torch.Tensor) -> nn.Parameter:
        _loss(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        return model[0].weight

    for (x,) in batches():
        assert step(x) is model[0].weight


def test_a_returned_argument_is_the_argument() -> None:
    model = mlp()

    @weft.compile
    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, model(x)

    for (x,) in batches():
        back, y = step(x)
        assert back is x
        assert torch.equal(y, model(x))


def test_results_of_one_call_survive_the_next() -> None:
    step, _ = training(_loss)()
    compiled = weft.compile(step)
    first = compiled(batches()[0][0])
    kept = detached(first)
    compiled(batches()[1][0])
    assert torch.equal(first, kept)


def test_parameters_stay_the_same_objects_in_the_same_memory() -> None:
    step, (model, _) = training(_loss)()
    before = [(p, p.data_ptr()) for p in model.parameters()]
    compiled = weft.compile(step)
    for (x,) in batches():
        compiled(x)
    after = list(model.parameters())
    assert all(p is q and q.data_ptr() == place for (p, place), q in zip(before, after, strict=True))
