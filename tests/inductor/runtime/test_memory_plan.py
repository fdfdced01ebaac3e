"""Memory planning: values that are live together share no byte, and planned programs compute the same bits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from step_builder import StepBuilder
from weft.capture.graph import StepGraph
from weft.capture.record.tracer import capture_step
from weft.inductor.compiler import make_kernels
from weft.inductor.graph.live_range import LiveInterval, peak_bytes
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes
from weft.inductor.runtime import memory_plan
from weft.inductor.runtime.aten import compile_aten
from weft.inductor.runtime.memory_plan import ArenaSpan, pack, plan_memory
from weft.inductor.runtime.multi_tensor import Launcher, use_kernels
from weft.inductor.runtime.placement import place
from weft.launch.minify import random_inputs

aten = torch.ops.aten
functional = torch.ops._c10d_functional
Node = torch.fx.Node

# ---- offsets


@st.composite
def live_intervals(draw: st.DrawFn, most: int = 40) -> list[LiveInterval]:
    found = []
    for _ in range(draw(st.integers(0, most))):
        start = draw(st.integers(0, 300))
        found.append(LiveInterval(512 * draw(st.integers(1, 20)), start, start + draw(st.integers(0, 200))))
    return found


def arena_size(values: list[LiveInterval], offsets: list[int]) -> int:
    return max((offset + life.size for offset, life in zip(offsets, values, strict=True)), default=0)


@given(live_intervals())
@settings(max_examples=200, deadline=None)
def test_values_that_are_live_together_share_no_byte(values: list[LiveInterval]) -> None:
    offsets = pack(values)
    for at, (here, mine) in enumerate(zip(offsets, values, strict=True)):
        for there, other in zip(offsets[:at], values[:at], strict=True):
            together = mine.start <= other.end and other.start <= mine.end
            assert not together or here + mine.size <= there or there + other.size <= here
    assert arena_size(values, offsets) >= peak_bytes(values)


def optimal_arena_size(values: list[LiveInterval]) -> int:
    """Size in bytes of the smallest arena: the best over all orders of placing each value at its lowest free offset."""
    best = sum(life.size for life in values)
    for order in permutations(range(len(values))):
        places: dict[int, int] = {}
        for at in order:
            mine, size = values[at], values[at].size
            apart = [other for other in places if values[other].start <= mine.end and mine.start <= values[other].end]
            tops = sorted([0, *(places[other] + values[other].size for other in apart)])
            places[at] = next(
                top for top in tops if all(top >= places[o] + values[o].size or top + size <= places[o] for o in apart)
            )
        best = min(best, max((places[at] + values[at].size for at in order), default=0))
    return best


@given(live_intervals(5))
@example([LiveInterval(*numbers) for numbers in [(2560, 1, 2), (3584, 2, 2), (2048, 0, 0), (2048, 0, 1), (2048, 0, 1)]])
@settings(max_examples=60, deadline=None)
def test_arena_of_few_values_is_at_most_half_larger_than_optimal(values: list[LiveInterval]) -> None:
    assert arena_size(values, pack(values)) <= 1.5 * optimal_arena_size(values)


def test_arena_of_nested_activation_lifetimes_equals_peak_live_bytes() -> None:
    layers = range(32)
    kept = [LiveInterval(512 * (1 + layer % 5), 3 * layer, 200 - 3 * layer) for layer in layers]
    short = [LiveInterval(512 * 7, at, at + 1) for layer in layers for at in (3 * layer + 1, 199 - 3 * layer)]
    assert arena_size([*kept, *short], pack([*kept, *short])) == peak_bytes([*kept, *short])


# ---- programs


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def trained(autocast: bool, clip: bool) -> StepGraph:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(x)
            loss = nn.functional.cross_entropy(out, y)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss, out

    return capture_step(step, (torch.randn(8, 16), torch.arange(8) % 3)).graph


def convolved() -> StepGraph:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor) -> Tensor:
        loss = model(x).logsumexp(1).sum()
        loss.backward()
        optimizer.step()
        return loss  # gradients stay

    return capture_step(step, (torch.randn(2, 3, 8, 8),)).graph


def strided() -> StepGraph:
    """A value that is read through its storage, and the gradient of a view, written back into a copy of a storage."""
    torch.manual_seed(0)
    first, second = nn.Linear(12, 12), nn.Linear(12, 12)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)

    def step(x: Tensor) -> Tensor:
        hidden = second(first(x).tanh())
        windows = torch.as_strided(hidden, (9, 5), (12, 2), 24)
        loss = (windows.square() @ windows.t()).sum() + hidden.sigmoid().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return capture_step(step, (torch.randn(16, 12),)).graph


STEPS: dict[str, Callable[[], StepGraph]] = {
    "read by storage": strided,
    "adamw": lambda: trained(False, False),
    "adamw, clipped, autocast": lambda: trained(True, True),
    "convolutions, gradients left": convolved,
}


@pytest.mark.parametrize("name", STEPS)
def test_planned_program_equals_unplanned_program_bit_for_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arena starts as bytes of 255, which are NaN as floats: a read before a write shows in the results."""
    step = use_kernels(make_kernels(run_passes(STEPS[name](), KERNEL_PASSES)))
    arenas: list[Tensor] = []

    def new_arena(size: int, device: torch.device) -> Tensor:
        arenas.append(torch.full((size,), 255, dtype=torch.uint8, device=device))
        return arenas[-1]

    values = random_inputs(step)
    expected_inputs = [value.clone() if isinstance(value, Tensor) else value for value in values]
    expected = compile_aten(step)(*expected_inputs)
    with monkeypatch.context() as patched:
        patched.setattr("weft.inductor.runtime.writer.new_arena", new_arena)
        program = compile_aten(step, planned=True)
    found = program(*values)
    assert len(arenas) == 1
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(values, expected_inputs, rtol=0, atol=0)
    of_arena = arenas[0].untyped_storage().data_ptr()
    assert all(value.untyped_storage().data_ptr() != of_arena for value in found)
    plan = plan_memory(step, place(step))
    assert plan.peak_live <= plan.size < 1.1 * plan.peak_live
    assert plan.size == len(arenas[0])


def test_outputs_of_kernels_gemms_and_multi_tensor_calls_lie_in_the_arena() -> None:
    step = use_kernels(make_kernels(run_passes(trained(True, True), KERNEL_PASSES)))
    plan = plan_memory(step, place(step))
    kinds = {type(node.target) for node in plan.spans}
    assert Launcher in kinds
    assert {aten.mm.default, aten.addmm.default} & {node.target for node in plan.spans}
    assert "part(arena" in compile_aten(step, planned=True).source
    assert "arena" not in compile_aten(step).source


def intervals_of(step: StepGraph) -> dict[Node, LiveInterval]:
    """Live intervals of the GEMMs whose output can lie in the arena."""
    candidates = memory_plan._ArenaCandidates(step, place(step))
    nodes = [node for node in step.graph.nodes if isinstance(candidates.spans_of(node), ArenaSpan)]
    return dict(zip(nodes, candidates.intervals, strict=True))


def gemm(builder: StepBuilder, x: Node) -> Node:
    return builder.call(aten.mm.default, x, x)


def test_operand_of_an_in_place_all_reduce_is_live_until_the_last_read_of_its_result() -> None:
    builder = StepBuilder()
    x = builder.input(torch.zeros(16, 16))
    partial = gemm(builder, x)
    started = builder.call(functional.all_reduce.default, partial, "sum", "world", val=x.meta["val"].clone())
    total = builder.call(functional.wait_tensor.default, started, val=started.meta["val"])
    other = gemm(builder, x)
    late = builder.call(aten.add.Tensor, total, other)
    builder.returns(late)
    step = builder.build({"world": "0"})
    order = list(step.graph.nodes)
    assert intervals_of(step)[partial].end == order.index(late)


def test_returned_values_and_their_views_stay_outside_the_arena() -> None:
    builder = StepBuilder()
    x = builder.input(torch.zeros(16, 16))
    handed, seen = gemm(builder, x), gemm(builder, x)
    view = builder.call(aten.view.default, seen, [256])
    builder.returns(handed)
    builder.returns(view)
    assert not intervals_of(builder.build())


def test_values_of_data_dependent_size_stay_outside_the_arena() -> None:
    weight = nn.Parameter(torch.randn(8, 8))

    def step(x: Tensor, chosen: Tensor) -> Tensor:
        with torch.no_grad():
            return (x[chosen.nonzero().squeeze(1)] @ weight @ (weight @ weight)).sum()

    graph = capture_step(step, (torch.randn(6, 8), torch.tensor([1, 0, 1, 1, 0, 0]))).graph
    made = use_kernels(make_kernels(run_passes(graph, KERNEL_PASSES)))
    assert [span.sizes for span in plan_memory(made, place(made)).spans.values() if isinstance(span, ArenaSpan)] == [
        (8, 8)
    ]
    program = compile_aten(made, planned=True)
    x, chosen = torch.randn(6, 8), torch.tensor([0, 1, 1, 1, 1, 0])
    by_path = {"args[0]": x, "args[1]": chosen, "weight": weight.detach()}
    (found,) = program(*(by_path[entry.path] for entry in made.inputs))
    torch.testing.assert_close(found, step(x, chosen))


def test_arena_holds_values_of_one_device_only() -> None:
    builder = StepBuilder()
    x, y = (builder.input(torch.zeros(16, 16, device=device)) for device in ("cpu", "meta"))
    here, there = gemm(builder, x), gemm(builder, y)
    builder.returns(builder.call(aten.sum.default, here))
    builder.returns(builder.call(aten.sum.default, there))
    step = builder.build()
    plan = plan_memory(step, place(step))
    assert plan.device == torch.device("cpu")
    assert [node.name for node in plan.spans] == [here.name]


def test_new_value_of_an_input_is_live_until_it_is_copied_into_the_input() -> None:
    builder = StepBuilder()
    x, state = builder.input(torch.zeros(16, 16)), builder.input(torch.zeros(16, 16))
    new = gemm(builder, x)
    read = builder.call(aten.add.Tensor, state, state)
    late = builder.call(aten.sum.default, builder.call(aten.mul.Tensor, read, state))
    builder.update(state, new)
    builder.returns(late)
    step = builder.build()
    placement = place(step)
    (copy,) = placement.copies
    assert intervals_of(step)[new].end >= copy.after
    values: list[Any] = [torch.eye(16), torch.ones(16, 16)]
    compile_aten(step, planned=True)(*values)
    assert torch.equal(values[1], torch.eye(16))
