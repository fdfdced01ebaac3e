"""Sequence parallelism found between all-reduces: what a graph becomes, and which inputs leave it alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

import weft
from step_builder import StepBuilder
from weft import knobs
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import WAIT, is_collective
from weft.capture.step_interface import Role
from weft.inductor.fusion.kernel_stages import kernel_graph
from weft.inductor.graph import serialize
from weft.inductor.graph.aliasing import looks_into
from weft.inductor.graph.retarget import retarget
from weft.inductor.graph.sizes import node_bytes
from weft.inductor.passes import sequence_parallel as module
from weft.inductor.passes.number_collectives import number_collectives
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes
from weft.inductor.passes.sequence_parallel import sequence_parallel
from weft.inductor.schedule.decisions import structure

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
from llama import Llama, Shape

Node = torch.fx.Node

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
ALL_REDUCE = c10d.all_reduce.default
REDUCE = c10d.reduce_scatter_tensor.default
GATHER = c10d.all_gather_into_tensor.default


def everywhere() -> Any:
    """Inside, the pass shards on CPUs too, and however small the region."""
    return mock.patch.object(module, "pays", return_value=True)


class Case:
    """A step of hidden values in rows of six: all-reduced, scaled, activated and multiplied by a matrix.

    Attributes:
        b: its builder.
        partial: what is reduced.
        replicated: names of inputs that DTensors replicate over "tp", of a mesh with the dimensions ``axes``.
    """

    def __init__(self, rows: int = 8, dtype: torch.dtype = torch.float32) -> None:
        self.b = StepBuilder()
        self.partial = self.b.input(torch.zeros(rows, 6, dtype=dtype))
        self.matrix = self.b.input(torch.zeros(6, 5, dtype=dtype))
        self.replicated: dict[str, tuple[tuple[str, bool], ...]] = {}

    def weight(self, *shape: int, axes: tuple[tuple[str, bool], ...] = (("tp", True),)) -> Node:
        node = self.b.input(torch.zeros(shape or (6,)))
        self.replicated[node.name] = axes
        return node

    def wait(self, start: Node) -> Node:
        return self.b.call(WAIT, start, val=start.meta["val"])

    def reduced(self, payload: Node | None = None, op: str = "sum", group: str = "tp") -> Node:
        return self.wait(self.b.call(ALL_REDUCE, self.partial if payload is None else payload, op, group))

    def build(self, *results: Node) -> StepGraph:
        self.b.returns(*results)
        step = self.b.build({"tp": "0", "dp": "0"})
        step.inputs = [replace(each, axes=self.replicated.get(each.name, ())) for each in step.inputs]
        return run_passes(step, [number_collectives])

    def product(self, hidden: Node, *results: Node) -> StepGraph:
        """The step that ends with the product of ``hidden`` and the matrix."""
        return self.build(self.b.call(aten.mm.default, hidden, self.matrix), *results)


def made(step: StepGraph, world: int = 4) -> tuple[list[Any], StepGraph]:
    """The collectives after the pass, and the graph."""
    with weft.fake_world(world), everywhere():
        graph = run_passes(step, [sequence_parallel])
    return [node.target for node in graph.collectives()], graph


def shapes(step: StepGraph, target: Any) -> list[list[int]]:
    return [list(node.meta["val"].shape) for node in step.graph.nodes if node.target is target]


def operands(case: Case) -> dict[str, Callable[[], Node]]:
    """What an all-reduced value is multiplied by, where ranks have the same by what the graph shows."""
    call = case.b.call
    dims = {"dtype": torch.float32, "device": torch.device("cpu")}
    mesh = (("dp", False), ("tp", True))
    return {
        "a replicated parameter": case.weight,
        "a constant": lambda: call(aten.arange.default, 6, **dims),
        "a parameter of one row": lambda: case.weight(1, 6),
        "a function of both": lambda: call(aten.exp.default, call(aten.mul.Tensor, case.weight(), 2)),
        "a number": lambda: call(aten.full.default, [], 3.0, **dims),
        "what is gathered over the group": lambda: case.wait(call(GATHER, case.b.input(torch.zeros(6)), 4, "tp")),
        "a sum over the group": lambda: case.reduced(case.b.input(torch.zeros(6))),
        "a parameter that FSDP gathers": lambda: case.wait(call(GATHER, case.weight(3, axes=mesh), 2, "dp")),
    }


@pytest.mark.parametrize("name", operands(Case()))
def test_rows_are_sharded_beside_what_ranks_have_alike(name: str) -> None:
    case = Case()
    operand = operands(case)[name]()
    if operand.meta["val"].numel() == 24:  # four ranks' parts of a row
        operand = case.b.call(aten.slice.Tensor, operand, 0, 0, 6)
    scaled = case.b.call(aten.mul.Tensor, case.reduced(), operand)
    found, graph = made(case.product(case.b.call(aten.gelu.default, scaled)))
    assert found[-2:] == [REDUCE, GATHER]
    assert shapes(graph, aten.gelu.default) == [[2, 6]]
    assert shapes(graph, aten.mm.default) == [[8, 5]]


def not_alike(case: Case) -> dict[str, Callable[[], Node]]:
    """What ranks may have differently, or what has rows itself."""
    call, plain = case.b.call, lambda *shape: case.b.input(torch.zeros(shape))
    dims = {"dtype": torch.float32, "device": torch.device("cpu")}
    return {
        "a plain parameter": lambda: plain(6),
        "a sharded parameter": lambda: case.weight(axes=(("tp", False),)),
        "a parameter that is replicated over others": lambda: case.weight(axes=(("dp", True),)),
        "a number of Python": lambda: case.b.input(2.0, Role.SCALAR),
        "a function of a plain parameter": lambda: call(aten.add.Tensor, case.weight(), plain(6)),
        "a draw": lambda: call(aten.rand.default, [6], **dims),
        "memory": lambda: call(aten.empty.memory_format, [6], **dims),
        "a sum over another group": lambda: case.reduced(plain(6), group="dp"),
        "a plain parameter that FSDP gathers": lambda: case.wait(call(GATHER, plain(3), 2, "dp")),
        "what no mesh of the group gathers": lambda: case.wait(call(GATHER, case.weight(3), 2, "dp")),
        "a part by rank": lambda: case.wait(call(REDUCE, case.weight(24), "sum", 4, "tp")),
        "a residual stream that is not reduced": lambda: plain(8, 6),
        "replicated rows": lambda: case.weight(8, 6),
        "replicated numbers of rows": lambda: case.weight(8, 1),
        "rows of another group": lambda: case.reduced(plain(8, 6), group="dp"),
    }


@pytest.mark.parametrize("name", not_alike(Case()))
def test_an_operand_that_ranks_may_have_differently_ends_the_region(name: str) -> None:
    case = Case()
    scaled = case.b.call(aten.mul.Tensor, case.reduced(), not_alike(case)[name]())
    step = case.product(case.b.call(aten.gelu.default, scaled))
    found, graph = made(step)
    assert found == [node.target for node in step.collectives()]
    assert shapes(graph, aten.gelu.default) == [[8, 6]]


def whole_only(case: Case, name: str) -> StepGraph:
    """Steps in which something other than an operand keeps the rows together."""
    call = case.b.call
    if name == "maximum":
        return case.product(call(aten.gelu.default, case.reduced(op="max")))
    if name == "transposed":
        turned = call(aten.t.default, case.b.input(torch.zeros(6, 8)))
        return case.product(call(aten.gelu.default, case.reduced(turned)))
    y = case.reduced()
    if name == "dropout":
        return case.product(case.b.pick(call(aten.native_dropout.default, y, 0.5, True))[0])
    if name == "written in place":
        return case.product(case.b.write(aten.mul_.Tensor, y, 2))
    if name == "views alone":
        return case.product(call(aten.view.default, call(aten.view.default, y, [2, 4, 6]), [8, 6]))
    if name == "a sum over some rows":
        return case.product(call(aten.sum.dim_IntList, call(aten.view.default, y, [2, 4, 6]), [0]))
    if name == "a mean over rows":
        return case.product(call(aten.sub.Tensor, y, call(aten.mean.dim, y, [0], True)))
    if name == "a softmax over rows":
        return case.product(call(aten._softmax.default, y, 0, False))
    z = call(aten.gelu.default, y)
    if name == "returned":  # the user may write to it
        return case.product(z, y)
    if name == "another returned":
        return case.product(call(aten.exp.default, z), z)
    if name == "another written in place":
        return case.product(case.b.write(aten.mul_.Tensor, z, case.b.input(torch.zeros(6))))
    if name == "returned in part":
        return case.product(z, call(aten.slice.Tensor, y, 0, 0, 2))
    if name == "read whole too":
        return case.product(z, call(aten.mm.default, y, case.matrix))
    if name == "written through a view":
        part = call(aten.view.default, y, [48])
        return case.build(case.b.write(aten.mul_.Tensor, part, 2), call(aten.mm.default, z, case.matrix))
    assert name == "a side stream"
    z.meta["stream"] = 1
    return case.product(z)


@pytest.mark.parametrize(
    "name",
    [
        *("maximum", "transposed", "dropout", "written in place", "views alone", "a sum over some rows"),
        *("a mean over rows", "a softmax over rows", "returned", "returned in part", "read whole too"),
        *("written through a view", "a side stream", "another returned", "another written in place"),
    ],
)
def test_what_needs_all_rows_keeps_its_all_reduce(name: str) -> None:
    step = whole_only(Case(), name)
    found, graph = made(step)
    assert found == [ALL_REDUCE]
    assert str(graph) == str(step)


@pytest.mark.parametrize(
    ("rows", "world", "dtype"), [(6, 4, torch.float32), (8, 1, torch.float32), (8, 4, torch.int64)]
)
def test_rows_that_ranks_do_not_divide_are_left_alone(rows: int, world: int, dtype: torch.dtype) -> None:
    case = Case(rows, dtype)
    found, _ = made(case.product(case.b.call(aten.neg.default, case.reduced())), world)
    assert found == [ALL_REDUCE]


def test_fewest_bytes_are_gathered() -> None:
    """Two norms of one activation: to gather both would take more than to gather the activation."""
    case = Case()
    total = case.b.call(aten.add.Tensor, case.reduced(), case.reduced(case.b.input(torch.zeros(8, 6))))
    both = [case.b.call(op, total) for op in (aten.gelu.default, aten.silu.default)]
    step = case.build(*(case.b.call(aten.mm.default, each, case.matrix) for each in both))
    found, graph = made(step)
    assert found == [REDUCE, REDUCE, GATHER]
    assert shapes(graph, aten.add.Tensor) == [[2, 6]]
    assert shapes(graph, aten.gelu.default) == [[8, 6]]


def test_a_value_is_gathered_in_its_narrow_dtype() -> None:
    case = Case(dtype=torch.bfloat16)
    wide = case.b.call(aten._to_copy.default, case.reduced(), dtype=torch.float32)
    narrow = case.b.call(aten._to_copy.default, case.b.call(aten.exp.default, wide), dtype=torch.bfloat16)
    found, graph = made(case.product(narrow))
    assert found == [REDUCE, GATHER]
    assert graph.collectives()[1].args[0].meta["val"].dtype == torch.bfloat16  # type: ignore[union-attr]


def test_a_sum_over_rows_is_summed_over_the_ranks_in_float32_and_may_be_overwritten() -> None:
    case = Case(dtype=torch.bfloat16)
    y = case.b.call(aten.mul.Tensor, case.reduced(), 2)
    total = case.b.call(aten.sum.dim_IntList, y, [0], True)
    scaled = case.b.write(aten.mul_.Tensor, case.b.call(aten.view.default, total, [6]), 0.5)
    found, graph = made(case.product(case.b.call(aten.gelu.default, y), total, scaled))
    assert found == [REDUCE, ALL_REDUCE, GATHER]
    small = graph.collectives()[1].meta["val"]
    assert (small.dtype, list(small.shape)) == (torch.float32, [6])
    assert graph.results[1].meta["val"].shape == (1, 6)  # type: ignore[union-attr]


def test_rows_written_in_place_inside_the_region() -> None:
    case = Case()
    y = case.b.call(aten.mul.Tensor, case.reduced(), 2)
    found, graph = made(case.product(case.b.write(aten.add_.Scalar, y, 1)))
    assert found == [REDUCE, GATHER]
    assert shapes(graph, aten.add.Scalar) == [[2, 6]]


def test_collectives_of_a_region_come_behind_those_that_they_depend_on() -> None:
    """Ranks that agree on no schedule issue collectives by these numbers."""
    case = Case()
    first = case.reduced()
    weight = case.wait(case.b.call(GATHER, case.b.input(torch.zeros(6)), 4, "tp"))
    scaled = case.b.call(aten.mul.Tensor, first, case.b.call(aten.slice.Tensor, weight, 0, 0, 6))
    _, graph = made(case.product(scaled))
    order = [(node.target, node.meta["capture_order"]) for node in graph.collectives()]
    assert order == [(REDUCE, 0), (GATHER, 1), (GATHER, 1)]


# ---- where it pays


def llama(world: int, tokens: int) -> StepGraph:
    """Forward and backward of a layer as wide as Llama 8B on GPUs, in bfloat16, with sharded embedding and logits."""
    with torch.device("meta"):
        model = Llama(Shape(layers=1, width=4096, heads=32, key_heads=32, hidden=14_336, vocabulary=8192)).bfloat16()
    wide = ("query", "key", "value", "gate", "up")
    plan: dict[str, Any] = {f"blocks.*.{name}": weft.ColwiseParallel() for name in wide}
    plan |= {f"blocks.*.{name}": weft.RowwiseParallel() for name in ("out", "down")}
    plan["embedding"] = weft.RowwiseParallel(input_layouts=Replicate())
    plan["head"] = weft.ColwiseParallel(output_layouts=Replicate())
    weft.parallelize(model, init_device_mesh("cuda", (world,), mesh_dim_names=("tp",)), plan)
    model.to_empty(device="cuda")

    def step(ids: Tensor) -> list[Tensor | None]:
        model(ids, ids).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        return gradients

    return retarget(weft.capture(step, torch.zeros(1, tokens, dtype=torch.long, device="cuda")))


def moved(step: StepGraph) -> dict[Any, int]:
    """Bytes of the collectives of a step by operation, of whole tensors."""
    found: dict[Any, int] = {ALL_REDUCE: 0, REDUCE: 0, GATHER: 0}
    for node in step.collectives():
        (payload,) = node.all_input_nodes
        found[node.target] += max(node_bytes(node), node_bytes(payload))
    return found


@pytest.fixture
def gaining_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer gains less per all-reduce than several: the embedding and the head count."""
    monkeypatch.setattr(module, "LEAST_GAIN", 1.0)


@pytest.mark.usefixtures("gaining_anything")
def test_a_transformer_gathers_what_it_all_reduced() -> None:
    with weft.fake_world(8):
        step = run_passes(llama(8, 8192), KERNEL_PASSES[: KERNEL_PASSES.index(sequence_parallel)])
        graph = run_passes(step, [sequence_parallel])
        finished = kernel_graph(run_passes(graph, KERNEL_PASSES[KERNEL_PASSES.index(sequence_parallel) + 1 :]))
    before, after = moved(step), moved(graph)
    activation = 8192 * 4096 * 2
    assert before[ALL_REDUCE] == 6 * activation
    # Gradients of three norms' weights, in float32.
    assert after == {ALL_REDUCE: 3 * 4096 * 4, REDUCE: 6 * activation, GATHER: before[GATHER] + 6 * activation}
    assert collectives(finished) == collectives(graph)
    # Between two GEMMs nothing has all rows of the residual stream but what is gathered.
    whole = [node for node in graph.graph.nodes if _is_computed(node) and node.meta["val"].shape[-1:] == (4096,)]
    assert {node.target for node in whole if node.meta["val"].numel() == 8192 * 4096} <= {
        *(aten.embedding.default, aten.where.self, aten.mm.default, aten.addmm.default)
    }
    assert serialize.load(serialize.dump(graph, step), step).collectives()[0].meta["agreed_rows"]


def _is_computed(node: Node) -> bool:
    tensor = isinstance(node.meta.get("val"), torch.Tensor) and node.op == "call_function"
    return tensor and not looks_into(node) and not is_collective(node)


def collectives(step: StepGraph) -> list[Any]:
    return [node.target for node in step.collectives()]


@pytest.mark.usefixtures("gaining_anything")
def test_all_ranks_make_the_same_graph() -> None:
    """Else they would keep their collectives as captured, or find no schedule."""
    found = set()
    for rank in (0, 1, 5):
        with weft.fake_world(8, rank):
            graph = run_passes(llama(8, 8192), KERNEL_PASSES)
            digests = tuple(str(node.meta.get("agreed_rows")) for node in graph.collectives())
            found.add((digests, structure(kernel_graph(graph))))
    ((digests, _),) = found
    assert len(set(digests)) > 12


DISABLED = {"disable_passes": "sequence_parallel"}


@pytest.mark.usefixtures("gaining_anything")
@pytest.mark.parametrize(("world", "tokens", "changed"), [(8, 512, {}), (16, 8192, {}), (8, 8192, DISABLED)])
def test_steps_that_gain_nothing_are_left_alone(world: int, tokens: int, changed: dict[str, str]) -> None:
    """Small ones, groups on two hosts, and with the pass disabled."""
    with weft.fake_world(world), knobs.override(**changed):
        step = run_passes(llama(world, tokens), KERNEL_PASSES[: KERNEL_PASSES.index(sequence_parallel)])
        assert collectives(run_passes(step, [sequence_parallel])) == collectives(step)
    assert REDUCE not in collectives(step)


@pytest.mark.parametrize(("rows", "sharded"), [(4096, True), (8, False)])
def test_sums_over_few_rows_would_add_bytes(rows: int, sharded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a weight is as large as one row."""
    for name in ("SECONDS_PER_PAIR", "SECONDS_PER_BYTE"):
        monkeypatch.setattr(module, name, 0)
    case = Case(rows)
    y = case.b.call(aten.gelu.default, case.reduced())
    step = retarget(case.product(y, case.b.call(aten.sum.dim_IntList, y, [0])), "cuda:0")
    with weft.fake_world(4):
        assert (REDUCE in collectives(run_passes(step, [sequence_parallel]))) is sharded


def test_on_cpus_nothing_is_sharded() -> None:
    case = Case(4096)
    step = case.product(case.b.call(aten.gelu.default, case.reduced()))
    with weft.fake_world(4):
        assert collectives(run_passes(step, [sequence_parallel])) == [ALL_REDUCE]
