"""Training loops recorded as CUDA graphs, against the same loops uncompiled. On a GPU only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from harness import run_ranks
from weft import knobs
from weft.inductor.runtime.cuda_graph import GraphedProgram
from weft.inductor.runtime.graph_memory import graph_pool_bytes, peak_memory
from weft.inductor.runtime.piecewise_cudagraph import PiecewiseProgram

pytestmark = pytest.mark.gpu

WIDTH = 64
Loop = Callable[[nn.Module, torch.optim.Optimizer, Callable[..., Any]], list[torch.Tensor]]


def _model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers).cuda()


def _batches(count: int, size: int = 32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, WIDTH, generator=generator).cuda() for _ in range(count)]


def _graphed(step: Any) -> list[GraphedProgram]:
    found = []
    for entry in step.entries:
        partitions = entry.program.partitions if isinstance(entry.program, PiecewiseProgram) else [entry.program]
        found += [partition for partition in partitions if isinstance(partition, GraphedProgram)]
    return found


def _training_step(model: nn.Module, opt: torch.optim.Optimizer) -> Callable[..., Any]:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x.cuda()).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return step


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def _agrees(
    loop: Loop,
    step: Callable[..., Callable[..., Any]] = _training_step,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = _adamw,
) -> Any:
    """Run the loop uncompiled and compiled, which must agree; returns the compiled step."""
    found = []
    run: Any = None
    for compiled in (False, True):
        model = _model()
        opt = optimizer(model)
        run = weft.compile(step(model, opt)) if compiled else step(model, opt)
        found.append([*loop(model, opt, run), *(p.detach() for p in model.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)
    assert all(graphed.why_not is None for graphed in _graphed(run))
    return run


def _plain(model: nn.Module, opt: torch.optim.Optimizer, run: Callable[..., Any]) -> list[torch.Tensor]:
    return [run(x) for x in _batches(8)]


@pytest.mark.parametrize(
    "optimizer",
    [
        _adamw,
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.01, foreach=False),
    ],
    ids=["fused AdamW", "AdamW", "SGD", "SGD one by one"],
)
def test_a_schedule_of_learning_rates_is_recorded_once(optimizer: Any) -> None:
    def loop(model: nn.Module, opt: torch.optim.Optimizer, run: Callable[..., Any]) -> list[torch.Tensor]:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.7)
        losses = []
        for x in _batches(10):
            losses.append(run(x))
            scheduler.step()
        return losses

    run = _agrees(loop, optimizer=optimizer)
    assert [graphed.recordings for graphed in _graphed(run) if graphed.replays] == [1]


def test_batches_from_the_cpu_and_a_smaller_last_one() -> None:
    def loop(model: nn.Module, opt: torch.optim.Optimizer, run: Callable[..., Any]) -> list[torch.Tensor]:
        sizes = [32, 32, 32, 20] * 4
        return [run(x[:size].cpu()) for x, size in zip(_batches(16), sizes, strict=True)]

    run = _agrees(loop)
    assert sum(graphed.replays for graphed in _graphed(run)) >= 6


def test_arguments_that_are_not_contiguous() -> None:
    def loop(model: nn.Module, opt: torch.optim.Optimizer, run: Callable[..., Any]) -> list[torch.Tensor]:
        return [run(x[:1].expand(32, WIDTH)) for x in _batches(6)]

    assert any(graphed.replays for graphed in _graphed(_agrees(loop)))


def test_gradients_accumulate_and_are_left_behind() -> None:
    def step(model: nn.Module, opt: torch.optim.Optimizer) -> Callable[..., Any]:
        def accumulate(x: torch.Tensor, update: bool) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            if update:
                opt.step()
                opt.zero_grad()
            return loss

        return accumulate

    def loop(model: nn.Module, opt: torch.optim.Optimizer, run: Callable[..., Any]) -> list[torch.Tensor]:
        return [run(x, at % 3 == 2) for at, x in enumerate(_batches(24))]

    run = _agrees(loop, step)
    # Without gradients, with them, with them and an update. Calls that do not update do not ask for the states.
    assert len(run.entries) == 3
    assert sum(graphed.replays > 0 for graphed in _graphed(run)) >= 3


def test_recordings_that_share_memory_leave_results_of_each_other_alone() -> None:
    model = nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024)).cuda()
    x = torch.randn(512, 1024, device="cuda")

    @weft.compile
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(x).square().mean()

    @weft.compile
    def gradients(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for first, second in ((evaluate, gradients), (gradients, evaluate)):
        for _ in range(5):
            model.zero_grad()
            first(x)
            second(x)
        model.zero_grad()
        gradients(x)
        kept = [p.grad for p in model.parameters() if p.grad is not None]
        before = [grad.clone() for grad in kept]
        for _ in range(2):
            evaluate(x * 2)
        assert len(kept) == 4
        assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))
        model.zero_grad()
        gradients(x * 3)
        assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))


def test_a_number_copied_to_the_host_partitions_the_step() -> None:
    def step(model: nn.Module, opt: torch.optim.Optimizer) -> Callable[..., Any]:
        train = _training_step(model, opt)

        def logged(x: torch.Tensor) -> tuple[torch.Tensor, float]:
            loss = train(x)
            return loss, loss.item()

        return logged

    def loop(model: nn.Module, opt: torch.optim.Optimizer, run: Callable[..., Any]) -> list[torch.Tensor]:
        found = [run(x) for x in _batches(8)]
        assert all(loss.item() == number for loss, number in found)
        return [loss for loss, _ in found]

    assert any(graphed.replays for graphed in _graphed(_agrees(loop, step)))


def test_random_numbers_follow_the_generator() -> None:
    model = _model(dropout=0.5)
    (x,) = _batches(1)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        y.square().mean().backward()
        for p in model.parameters():
            p.grad = None
        return y + torch.rand_like(y) * 1e-3

    run = weft.compile(step)
    for _ in range(4):
        run(x)
    seeded = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        seeded.append(torch.stack([run(x), run(x)]))
    assert torch.equal(seeded[0], seeded[2])
    assert not torch.equal(seeded[0], seeded[1])
    assert not torch.equal(seeded[0][0], seeded[0][1])
    state = torch.cuda.get_rng_state()
    first = run(x)
    torch.cuda.set_rng_state(state)
    assert torch.equal(run(x), first)
    assert [graphed.recordings for graphed in _graphed(run)] == [1]


@torch.library.custom_op("weft_tests::waits", mutates_args=())
def _waits(x: torch.Tensor) -> torch.Tensor:
    torch.cuda.synchronize()
    return x.clone()


@_waits.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_stream_allocator_and_generator_work_after_a_failed_recording() -> None:
    """Waiting for the GPU invalidates a recording: it cannot even be ended."""
    model = _model(dropout=0.5)
    good, (x,) = weft.compile(_training_step(model, _adamw(model))), _batches(1)
    for _ in range(4):
        good(x)
    bad = weft.compile(lambda x: _waits(torch.nn.functional.dropout(x, 0.5)) * 2)
    stream = torch.cuda.current_stream()
    for _ in range(5):
        bad(x)
    (graphed,) = _graphed(bad)
    assert "recording failed" in (graphed.why_not or "")
    assert torch.cuda.current_stream() == stream
    assert 0 < torch.rand(100, device="cuda").mean() < 1  # the generator draws again
    torch.manual_seed(3)
    first = good(x)
    assert torch.isfinite(first)
    assert _graphed(good)[0].why_not is None
    assert _graphed(good)[0].recordings == 2


def test_functions_compiled_by_torchscript() -> None:
    @torch.jit.script
    def scaled(x: torch.Tensor, by: int) -> torch.Tensor:
        return (x * by).tanh() + x

    weight = torch.randn(WIDTH, device="cuda", requires_grad=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = scaled(x * weight, 3).square().mean()
        loss.backward()
        weight.grad = None
        return loss

    (x,) = _batches(1)
    for _ in range(5):  # until the executor has fused it
        wanted = step(x)
    run = weft.compile(step)
    for _ in range(4):
        torch.testing.assert_close(run(x), wanted)


def test_peak_memory_counts_the_pool() -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).cuda()
    run, x = weft.compile(_training_step(model, _adamw(model))), torch.randn(4096, 1024, device="cuda")
    for _ in range(4):
        run(x)
    torch.cuda.reset_peak_memory_stats()
    run(x)
    set_aside, _ = graph_pool_bytes()
    assert set_aside >= 4 * 4096 * 1024 * 4  # activations kept for backward
    assert peak_memory() >= set_aside + sum(p.numel() * 4 for p in model.parameters()) * 3


def test_calls_before_the_recording_give_their_memory_back() -> None:
    """Also where a copy of an argument fits into it."""
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).cuda()
    run, x = weft.compile(_training_step(model, _adamw(model))), torch.randn(32768, 1024, device="cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(4):
        run(x)
    set_aside, _ = graph_pool_bytes()
    assert set_aside >= 4 * x.nbytes
    assert torch.cuda.memory_reserved() - before - set_aside <= 2 * x.nbytes  # states of AdamW, and the copy


def _trained_with_all_reduce(rank: int, world: int, compiled: bool) -> tuple[list[torch.Tensor], list[str | None]]:
    model = _model()
    opt = _adamw(model)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        opt.step()
        opt.zero_grad()
        return loss

    run: Any = weft.compile(step) if compiled else step
    with knobs.override(record_collectives=True):
        for x in _batches(8 * world)[rank::world]:
            run(x)
    torch.cuda.synchronize()
    whys = [graphed.why_not for graphed in _graphed(run)] if compiled else []
    return [p.detach().cpu() for p in model.parameters()], whys


@pytest.mark.gpu(2)
def test_collectives_of_nccl_are_recorded() -> None:
    (wanted, _), _ = run_ranks(_trained_with_all_reduce, 2, False, backend="nccl", timeout=240)
    results = run_ranks(_trained_with_all_reduce, 2, True, backend="nccl", timeout=240)
    for parameters, whys in results:
        assert whys == [None]
        torch.testing.assert_close(parameters, wanted, rtol=1e-3, atol=1e-4)


def test_results_share_memory_as_those_of_eager_do() -> None:
    states = []
    for compiled in (False, True):
        model, (x,) = _model(), _batches(1)
        buffer = torch.arange(12.0, device="cuda")

        def step(x: torch.Tensor, model: nn.Module = model, buffer: torch.Tensor = buffer) -> list[torch.Tensor]:
            whole = model(x).detach().exp()
            return [whole, whole[1:3], whole.t()[1], whole.sum(), model[0].weight.detach()[3:5], buffer[4:6], x[1]]

        run = weft.compile(step) if compiled else step
        for _ in range(6):
            results = run(x)
            for at, result in enumerate(results):
                with torch.no_grad():
                    result.mul_(0.5).add_(at)
            kept = [result.clone() for result in results]
        states.append([*kept, *model.parameters(), buffer, x])
        if compiled:
            assert all(graphed.replays for graphed in _graphed(run))
    torch.testing.assert_close(states[1], states[0])
