"""Live ranges against running the graph on real tensors and adding up the storages that are held."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.node import map_arg

import weft
from step_builder import StepBuilder
from weft.capture.graph import StepGraph
from weft.inductor.graph.liveness import liveness
from weft.inductor.passes.fuse_optimizer import fuse_optimizer
from weft.inductor.passes.pipeline import run_passes
from weft.inductor.passes.schedule_waits import issue_order
from weft.inductor.runtime.multi_tensor import Launcher, use_kernels

Node = torch.fx.Node
aten = torch.ops.aten


def held_over_time(step: StepGraph, inputs: list[torch.Tensor]) -> list[int]:
    """Bytes held during each node when values are let go after their last reader; in place where the step was."""
    nodes = list(step.graph.nodes)
    last = {node: max((nodes.index(user) for user in node.users), default=nodes.index(node)) for node in nodes}
    held: dict[Node, Any] = {}
    over_time = []
    for at, node in enumerate(nodes):
        if node.op == "placeholder":
            held[node] = inputs[step.placeholders.index(node)]
        elif node.op == "call_function":
            held[node] = node.meta.get("inplace", node.target)(*map_arg(node.args, lambda used: held[used]))
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for v in held.values() for t in tensors(v)}
        over_time.append(sum(storage.nbytes() for storage in storages.values()))
        for used in [n for n in held if last[n] <= at and n.op != "placeholder"]:
            del held[used]
    return over_time


def tensors(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [t for item in value for t in tensors(item)]


MAKERS = ["add", "view", "t", "slice", "split", "reshape", "expand", "write", "write view"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(MAKERS), st.integers(0, 1 << 16)), min_size=1, max_size=14))
def test_bytes_over_time_are_those_of_a_run(ops: list[tuple[str, int]]) -> None:
    b = StepBuilder()
    inputs = [torch.ones(4, 6), torch.ones(4, 6)]
    pool: list[Node] = [b.input(x) for x in inputs]
    for op, pick in ops:
        x = pool[pick % len(pool)]
        val = x.meta["val"]
        if op == "add":
            pool.append(b.call(aten.add.Tensor, x, 1.5))
        elif op == "view" and val.is_contiguous():
            pool.append(b.call(aten.view.default, x, [-1]))
        elif op == "t" and val.dim() == 2:
            pool.append(b.call(aten.t.default, x))
        elif op == "slice":
            pool.append(b.call(aten.slice.Tensor, x, 0, 0, max(1, val.shape[0] // 2)))
        elif op == "split" and val.shape[0] > 1:
            pool += b.pick(b.call(aten.split.Tensor, x, (val.shape[0] + 1) // 2))
        elif op == "reshape":
            pool.append(b.call(aten.reshape.default, x, [-1]))
        elif op == "expand" and val.dim() == 1:
            pool.append(b.call(aten.clone.default, b.call(aten.expand.default, x, [3, val.shape[0]])))
        elif op.startswith("write"):
            # What shares memory with a written value is not read again.
            key = val.untyped_storage()._cdata
            pool = [n for n in pool if n.meta["val"].untyped_storage()._cdata != key]
            pool.append(b.write(aten.mul_.Scalar, x, 2.0))
    b.returns(pool[-1])
    step = b.build()
    found = liveness(step, rounded=False)
    expected = held_over_time(step, [x.clone() for x in inputs])
    assert found.over_time == expected
    assert found.peak == max(expected)
    assert sum(r.size for r in found.alive(found.peak_at)) == found.peak


def test_sizes_are_rounded_to_blocks_and_the_peak_names_lines() -> None:
    b = StepBuilder()
    x = b.input(torch.ones(3))
    b.returns(b.call(aten.exp.default, x))
    found = liveness(b.build())
    assert found.over_time == [512, 1024, 1024]
    assert "test_liveness.py" in found.explain()
    assert not found.unknown


def test_a_collective_holds_its_input_until_it_is_waited_for() -> None:
    with weft.fake_world(2):
        weight = torch.ones(256)

        def step(x: torch.Tensor) -> torch.Tensor:
            work = torch.ops._c10d_functional.all_reduce(x * 2, "sum", torch.distributed.group.WORLD.group_name)
            y = weight + 1
            return torch.ops._c10d_functional.wait_tensor(work) + y

        graph = weft.capture(step, torch.ones(256))
    found = liveness(graph, issue_order(graph))
    doubled = next(n for n in graph.graph.nodes if "mul" in n.name)
    wait = next(n for n in graph.graph.nodes if "wait" in n.name)
    assert found.of[doubled][0].end == found.order.index(wait)
    assert found.of[wait][0].maker.name.startswith("all_reduce")


def test_symbolic_sizes_count_at_their_captured_value() -> None:
    batch = torch.ones(7, 8)
    weft.mark_dynamic(batch, 0)
    graph = weft.capture(lambda x: x * 2, batch)
    found = liveness(graph, rounded=False)
    assert found.peak == 2 * 7 * 8 * 4
    assert all(type(size) is int for size in found.over_time)


def test_an_optimizer_in_place_makes_no_second_copy() -> None:
    model = torch.nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = liveness(weft.capture(step, torch.ones(2, 64)), rounded=False)
    weight = 64 * 64 * 4
    # The weight, its gradient and what the optimizer makes for a moment of both; never a second weight for good.
    assert found.over_time[-1] < 2 * weight
    assert found.peak < 4 * weight


def test_multi_tensor_kernels_in_place_make_no_second_copy() -> None:
    """Verifiers ask for liveness after the kernels of an optimizer were bound, which write over their arguments."""
    weights = [torch.nn.Parameter(torch.randn(1000)) for _ in range(3)]
    optimizer = torch.optim.AdamW(weights, fused=True)

    def step(x: torch.Tensor) -> None:
        sum((w * x).sum() for w in weights).backward()
        optimizer.step()
        optimizer.zero_grad()

    fused = run_passes(weft.capture(step, torch.randn(1000)), [fuse_optimizer])
    before = liveness(fused).peak
    assert liveness(use_kernels(fused)).peak == before
    assert any(isinstance(node.meta.get("inplace"), Launcher) for node in fused.graph.nodes)
