"""Saved graphs compute what the step computes, and reduction finds the call that was made wrong."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from step_builder import StepBuilder
from weft import knobs
from weft.capture.graph import StepGraph
from weft.capture.record.tracer import capture_step
from weft.capture.step_interface import Update
from weft.errors import NothingToReduce, UnsupportedNest
from weft.inductor.codegen import expressions, kernel
from weft.inductor.fusion import emit
from weft.inductor.graph.repro import load, part, save, units
from weft.inductor.loop_ir.ir import Call, Nest
from weft.inductor.lowering.registry import LOWERINGS, Lowering
from weft.inductor.runtime.aten import compile_aten
from weft.launch import minify
from weft.launch.minify import find_fault, random_inputs, reduce

aten = torch.ops.aten


@pytest.fixture
def step() -> StepGraph:
    """A step with updates in place, results in lists, a number input and results of several kinds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def train(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return capture_step(train, (torch.randn(4, 6), torch.tensor([0, 1, 1, 0]))).graph


def outcome(step: StepGraph, values: list[Any]) -> dict[str, Tensor]:
    """The values of the inputs after the step, by name, and what it returned."""
    copies = [value.clone() if isinstance(value, Tensor) else value for value in values]
    results = compile_aten(step)(*copies)
    named = zip((entry.name for entry in step.inputs), copies, strict=True)
    return {name: value for name, value in named if isinstance(value, Tensor)} | {"returned": results[0]}


def test_a_saved_step_computes_the_same_bits(step: StepGraph, tmp_path: Path) -> None:
    save(step, tmp_path / "graph.py")
    again = load(tmp_path / "graph.py")
    assert sum(isinstance(o, Update) for o in again.outputs) == sum(isinstance(o, Update) for o in step.outputs) > 20
    values = dict(zip((entry.name for entry in step.inputs), random_inputs(step), strict=True))
    one = outcome(step, list(values.values()))
    other = outcome(again, [values[entry.name] for entry in again.inputs])
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_cannot_be_made_again_becomes_an_input() -> None:
    build = StepBuilder()
    x = build.input(torch.randn(4, 3))
    noise = build.call(aten.rand_like.default, x)
    hook = build.effect(print, x, val=x.meta["val"])
    total = build.call(aten.add.Tensor, build.call(aten.mul.Tensor, x, noise), hook)
    build.returns(total)
    whole = build.build()
    assert [node.target for node in units(whole)] == [aten.mul.Tensor, aten.add.Tensor]
    assert [entry.name for entry in part(whole, units(whole)).inputs] == [x.name, noise.name, hook.name]


def test_a_part_keeps_layouts_and_the_elements_of_results() -> None:
    build = StepBuilder()
    x = build.input(torch.randn(3, 4).t().expand(2, 4, 3))
    one, two = build.pick(build.call(aten.split.Tensor, x, 2, 1))
    build.returns(build.call(aten.neg.default, one), build.call(aten.exp.default, two))
    whole = build.build()
    split, _, exp = units(whole)
    (val,) = (node.meta["val"] for node in part(whole, [exp]).placeholders)
    assert (val.shape, val.stride()) == ((2, 2, 3), (0, 1, 4))
    assert [node.target for node in part(whole, [split]).results] == [operator.getitem] * 2


def test_a_wrong_lowering_is_found(
    step: StepGraph, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert find_fault(step) is None

    def sine(out: Lowering, node: torch.fx.Node) -> None:
        out.store(Call("sin", (out.value(node.args[0], out.fake().shape),), torch.float32))

    monkeypatch.setitem(LOWERINGS, aten.tanh.default, sine)
    save(step, tmp_path / "graph.py")
    minify.main(tmp_path / "graph.py")
    small = load(tmp_path / "graph_reduced.py")
    assert [node.target for node in units(small)] == [aten.tanh.default]
    assert "1 of " in capsys.readouterr().out
    fault = find_fault(small)
    assert fault is not None
    assert fault.kind == "differs"


def test_a_failure_of_two_calls_together_is_reduced_to_them(step: StepGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = emit.generate

    def refuse(nest: Nest, *rest: Any) -> Any:
        if {"tanh", "rsqrt"} <= {value.op for value in nest.values() if isinstance(value, Call)}:
            raise UnsupportedNest("a tanh beside a root")
        return generate(nest, *rest)

    monkeypatch.setattr(emit, "generate", refuse)
    fault = find_fault(step)
    assert fault is not None
    assert fault.kind == "UnsupportedNest"
    small = reduce(step, lambda graph: (again := find_fault(graph)) is not None and again.kind == fault.kind)
    assert aten.tanh.default in {node.target for node in units(small)}
    assert len(units(small)) <= 2


def test_a_kernel_that_does_not_compile_is_found_without_a_gpu(
    step: StepGraph, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(expressions._WRITE, "tanh", lambda value, x: expressions.call("tl.no_such_function", x))
    kernel._generate_canonical.cache_clear()
    try:
        with knobs.override(cache_dir=str(tmp_path)):
            fault = find_fault(part(step, units(step)[:8]), run=False, arch=90)
    finally:
        kernel._generate_canonical.cache_clear()
    assert fault is not None
    assert fault.kind == "KernelCompilationFailed"
    assert "no_such_function" in fault.text


def test_a_step_without_a_fault_is_not_reduced(step: StepGraph) -> None:
    with pytest.raises(NothingToReduce):
        reduce(step, lambda graph: False)


@pytest.mark.parametrize("needed", [{3}, {0, 19}, {4, 5, 6}, {1, 7, 11, 18}])
def test_exactly_what_a_fault_needs_remains(needed: set[int]) -> None:
    tried: list[list[int]] = []

    def fails(items: list[int]) -> bool:
        tried.append(items)
        return needed <= set(items)

    assert set(minify._smallest(list(range(20)), fails)) == needed
    assert len(tried) < 120
