"""Numbers that change and that functions of torch's in C++ take as ``double``: dropout, eps, momentum, smoothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import init_device_mesh
from torch.nn import functional as F

import weft
from both_ways import assert_equal, both_ways, training
from harness import run_ranks
from weft import knobs
from weft.capture.record import float_arguments
from weft.errors import WeftError
from weft.inductor import compiler

LABELS = torch.tensor([0, 3, 1, 5, 2, 2])


def linear() -> nn.Module:
    return nn.Linear(8, 8)


def calls(values: list[Any]) -> list[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(6, 8, generator=generator), value) for value in values]


# 0.25 and 0.5 look like constants, also where C++ rounds them to float32.
SCHEDULE = [0.1, 0.25, 0.5, *(0.13 + 0.031 * at for at in range(17))]


def attention(y: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(y[None, None], y[None, None], y[None, None], **options)


FUNCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]] = {
    "dropout": lambda y, x, v: F.dropout(y, v),
    "dropout in place": lambda y, x, v: F.dropout(y * 1, v, inplace=True),
    "torch.dropout": lambda y, x, v: torch.dropout(y, v, train=True),
    "native dropout": lambda y, x, v: torch.native_dropout(y, v, True)[0],
    "no dropout": lambda y, x, v: F.dropout(y, v, training=False),
    "alpha dropout": lambda y, x, v: F.alpha_dropout(y, v, training=True),
    "dropout of channels": lambda y, x, v: F.dropout1d(y[None], v),
    "alpha dropout of channels": lambda y, x, v: F.feature_alpha_dropout(y[None], v, training=True),
    "attention": lambda y, x, v: attention(y, dropout_p=v),
    "attention of two numbers": lambda y, x, v: attention(y, dropout_p=v, scale=1 - v),
    "scale of attention": lambda y, x, v: attention(y, scale=v),
    "smooth labels": lambda y, x, v: F.cross_entropy(y, LABELS, label_smoothing=v),
    "smooth weighted labels": lambda y, x, v: F.cross_entropy(
        y, LABELS, weight=torch.arange(8.0) + 1, ignore_index=2, label_smoothing=v
    ),
    "smooth probabilities": lambda y, x, v: F.cross_entropy(y, x.softmax(-1), label_smoothing=v),
    "huber": lambda y, x, v: F.huber_loss(y, x, delta=v),
    "smooth l1": lambda y, x, v: F.smooth_l1_loss(y, x, beta=v),
    "layer norm": lambda y, x, v: F.layer_norm(y, (8,), eps=v),
    "rms norm": lambda y, x, v: F.rms_norm(y, (8,), eps=v),
    "rms norm in float64": lambda y, x, v: F.rms_norm(y.double(), (8,), eps=v),
    "rms norm in bfloat16": lambda y, x, v: F.rms_norm(y.bfloat16(), (8,), eps=v),
    "group norm": lambda y, x, v: F.group_norm(y, 2, eps=v),
    "instance norm": lambda y, x, v: F.instance_norm(y[None], eps=v),
    "batch norm": lambda y, x, v: F.batch_norm(y, None, None, training=True, eps=v),
    "leaky relu": lambda y, x, v: F.leaky_relu(y, v),
    "elu": lambda y, x, v: F.elu(y, v),
    "celu": lambda y, x, v: F.celu(y, v),
    "rrelu": lambda y, x, v: F.rrelu(y, v, 1.0, training=True),
    "softplus": lambda y, x, v: F.softplus(y, v),
    "hardtanh": lambda y, x, v: F.hardtanh(y, -v, v),
    "gumbel softmax": lambda y, x, v: F.gumbel_softmax(y, tau=v),
    "normalize": lambda y, x, v: F.normalize(y, eps=v),
    "cosine similarity": lambda y, x, v: F.cosine_similarity(y, x, eps=v),
    "pairwise distance": lambda y, x, v: F.pairwise_distance(y, x, eps=v),
    "margins": lambda y, x, v: (
        F.margin_ranking_loss(y[:, 0], x[:, 0], torch.ones(6), margin=v)
        + F.hinge_embedding_loss(y, -torch.ones(6, 8), margin=v)
        + F.triplet_margin_loss(y, x, x.flip(0), margin=v)
        + F.cosine_embedding_loss(y, x, -torch.ones(6), margin=v)
        + F.multi_margin_loss(y, LABELS, margin=v)
    ),
    "poisson": lambda y, x, v: F.poisson_nll_loss(y.abs(), x.abs(), log_input=False, full=True, eps=v),
    "noise": lambda y, x, v: y + torch.empty_like(x).normal_(0.3, v) + torch.normal(0.3, v, (6, 8)),
    "uniform": lambda y, x, v: y + torch.empty_like(x).uniform_(-v, v) + torch.empty_like(x).exponential_(v),
    "bernoulli": lambda y, x, v: y * torch.empty_like(x).bernoulli_(v) + torch.bernoulli(x, v),
    "lerp": lambda y, x, v: torch.lerp(y, x, v),
    "power": lambda y, x, v: y.abs() ** v + torch.pow(y.abs(), v),
    "logit": lambda y, x, v: torch.logit(y.sigmoid(), eps=v / 2),
    "nan_to_num": lambda y, x, v: (y / x.relu()).nan_to_num(v, v, -v),
    "isclose": lambda y, x, v: y * torch.isclose(y, x, atol=v),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_number_that_changes_is_one_capture(name: str) -> None:
    function = FUNCTIONS[name]
    make = training(lambda net, x, v: function(net(x), x, v).pow(2).mean(), linear)
    step = both_ways(make, calls(SCHEDULE), captures=None)
    assert len(step.captures) <= 3, step.captures


MODULES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "dropout": (lambda: nn.Dropout(0.5), "p"),
    "alpha dropout": (lambda: nn.AlphaDropout(0.5), "p"),
    "momentum": (lambda: nn.BatchNorm1d(8), "momentum"),
    "eps": (lambda: nn.BatchNorm1d(8), "eps"),
    "layer norm": (lambda: nn.LayerNorm(8), "eps"),
    "rms norm": (lambda: nn.RMSNorm(8), "eps"),
    "slope": (lambda: nn.LeakyReLU(0.5), "negative_slope"),
    "attention": (lambda: nn.MultiheadAttention(8, 2, dropout=0.5), "dropout"),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16).self_attn, "dropout"),
}


@pytest.mark.parametrize("name", MODULES)
def test_settings_of_modules_that_a_schedule_changes_are_one_capture(name: str) -> None:
    module, attribute = MODULES[name]

    def forward(net: Any, x: torch.Tensor, value: float) -> torch.Tensor:
        setattr(net[1], attribute, value)
        hidden = net[0](x)
        result = net[1](hidden, hidden, hidden)[0] if hasattr(net[1], "in_proj_weight") else net[1](hidden)
        return result.pow(3).mean()

    make = training(forward, lambda: nn.Sequential(nn.Linear(8, 8), module()))
    step = both_ways(make, calls(SCHEDULE), captures=None)
    assert len(step.captures) <= 3, step.captures


def test_a_setting_that_the_step_itself_changes_is_one_capture() -> None:
    def forward(net: Any, x: torch.Tensor, _: Any) -> torch.Tensor:
        net[1].p = min(0.9, net[1].p * 1.1)
        return net(x).pow(2).mean()

    make = training(forward, lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)))
    step = both_ways(make, calls([None] * 20), captures=None)
    assert len(step.captures) <= 3, step.captures


@pytest.mark.parametrize("name", ["dropout", "alpha dropout", "attention", "alpha dropout of channels"])
def test_dropout_of_nothing_and_of_all_are_graphs_of_their_own(name: str) -> None:
    function = FUNCTIONS[name]
    values = [0.0, 0.3, 1.0, 0.5, 0.0, 1.0, 0.4, 1e-300, 1 - 2**-53]
    both_ways(training(lambda net, x, v: function(net(x), x, v).pow(2).sum(), linear), calls(values), captures=None)


@pytest.mark.parametrize(
    "values", [[0.3, 1e-17, 0.2, 0.4], [0.3, 0.0, 0.2, 0.4], [0.3, 1e-45, 1e-12, 0.1], [0.3, 1e-310, 0.1]]
)
@pytest.mark.parametrize("name", ["dropout", "lerp", "rms norm", "smooth labels", "layer norm", "power", "noise"])
def test_tiny_numbers_are_not_taken_for_constants(name: str, values: list[float]) -> None:
    """1 - 1e-17 is 1, which stands at many places of a program."""
    function = FUNCTIONS[name]
    forward = lambda net, x, v: function(net(x), x, v).pow(2).mean() * 1.0 + torch.add(x, x, alpha=1.0).mean() * 0.0
    both_ways(training(forward, linear), calls(values), captures=None)


def test_a_probability_of_the_data_is_not_taken_for_a_constant() -> None:
    def outcomes(wrap: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(3)
        step = wrap(lambda x: F.layer_norm(torch.lerp(x, x * 2, x.mean().abs().item()), (8,)) * 1.0)
        return [step(x) for x, _ in calls([0, 0, 0])]

    try:
        found = outcomes(weft.compile)
    except WeftError:
        return  # refused with the line
    torch.testing.assert_close(found, outcomes(lambda step: step), rtol=0, atol=0)


def test_two_numbers_of_equal_values_stay_two() -> None:
    def forward(net: Any, x: torch.Tensor, pair: tuple[float, float]) -> torch.Tensor:
        return F.dropout(F.dropout(net(x), pair[0]), pair[1]).pow(2).mean()

    values = [(0.1, 0.2), (0.3, 0.3), (0.4, 0.4), (0.2, 0.6), (0.7, 0.1)]
    step = both_ways(training(forward, linear), calls(values), captures=None)
    assert len(step.captures) <= 3, step.captures


def test_a_number_computed_from_a_counter_is_one_capture() -> None:
    def forward(net: Any, x: torch.Tensor, step: int) -> torch.Tensor:
        return F.dropout(net(x), 0.5 * math.exp(-step / 7) + 0.1).pow(2).mean()

    step = both_ways(training(forward, linear), calls(list(range(2, 22))), captures=None)
    assert len(step.captures) <= 3, step.captures


WRONG = ("dropout", "torch.dropout", "attention", "bernoulli", "smooth labels", "noise", "huber")


@pytest.mark.parametrize("wrong", [1.5, -0.1, math.nan])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_numbers_raise_as_in_eager(name: str, wrong: float) -> None:
    """Where the kernel raises, the error of the call has the kernel's text."""
    function = FUNCTIONS[name]

    def outcomes(wrap: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(3)
        step, _ = training(lambda net, x, v: function(net(x), x, v).pow(2).mean(), linear)()
        step, found = wrap(step), []
        for args in calls([0.1, 0.2, 0.3, wrong, 0.4]):
            try:
                found.append(str(step(*args).item()))
            except (RuntimeError, ValueError, WeftError) as error:
                found.append(str(error))
        return found

    for ours, theirs in zip(outcomes(weft.compile), outcomes(lambda step: step), strict=True):
        assert theirs in ours


def test_gradients_of_gradients_of_powers_match_eager() -> None:
    def forward(net: Any, x: torch.Tensor, v: float) -> torch.Tensor:
        x = x.abs().requires_grad_()
        (grad,) = torch.autograd.grad((net(x).abs() ** v).sum(), x, create_graph=True)
        return grad.pow(2).sum()

    both_ways(training(forward, linear), calls([2.1, 2.25, 2.5, 2.7, 2.9]), captures=None)


def test_autocast_takes_changing_numbers() -> None:
    def forward(net: Any, x: torch.Tensor, v: float) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.layer_norm(F.dropout(net(x), v), (8,), eps=v).pow(3).mean()

    step = both_ways(training(forward, linear), calls(SCHEDULE), captures=None)
    assert len(step.captures) <= 3, step.captures


def test_a_number_that_a_function_computes_with_in_an_unknown_way_is_captured_for_each_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A learning rate is symbolic in any case, and must not be an error where a function computes with it."""
    monkeypatch.setitem(float_arguments._USES, "lerp", float_arguments._FloatUse())

    def make() -> tuple[Any, list[Any]]:
        net = linear()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x: torch.Tensor, rate: float) -> torch.Tensor:
            optimizer.param_groups[0]["lr"] = rate
            loss = torch.lerp(net(x), x, optimizer.param_groups[0]["lr"]).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss

        return step, [net, optimizer]

    both_ways(make, calls([0.1, 0.25, 0.5, 0.25]), captures=None)


LOWERED = (
    *("dropout", "native dropout", "alpha dropout", "attention", "noise", "uniform", "bernoulli", "smooth labels"),
    *("huber", "smooth l1", "layer norm", "rms norm", "batch norm", "celu", "lerp", "power", "margins"),
)


@pytest.mark.parametrize("name", LOWERED)
def test_generated_kernels_take_numbers_that_change(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For generated kernels, which run in Triton's interpreter, although the step is on the CPU: as those compiled for
    each value, which draw in another order than eager."""
    monkeypatch.setattr(compiler, "device_kind", lambda nodes: "cuda")
    function = FUNCTIONS[name]

    def trained(wrap: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(3)
        step, (net, _) = training(lambda net, x, v: function(net(x), x, v).pow(2).mean(), linear)()
        step, losses = wrap(step), []
        for at, args in enumerate(calls([0.1, 0.25, 0.5, 0.4])):
            torch.manual_seed(at)
            losses.append(step(*args).detach())
        return [*losses, *net.parameters()]

    with knobs.override(cache_dir="", strict=True):
        found = trained(weft.compile)
        expected = trained(lambda step: lambda *args: weft.compile(step)(*args))
    torch.testing.assert_close(found, expected, equal_nan=True)


def sharded(rank: int, world: int, compiled: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = weft.fully_shard(
        nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.5)), mesh=init_device_mesh("cpu", (world,))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(x: torch.Tensor, value: float) -> torch.Tensor:
        model[2].p, model[1].eps = value, value / 3
        loss = F.smooth_l1_loss(model(x), x, beta=value)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = weft.compile(train) if compiled else train
    losses = [step(x + rank, value).detach() for x, value in calls(SCHEDULE)]
    assert not compiled or len(step.captures) <= 3
    return [*losses, *(parameter.full_tensor().detach() for parameter in model.parameters())]


@pytest.mark.gloo
def test_two_ranks_take_numbers_that_change() -> None:
    eager, compiled = (run_ranks(sharded, 2, compiled) for compiled in (False, True))
    assert_equal(compiled, eager)
