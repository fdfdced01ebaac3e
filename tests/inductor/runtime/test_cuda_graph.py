"""Recorded programs in ordinary training loops: without a GPU by a recorder that stands in for CUDA graphs."""

from __future__ import annotations

import importlib
import operator
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from fake_recorder import FakeRecorder
from harness import run_ranks
from step_builder import StepBuilder
from weft import torch_adapter
from weft.capture.graph import StepGraph
from weft.capture.step_interface import Return, Role
from weft.inductor.codegen.kernel_call import KernelCall
from weft.inductor.compiler import make_kernels
from weft.inductor.graph.retarget import retarget
from weft.inductor.passes.fuse_optimizer import fuse_optimizer
from weft.inductor.passes.pipeline import ATEN_PASSES, run_passes
from weft.inductor.passes.scalars_to_memory import scalars_to_memory
from weft.inductor.runtime.aten import AtenProgram, compile_aten
from weft.inductor.runtime.cuda_graph import GraphedProgram
from weft.inductor.runtime.cudagraph_partition import partition_step
from weft.inductor.runtime.graph_memory import graph_pool_bytes
from weft.inductor.runtime.piecewise_cudagraph import PiecewiseProgram, compile_recorded

aten = torch.ops.aten
functional = torch.ops._c10d_functional
Node = torch.fx.Node

CPU = torch.device("cpu")


# ---- whole training loops


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> FakeRecorder:
    """Compiled steps run as if on a GPU, recorded by what this returns."""
    recorder = FakeRecorder()

    def compile_graph(step: StepGraph, *how: Any) -> Any:
        step = run_passes(retarget(step.copy(), "cuda"), [*ATEN_PASSES, fuse_optimizer, scalars_to_memory])
        return compile_recorded(step, recorder, CPU)

    monkeypatch.setattr(importlib.import_module("weft.program_form"), "compile_graph", compile_graph)
    return recorder


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def _graphed(program: Any) -> list[GraphedProgram]:
    partitions = program.partitions if isinstance(program, PiecewiseProgram) else [program]
    return [partition for partition in partitions if isinstance(partition, GraphedProgram)]


Loop = Callable[[nn.Module, torch.optim.Optimizer, Callable[..., Any]], list[torch.Tensor]]


def _agrees(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer], loop: Loop, step: Callable[..., Callable[..., Any]]
) -> list[Any]:
    """Run the loop uncompiled and compiled; returns the compiled step's programs."""
    losses, states, programs = [], [], []
    for compiled in (False, True):
        model = _model()
        opt = optimizer(model)
        function = step(model, opt)
        run = weft.compile(function) if compiled else function
        losses.append(loop(model, opt, run))
        states.append([p.detach() for p in model.parameters()])
        if compiled:
            programs = [entry.program for entry in run.entries]
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(states[1], states[0])
    return programs


def _training_step(model: nn.Module, opt: torch.optim.Optimizer) -> Callable[..., Any]:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return step


def _batches(count: int, size: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 8, generator=generator) for _ in range(count)]


def _scheduled(model: nn.Module, opt: torch.optim.Optimizer, run: Callable[..., Any]) -> list[torch.Tensor]:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.7)
    losses = []
    for x in _batches(8):
        losses.append(run(x))
        scheduler.step()
    return losses


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, foreach=True),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, fused=True),
    ],
    ids=["fused AdamW", "foreach AdamW", "foreach SGD", "fused SGD"],
)
def test_a_schedule_of_learning_rates_is_recorded_once(optimizer: Any, recorder: FakeRecorder) -> None:
    (program,) = _agrees(optimizer, _scheduled, _training_step)
    (graphed,) = _graphed(program)
    assert graphed.why_not is None
    assert graphed.recordings == 1
    assert graphed.replays == 6


@pytest.mark.parametrize("steps", [1, 6])
def test_results_share_memory_as_those_of_eager_do(steps: int, recorder: FakeRecorder) -> None:
    """Results with each other, with a parameter and with an argument; also as complex and as negated numbers."""
    states = []
    for compiled in (False, True):
        model, (x,) = _model(), _batches(1)
        buffer = torch.arange(12.0)

        def step(x: torch.Tensor, model: nn.Module = model, buffer: torch.Tensor = buffer) -> list[torch.Tensor]:
            whole = model(x).cos().detach()
            pairs = torch.view_as_complex(whole.view(-1, 2))
            alone = whole.sum()
            return [whole, whole[1:3], whole.t()[1], pairs[2:], alone, model[0].weight.detach()[3:5], buffer[4:6], x[1]]

        run = weft.compile(step) if compiled else step
        for _ in range(steps):
            results = run(x)
            for at, result in enumerate(results):
                with torch.no_grad():
                    result.mul_(2).add_(at)
            kept = [result.clone() for result in results]
        states.append([*kept, *model.parameters(), buffer, x])
        if compiled and steps > 3:
            (graphed,) = _graphed(run.entries[0].program)
            assert graphed.replays
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)


def test_losses_kept_over_steps_keep_their_values(recorder: FakeRecorder) -> None:
    step = weft.compile(_training_step(model := _model(), torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)))
    (x,) = _batches(1)
    losses = [step(x) for _ in range(6)]
    before = [loss.item() for loss in losses]
    step(x)
    assert [loss.item() for loss in losses] == before
    assert len(set(before)) == 6


def test_gradients_accumulate_over_steps(recorder: FakeRecorder) -> None:
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

    programs = _agrees(lambda m: torch.optim.SGD(m.parameters(), lr=0.1, foreach=True), loop, step)
    assert len(programs) == 3  # without gradients, on top of them, with the update
    assert all(graphed.why_not is None and graphed.replays for p in programs for graphed in _graphed(p))


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_left_behind_and_zeroed_outside(to_none: bool, recorder: FakeRecorder) -> None:
    def step(model: nn.Module, opt: torch.optim.Optimizer) -> Callable[..., Any]:
        def forward_backward(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            return loss

        return forward_backward

    def loop(model: nn.Module, opt: torch.optim.Optimizer, run: Callable[..., Any]) -> list[torch.Tensor]:
        kept = []
        for x in _batches(8):
            kept.append(run(x))
            kept += [p.grad.norm() for p in model.parameters() if p.grad is not None]
            opt.step()
            opt.zero_grad(set_to_none=to_none)
        return kept

    programs = _agrees(lambda m: torch.optim.SGD(m.parameters(), lr=0.1), loop, step)
    assert all(graphed.why_not is None for p in programs for graphed in _graphed(p))


def test_checkpoints_are_loaded_between_steps(recorder: FakeRecorder) -> None:
    def loop(model: nn.Module, opt: torch.optim.Optimizer, run: Callable[..., Any]) -> list[torch.Tensor]:
        losses, saved = [], {}
        average = [p.detach().clone() for p in model.parameters()]
        for at, x in enumerate(_batches(12)):
            if at == 4:
                saved = {k: v.clone() for k, v in model.state_dict().items()}
            if at == 7:
                model.load_state_dict(saved)
            if at == 8:
                opt.load_state_dict(opt.state_dict())
            losses.append(run(x))
            for kept, p in zip(average, model.parameters(), strict=True):
                kept.lerp_(p.detach(), 0.1)
        return [*losses, *average]

    programs = _agrees(lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, fused=True), loop, _training_step)
    graphed = [graphed for p in programs for graphed in _graphed(p)]
    assert all(g.why_not is None for g in graphed)
    assert sum(g.recordings for g in graphed) <= 3


def test_numbers_copied_to_the_host_partition_the_step(recorder: FakeRecorder) -> None:
    seen: list[float] = []

    def step(model: nn.Module, opt: torch.optim.Optimizer) -> Callable[..., Any]:
        @weft.opaque
        def log(loss: torch.Tensor) -> None:
            seen.append(loss.item())

        def logged(x: torch.Tensor) -> tuple[torch.Tensor, float]:
            loss = model(x).square().mean()
            log(loss)
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss, loss.item()

        return logged

    def loop(model: nn.Module, opt: torch.optim.Optimizer, run: Callable[..., Any]) -> list[torch.Tensor]:
        return [torch.stack([loss.detach(), torch.tensor(number)]) for loss, number in map(run, _batches(6))]

    (program,) = _agrees(lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, fused=True), loop, step)
    assert seen[:6] == seen[6:]
    assert len(_graphed(program)) == 1  # the forward alone is too small
    assert all(g.replays == 4 for g in _graphed(program))


# ---- one program


def _program(build: StepBuilder, recorder: FakeRecorder) -> GraphedProgram:
    step = build.build()
    return GraphedProgram(compile_aten(step), step, recorder)


def _doubling(recorder: FakeRecorder, role: Role = Role.BATCH, like: torch.Tensor | None = None) -> GraphedProgram:
    build = StepBuilder()
    x = build.input(torch.ones(3) if like is None else like, role)
    build.returns(build.call(aten.mul.Tensor, x, 2.0))
    return _program(build, recorder)


def test_sizes_and_numbers_that_alternate_have_a_recording_each() -> None:
    recorder = FakeRecorder()
    build = StepBuilder()
    x, number = build.input(torch.ones(3), Role.BATCH), build.input(2, Role.SCALAR)
    build.returns(build.call(aten.mul.Tensor, x, number))
    program = _program(build, recorder)
    for at in range(20):
        size, by = 3 + at % 2, 2 + at // 2 % 2
        x = torch.randn(size)
        assert torch.equal(program(x, by)[0], x * by)
    assert program.recordings == 4


def test_recording_is_given_up_when_an_input_changes_at_every_call() -> None:
    program = _doubling(FakeRecorder())
    for size in range(1, 40):
        assert torch.equal(program(torch.ones(size))[0], torch.full((size,), 2.0))
    assert program.why_not is not None
    assert "in_0 changed" in program.why_not


@pytest.mark.parametrize(
    "of",
    [
        lambda: torch.randn(3, 1).expand(3, 4),
        lambda: torch.randn(8).unfold(0, 4, 2),
        lambda: torch.randn(4, 3).t(),
        lambda: torch.randn(3, 9)[:, 2:7:2],
        lambda: torch.randn(0, 4),
        lambda: torch.randn(()),
    ],
    ids=["expanded", "unfolded", "transposed", "sliced", "empty", "scalar"],
)
def test_arguments_of_any_layout_are_copied_to_static_buffers(of: Callable[[], torch.Tensor]) -> None:
    program = _doubling(FakeRecorder(), like=of())
    for _ in range(5):
        x = of()
        assert torch.equal(program(x)[0], x * 2)
    assert program.replays == 3


def test_a_parameter_that_moves_is_recorded_again_and_what_keeps_moving_is_copied() -> None:
    program = _doubling(FakeRecorder(), Role.PARAMETER)
    held = [torch.randn(3) for _ in range(30)]
    for x in held:
        assert torch.equal(program(x)[0], x * 2)
    assert program.why_not is None
    assert program.recordings == 4


def test_an_update_reaches_an_input_that_is_copied() -> None:
    build = StepBuilder()
    x = build.input(torch.ones(3), Role.GRADIENT)
    build.update(x, build.write(aten.mul_.Tensor, x, 2.0))
    program = _program(build, FakeRecorder())
    held = [torch.full((3,), float(at)) for at in range(12)]
    for at, x in enumerate(held):
        program(x)
        assert torch.equal(x, torch.full((3,), 2.0 * at))
    assert program.why_not is None


def _large(recorder: FakeRecorder) -> GraphedProgram:
    return _doubling(recorder, like=torch.ones(1 << 18))


def test_large_results_are_returned_without_a_copy_while_the_caller_drops_them() -> None:
    program = _large(FakeRecorder())
    addresses = set()
    for at in range(8):
        (result,) = program(torch.full((1 << 18,), float(at)))
        assert result[0] == 2 * at
        if at >= 2:
            addresses.add(result.data_ptr())
        del result
    assert len(addresses) == 1
    assert program.recordings == 1


@pytest.mark.parametrize("part", [lambda x: x, lambda x: x[5:7]], ids=["whole", "view"])
def test_large_results_that_the_caller_keeps_are_not_overwritten(part: Callable[[torch.Tensor], torch.Tensor]) -> None:
    program = _large(FakeRecorder())
    kept = [part(program(torch.full((1 << 18,), float(at)))[0]) for at in range(8)]
    assert [x[0].item() for x in kept] == [2.0 * at for at in range(8)]
    assert program.recordings == 2
    assert program.why_not is None


def test_results_that_another_recording_may_write_to_are_copied() -> None:
    program = _large(FakeRecorder(alone=False))
    kept = [program(torch.full((1 << 18,), float(at)))[0] for at in range(5)]
    assert len({x.data_ptr() for x in kept}) == 5
    assert program.recordings == 1


def test_a_failed_recording_is_logged_and_the_step_runs(caplog: pytest.LogCaptureFixture) -> None:
    for error, said in ((RuntimeError("no\nlong story"), "RuntimeError: no"), (torch.OutOfMemoryError(), "memory")):
        program = _doubling(FakeRecorder(error))
        assert [program(torch.ones(3))[0].tolist() for _ in range(4)] == [[2.0] * 3] * 4
        assert said in (program.why_not or "")
        assert said in caplog.text


def test_recordings_of_an_earlier_era_are_made_again() -> None:
    recorder = FakeRecorder()
    program = _doubling(recorder)
    for _ in range(4):
        program(torch.ones(3))
    recorder.era += 1
    assert torch.equal(program(torch.ones(3))[0], torch.full((3,), 2.0))
    assert program.recordings == 2


def test_a_returned_input_is_the_callers_own_tensor() -> None:
    build = StepBuilder()
    x = build.input(torch.ones(3), Role.PARAMETER)
    new = build.write(aten.add_.Tensor, x, 1.0)
    build.update(x, new)
    build.returns(new)
    program = _program(build, FakeRecorder())
    x = torch.zeros(3)
    for at in range(5):
        assert program(x)[0] is x
        assert x[0] == at + 1


# ---- partitions


def _on_gpu(build: StepBuilder, *on_cpu: Node) -> StepGraph:
    return retarget(build.build(), "cuda", on_cpu.__contains__)


def test_batches_on_the_cpu_are_staged() -> None:
    build = StepBuilder()
    weight, x = build.input(torch.ones(3)), build.input(torch.ones(3), Role.BATCH)
    moved = build.call(aten._to_copy.default, x, device=CPU)
    value = moved
    for _ in range(9):
        value = build.call(aten.mul.Tensor, value, weight)
    build.returns(value)
    program = compile_recorded(_on_gpu(build, x), FakeRecorder(), CPU)
    weight = torch.randn(3)
    for _ in range(5):
        x = torch.randn(3)
        torch.testing.assert_close(program(weight, x)[0], x * weight**9)
    assert [g.replays for g in _graphed(program)] == [3]


def test_constants_on_the_cpu_are_moved_and_do_not_partition_the_step() -> None:
    build = StepBuilder()
    x, half = build.input(torch.ones(3), Role.BATCH), build.input(torch.tensor(0.5, dtype=torch.float64))
    third = build.call(aten.div.Tensor, half, 1.5)
    value = x
    for by in (half, third):
        value = build.call(aten.mul.Tensor, value, by)
    build.returns(value)
    step = scalars_to_memory(_on_gpu(build, half, third))
    program = compile_recorded(step, FakeRecorder(), CPU)
    for at in range(5):
        x, half = torch.randn(3), torch.tensor(0.5 + at, dtype=torch.float64)
        (found,) = program(x, half)
        assert found.dtype is torch.float32
        torch.testing.assert_close(found, x * half * (half / 1.5))
    assert [g.replays for g in _graphed(program)] == [3]


def test_numbers_that_no_input_decides_are_constants_of_kernels() -> None:
    build = StepBuilder()
    x, number = build.input(torch.ones(3), Role.BATCH), build.input(torch.tensor(3.0))
    made = build.call(aten.full.default, [], 64.0, dtype=torch.float64, device=CPU)
    root = build.call(aten.sqrt.default, made)
    build.returns(build.call(aten.div.Tensor, build.call(aten.mul.Tensor, x, number), root))
    eager = compile_aten(build.build().copy())
    step = scalars_to_memory(_on_gpu(build, number, made, root))
    (copied,) = (node for node in step.graph.nodes if node.target is aten._to_copy.default)
    assert copied.args[0] is step.placeholders[1]
    x, number = torch.randn(3), torch.tensor(5.0)
    (found,), (expected,) = compile_recorded(step, FakeRecorder(), CPU)(x, number), eager(x, number)
    assert found.dtype is torch.float32
    assert torch.equal(found, expected)


FILLED: dict[str, Callable[[StepBuilder, Node, Node], Node]] = {
    "fill": lambda build, x, number: build.call(aten.fill.Tensor, x, number),
    "masked_fill": lambda build, x, number: build.call(
        aten.masked_fill.Tensor, x, build.call(aten.gt.Scalar, x, 0.0), number
    ),
    "index_put": lambda build, x, number: build.call(
        aten.index_put.default, x, [build.call(aten.arange.default, 2, device=CPU)], number
    ),
}


@pytest.mark.parametrize("name", FILLED)
def test_cpu_numbers_written_to_gpu_tensors_do_not_partition_the_step(name: str) -> None:
    build = StepBuilder()
    x, number = build.input(torch.ones(3), Role.BATCH), build.input(torch.tensor(7.0))
    value = FILLED[name](build, x, number)
    for _ in range(9):
        value = build.call(aten.mul.Tensor, value, 2.0)
    build.returns(value)
    eager = compile_aten(build.build().copy())
    program = compile_recorded(scalars_to_memory(_on_gpu(build, number)), FakeRecorder(), CPU)
    for at in range(5):
        x, number = torch.randn(3), torch.tensor(float(at))
        assert torch.equal(program(x, number)[0], eager(x, number)[0])
    assert [g.replays for g in _graphed(program)] == [3]


@pytest.mark.parametrize("others", [False, True], ids=["alone", "after a draw of the user's own"])
def test_draws_on_the_cpu_are_those_of_eager_and_come_first_where_they_can(others: bool) -> None:
    """One of them is of no use: it moves the generator on."""
    build = StepBuilder()
    x = build.input(torch.ones(3), Role.BATCH)
    value = x
    for _ in range(9):
        value = build.call(aten.mul.Tensor, value, 2.0)
    if others:
        build.effect(lambda value: torch.rand([]), value)
    draws = [build.call(aten.rand.default, [], device=CPU) for _ in range(2)]
    value = build.call(aten.mul.Tensor, value, draws[1])
    for _ in range(9):
        value = build.call(aten.mul.Tensor, value, 2.0)
    build.returns(value)
    program = compile_recorded(scalars_to_memory(_on_gpu(build, *draws)), FakeRecorder(), CPU)
    for at in range(5):
        torch.manual_seed(at)
        (found,) = program(torch.ones(3))
        after = torch.rand([])
        torch.manual_seed(at)
        *_, drawn, following = [torch.rand([]) for _ in range(3 + others)]
        assert torch.equal(after, following)
        assert torch.equal(found, drawn * 2.0**18 * torch.ones(3))
    assert [g.replays for g in _graphed(program)] == ([3, 3] if others else [3])


def test_an_input_is_updated_after_its_last_reader_in_any_partition() -> None:
    """The old value of a parameter is read, through a view, after the partition that computes the new one."""
    order: list[float] = []
    build = StepBuilder()
    weight = build.input(torch.ones(3))
    view = build.call(aten.view.default, weight, [3])
    new = weight
    for _ in range(9):
        new = build.call(aten.add.Tensor, new, 1.0)
    build.effect(lambda value: order.append(value[0].item()), new)
    read = view
    for _ in range(9):
        read = build.call(aten.mul.Tensor, read, 2.0)
    build.update(weight, new)
    build.returns(read, view)
    program = compile_recorded(_on_gpu(build), FakeRecorder(), CPU)
    value = torch.zeros(3)
    for at in range(5):
        old = 9.0 * at
        read, before = program(value)
        assert (read[0], before[0], value[0]) == (512 * old, old, old + 9)
    assert order == [9.0, 18.0, 27.0, 36.0, 45.0]
    assert [g.replays for g in _graphed(program)] == [3, 3]


def test_inputs_and_values_between_partitions_are_freed_at_their_last_use() -> None:
    """A call with an effect sees which of them are still there: it runs in a partition that is not recorded, behind the
    last readers of ``x`` and ``between``."""
    there: list[list[bool]] = []
    watched: list[weakref.ref[torch.Tensor]] = []
    build = StepBuilder()
    x, y = build.input(torch.ones(3)), build.input(torch.ones(3))
    between = build.call(aten.mul.Tensor, x, y)
    for _ in range(9):
        between = build.call(aten.add.Tensor, between, 1.0)
    build.effect(lambda value: watched.append(weakref.ref(value)), between)
    build.effect(lambda value: there.append([each() is not None for each in watched]), y)
    value = y
    for _ in range(9):
        value = build.call(aten.mul.Tensor, value, 2.0)
    build.returns(value)
    program = compile_recorded(_on_gpu(build), FakeRecorder(), CPU)
    assert isinstance(program, PiecewiseProgram)
    inputs = [torch.zeros(3), torch.ones(3)]
    watched.append(weakref.ref(inputs[0]))
    (found,) = program.boxed(inputs)
    assert there == [[False, False]]
    assert inputs == []
    assert found[0] == 512.0


def test_conditions_on_numbers_of_the_data_have_no_fake_value_and_pass_between_partitions() -> None:
    """As checks of data-dependent sizes have them."""
    seen: list[bool] = []
    build = StepBuilder()
    x = build.input(torch.ones(3))
    number = build.graph.call_function(aten._local_scalar_dense.default, (build.call(aten.sum.default, x),))
    holds = build.graph.call_function(operator.ge, (number, 0))
    build.effect(lambda condition: seen.append(condition), holds)
    value = x
    for _ in range(9):
        value = build.call(aten.mul.Tensor, value, 2.0)
    build.effect(lambda value, condition: seen.append(condition), value, holds)
    build.returns(value)
    program = compile_recorded(_on_gpu(build), FakeRecorder(), CPU)
    assert isinstance(program, PiecewiseProgram)
    assert program(torch.ones(3))[0][0] == 512.0
    assert program(-torch.ones(3))[0][0] == -512.0
    assert seen == [True, True, False, False]


def test_a_view_of_an_updated_input_lies_in_it_though_the_new_value_comes_from_an_earlier_partition() -> None:
    build = StepBuilder()
    weight, x = build.input(torch.ones(4)), build.input(torch.ones(4), Role.BATCH)
    value = x
    for _ in range(9):
        value = build.call(aten.mul.Tensor, value, 2.0)
    view = build.call(aten.slice.Tensor, value, 0, 0, 2)
    build.effect(lambda value: None, value)
    total = build.call(aten.add.Tensor, value, weight)
    for _ in range(9):
        total = build.call(aten.mul.Tensor, total, 0.5)
    build.update(weight, value)
    build.returns(view, total)
    build.outputs[1] = Return(0, memory=weight.name)
    program = compile_recorded(_on_gpu(build), FakeRecorder(), CPU)
    assert isinstance(program, PiecewiseProgram)
    for _ in range(3):
        weight = torch.ones(4)
        view, total = program(weight, torch.ones(4))
        assert view.data_ptr() == weight.data_ptr()
        assert view.tolist() == [512.0, 512.0]
        assert total[0] == 513 / 512


def test_a_step_of_which_nothing_can_be_recorded_is_one_program() -> None:
    build = StepBuilder()
    x = build.input(torch.ones(3), Role.BATCH)
    build.effect(lambda value: None, x)
    build.returns(x)
    assert isinstance(compile_recorded(_on_gpu(build), FakeRecorder(), CPU), AtenProgram)


# ---- collectives


def _reduced(between: Callable[[StepBuilder, Node], Any]) -> StepGraph:
    """Nine operations, an all-reduce, something before its wait, nine operations."""
    build = StepBuilder()
    value = build.input(torch.ones(3))
    for _ in range(9):
        value = build.call(aten.mul.Tensor, value, 2.0)
    start = build.call(functional.all_reduce.default, value, "sum", "dp", val=value.meta["val"].clone())
    between(build, value)
    value = build.call(functional.wait_tensor.default, start, val=start.meta["val"])
    for _ in range(9):
        value = build.call(aten.mul.Tensor, value, 2.0)
    build.returns(value)
    return retarget(build.build({"dp": "0"}), "cuda")


@pytest.mark.parametrize(
    ("backend", "waiting", "recorded"), [("nccl", "0", [True]), ("nccl", "1", [True, False, True]), ("gloo", "0", None)]
)
def test_collectives_are_recorded_where_nothing_on_the_host_is_needed(
    backend: str, waiting: str, recorded: list[bool] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_adapter, "backend_of_group", lambda name, device: backend)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", waiting)
    partitions = partition_step(_reduced(lambda build, value: None))
    assert [partition.why_not is None for partition in partitions] == (recorded or [True, False, True])


def test_a_collective_and_its_wait_are_recorded_together_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_adapter, "backend_of_group", lambda name, device: "nccl")
    partitions = partition_step(_reduced(lambda build, value: build.effect(print, value)))
    assert [partition.why_not is None for partition in partitions] == [True, False, True]
    targets = {node.target for node in partitions[1].step.graph.nodes}
    assert {functional.all_reduce.default, functional.wait_tensor.default, print} <= targets


def _backends(rank: int, world: int) -> tuple[str, str]:
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    return torch_adapter.backend_of_group(name, "cpu"), torch_adapter.backend_of_group(name, "cuda")


def test_the_backend_of_a_group() -> None:
    assert run_ranks(_backends, 1)[0][0] == "gloo"


# ---- numbers


def test_generated_kernels_read_numbers_from_memory() -> None:
    weight = nn.Parameter(torch.randn(40))
    opt = torch.optim.SGD([weight], lr=0.5)  # one tensor: no lists, plain operations

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (weight * x).sum() * opt.param_groups[0]["lr"]
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    graph = retarget(run_passes(weft.capture(step, torch.ones(40)), []), "cuda")
    made = make_kernels(retarget(run_passes(graph, [scalars_to_memory]), "cpu"))
    calls = [node for node in made.graph.nodes if isinstance(node.target, KernelCall)]
    assert calls
    assert not any(call.target.symbols for call in calls)
    program = compile_aten(made)
    values = {"parameter": weight.detach().clone(), "batch": torch.randn(40)}
    for lr in (0.5, 0.25):
        before = values["parameter"].clone()
        (loss,) = program(*(values.get(entry.role.value, lr) for entry in made.inputs))
        torch.testing.assert_close(loss, (before * values["batch"]).sum() * lr)
        torch.testing.assert_close(values["parameter"], before - lr * lr * values["batch"])


def test_graph_pool_memory_is_that_of_the_given_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without an index is the current one."""
    segments = [
        {"device": at, "segment_pool_id": pool, "total_size": 10**at * (1 + (pool != (0, 0))), "allocated_size": at}
        for at in (0, 1)
        for pool in ((0, 0), (0, 3))
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for device in (None, 1, torch.device("cuda"), torch.device("cuda", 1)):
        assert graph_pool_bytes(device) == (20, 1)
    assert graph_pool_bytes(0) == (2, 0)
