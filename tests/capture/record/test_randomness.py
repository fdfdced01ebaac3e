"""Random operations: the same stream of numbers as eager, from the same generator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import weft
from both_ways import assert_equal, batches, both_ways, mlp, training
from pass_runs import Run
from weft.inductor.passes.pipeline import KERNEL_PASSES

# both_ways compares the generator's state after the last call with eager's.


def _dropout_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4), nn.Linear(8, 8), nn.Dropout(0.2))


def test_dropout_draws_the_numbers_of_eager() -> None:
    both_ways(training(lambda model, x: model(x).square().mean(), _dropout_net), batches())


def test_dropout_off_in_eval_mode() -> None:
    both_ways(training(lambda model, x: model(x).square().mean(), lambda: _dropout_net().eval()), batches())


def test_every_random_operation_draws_the_numbers_of_eager() -> None:
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(model(x + torch.randn_like(x) * 0.1), 0.3)
        order = torch.randperm(4)
        keep = torch.bernoulli(torch.full((8,), 0.5))
        scale = torch.empty(8).uniform_()
        noise = torch.zeros(8).normal_(0, 0.1)
        pick = torch.randint(0, 4, (2,))
        sample = torch.multinomial(torch.ones(4), 2)
        y = y + (y[order] * keep * scale * torch.rand(8) + noise)
        return y.square().mean() + y[pick].sum() + y[sample].sum()

    both_ways(training(forward), batches())


def test_unused_random_numbers_are_still_drawn() -> None:
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch.rand(5)
        return F.dropout(model(x), 0.5).square().mean()

    both_ways(training(forward), batches())


_probabilities = torch.full((8,), 0.5)
_recurrent = nn.LSTM(4, 4, 2, dropout=0.5)
# In place, into a given tensor, and with a mask that autograd keeps: their functional forms are of different kinds.
DRAWS: dict[str, Any] = {
    "rand": lambda x: torch.rand(3),
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout_": lambda x: F.dropout(x.clone(), 0.5, inplace=True),
    "dropout2d": lambda x: F.dropout2d(x.view(1, 2, 2, 2), 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "bernoulli_": lambda x: torch.empty(3).bernoulli_(0.3),
    "bernoulli_ of a tensor": lambda x: torch.empty(8).bernoulli_(_probabilities),
    "exponential_": lambda x: torch.empty(3).exponential_(),
    "rand out": lambda x: torch.rand(3, out=torch.empty(3)),
    "randperm out": lambda x: torch.randperm(3, out=torch.empty(3, dtype=torch.long)),
    "normal out": lambda x: torch.normal(x, 1.0, out=torch.empty(8)),
    "multinomial out": lambda x: torch.multinomial(_probabilities, 2, out=torch.empty(2, dtype=torch.long)),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 2, 4)] * 3, dropout_p=0.5),
    "lstm": lambda x: _recurrent(x.view(2, 1, 4)),
    "gumbel": lambda x: F.gumbel_softmax(x, dim=0),
}


@pytest.mark.parametrize("used", [False, True])
def test_draws_survive_and_equal_ones_stay_two_whether_or_not_their_results_are_used(used: bool) -> None:
    x = torch.arange(8.0) + 0.1
    for name, draw in DRAWS.items():

        def step(x: torch.Tensor, draw: Any = draw) -> Any:
            first, again = draw(x), draw(x)
            return (torch.rand(2), first, again) if used else torch.rand(2)

        found = []
        # The passes that run in front of generated kernels, on GPUs too, and the compiled step on the CPU.
        runs = (step, weft.compile(step), lambda x, step=step: Run(step, [x], list(KERNEL_PASSES)).outcome)
        for run in runs:
            torch.manual_seed(5)
            result = run(x.clone())
            found.append((result, torch.get_rng_state()))
        for _, state in found[1:]:
            assert torch.equal(state, found[0][1]), name
        assert_equal(found[1][0], found[0][0])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("preserve", [False, True])
def test_checkpointing_draws_again(reentrant: bool, preserve: bool) -> None:
    def forward(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(model[1:], model[0](x), use_reentrant=reentrant, preserve_rng_state=preserve)
        return y.square().mean() + torch.rand(())

    both_ways(training(forward, _dropout_net), batches())


def test_nested_checkpoints() -> None:
    def forward(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        def inner(y: torch.Tensor) -> torch.Tensor:
            return model[3](checkpoint(model[1:3], y, use_reentrant=False))

        return checkpoint(inner, model[0](x), use_reentrant=False).square().mean()

    both_ways(training(forward, _dropout_net), batches())


def test_a_forked_generator() -> None:
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            noise = torch.rand(8)
        return (model(x) * noise).sum() + torch.rand(())

    both_ways(training(forward), batches())


def test_state_saved_and_set_again() -> None:
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        state = torch.get_rng_state()
        first = torch.rand(8)
        torch.set_rng_state(state)
        return (model(x) * first).sum() + torch.rand(8).sum()

    both_ways(training(forward), batches())


def test_a_generator_of_the_users_own() -> None:
    def make() -> tuple[Any, list[Any]]:
        model = mlp()
        generator = torch.Generator().manual_seed(3)

        def step(x: torch.Tensor) -> torch.Tensor:
            return (model(x) * torch.rand(8, generator=generator)).sum()

        return step, [model]

    both_ways(make, batches())


def test_a_capture_draws_nothing() -> None:
    step, _ = training(lambda model, x: model(x).square().mean(), _dropout_net)()
    torch.manual_seed(11)
    before = torch.get_rng_state()
    weft.capture(step, *batches()[0])
    assert torch.equal(torch.get_rng_state(), before)


def test_another_seed_gives_other_numbers_without_a_capture() -> None:
    compiled = weft.compile(lambda: torch.rand(4))
    draws = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        draws.append(compiled())
    assert torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], draws[1])
    assert len(compiled.captures) == 1


def test_a_seed_set_by_the_step() -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(3)
        first = torch.rand(2)
        again = torch.manual_seed(3)
        return first, torch.rand(2), torch.rand(2) + x, torch.tensor(again is torch.default_generator)

    fast = weft.compile(step)
    for _ in range(2):
        torch.manual_seed(0)
        torch.testing.assert_close(fast(torch.ones(2)), step(torch.ones(2)), rtol=0, atol=0)
    state = torch.get_rng_state()
    weft.capture(step, torch.ones(2))
    assert torch.equal(torch.get_rng_state(), state)
