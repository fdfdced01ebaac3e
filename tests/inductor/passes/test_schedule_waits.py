"""Collectives start early and are waited for late, and nothing else moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from harness import run_ranks
from step_builder import StepBuilder
from weft import knobs
from weft.capture.step_interface import Role
from weft.inductor.graph.retarget import retarget
from weft.inductor.passes.schedule_waits import issue_order, schedule_waits
from weft.inductor.runtime.aten import compile_aten

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
Node = torch.fx.Node
GROUPS = {"fsdp": "0"}


def gather(b: StepBuilder, shard: Node, group_size: int = 2) -> tuple[Node, Node]:
    start = b.call(c10d.all_gather_into_tensor.default, shard, group_size, "fsdp")
    return start, b.call(c10d.wait_tensor.default, start, val=start.meta["val"])


def scatter(b: StepBuilder, full: Node, group_size: int = 2) -> tuple[Node, Node]:
    start = b.call(c10d.reduce_scatter_tensor.default, full, "sum", group_size, "fsdp")
    return start, b.call(c10d.wait_tensor.default, start, val=start.meta["val"])


def in_order(order: list[Node], *nodes: Node) -> bool:
    places = [order.index(node) for node in nodes]
    return places == sorted(places)


def layers(count: int) -> tuple[StepBuilder, list[tuple[Node, Node]], list[Node]]:
    """x @ w1 @ w2 ... with each w gathered where it is used: 4 x 4 floats, 64 bytes each."""
    b = StepBuilder()
    x = b.input(torch.ones(4, 4), Role.BATCH)
    shards = [b.input(torch.ones(2, 4)) for _ in range(count)]
    gathers, products = [], []
    for shard in shards:
        gathers.append(gather(b, shard))
        x = b.call(aten.mm.default, x, gathers[-1][1])
        products.append(x)
    b.returns(x)
    return b, gathers, products


def test_the_knob_is_for_cpus_only() -> None:
    """On GPUs the planner decides, and starts from the order of this pass."""
    b, _, _ = layers(4)
    on_cpu = b.build(GROUPS)
    orders = []
    for step in (on_cpu, retarget(on_cpu.copy())):
        found = set()
        for mib in (0, 1024):
            with knobs.override(prefetch_mib=mib):
                found.add(tuple(node.name for node in issue_order(step)))
        orders.append(len(found))
    assert orders == [2, 1]


def test_gathers_start_ahead_within_the_limit() -> None:
    b, gathers, products = layers(4)
    order = issue_order(b.build(GROUPS), prefetch_bytes=128)
    starts = [start for start, _ in gathers]
    assert in_order(order, *starts)
    waits = [wait for _, wait in gathers]
    assert in_order(order, starts[1], waits[0], starts[2], products[0], waits[1], starts[3], products[1])


def test_the_nodes_of_the_graph_are_put_into_the_order_of_issue() -> None:
    b, _, _ = layers(4)
    step = b.build(GROUPS)
    order = issue_order(step, prefetch_bytes=128)
    assert list(step.graph.nodes) != order
    assert list(schedule_waits(step, prefetch_bytes=128).check().graph.nodes) == order


def test_without_a_limit_to_prefetch_gathers_stay_where_they_are() -> None:
    b, _, _ = layers(3)
    step = b.build(GROUPS)
    assert issue_order(step, prefetch_bytes=0) == list(step.graph.nodes)


def test_a_gather_of_a_computed_tensor_stays_where_it_is() -> None:
    b = StepBuilder()
    shard = b.input(torch.ones(2, 4))
    x = b.call(aten.exp.default, shard)
    y = b.call(aten.exp.default, x)
    start, wait = gather(b, y)
    b.returns(wait)
    assert in_order(issue_order(b.build(GROUPS)), y, start, wait)


def test_a_gather_that_moves_ahead_moves_its_cast() -> None:
    b = StepBuilder()
    shard, x = b.input(torch.ones(2, 4)), b.input(torch.ones(4))
    y = b.call(aten.exp.default, x)
    cast = b.call(aten._to_copy.default, b.call(aten.view.default, shard, [8]), dtype=torch.bfloat16)
    start, wait = gather(b, cast)
    b.returns(y, wait)
    assert in_order(issue_order(b.build(GROUPS)), cast, start, y, wait)


def test_a_wait_sinks_with_its_views_to_the_first_use() -> None:
    b = StepBuilder()
    full = b.input(torch.ones(4, 4))
    start, wait = scatter(b, b.call(aten.exp.default, full))
    view = b.call(aten.view.default, wait, [8])
    other = b.call(aten.neg.default, full)
    used = b.call(aten.exp.default, view)
    b.returns(other, used)
    order = issue_order(b.build(GROUPS))
    assert in_order(order, start, other, wait, view, used)
    assert order.index(used) - order.index(wait) == 2


def test_reduce_scatters_hold_no_more_than_the_limit() -> None:
    b = StepBuilder()
    x = b.input(torch.ones(4, 4))
    scattered = []
    for _ in range(4):
        x = b.call(aten.exp.default, x)
        scattered.append(scatter(b, x))
    b.returns(*(wait for _, wait in scattered))
    order = issue_order(b.build(GROUPS), prefetch_bytes=128)
    starts, waits = zip(*scattered, strict=True)
    assert in_order(order, *starts)
    assert in_order(order, starts[1], waits[0], starts[2], waits[1], starts[3], waits[2])


def test_random_operations_and_effects_keep_their_order() -> None:
    b = StepBuilder()
    shard, x = b.input(torch.ones(2, 4)), b.input(torch.ones(4))
    fixed = []
    for _ in range(3):
        fixed.append(b.call(aten.rand_like.default, x))
        fixed.append(b.effect(print, x))
        _, wait = gather(b, shard)
        fixed.append(b.effect(print, wait))
    b.returns(wait)
    assert in_order(issue_order(b.build(GROUPS)), *fixed)


def test_elements_are_picked_where_the_list_is_made() -> None:
    b = StepBuilder()
    x = b.input(torch.ones(4))
    parts = b.call(aten.split.Tensor, x, 2)
    y = b.call(aten.exp.default, x)
    picked = b.pick(parts)
    b.returns(b.call(aten.cat.default, picked), y)
    assert in_order(issue_order(b.build()), parts, *picked, y)


def test_the_input_of_a_collective_is_not_written_before_its_wait() -> None:
    b = StepBuilder()
    x = b.input(torch.ones(4, 4))
    t = b.call(aten.exp.default, x)
    _, wait = scatter(b, t)
    new = b.write(aten.add_.Tensor, t, 1)
    b.returns(new, wait)
    assert "clone" in compile_aten(schedule_waits(b.build(GROUPS))).source


# ---- on real processes


def fsdp_step(world: int) -> tuple[StepBuilder, int]:
    """Two layers gathered, a loss, their gradients scattered, SGD in place, the loss all-reduced in place."""
    b = StepBuilder()
    x = b.input(torch.ones(4, 4), Role.BATCH)
    shards = [b.input(torch.ones(4 // world, 4)) for _ in range(2)]
    (_, first), (_, second) = gather(b, shards[0], world), gather(b, shards[1], world)
    hidden = b.call(aten.mm.default, x, first)
    out = b.call(aten.mm.default, hidden, second)
    grad_second = b.call(aten.mm.default, b.call(aten.t.default, hidden), out)
    _, scattered = scatter(b, grad_second, world)
    grad_hidden = b.call(aten.mm.default, out, b.call(aten.t.default, second))
    _, scattered_first = scatter(b, b.call(aten.mm.default, b.call(aten.t.default, x), grad_hidden), world)
    for shard, grad in ((shards[0], scattered_first), (shards[1], scattered)):
        b.update(shard, b.write(aten.add_.Tensor, shard, grad, alpha=-0.01))
    loss = b.call(aten.sum.default, out)
    reduced = b.write(c10d.all_reduce_.default, loss, "sum", "fsdp")
    b.returns(b.call(c10d.wait_tensor.default, reduced, val=reduced.meta["val"]))
    return b, len(shards)


def eager_step(x: torch.Tensor, shards: list[torch.Tensor], world: int) -> torch.Tensor:
    full = []
    for shard in shards:
        full.append(torch.empty(4, 4))
        dist.all_gather_into_tensor(full[-1], shard)
    hidden = x @ full[0]
    out = hidden @ full[1]
    for shard, grad in ((shards[1], hidden.t() @ out), (shards[0], x.t() @ (out @ full[1].t()))):
        own = torch.empty_like(shard)
        dist.reduce_scatter_tensor(own, grad)
        shard.add_(own, alpha=-0.01)
    loss = out.sum()
    dist.all_reduce(loss)
    return loss


def on_ranks(rank: int, world: int, prefetch: int) -> list[Any]:
    torch.manual_seed(rank)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    b, _ = fsdp_step(world)
    program = compile_aten(schedule_waits(b.build({"fsdp": mesh.get_group().group_name}), prefetch).check())
    x, shards = torch.randn(4, 4), [torch.randn(4 // world, 4) for _ in range(2)]
    eager = [shard.clone() for shard in shards]
    same = []
    for _ in range(3):
        (loss,) = program(x, *shards)
        same.append(torch.equal(loss, eager_step(x, eager, world)))
        same += [torch.equal(a, e) for a, e in zip(shards, eager, strict=True)]
    return [*same, "clone" in program.source]


@pytest.mark.gloo
@pytest.mark.parametrize("prefetch", [0, 64, 1 << 20])
def test_collectives_equal_eager_on_two_processes(prefetch: int) -> None:
    for same in run_ranks(on_ranks, 2, prefetch):
        assert same == [True] * 9 + [False]
