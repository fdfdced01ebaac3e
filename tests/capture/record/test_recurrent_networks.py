"""Recurrent networks over tensors whose length or batch is not known before the step runs: eager's bits, one graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import weft
from both_ways import assert_equal, detached
from harness import run_ranks
from weft.errors import CannotCapture

WIDTH, HIDDEN, BATCH, LONGEST, CALLS = 4, 5, 6, 7, 5

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("LSTM", {}),
    ("GRU", {}),
    ("RNN", {}),
    ("RNN", {"nonlinearity": "relu", "bias": False}),
    ("LSTM", {"num_layers": 2, "bidirectional": True}),
    ("GRU", {"num_layers": 2, "bidirectional": True, "bias": False}),
    ("LSTM", {"num_layers": 2, "dropout": 0.4}),
    ("GRU", {"num_layers": 2, "dropout": 0.4}),
    ("LSTM", {"proj_size": 3}),
    ("LSTM", {"dtype": torch.float64}),
]


class Network(nn.Module):
    """A linear layer below and above the recurrent network, whose gradients depend on the layouts of its own."""

    def __init__(self, kind: str, options: dict[str, Any], first: bool) -> None:
        super().__init__()
        dtype = options.get("dtype")
        self.below = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.core = getattr(nn, kind)(WIDTH, HIDDEN, batch_first=first, **options)
        width = (options.get("proj_size") or HIDDEN) * (2 if options.get("bidirectional") else 1)
        self.above = nn.Linear(width, 3, dtype=dtype)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, last = self.core(self.below(x))
        return self.above(out), last[0] if isinstance(last, tuple) else last


def data(at: int, sizes: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(at), dtype=dtype)


def both(make: Any, call: Any, captures: int, calls: int = CALLS) -> None:
    """The step as it is and compiled: the same results, gradients and random numbers, bit for bit."""
    found = []
    for wrap in (lambda step: step, weft.compile):
        torch.manual_seed(0)
        model, step = make()
        step = wrap(step)
        results = [detached(step(*call(at))) for at in range(calls)]
        found.append([results, detached([p.grad for p in model.parameters()]), torch.get_rng_state()])
    assert_equal(found[1], found[0])
    assert len(step.captures) <= captures, step.captures


@pytest.mark.parametrize("first", [True, False], ids=["batch_first", "length_first"])
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=lambda each: str(each))
def test_rows_that_the_data_select(kind: str, options: dict[str, Any], first: bool) -> None:
    def make() -> Any:
        model = Network(kind, options, first)

        def step(x: torch.Tensor, mask: torch.Tensor) -> Any:
            model.zero_grad()
            out, state = model(x[mask])
            loss = out.square().sum() + state.sum()
            loss.backward()
            return loss, out, state

        return model, step

    counts = (3, 1, 6, 2, 5)
    call = lambda at: (data(at, (6, BATCH, WIDTH), options.get("dtype")), torch.arange(6) < counts[at])
    both(make, call, captures=2)  # without gradients, and with those of the call before


@pytest.mark.parametrize("changes", ["batch", "length"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_sizes_of_arguments_that_change(kind: str, changes: str) -> None:
    def make() -> Any:
        model = Network(kind, {"num_layers": 2}, True)

        def step(x: torch.Tensor) -> Any:
            model.zero_grad()
            out, state = model(x)
            loss = out.square().sum() + state.sum()
            loss.backward()
            return loss, out

        return model, step

    sizes = lambda at: (BATCH + at, LONGEST) if changes == "batch" else (BATCH, LONGEST + at)
    both(make, lambda at: (data(at, (*sizes(at), WIDTH)),), captures=2)


def test_initial_states_and_unbatched_sequences() -> None:
    def make() -> Any:
        model = nn.LSTM(WIDTH, HIDDEN)

        def step(x: torch.Tensor, mask: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> Any:
            model.zero_grad()
            h, c = h.requires_grad_(), c.requires_grad_()
            out, (last, cell) = model(x[mask], (h, c))
            (out.sum() + cell.square().sum()).backward()
            return out, last, cell, h.grad, c.grad

        return model, step

    def call(at: int) -> Any:
        return data(at, (6, WIDTH)), torch.arange(6) <= at, data(at + 50, (1, HIDDEN)), data(at + 90, (1, HIDDEN))

    both(make, call, captures=2)


def test_two_uses_of_one_network_sum_gradients_as_eager_does() -> None:
    def make() -> Any:
        model = nn.GRU(WIDTH, WIDTH)

        def step(x: torch.Tensor, mask: torch.Tensor) -> Any:
            model.zero_grad()
            out, state = model(x[mask])
            again, state = model(out * 2, state)
            penalty = sum(p.square().sum() for p in model.parameters())
            (again.square().sum() + penalty).backward()
            return again, state

        return model, step

    both(make, lambda at: (data(at, (6, BATCH, WIDTH)), torch.arange(6) <= at), captures=2)


def test_evaluation_without_gradients() -> None:
    def make() -> Any:
        model = Network("LSTM", {"num_layers": 2, "dropout": 0.4}, True).eval()

        @torch.no_grad()
        def step(x: torch.Tensor, mask: torch.Tensor) -> Any:
            return model(x[mask])

        return model, step

    both(make, lambda at: (data(at, (6, LONGEST, WIDTH)), torch.arange(6) <= at), captures=2)


def test_no_row_is_eagers_error() -> None:
    model = nn.GRU(WIDTH, HIDDEN)
    step = weft.compile(lambda x, mask: model(x[mask])[0])
    x = data(0, (6, BATCH, WIDTH))
    step(x, torch.ones(6, dtype=torch.bool))
    none = torch.zeros(6, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="Expected sequence length to be larger than 0") as eager:
        model(x[none])
    with pytest.raises(RuntimeError, match=str(eager.value)):
        step(x, none)


def test_gradients_of_gradients_are_refused_by_name() -> None:
    model = nn.GRU(WIDTH, HIDDEN)

    @weft.compile
    def step(x: torch.Tensor, mask: torch.Tensor) -> Any:
        x = x.requires_grad_()
        (grad,) = torch.autograd.grad(model(x[mask])[0].sum(), x, create_graph=True)
        grad.square().sum().backward()

    with pytest.raises(CannotCapture, match="recurrent network"):
        step(data(0, (6, BATCH, WIDTH)), torch.ones(6, dtype=torch.bool))


@pytest.mark.parametrize("kind", ["GRUCell", "LSTMCell", "RNNCell"])
def test_cells_over_rows_that_the_data_select(kind: str) -> None:
    """A cell writes into parts of its gates in place (`unsafe_chunk`), whose places depend on the number of rows. Torch
    asks for that number in C++, so each one is an outcome of a branch."""

    def make() -> Any:
        model = getattr(nn, kind)(WIDTH, HIDDEN)

        def step(x: torch.Tensor, mask: torch.Tensor) -> Any:
            model.zero_grad()
            state = model(x[mask])
            out = state[0] if isinstance(state, tuple) else state
            out.square().sum().backward()
            return out

        return model, step

    both(make, lambda at: (data(at, (6, WIDTH)), torch.arange(6) <= at), captures=2 + CALLS)


# ---- on two ranks


def train_sharded(rank: int, world: int, recompute: bool) -> None:
    """Each rank has another number of sequences."""
    found = []
    for wrap in (lambda step: step, weft.compile):
        torch.manual_seed(0)
        model = Network("LSTM", {"num_layers": 2}, True)
        weft.fully_shard(model.core)
        weft.fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def step(x: torch.Tensor, mask: torch.Tensor, model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            out, _ = checkpoint(model, x[mask], use_reentrant=False) if recompute else model(x[mask])
            loss = out.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step = wrap(step)
        masks = [torch.arange(6) < 2 + (at + rank) % 4 for at in range(CALLS)]
        losses = [step(data(10 * at + rank, (6, LONGEST, WIDTH)), masks[at]) for at in range(CALLS)]
        found.append([losses, [p.full_tensor() for p in model.parameters()]])  # type: ignore[attr-defined]
    assert_equal(detached(found[1]), detached(found[0]))
    assert len(step.captures) == 1, step.captures


@pytest.mark.gloo
@pytest.mark.parametrize("recompute", [False, True])
def test_sharded_networks_over_other_numbers_of_sequences_on_each_rank(recompute: bool) -> None:
    run_ranks(train_sharded, 2, recompute)


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("first", [True, False], ids=["batch_first", "length_first"])
@pytest.mark.parametrize(("kind", "options"), [each for each in KINDS if "dropout" not in each[1]], ids=str)
def test_networks_on_a_gpu(kind: str, options: dict[str, Any], first: bool) -> None:
    """Of fixed sizes, of sizes that change, and of rows that the data select: cuDNN's results in both."""

    def make() -> Any:
        model = Network(kind, options, first).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)

        def step(x: torch.Tensor, mask: torch.Tensor | None) -> Any:
            out, state = model(x if mask is None else x[mask])
            loss = out.square().mean() + state.mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach(), out.detach()

        return model, step

    dtype = options.get("dtype")
    for sizes, masked in (
        (lambda at: (6, BATCH), False),
        (lambda at: (6 + at, BATCH + at), False),
        (lambda at: (6, BATCH), True),
    ):
        found = []
        for wrap in (lambda step: step, weft.compile):
            torch.manual_seed(0)
            model, step = make()
            step = wrap(step)
            masks = [(torch.arange(6) <= at).cuda() if masked else None for at in range(CALLS)]
            results = [step(data(at, (*sizes(at), WIDTH), dtype).cuda(), masks[at]) for at in range(CALLS)]
            found.append([*results, tuple(model.parameters())])
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
        assert len(step.captures) <= 2, step.captures


@pytest.mark.gpu
def test_autocast_on_a_gpu_is_refused_by_name() -> None:
    model = nn.LSTM(WIDTH, HIDDEN).cuda()

    @weft.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return model(x)[0]

    with pytest.raises(CannotCapture, match="recurrent network on a GPU under autocast"):
        step(data(0, (6, BATCH, WIDTH)).cuda())
