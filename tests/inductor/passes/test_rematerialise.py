"""Recomputing in backward keeps the bits and lowers the peak, and nothing expensive runs twice."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from step_builder import StepBuilder
from weft.capture.graph import StepGraph
from weft.capture.step_interface import Role
from weft.inductor.graph.liveness import liveness
from weft.inductor.passes.chunk_loss import ChunkLoss
from weft.inductor.passes.pipeline import run_passes
from weft.inductor.passes.rematerialise import Rematerialise, is_elementwise
from weft.inductor.passes.schedule_waits import issue_order
from weft.inductor.runtime.aten import compile_aten

FREE = Rematerialise(smallest_bytes=0)
ALL = Rematerialise(0, smallest_bytes=0)


class Norm(nn.Module):
    """RMS norm as models write it: in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.weight


class Llama(nn.Module):
    """Blocks of gated feed-forwards and attention with turned queries, in bfloat16."""

    def __init__(self, width: int = 16, hidden: int = 40, layers: int = 2) -> None:
        super().__init__()
        make = lambda a, b: nn.Linear(a, b, bias=False)
        self.table = nn.Embedding(32, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "first": Norm(width),
                    "second": Norm(width),
                    "qkv": make(width, 3 * width),
                    "out": make(width, width),
                    "gate": make(width, hidden),
                    "up": make(width, hidden),
                    "down": make(hidden, width),
                }
            )
            for _ in range(layers)
        )
        self.norm = Norm(width)
        self.to(torch.bfloat16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        turn = torch.arange(ids.shape[1]).float()[:, None].cos()
        for layer in self.layers:
            query, key, value = layer["qkv"](layer["first"](x)).chunk(3, -1)  # type: ignore[index]
            turned = [(part.float() * turn).to(x.dtype).unsqueeze(1) for part in (query, key)]
            mixed = F.scaled_dot_product_attention(*turned, value.unsqueeze(1), is_causal=True)
            x = x + layer["out"](mixed.squeeze(1))  # type: ignore[index]
            inner = layer["second"](x)  # type: ignore[index]
            x = x + layer["down"](F.silu(layer["gate"](inner)) * layer["up"](inner))  # type: ignore[index]
        return F.cross_entropy(F.linear(self.norm(x), self.table.weight).flatten(0, 1).float(), ids.flatten())


class Gpt(nn.Module):
    """LayerNorm, GELU, dropout."""

    def __init__(self, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.table = nn.Embedding(32, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width), nn.Dropout(0.2))
            for _ in range(layers)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(F.linear(x, self.table.weight).flatten(0, 1), ids.flatten())


class Stream(nn.Module):
    """A residual stream in float32, of what layers compute in bfloat16, as autocast has it."""

    def __init__(self, width: int = 16, layers: int = 4) -> None:
        super().__init__()
        self.table = nn.Embedding(32, width)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x).bfloat16()).float()
        return F.cross_entropy(F.linear(x, self.table.weight).flatten(0, 1), ids.flatten())


class Convolutions(nn.Module):
    """Batch norm, which writes its statistics, and activations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.layers = nn.Sequential(
            nn.Conv1d(16, 16, 3, padding=1), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Conv1d(16, 16, 1), nn.SiLU()
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids).transpose(1, 2)
        x = torch.tanh((self.layers(x) + x).mul_(0.5))
        return (x * torch.sigmoid(x)).square().mean()


def training(make: Callable[[], nn.Module]) -> tuple[Callable[[Tensor], Tensor], nn.Module]:
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(ids: Tensor) -> Tensor:
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, model


def batch(at: int = 0) -> Tensor:
    return torch.arange(24).mul(7 + at).remainder(32).view(2, 12)


def outcome(make: Callable[[], nn.Module], passes: list[Any] | None) -> list[Tensor]:
    """Losses of three steps and what they leave in the model; eager without passes."""
    step, model = training(make)
    program = graph = None
    if passes is not None:
        graph = weft.capture(step, batch())
        program = compile_aten(run_passes(graph, passes))
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    losses = []
    for at in range(3):
        torch.manual_seed(at)
        if program is None or graph is None:
            losses.append(step(batch(at)).detach())
            continue
        values = [_value(entry, batch(at), state) for entry in graph.inputs]
        losses.append(program(*values)[-1])
    return [*losses, *(value.detach().clone() for value in state.values())]


def _value(entry: Any, ids: Tensor, state: dict[str, Tensor]) -> Any:
    if entry.role is Role.BATCH:
        return ids
    return 0.1 if "lr" in entry.path else state[entry.path.removeprefix("model.")]


def recomputed(step: StepGraph) -> list[torch.fx.Node]:
    return [node for node in step.graph.nodes if node.meta.get("recomputed")]


def peak(step: StepGraph) -> int:
    return liveness(step, issue_order(step), rounded=False).peak


@pytest.mark.parametrize("make", [Llama, Gpt, Stream, Convolutions])
@pytest.mark.parametrize("pass_", [FREE, ALL])
def test_bits_are_kept(make: Callable[[], nn.Module], pass_: Rematerialise) -> None:
    eager, plain, again = (outcome(make, passes) for passes in (None, [], [pass_]))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(eager, again, strict=True))


@pytest.mark.parametrize("make", [Llama, Gpt, Stream, Convolutions])
def test_peak_memory_falls_and_no_expensive_operation_is_recomputed(make: Callable[[], nn.Module]) -> None:
    graph = weft.capture(training(make)[0], batch())
    free, everything = run_passes(graph, [FREE]), run_passes(graph, [ALL])
    assert peak(everything) <= peak(free) <= peak(graph)
    assert recomputed(everything)
    views = {"view", "t", "transpose", "unsqueeze", "expand", "getitem", "slice", "split", "permute", "squeeze"}
    for node in recomputed(free):
        assert is_elementwise(node) or str(node.target).split(".")[1] in views
    expensive = Counter(str(node.target) for node in recomputed(everything))
    words = ("mm", "conv", "attention", "dropout", "bernoulli", "embedding", "batch_norm", "rand")
    assert not [name for name in expensive if any(word in name for word in words)]
    for step in (free, everything):
        assert sum("mm" in str(n.target) for n in step.graph.nodes) == sum(
            "mm" in str(n.target) for n in graph.graph.nodes
        )


def test_a_llama_keeps_what_matrix_products_read_and_no_float32() -> None:
    """Kept for free: one copy of the residual stream, products and their inputs, statistics; never float32 copies."""
    graph = weft.capture(training(Llama)[0], batch())
    values = 2 * 12 * 16

    def float32s(step: StepGraph) -> int:
        """Float32 values as large as the residual stream that forward makes and backward reads."""
        return sum(
            node.meta.get("stage") == "forward"
            and isinstance(node.meta["val"], Tensor)
            and node.meta["val"].dtype == torch.float32
            and node.meta["val"].numel() == values
            and any(user.meta.get("stage") == "backward" for user in node.users)
            for node in step.graph.nodes
        )

    assert float32s(graph) >= 5
    assert float32s(run_passes(graph, [FREE])) == 0


def test_sums_of_a_residual_stream_are_kept() -> None:
    """Backward reads them one after another: made again from the layers' results, all would be written a second time,
    for the first reader. The last in front of the head's is made again where it is read, and for no other."""
    graph = run_passes(weft.capture(training(Stream)[0], batch()), [FREE])
    sums = [node for node in graph.graph.nodes if node.target is torch.ops.aten.add.Tensor]
    first = [node for node in sums if node.meta["stage"] == "forward"]
    (again,) = [node for node in sums if node.meta.get("recomputed")]
    assert len(first) == 4
    assert again.args[0] is first[1]


def test_a_budget_is_reached_without_recomputing_more_than_needed(caplog: pytest.LogCaptureFixture) -> None:
    graph = weft.capture(training(Llama)[0], batch())
    free, least = run_passes(graph, [FREE]), run_passes(graph, [ALL])
    high, low = (liveness(step, issue_order(step)).peak for step in (free, least))
    assert low < high
    wanted = high - (high - low) // 3
    some = run_passes(graph, [Rematerialise(wanted, smallest_bytes=0)])
    assert liveness(some, issue_order(some)).peak <= wanted
    assert len(recomputed(free)) < len(recomputed(some)) < len(recomputed(least))
    with caplog.at_level(logging.INFO, "weft.inductor.passes.rematerialise"):
        run_passes(graph, [ALL])
    assert "budget 0 B" in caplog.text


def test_recomputed_nodes_are_in_backward_and_keep_their_lines() -> None:
    graph = run_passes(weft.capture(training(Llama)[0], batch()), [FREE])
    nodes = list(graph.graph.nodes)
    first = next(at for at, node in enumerate(nodes) if node.meta.get("stage") == "backward")
    for node in recomputed(graph):
        assert nodes.index(node) >= first
        assert node.meta["stage"] == "backward"
        assert node.meta["frames"][0].filename == __file__
        assert node.users


def test_a_value_whose_source_is_overwritten_is_kept() -> None:
    """Backward reads exp(x) after forward wrote over x."""
    aten = torch.ops.aten
    b = StepBuilder()
    given = b.input(torch.randn(8))
    x = b.call(aten.mm.default, b.call(aten.view.default, given, [8, 1]), b.call(aten.view.default, given, [1, 8]))
    big = b.call(aten.exp.default, x)
    over = b.write(aten.neg_.default, x)
    product = b.call(aten.mm.default, over, over)
    late = b.call(aten.mul.Tensor, big, product)
    b.returns(late)
    step = b.build()
    for node in (x, big, over, product):
        node.meta["stage"] = "forward"
    late.meta["stage"] = "backward"
    assert not recomputed(run_passes(step, [FREE]))
    over.meta.pop("inplace")
    over.meta["val"] = over.meta["val"].clone()
    assert [node.target for node in recomputed(run_passes(step, [FREE]))] == [aten.exp.default]


def test_chunks_of_a_loss_do_not_count_as_forward() -> None:
    chunk = ChunkLoss(chunk_bytes=0, smallest_bytes=0, least_rows=5, multiple=1)
    chunked, both = outcome(Llama, [chunk]), outcome(Llama, [chunk, ALL])
    assert all(torch.equal(a, b) for a, b in zip(chunked, both, strict=True))
    graph = run_passes(weft.capture(training(Llama)[0], batch()), [chunk, ALL])
    assert not [node for node in recomputed(graph) if "log_softmax" in str(node.target)]
