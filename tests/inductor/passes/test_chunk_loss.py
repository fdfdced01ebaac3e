"""Losses by chunks against the same step as eager runs it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import weft
from weft.capture.graph import StepGraph
from weft.inductor.graph.liveness import liveness
from weft.inductor.passes.chunk_loss import ChunkLoss
from weft.inductor.passes.pipeline import run_passes
from weft.inductor.runtime.aten import compile_aten

BATCH, LENGTH, WIDTH, WORDS = 3, 8, 6, 40
Form = Callable[[Tensor, Tensor], Tensor]
SMALL = ChunkLoss(chunk_bytes=0, smallest_bytes=0, least_rows=5, multiple=1)


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, WORDS), labels.view(-1))


def wide(logits: Tensor, labels: Tensor) -> Tensor:
    wider = torch.promote_types(logits.dtype, torch.float32)
    labels = labels.masked_fill(labels == -100, 3)
    return F.cross_entropy(logits.to(wider).flatten(0, 1), labels.flatten(), ignore_index=3)


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, WORDS), labels.view(-1), label_smoothing=0.1)


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, WORDS), labels.view(-1), reduction="sum") / (labels != -100).sum() * 3.0


def by_row(logits: Tensor, labels: Tensor) -> Tensor:
    rows = F.cross_entropy(logits.view(-1, WORDS), labels.view(-1), reduction="none")
    return (rows * torch.linspace(0.5, 2, rows.numel(), dtype=rows.dtype)).mean()


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(
        logits.view(-1, WORDS), labels.view(-1), weight=torch.linspace(0.1, 1, WORDS, dtype=logits.dtype)
    )


def shifted_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """As Hugging Face's causal models: labels move, one is padded."""
    moved = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    return F.cross_entropy(logits.view(-1, WORDS), moved, ignore_index=-100)


def shifted_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """As its older models: the last position's logits are cut off."""
    cut = logits[..., :-1, :].contiguous()
    return F.cross_entropy(cut.view(-1, WORDS), labels[..., 1:].contiguous().view(-1))


def gathered(logits: Tensor, labels: Tensor) -> Tensor:
    words = labels.clamp(min=0).unsqueeze(-1)
    return -F.log_softmax(logits, -1).gather(-1, words).mean()


def capped_with_z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    logits = 5 * torch.tanh(logits / 5)
    spread = torch.logsumexp(logits, -1)
    return mean(logits, labels) + 1e-2 * spread.square().mean()


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    rows = F.cross_entropy(logits.view(-1, WORDS), labels.view(-1), reduction="none")
    return ((1 - torch.exp(-rows)) ** 2 * rows).sum()


FORMS = [
    mean,
    wide,
    smoothed,
    summed,
    by_row,
    weighted,
    shifted_labels,
    shifted_logits,
    gathered,
    capped_with_z_loss,
    focal,
]


def step_of(form: Form, bias: bool, tied: bool = False) -> Callable[..., Any]:
    """A step that returns loss and gradients."""

    def step(table: Tensor, inner: Tensor, head: Tensor, added: Tensor, ids: Tensor, labels: Tensor) -> Any:
        hidden = torch.tanh(F.linear(F.embedding(ids, table), inner))
        loss = form(F.linear(hidden, table if tied else head, added if bias else None), labels)
        leaves = [table, inner, *([] if tied else [head]), *([added] if bias else [])]
        return loss, *torch.autograd.grad(loss, leaves)

    return step


def arguments(dtype: torch.dtype, seed: int = 0, ignored: float = 0.2) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = [(WORDS, WIDTH), (WIDTH, WIDTH), (WORDS, WIDTH), (WORDS,)]
    parameters = [
        torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes
    ]
    ids, labels = (torch.randint(WORDS, (BATCH, LENGTH), generator=draw) for _ in range(2))
    labels[torch.rand(labels.shape, generator=draw) < ignored] = -100
    return [*parameters, ids, labels]


def run(graph: StepGraph, given_: list[Tensor]) -> list[Tensor]:
    values = [given_[int(entry.path.removeprefix("args[").removesuffix("]"))] for entry in graph.inputs]
    return compile_aten(graph)(*(value.detach() for value in values))


def large(graph: StepGraph, count: int) -> list[str]:
    """Nodes that make a storage of at least ``count`` elements."""
    found = []
    for node in graph.graph.nodes:
        val = node.meta.get("val")
        for item in val if isinstance(val, (list, tuple)) else [val]:
            if isinstance(item, Tensor) and item.untyped_storage().nbytes() >= count * item.dtype.itemsize:
                found.append(node.name)
    return found


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(FORMS),
    st.booleans(),
    st.booleans(),
    st.integers(1, 20),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_loss_and_gradients_equal_eager_in_float64(
    form: Form, bias: bool, tied: bool, least: int, multiple: int, seed: int
) -> None:
    """In float64, whatever the form of the loss and the size of a chunk."""
    given_ = arguments(torch.float64, seed, ignored=0.25 * seed if form not in (gathered,) else 0)
    step = step_of(form, bias, tied)
    graph = weft.capture(step, *given_)
    chunked = run_passes(graph, [ChunkLoss(chunk_bytes=0, smallest_bytes=0, least_rows=least, multiple=multiple)])
    # Weights have WORDS * WIDTH elements; a chunk of up to 20 of 24 rows has less than the logits.
    assert large(graph, 21 * WORDS)
    assert not large(chunked, 21 * WORDS)
    for ours, theirs in zip(run(chunked, given_), step(*given_), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_errors_against_float64_are_at_most_twice_those_of_eager(form: Form, dtype: torch.dtype) -> None:
    """Against float64: no more than twice eager's error, and a few roundings for sums of chunks."""
    given_ = arguments(dtype, seed=5, ignored=0.0)
    step = step_of(form, bias=True)
    exact = step(*[x.detach().double().requires_grad_() if x.is_floating_point() else x for x in given_])
    chunked = run_passes(weft.capture(step, *given_), [SMALL])
    for ours, eager, reference in zip(run(chunked, given_), step(*given_), exact, strict=True):
        scale = reference.abs().max()
        error, eagers = ((x.double() - reference).abs().max() / scale for x in (ours, eager))
        assert ours.dtype == eager.dtype
        assert error <= 2 * eagers + 4 * torch.finfo(dtype).eps


def test_the_weights_gradient_is_summed_up_in_place() -> None:
    graph = run_passes(weft.capture(step_of(mean, bias=False), *arguments(torch.float32)), [SMALL])
    source = compile_aten(graph).source
    assert source.count("addmm_(") == 4
    assert "clone" not in source


def test_losses_under_autocast_and_loss_scaling_are_chunked() -> None:
    def step(table: Tensor, head: Tensor, scale: Tensor, ids: Tensor, labels: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = mean(F.linear(F.embedding(ids, table), head), labels)
        return loss, *torch.autograd.grad(loss * scale / 4, [table, head])

    table, _, head, _, ids, labels = arguments(torch.float32)
    given_ = [table, head, torch.tensor(1024.0), ids, labels]
    chunked = run_passes(weft.capture(step, *given_), [SMALL])
    assert not large(chunked, 21 * WORDS)
    for ours, theirs in zip(run(chunked, given_), step(*given_), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2 * float(theirs.detach().abs().max()))


def test_every_loss_of_a_training_step_is_chunked() -> None:
    """Two micro-batches whose gradients add up, and an optimizer that writes the weights they view."""

    def training() -> tuple[Callable[..., Tensor], torch.nn.Module]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(WORDS, WIDTH), torch.nn.Linear(WIDTH, WORDS))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(first: Tensor, second: Tensor) -> Tensor:
            losses = [mean(model(ids), ids) / 2 for ids in (first, second)]
            for loss in losses:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return losses[0].detach() + losses[1].detach()

        return step, model

    batches = [torch.arange(24).mul(3 + at).remainder(WORDS).view(BATCH, LENGTH) for at in range(2)]
    eager, theirs = training()
    step, ours = training()
    graph = run_passes(weft.capture(step, *batches), [SMALL])
    assert not large(graph, 21 * WORDS)
    state = {f"model.{name}": value for name, value in ours.named_parameters()}
    values = {"args[0]": batches[0], "args[1]": batches[1], **state}
    loss = compile_aten(graph)(*(values.get(entry.path, 0.1) for entry in graph.inputs))[-1]
    torch.testing.assert_close(loss, eager(*batches))
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def test_a_model_sharded_over_ranks_is_chunked() -> None:
    with weft.fake_world(2):
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        model = torch.nn.Sequential(torch.nn.Embedding(WORDS, WIDTH), torch.nn.Linear(WIDTH, WORDS, bias=False))
        for layer in model:
            weft.fully_shard(layer, mesh=mesh)

        def step(ids: Tensor, labels: Tensor) -> Tensor:
            loss = mean(model(ids), labels)
            loss.backward()
            return loss

        graph = weft.capture(step, *arguments(torch.float32)[-2:])
    chunked = run_passes(graph, [SMALL])
    assert large(graph, 21 * WORDS)
    assert not large(chunked, 21 * WORDS)
    assert len(chunked.collectives()) == len(graph.collectives())


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    return mean(logits, labels) + 0 * (logits.argmax(-1) == labels).sum()


def logits_returned(table: Tensor, head: Tensor, ids: Tensor, labels: Tensor) -> Any:
    logits = F.linear(F.embedding(ids, table), head)
    loss = mean(logits, labels)
    return loss, logits, *torch.autograd.grad(loss, [table, head])


def squared(logits: Tensor, labels: Tensor) -> Tensor:
    return mean(logits, labels).square()


def step_with(form: Form) -> Callable[..., Any]:
    def step(table: Tensor, head: Tensor, ids: Tensor, labels: Tensor) -> Any:
        loss = form(F.linear(F.embedding(ids, table), head), labels)
        return loss, *torch.autograd.grad(loss, [table, head])

    return step


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (step_with(accuracy), "argmax"),
        (logits_returned, "output"),
        (step_with(squared), "needs all rows"),
    ],
)
def test_losses_that_read_whole_logits_are_left_alone(
    step: Callable[..., Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    table, _, head, _, ids, labels = arguments(torch.float32)
    graph = weft.capture(step, table, head, ids, labels)
    with caplog.at_level(logging.DEBUG, "weft.inductor.passes.chunk_loss"):
        assert str(run_passes(graph, [SMALL])) == str(graph)
    assert reason in caplog.text
    assert "test_chunk_loss.py" in caplog.text


def test_small_logits_are_left_alone() -> None:
    graph = weft.capture(step_of(mean, bias=False), *arguments(torch.float32))
    assert str(run_passes(graph, [ChunkLoss()])) == str(graph)


def test_no_chunk_exceeds_the_byte_limit() -> None:
    """Real sizes, on fakes: 6,000 rows of 50,304 words, float32 after the head's bfloat16."""
    with weft.fake_world(1):
        table, head = (torch.empty(50304, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
        ids = torch.zeros(4, 1500, dtype=torch.long)

        def step(ids: Tensor, labels: Tensor) -> Any:
            logits = F.linear(F.embedding(ids, table), head).float()
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return loss, *torch.autograd.grad(loss, [table, head])

        graph = weft.capture(step, ids, ids)
    chunked = run_passes(graph, [ChunkLoss(chunk_bytes=256 << 20)])
    rows = {n.meta["val"].shape[0] for n in chunked.graph.nodes if "_log_softmax.default" in str(n.target)}
    assert rows == {2048, 1904}
    assert liveness(graph).peak > 2.5 * liveness(chunked).peak
