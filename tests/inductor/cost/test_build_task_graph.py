"""Problems of steps: any order they allow gives the same results, and holds what liveness says."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from example_graphs import EXAMPLES, example
from exploration import examples
from growth import assert_near_linear
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.node import map_arg

import weft
from step_builder import StepBuilder
from weft import torch_adapter
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import WAIT, is_collective
from weft.capture.record.streams import StreamCall
from weft.capture.step_interface import Input, Return, Role
from weft.inductor.codegen.kernel_call import KernelCall
from weft.inductor.cost.build_task_graph import build, gpu_in
from weft.inductor.cost.cluster import load_cluster
from weft.inductor.cost.collective_cost import collective_of, transfer
from weft.inductor.cost.compute_cost import ComputeCosts
from weft.inductor.cost.simulate import simulate
from weft.inductor.cost.task_graph import Kind, TaskGraph
from weft.inductor.fusion.kernel_stages import kernel_graph
from weft.inductor.graph.liveness import liveness
from weft.inductor.graph.retarget import retarget
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes

Node = torch.fx.Node

aten = torch.ops.aten
functional = torch.ops._c10d_functional
CLUSTER = load_cluster("h200x8")
WORLD = 8


def kernels_of(step: StepGraph) -> StepGraph:
    return kernel_graph(run_passes(retarget(step), KERNEL_PASSES))


def sharded_step() -> StepGraph:
    """Three layers over eight ranks: gathers, reduce-scatters, clipping, AdamW. Inside a fake world."""
    mesh = init_device_mesh("cuda", (WORLD,), mesh_dim_names=("dp",))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(3)))
    policy = weft.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        weft.fully_shard(layer, mesh=mesh, mp_policy=policy)
    weft.fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(x: Tensor) -> Tensor:
        loss = model(x).float().square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return weft.capture(step, torch.ones(64, 256))


def group() -> dict[str, str]:
    return {"world": torch.distributed.group.WORLD.group_name}  # type: ignore[union-attr]


def some_order(task_graph: TaskGraph, rng: random.Random) -> list[int]:
    """Any order that a task graph allows."""
    order: list[int] = []
    left = dict.fromkeys(range(len(task_graph.tasks)))
    done: set[int] = set()
    while left:
        pinned = next((at for at in left if task_graph.tasks[at].pinned), None)
        ready = [at for at in left if done.issuperset(task_graph.tasks[at].needs)]
        at = rng.choice([at for at in ready if at == pinned or not task_graph.tasks[at].pinned])
        order.append(at)
        done.add(at)
        del left[at]
    assert task_graph.is_order(order)
    return order


def held(task_graph: TaskGraph, order: Sequence[int]) -> list[int]:
    """Bytes held at each position of an order, storage by storage, by the words of ``Storage``."""
    place = {task: at for at, task in enumerate(order)}
    waits = task_graph.waits_of()
    change = [0] * (len(order) + 1)
    for storage in task_graph.storages:
        ends = [place[storage.maker]]
        for reader in storage.readers:
            ends += [place[reader], *(place[wait] for wait in waits.get(reader, ()))]
        change[place[storage.maker]] += storage.size
        change[len(order) if storage.kept else max(ends) + 1] -= storage.size
    total, over_time = task_graph.base, []
    for delta in change[:-1]:
        total += delta
        over_time.append(total)
    return over_time


def from_first_call(step: StepGraph, over_time: Sequence[int]) -> Sequence[int]:
    """Without the inputs, which liveness counts as they come."""
    return over_time[len(step.placeholders) :]


# ---- tasks


def test_tasks_are_the_nodes_in_order() -> None:
    with weft.fake_world(WORLD):
        step = kernels_of(sharded_step())
        task_graph, nodes = build(step, CLUSTER)
        assert nodes == list(step.graph.nodes)
        assert [task.name for task in task_graph.tasks] == [node.name for node in nodes]
        assert task_graph.is_order(range(len(nodes)))
        for task, node in zip(task_graph.tasks, nodes, strict=True):
            assert task.needs[: len(node.all_input_nodes)] == tuple(map(nodes.index, node.all_input_nodes))
            assert (task.kind is Kind.START) == is_collective(node)
            assert (task.kind is Kind.WAIT) == (node.target is WAIT)
            if task.kind is Kind.START:
                expected = transfer(CLUSTER, collective_of(step, node))
                assert (task.seconds, task.stream) == (expected.seconds, expected.stream)
                assert (task.link, task.interference) == (expected.link, expected.interference)
            else:
                expected_seconds = ComputeCosts(gpu_in(step, CLUSTER)).seconds(node)
                assert task.seconds == expected_seconds
                assert (task.kind is Kind.COMPUTE) == (expected_seconds > 0)
                assert not task.stream
        assert sum(isinstance(node.target, KernelCall) for node in nodes) > 3


def test_products_are_slower_beside_transfers() -> None:
    """A GPU at its power limit lowers its clock; without collectives, and on one rank, it keeps it."""
    part, gpu = CLUSTER.gpu.clock_beside_links, CLUSTER.gpu
    assert part < 1
    with weft.fake_world(WORLD):
        beside = gpu_in(kernels_of(sharded_step()), CLUSTER)
        alone = gpu_in(random_step([])[0], CLUSTER)
    assert beside.matmul["bfloat16"] == pytest.approx(part * gpu.matmul["bfloat16"])
    assert beside.attention_backward == pytest.approx(part * gpu.attention_backward)
    assert beside.copy_bandwidth == gpu.copy_bandwidth
    assert alone == gpu


def test_costs_may_be_given() -> None:
    b = StepBuilder()
    x = b.input(torch.ones(4))
    b.returns(b.call(aten.exp.default, x))

    class Slow(ComputeCosts):
        def seconds(self, node: Node) -> float:
            return 2.0

    task_graph, _ = build(b.build(), CLUSTER, Slow(CLUSTER.gpu))
    assert [task.seconds for task in task_graph.tasks] == [0.0, 2.0, 0.0]


def test_waits_of_a_coalesced_collective_find_their_start() -> None:
    with weft.fake_world(WORLD):
        b = StepBuilder()
        inputs = [b.input(torch.ones(8)), b.input(torch.ones(16))]
        start = b.call(functional.all_gather_into_tensor_coalesced.default, inputs, WORLD, "world")
        waits = [b.call(functional.wait_tensor.default, each) for each in b.pick(start)]
        again = b.call(functional.wait_tensor.default, waits[0])
        b.returns(*waits, again)
        step = b.build(group())
        task_graph, nodes = build(step, CLUSTER)
    at = nodes.index(start)
    assert task_graph.waits_of() == {at: [nodes.index(wait) for wait in (*waits, again)]}


def test_a_wait_for_no_collective_takes_nothing() -> None:
    b = StepBuilder()
    x = b.input(torch.ones(4))
    b.returns(b.call(functional.wait_tensor.default, b.call(aten.exp.default, x)))
    task_graph, _ = build(b.build(), CLUSTER)
    assert [task.kind for task in task_graph.tasks] == [Kind.NO_TIME, Kind.COMPUTE, Kind.NO_TIME, Kind.NO_TIME]


def test_host_computation_takes_no_gpu_time() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step(x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    task_graph, nodes = build(retarget(weft.capture(step, torch.ones(2, 8))), CLUSTER)
    on_cpu = [
        task
        for task, node in zip(task_graph.tasks, nodes, strict=True)
        if "_foreach_add" in node.name and node.meta["val"][0].device.type == "cpu"
    ]
    assert [task.kind for task in on_cpu] == [Kind.NO_TIME]


# ---- order


def test_effects_and_random_numbers_keep_their_order_and_collectives_do_not() -> None:
    with weft.fake_world(WORLD):
        b = StepBuilder()
        x = b.input(torch.ones(4))
        b.effect(print, x)
        noise = b.call(aten.rand_like.default, x)
        start = b.call(functional.all_reduce.default, noise, "sum", "world")
        wait = b.call(functional.wait_tensor.default, start)
        b.effect(print, x)
        b.returns(wait)
        task_graph, _ = build(b.build(group()), CLUSTER)
    pinned = [task.pinned for task in task_graph.tasks]
    assert pinned == [True, True, True, False, False, True, True]


def test_inputs_come_first_and_outputs_last() -> None:
    b = StepBuilder()
    x, _ = b.input(torch.ones(4)), b.input(torch.ones(4))
    b.call(aten.ones.default, [4])
    b.effect(print, x)
    b.returns(b.call(aten.exp.default, x))
    task_graph, nodes = build(b.build(), CLUSTER)
    for seed in range(30):
        order = some_order(task_graph, random.Random(seed))
        assert order[:2] == [0, 1]
        assert order[-1] == len(nodes) - 1


def test_nothing_passes_a_call_that_orders_streams() -> None:
    b = StepBuilder()
    x = b.input(torch.ones(4))
    before = [b.call(aten.exp.default, x), b.call(aten.neg.default, x)]
    fence = b.effect(StreamCall("event_record", None), x)
    after = [b.call(aten.sin.default, x), b.call(aten.cos.default, before[0])]
    b.returns(*before, *after)
    task_graph, nodes = build(b.build(), CLUSTER)
    for seed in range(30):
        place = {nodes[task]: at for at, task in enumerate(some_order(task_graph, random.Random(seed)))}
        assert max(place[node] for node in before) < place[fence] < min(place[node] for node in after)


def run(nodes: Sequence[Node], inputs: dict[Node, Tensor]) -> list[Tensor]:
    """Results of nodes run as they stand, in place where the step was; the memory of collectives' inputs is read at
    their waits, as late as may be."""
    values: dict[Node, Any] = dict(inputs)
    for node in nodes:
        if node.op == "call_function" and not is_collective(node) and node.target is not WAIT:
            args = map_arg(node.args, lambda used: values[used])
            values[node] = node.meta.get("inplace", node.target)(*args)
        elif is_collective(node):
            values[node] = map_arg(node.args[0], lambda used: values[used])
        elif node.target is WAIT:
            values[node] = values[node.args[0]] * 3  # type: ignore[index]
    return [x.clone() for x in map_arg(nodes[-1].args[0], lambda used: values[used])]  # type: ignore[attr-defined]


MAKERS = ["add", "view", "slice", "split", "max", "write", "write view", "reduce", "reduce list"]


def random_step(ops: list[tuple[str, int]]) -> tuple[StepGraph, list[Tensor]]:
    """Views, writes through views, collectives. What shares memory with a written value is not read again."""
    b = StepBuilder()
    inputs = [torch.arange(24.0).view(4, 6), torch.arange(24.0).view(4, 6) + 100]
    pool: list[Node] = [b.input(x) for x in inputs]
    for op, pick in ops:
        if not pool:
            break
        x = pool[pick % len(pool)]
        val = x.meta["val"]
        if op == "add":
            pool.append(b.call(aten.add.Tensor, x, 1.5))
        elif op == "view" and val.is_contiguous():
            pool.append(b.call(aten.view.default, x, [-1]))
        elif op == "slice":
            pool.append(b.call(aten.slice.Tensor, x, 0, 0, max(1, val.shape[0] // 2)))
        elif op == "split" and val.shape[0] > 1:
            pool += b.pick(b.call(aten.split.Tensor, x, (val.shape[0] + 1) // 2))
        elif op == "max" and val.dim() == 2:
            pool.append(b.pick(b.call(aten.max.dim, x, 0))[0])  # nobody reads where they are
        elif op == "reduce list":
            start = b.call(functional.all_reduce_coalesced.default, [x], "sum", "world", val=[torch.empty_like(val)])
            (picked,) = b.pick(start)
            pool.append(b.call(functional.wait_tensor.default, picked, val=picked.meta["val"]))
        elif op == "reduce":
            start = b.call(functional.all_reduce.default, x, "sum", "world", val=torch.empty_like(val))
            pool.append(b.call(functional.wait_tensor.default, start, val=start.meta["val"]))
        elif op.startswith("write"):
            key = val.untyped_storage()._cdata
            pool = [n for n in pool if n.meta["val"].untyped_storage()._cdata != key]
            pool.append(b.write(aten.mul_.Scalar, x, 2.0))
    b.returns(*pool)
    return b.build(group()), inputs


@settings(max_examples=examples(ci=30, exploring=1_000), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(MAKERS), st.integers(0, 1 << 16)), min_size=1, max_size=16), st.integers(0))
def test_any_order_gives_the_same_results_and_holds_what_liveness_says(ops: list[tuple[str, int]], seed: int) -> None:
    with weft.fake_world(WORLD), torch_adapter.only_mode():
        step, inputs = random_step(ops)
        task_graph, nodes = build(step, CLUSTER)

    def results(order: Sequence[int]) -> list[Tensor]:
        return run([nodes[at] for at in order], dict(zip(step.placeholders, (x.clone() for x in inputs), strict=True)))

    wanted = results(range(len(nodes)))
    for order in (some_order(task_graph, random.Random(seed + more)) for more in range(4)):
        for found, expected in zip(results(order), wanted, strict=True):
            assert torch.equal(found, expected)
        expected_bytes = from_first_call(step, liveness(step, [nodes[at] for at in order]).over_time)
        assert from_first_call(step, held(task_graph, order)) == expected_bytes


def test_writes_over_one_tensor_need_each_other_and_no_more() -> None:
    b = StepBuilder()
    x = b.input(torch.ones(4))
    value = x
    for _ in range(100):
        b.call(aten.exp.default, value)
        value = b.write(aten.mul_.Scalar, value, 2.0)
    b.update(x, value)
    task_graph, nodes = build(b.build(), CLUSTER)
    assert sum(len(task.needs) for task in task_graph.tasks) < 4 * len(nodes)


# ---- memory


def hold_the_same(step: StepGraph) -> None:
    task_graph, nodes = build(step, CLUSTER)
    found = liveness(step)
    over_time = held(task_graph, range(len(nodes)))
    assert from_first_call(step, over_time) == from_first_call(step, found.over_time)
    assert max(over_time) == found.peak
    assert simulate(task_graph).peak == found.peak


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_step_in_its_own_order_holds_what_liveness_says(name: str) -> None:
    step = example(name)
    hold_the_same(step)
    hold_the_same(kernels_of(step))


def test_a_sharded_step_holds_what_liveness_says() -> None:
    with weft.fake_world(WORLD):
        step = sharded_step()
        hold_the_same(step)
        hold_the_same(kernels_of(step))


def test_an_input_that_is_updated_in_place_counts_once() -> None:
    b = StepBuilder()
    x = b.input(torch.ones(256))
    b.update(x, b.write(aten.mul_.Scalar, x, 2.0))
    task_graph, _ = build(b.build(), CLUSTER)
    assert (task_graph.base, task_graph.storages) == (1024, [])


def test_an_input_that_is_updated_by_a_new_tensor_counts_twice() -> None:
    b = StepBuilder()
    x = b.input(torch.ones(256))
    b.update(x, b.call(aten.mul.Scalar, x, 2.0))
    task_graph, _ = build(b.build(), CLUSTER)
    assert task_graph.base == 1024
    assert [(s.size, s.maker, s.kept) for s in task_graph.storages] == [(1024, 1, True)]


# ---- size


def synthetic(nodes: int) -> StepGraph:
    """Layers of an all-gather, two products, a sum, a reduce-scatter and nine views. Inside a fake world."""
    mode, device = FakeTensorMode(), torch.device("cuda:0")
    graph = torch.fx.Graph()

    def fake() -> Tensor:
        return torch_adapter.new_fake(mode, device, torch.bfloat16, (1024, 1024), (1024, 1), 0, None)

    def call(target: Callable[..., Any], *args: Any, val: Tensor | None = None) -> Node:
        node = graph.call_function(target, args)
        node.meta["val"] = fake() if val is None else val
        return node

    weights = [graph.placeholder(f"weight_{at}") for at in range(100)]
    for weight in weights:
        weight.meta["val"] = fake()
    x, results = weights[0], []
    for at in range(nodes // 16):
        gathered = call(functional.all_gather_into_tensor.default, weights[at % 100], WORLD, "world")
        turned = call(WAIT, gathered, val=gathered.meta["val"])
        for _ in range(9):
            turned = call(aten.t.default, turned, val=turned.meta["val"])
        x = call(aten.add.Tensor, call(aten.mm.default, x, turned), x)
        reduced = call(
            functional.reduce_scatter_tensor.default, call(aten.mm.default, turned, x), "sum", WORLD, "world"
        )
        results.append(call(WAIT, reduced, val=reduced.meta["val"]))
    graph.output(tuple(results))
    inputs = [Input(weight.name, Role.PARAMETER, weight.name) for weight in weights]
    return StepGraph(graph, inputs, [Return(at) for at in range(len(results))], group())


def test_the_task_graph_of_a_large_step_takes_near_linear_time() -> None:
    def of(size: int) -> Callable[[], object]:
        step = synthetic(size)
        return lambda: build(step, CLUSTER)

    with weft.fake_world(WORLD), torch_adapter.only_mode():
        task_graph, nodes = build(synthetic(20_000), CLUSTER)
        assert len(nodes) > 20_000
        assert task_graph.is_order(range(len(nodes)))
        assert sum(len(task.needs) for task in task_graph.tasks) < 4 * len(nodes)
        assert_near_linear(of, 5_000)
