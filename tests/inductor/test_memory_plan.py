"""Plans of memory: no two values that live at once share a byte, and a program that follows one computes the same."""

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
from weft.capture.tracer import capture_step
from weft.inductor.compiler import make_kernels
from weft.inductor.minify import random_inputs
from weft.inductor.multi_tensor.launcher import Launcher, use_kernels
from weft.inductor.passes.pipeline import EVERY_PASS, run_passes
from weft.inductor.runtime import memory_plan
from weft.inductor.runtime.aten import compile_aten
from weft.inductor.runtime.memory_plan import Life, Span, most_held, pack, plan_memory
from weft.inductor.runtime.placement import place

aten = torch.ops.aten
functional = torch.ops._c10d_functional
Node = torch.fx.Node

# ---- offsets


@st.composite
def lives(draw: st.DrawFn, most: int = 40) -> list[Life]:
    found = []
    for _ in range(draw(st.integers(0, most))):
        start = draw(st.integers(0, 300))
        found.append(Life(512 * draw(st.integers(1, 20)), start, start + draw(st.integers(0, 200))))
    return found


def end_of(values: list[Life], offsets: list[int]) -> int:
    return max((offset + life.size for offset, life in zip(offsets, values, strict=True)), default=0)


@given(lives())
@settings(max_examples=200, deadline=None)
def test_values_that_are_alive_together_share_no_byte(values: list[Life]) -> None:
    offsets = pack(values)
    for at, (here, mine) in enumerate(zip(offsets, values, strict=True)):
        for there, other in zip(offsets[:at], values[:at], strict=True):
            together = mine.start <= other.end and other.start <= mine.end
            assert not together or here + mine.size <= there or there + other.size <= here
    assert end_of(values, offsets) >= most_held(values)


def fewest_bytes(values: list[Life]) -> int:
    """By all orders, each value as low as those before it allow: one of them gives the smallest arena there is."""
    best = sum(life.size for life in values)
    for order in permutations(range(len(values))):
        places: dict[int, int] = {}
        for at in order:
            size, start, end = values[at]
            apart = [other for other in places if values[other].start <= end and start <= values[other].end]
            tops = sorted([0, *(places[other] + values[other].size for other in apart)])
            places[at] = next(
                top for top in tops if all(top >= places[o] + values[o].size or top + size <= places[o] for o in apart)
            )
        best = min(best, max((places[at] + values[at].size for at in order), default=0))
    return best


@given(lives(5))
@example([Life(2560, 1, 2), Life(3584, 2, 2), Life(2048, 0, 0), Life(2048, 0, 1), Life(2048, 0, 1)])
@settings(max_examples=60, deadline=None)
def test_few_values_take_little_more_than_they_must(values: list[Life]) -> None:
    assert end_of(values, pack(values)) <= 1.5 * fewest_bytes(values)


def test_what_is_kept_for_backward_takes_no_more_than_is_held() -> None:
    layers = range(32)
    kept = [Life(512 * (1 + layer % 5), 3 * layer, 200 - 3 * layer) for layer in layers]
    short = [Life(512 * 7, at, at + 1) for layer in layers for at in (3 * layer + 1, 199 - 3 * layer)]
    assert end_of([*kept, *short], pack([*kept, *short])) == most_held([*kept, *short])


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
    """A value that is read by its storage, and the gradient of a view that is written back into a copy of a storage."""
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
def test_a_planned_program_computes_what_one_without_a_plan_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory that nobody has written yet, or that is free again, holds what makes every sum a nan."""
    step = use_kernels(make_kernels(run_passes(STEPS[name](), EVERY_PASS)))
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
    assert plan.held <= plan.size < 1.1 * plan.held
    assert plan.size == len(arenas[0])


def test_kernels_products_and_lists_lie_in_the_arena() -> None:
    step = use_kernels(make_kernels(run_passes(trained(True, True), EVERY_PASS)))
    plan = plan_memory(step, place(step))
    kinds = {type(node.target) for node in plan.spans}
    assert Launcher in kinds
    assert {aten.mm.default, aten.addmm.default} & {node.target for node in plan.spans}
    assert "part(arena" in compile_aten(step, planned=True).source
    assert "arena" not in compile_aten(step).source


def lives_of(step: StepGraph) -> dict[Node, Life]:
    """Of products."""
    found = memory_plan._Lives(step, place(step))
    made = [node for node in step.graph.nodes if isinstance(found.results(node), Span)]
    return dict(zip(made, found.found, strict=True))


def product(builder: StepBuilder, x: Node) -> Node:
    return builder.call(aten.mm.default, x, x)


def test_what_an_all_reduce_writes_in_place_lives_as_long_as_its_result() -> None:
    builder = StepBuilder()
    x = builder.input(torch.zeros(16, 16))
    partial = product(builder, x)
    started = builder.call(functional.all_reduce.default, partial, "sum", "world", val=x.meta["val"].clone())
    total = builder.call(functional.wait_tensor.default, started, val=started.meta["val"])
    other = product(builder, x)
    late = builder.call(aten.add.Tensor, total, other)
    builder.returns(late)
    step = builder.build({"world": "0"})
    order = list(step.graph.nodes)
    assert lives_of(step)[partial].end == order.index(late)


def test_what_is_handed_out_or_depends_on_sizes_is_left_to_the_allocator() -> None:
    builder = StepBuilder()
    x = builder.input(torch.zeros(16, 16))
    handed, seen = product(builder, x), product(builder, x)
    view = builder.call(aten.view.default, seen, [256])
    builder.returns(handed)
    builder.returns(view)
    assert not lives_of(builder.build())


def test_sizes_that_the_data_decides_are_left_to_the_allocator() -> None:
    weight = nn.Parameter(torch.randn(8, 8))

    def step(x: Tensor, chosen: Tensor) -> Tensor:
        with torch.no_grad():
            return (x[chosen.nonzero().squeeze(1)] @ weight @ (weight @ weight)).sum()

    graph = capture_step(step, (torch.randn(6, 8), torch.tensor([1, 0, 1, 1, 0, 0]))).graph
    made = use_kernels(make_kernels(run_passes(graph, EVERY_PASS)))
    assert [span.sizes for span in plan_memory(made, place(made)).spans.values() if isinstance(span, Span)] == [(8, 8)]
    program = compile_aten(made, planned=True)
    x, chosen = torch.randn(6, 8), torch.tensor([0, 1, 1, 1, 1, 0])
    by_path = {"args[0]": x, "args[1]": chosen, "weight": weight.detach()}
    (found,) = program(*(by_path[entry.path] for entry in made.inputs))
    torch.testing.assert_close(found, step(x, chosen))


def test_an_arena_holds_what_is_on_one_device() -> None:
    builder = StepBuilder()
    x, y = (builder.input(torch.zeros(16, 16, device=device)) for device in ("cpu", "meta"))
    here, there = product(builder, x), product(builder, y)
    builder.returns(builder.call(aten.sum.default, here))
    builder.returns(builder.call(aten.sum.default, there))
    step = builder.build()
    plan = plan_memory(step, place(step))
    assert plan.device == torch.device("cpu")
    assert [node.name for node in plan.spans] == [here.name]


def test_a_value_lives_until_it_is_copied_into_an_input() -> None:
    builder = StepBuilder()
    x, state = builder.input(torch.zeros(16, 16)), builder.input(torch.zeros(16, 16))
    new = product(builder, x)
    read = builder.call(aten.add.Tensor, state, state)
    late = builder.call(aten.sum.default, builder.call(aten.mul.Tensor, read, state))
    builder.update(state, new)
    builder.returns(late)
    step = builder.build()
    placement = place(step)
    (copy,) = placement.copies
    assert lives_of(step)[new].end >= copy.after
    values: list[Any] = [torch.eye(16), torch.ones(16, 16)]
    compile_aten(step, planned=True)(*values)
    assert torch.equal(values[1], torch.eye(16))
