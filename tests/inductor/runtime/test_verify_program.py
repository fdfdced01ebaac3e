"""The verifier of programs finds faults that are planted in correct ones: in the text, the arena and the partitions."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weft
from step_builder import StepBuilder
from weft import knobs
from weft.capture.fake.fake_world import fake_world
from weft.capture.graph import StepGraph
from weft.capture.record.tracer import capture_step
from weft.capture.step_interface import Role
from weft.errors import MalformedProgram
from weft.inductor.fusion.kernel_stages import kernel_graph
from weft.inductor.graph.retarget import retarget
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes
from weft.inductor.runtime.aten import compile_aten
from weft.inductor.runtime.cudagraph_partition import Partition, partition_step
from weft.inductor.runtime.memory_plan import plan_memory
from weft.inductor.runtime.placement import place
from weft.inductor.runtime.verify import verify_partitions, verify_program
from weft.inductor.runtime.writer import write_program

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
Node = torch.fx.Node


class Text:
    """The statements of a program, each with the node it belongs to, to be changed and verified."""

    def __init__(self, step: StepGraph, planned: bool) -> None:
        placement = place(step)
        plan = plan_memory(step, placement) if planned else None
        source, self.names, nodes = write_program(step, placement, None, plan)
        self.step = step
        (function,) = ast.parse(source).body
        assert isinstance(function, ast.FunctionDef)
        self.statements = [ast.unparse(statement) for statement in function.body]
        self.nodes = [nodes[statement.lineno - 1] for statement in function.body]

    def verify(self) -> None:
        lines: list[Node | None] = [None, *self.nodes]
        text = "\n    ".join(["def run(inputs):", *self.statements])
        verify_program(self.step, text + "\n", self.names, lines)

    def at(self, pattern: str, number: int = 0) -> int:
        """Position of a statement that a pattern is found in."""
        return [at for at, statement in enumerate(self.statements) if re.search(pattern, statement)][number]

    def move(self, at: int, to: int) -> None:
        self.statements.insert(to, self.statements.pop(at))
        self.nodes.insert(to, self.nodes.pop(at))

    def remove(self, pattern: str, number: int = 0) -> None:
        at = self.at(pattern, number)
        del self.statements[at], self.nodes[at]

    def insert(self, at: int, statement: str) -> None:
        self.statements.insert(at, statement)
        self.nodes.insert(at, None)

    def replace(self, pattern: str, new: str, number: int = 0) -> None:
        at = self.at(pattern, number)
        before = self.statements[at]
        self.statements[at] = re.sub(pattern, new, before, count=1)
        assert self.statements[at] != before


@pytest.fixture(scope="module")
def sharded() -> StepGraph:
    with fake_world(4):
        mesh = torch.distributed.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
        weft.fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return kernel_graph(run_passes(capture_step(step, (torch.zeros(4, 16),), {}).graph, KERNEL_PASSES))


def _place(text: Text, pattern: str, offset: int) -> None:
    text.replace(rf"({pattern}.*?)part\(arena, \d+", rf"\1part(arena, {offset}")


def _offset(text: Text, variable: str) -> int:
    found = re.search(r"part\(arena, (\d+)", text.statements[text.at(rf"^{variable}\b.* = ")])
    assert found is not None
    return int(found[1])


def _reader_over_its_operand(text: Text) -> None:
    """A kernel writes its result where what it reads lies."""
    _place(text, r"normal_cdf_mul\w*\(", _offset(text, "addmm"))


def _memory_of_a_collective_in_flight(text: Text) -> None:
    """A product is computed where a reduce-scatter still reads."""
    product, start = text.at(r"^mm_2 = "), text.at(r"^reduce_scatter_tensor_1 = ")
    _place(text, "mm_2 = ", _offset(text, "mm_1"))
    text.move(product + 1, start)  # its operands are dropped later too
    text.move(product, start - 1)


def _return_from_the_arena(text: Text) -> None:
    text.replace(r"out=\[None\]", "out=[part(arena, 3840, [], [], torch.float32)]")


def _wait_after_use(text: Text) -> None:
    wait = text.at("wait_tensor")
    text.move(wait, wait + 1)


FAULTS: dict[str, tuple[str, Callable[[Text], Any]]] = {
    "a variable is dropped before its last use": (
        "not bound",
        lambda text: text.move(text.at(r"^del getitem$"), text.at("all_gather_into_tensor")),
    ),
    "a variable is dropped twice": (
        "dropped twice",
        lambda text: text.insert(text.at(r"^del .*\bt_1\b") + 1, "del t_1"),
    ),
    "a variable is never dropped": ("never dropped: addmm_1", lambda text: text.remove("^del addmm_1$")),
    "a value is used before it is computed": (
        "t is used, but not bound",
        lambda text: text.move(text.at("^t = "), text.at("^addmm = ") + 1),
    ),
    "a statement is missing": ("t_3 is used, but not bound", lambda text: text.remove("^t_3 = ")),
    "a variable is bound again": ("bound again", lambda text: text.replace("^t_1 = ", "addmm = ")),
    "a variable hides a function": ("hides", lambda text: text.replace("^t_6 = ", "aten_t = ")),
    "a function is unknown": ("no_function is called", lambda text: text.replace(r"aten_t\(", "no_function(")),
    "an input is missing": ("number of inputs", lambda text: text.replace("args_0, ", "")),
    "a collective is never waited for": (
        "before its collective is waited for",
        lambda text: text.remove("wait_tensor"),
    ),
    "a result is used before the wait": ("before its collective is waited for", _wait_after_use),
    "the last collective is never waited for": (
        "before its collective is waited for",
        lambda text: text.remove("wait_tensor", -1),
    ),
    "what a collective reads is overwritten": (
        "overwritten while a collective reads it",
        lambda text: text.insert(text.at("^reduce_scatter_tensor_1 = ") + 1, "aten_copy_(mm_1, mm_1)"),
    ),
    "a kernel writes over its operand": ("alive at once", _reader_over_its_operand),
    "two values that are alive share bytes": (
        "alive at once",
        lambda text: _place(text, "mm_1 = ", _offset(text, "addmm") + 64),
    ),
    "memory is used again while a collective reads it": ("alive at once", _memory_of_a_collective_in_flight),
    "a value lies beyond the arena": ("no place in an arena", lambda text: _place(text, "mm_2 = ", 1 << 20)),
    "a value starts inside an element": ("no place in an arena", lambda text: _place(text, "mm_2 = ", 1)),
    "what is returned lies in the arena": ("is returned, but lies in the arena", _return_from_the_arena),
    "an update is missing": ("input model_0_weight", lambda text: text.remove(r"copy_\(model_0_weight")),
    "an update has another value": (
        "input model_2_bias",
        lambda text: text.replace(r"copy_\(model_2_bias, \w+\)", "copy_(model_2_bias, model_2_bias)"),
    ),
    "nothing is returned": ("does not end with a return", lambda text: text.remove("^return")),
    "a branch": ("no program has", lambda text: text.replace("^t_1 = (.*)", r"t_1 = \1 if arena else \1")),
}


@pytest.mark.parametrize(("what", "plant"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found(what: str, plant: Callable[[Text], Any], sharded: StepGraph) -> None:
    text = Text(sharded, planned=True)
    text.verify()
    plant(text)
    with pytest.raises(MalformedProgram, match=what):
        text.verify()


# ---- writes in place, which the step above has none of


def step_with_writes() -> StepGraph:
    """Reads an input, then writes it in place; and sums a value over ranks in place."""
    build = StepBuilder()
    x, total = build.input(torch.zeros(4)), build.input(torch.zeros(4), Role.BUFFER)
    before = build.call(aten.mul.Tensor, x, 2)
    after = build.write(aten.add_.Tensor, x, 1)
    build.update(x, after)
    summed = build.call(c10d.all_reduce.default, before, "sum", "0", val=before.meta["val"].clone())
    waited = build.call(c10d.wait_tensor.default, summed, val=summed.meta["val"])
    new = build.write(aten.add_.Tensor, total, waited)
    build.update(total, new)
    build.returns(waited)
    return build.build({"0": "0"})


WRITES: dict[str, tuple[str, Callable[[Text], Any]]] = {
    "a value is read after it was overwritten": (
        "overwritten before",
        lambda text: text.move(text.at(r"^mul_tensor = "), text.at(r"add__Tensor\(in_0")),
    ),
    "an update in place is missing": ("input in_0", lambda text: text.remove(r"add__Tensor\(in_0")),
    "the last update in place is missing": ("input in_1", lambda text: text.remove(r"add__Tensor\(in_1")),
    "a write to the result of a collective in flight": (
        "before its collective is waited for",
        lambda text: text.insert(text.at("wait_tensor"), "aten_add__Tensor(mul_tensor, 1)"),
    ),
}


@pytest.mark.parametrize(("what", "plant"), WRITES.values(), ids=WRITES)
def test_a_fault_of_writes_in_place_is_found(what: str, plant: Callable[[Text], Any]) -> None:
    text = Text(step_with_writes(), planned=False)
    text.verify()
    plant(text)
    with pytest.raises(MalformedProgram, match=what):
        text.verify()


def test_programs_are_verified_where_the_knob_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """In tests it is on."""
    assert knobs.verify_graphs
    verified: list[StepGraph] = []
    monkeypatch.setattr("weft.inductor.runtime.aten.verify_program", lambda step, *program: verified.append(step))
    step = step_with_writes()
    compile_aten(step)
    with knobs.override(verify_graphs=False):
        compile_aten(step)
    assert verified == [step]


# ---- partitions


def step_in_pieces() -> StepGraph:
    build = StepBuilder()
    x = build.input(torch.zeros(4))
    value = x
    for _ in range(9):
        value = build.call(aten.sin.default, value)
    number = build.call(aten._local_scalar_dense.default, build.call(aten.sum.default, value), val=1.0)
    for _ in range(9):
        value = build.call(aten.mul.Tensor, value, number, val=value.meta["val"].clone())
    build.update(x, value)
    build.returns(build.call(aten.cos.default, value))
    return retarget(build.build(), "cuda")


PARTITIONS: dict[str, tuple[str, Callable[[list[Partition]], Any]]] = {
    "partitions are in another order": ("no earlier partition computes", lambda partitions: partitions.reverse()),
    "a partition is missing": ("no earlier partition computes", lambda partitions: partitions.pop(0)),
    "a partition runs twice": ("exist already", lambda partitions: partitions.append(partitions[0])),
    "the last partition is missing": ("the partitions update", lambda partitions: partitions.pop()),
}


@pytest.mark.parametrize(("what", "plant"), PARTITIONS.values(), ids=PARTITIONS)
def test_a_fault_of_partitions_is_found(what: str, plant: Callable[[list[Partition]], Any]) -> None:
    step = step_in_pieces()
    partitions = partition_step(step)
    assert len(partitions) > 1
    verify_partitions(step, partitions)
    plant(partitions)
    with pytest.raises(MalformedProgram, match=what):
        verify_partitions(step, partitions)
