"""Collectives of a captured step as calls over peers: what the graph is then, and where their members lie."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from fake_recorder import FakeRecorder
from step_builder import StepBuilder
from weft import MixedPrecisionPolicy, errors
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import WAIT, group_of, is_collective, is_effect, is_wait
from weft.inductor.graph import serialize
from weft.inductor.graph.liveness import liveness
from weft.inductor.graph.node_order import start_of, waits_of
from weft.inductor.graph.retarget import retarget
from weft.inductor.multi_tensor.cast import Cast
from weft.inductor.passes.drop_noops import drop_noops
from weft.inductor.passes.fold_casts import fold_casts
from weft.inductor.passes.group_casts import group_casts
from weft.inductor.passes.pipeline import ATEN_PASSES, run_passes
from weft.inductor.passes.wire_dtype import wire_dtype
from weft.inductor.runtime.capturable import why_not as not_recorded
from weft.inductor.runtime.cuda_graph import GraphedProgram
from weft.inductor.runtime.cudagraph_partition import partition_step
from weft.inductor.transports import arena_layout
from weft.inductor.transports.apply_transports import drop_unread_casts
from weft.inductor.transports.arena import ALIGNMENT, Region, can_write
from weft.inductor.transports.arena_layout import ArenaSlot, lay_out
from weft.inductor.transports.peer_calls import (
    CopyEngineGather,
    PeerCall,
    PeerWait,
    arena_tensors_of,
    inputs_of,
    multi_tensor_cast_of,
    results_in_arena,
    unsupported_reason,
    use_transport,
)

pytestmark = pytest.mark.fake

WORLD = 8
TRANSPORTS = {"all_gather_into_tensor": "push", "reduce_scatter_tensor": "pull_16", "all_reduce": "two_shot"}


def captured(device: str = "", transports: dict[str, str] | None = None) -> StepGraph:
    """A training step of eight ranks, its collectives over peers."""
    with weft.fake_world(WORLD):
        mesh = init_device_mesh("cpu", (WORLD,))
        net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64, bias=False), nn.LayerNorm(64))
        for layer in (net[0], net[2], net[3]):
            weft.fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        weft.fully_shard(net, mesh=mesh)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = net(x).float().square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        graph = weft.capture(step, torch.randn(16, 64))
        if device:
            graph = retarget(graph.copy(), device)
        graph = wire_dtype(run_passes(graph, ATEN_PASSES))
        wanted = TRANSPORTS if transports is None else transports
        for node in graph.collectives():
            kind = next(name for name in TRANSPORTS if name in str(node.target))
            if kind in wanted:
                use_transport(graph, node, wanted[kind])
        return graph


@pytest.fixture(scope="module")
def step() -> StepGraph:
    graph = captured()
    lay_out(graph)
    return graph


def starts(step: StepGraph) -> list[torch.fx.Node]:
    return [node for node in step.graph.nodes if isinstance(node.target, PeerCall)]


# ---- the graph


def test_calls_over_peers_are_collectives_to_everybody(step: StepGraph) -> None:
    step.check()
    assert starts(step) == step.collectives()
    for start in starts(step):
        assert is_collective(start)
        assert is_effect(start)
        assert group_of(start) == "world"
        assert waits_of(start)
        for wait in waits_of(start):
            assert is_wait(wait)
            assert isinstance(wait.target, PeerWait)
            assert start_of(wait) is start
    assert not any(node.target is WAIT for node in step.graph.nodes)


def test_the_graph_prints_what_goes_over_which_wires(step: StepGraph) -> None:
    text = str(step)
    assert "= peer_gather([" in text
    assert "= peer_reduce_scatter([" in text
    assert "# over world, 16.0 KiB" in text
    assert " peer_reduce_scatter\n" in text.partition("def step")[0]


def test_a_number_behind_the_name_is_how_many_programs_there_are(step: StepGraph) -> None:
    programs = {type(start.target).__name__: start.target.programs for start in starts(step)}  # type: ignore[union-attr]
    assert programs == {"PeerGather": 0, "PeerReduceScatter": 16, "PeerAllReduce": 0}


def test_a_laid_out_graph_survives_being_written_down(step: StepGraph) -> None:
    again = serialize.load(serialize.dump(step), step)
    assert [node.target for node in again.graph.nodes if isinstance(node.target, PeerCall)] == [
        start.target for start in starts(step)
    ]
    assert str(again) == str(step)
    places = [node.meta.get("arena_slots") for node in step.graph.nodes]
    assert [node.meta.get("arena_slots") for node in again.graph.nodes] == places
    assert any(places)


def test_a_call_without_memory_says_so(step: StepGraph) -> None:
    with pytest.raises(AssertionError, match="bind"):
        starts(step)[0].target([])  # type: ignore[operator]
    with pytest.raises(AssertionError, match="bind"):
        PeerWait()(torch.ones(1))


def cast_and_gathered(carried: int) -> StepGraph:
    """Three parameters, cast by one call and gathered one by one; the first ``carried`` of them by pushes."""
    with weft.fake_world(WORLD):
        weights = [nn.Parameter(torch.randn(4, size)) for size in (2, 3, 5)]

        def step() -> list[torch.Tensor]:
            casts = [weight.bfloat16() for weight in weights]
            gathered = [cast.new_empty(WORLD * 4, cast.shape[1]) for cast in casts]
            for out, cast in zip(gathered, casts, strict=True):
                dist.all_gather_into_tensor(out, cast)
            return [out.float().sum() for out in gathered]

        graph = run_passes(weft.capture(step), [drop_noops, fold_casts, group_casts])
        for node in graph.collectives()[:carried]:
            use_transport(graph, node, "push")
        drop_unread_casts(graph)
        return graph.check()


@pytest.mark.parametrize("carried", [0, 1, 3])
def test_shards_are_cast_on_their_way(carried: int) -> None:
    graph = cast_and_gathered(carried)
    pushed = starts(graph)
    assert [inputs_of(start)[0].op for start in pushed] == ["placeholder"] * carried
    for start in pushed:
        assert inputs_of(start)[0].meta["val"].dtype == torch.float32
        assert arena_tensors_of(start)[0][1] == start.meta["val"][0].dtype == torch.bfloat16
    casts = [node for node in graph.graph.nodes if isinstance(node.target, Cast)]
    assert len(casts) == (carried < 3)
    for cast in casts:
        kept = [tuple(val.shape) for val in cast.meta["val"][0]]
        assert kept == [(4, 2), (4, 3), (4, 5)][carried:]
        others = [node for node in graph.collectives() if node not in pushed]
        assert [tuple(node.args[0].meta["val"].shape) for node in others] == kept  # type: ignore[union-attr]
        assert [multi_tensor_cast_of(node.args[0]) for node in others] == [cast] * len(kept)  # type: ignore[arg-type]


# ---- places


def test_the_compute_stream_brings_shards_where_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before something of this step has been waited for: peers may still read what the step before left there.
    Where it does, bytes are in use from there on, as those of what a product writes."""
    planned: list[list[Region]] = []
    plan = arena_layout.plan
    monkeypatch.setattr(arena_layout, "plan", lambda intervals, found: planned.append(found) or plan(intervals, found))
    graph = captured(transports={"all_gather_into_tensor": "copy_engine", "reduce_scatter_tensor": "copy_sum"})
    lay_out(graph)
    at = {node: position for position, node in enumerate(graph.graph.nodes)}
    first = min(at[wait] for start in starts(graph) for wait in waits_of(start))
    gathers = [start for start in starts(graph) if isinstance(start.target, CopyEngineGather)]
    assert [start.target.copy_in_on_compute_stream for start in gathers] == [at[start] > first for start in gathers]
    assert {start.target.copy_in_on_compute_stream for start in gathers} == {False, True}
    numbers = [(number, start) for number, start in enumerate(starts(graph)) if start in gathers]
    for number, start in numbers:
        written = {region.first_write for region in planned[0] if number in region.intervals}
        assert written == {at[start] if start.target.copy_in_on_compute_stream else None}
    assert not any(start.target.copy_in_on_compute_stream and start.target.opening_barrier for start in gathers)


@dataclass
class Life:
    """Bytes of the arena, and the positions of the first and the last node that use them or let peers use them."""

    begin: int
    end: int
    first: int
    last: int


def lives(step: StepGraph) -> Iterator[Life]:
    """Of every member."""
    at = {node: position for position, node in enumerate(step.graph.nodes)}
    memory = liveness(step)
    made_in = {slot: node for node in step.graph.nodes for slot in node.meta.get("arena_slots", ()) if slot is not None}
    for start in starts(step):
        call: Any = start.target
        for number, offset in enumerate(call.offsets):
            if call.in_arena:
                val = start.meta["val"][number]
                element = next(user for user in start.users if user.args[1] == number)
                yield Life(offset, offset + val.nbytes, at[start], memory.of[element][0].end)
                continue
            val = start.args[0][number].meta["val"]  # type: ignore[index, union-attr]
            maker = next((m for slot, m in made_in.items() if slot.offset == offset and start in reached(m)), start)
            yield Life(offset, offset + val.nbytes, at[maker], at[start])


def reached(maker: torch.fx.Node) -> set[torch.fx.Node]:
    found, todo = set(), [maker]
    while todo:
        for user in todo.pop().users:
            if user not in found:
                found.add(user)
                if not is_collective(user):
                    todo.append(user)
    return found


def test_members_that_live_at_once_lie_apart(step: StepGraph) -> None:
    found = list(lives(step))
    assert len(found) == sum(len(start.meta["val"]) for start in starts(step))
    assert all(life.begin % ALIGNMENT == 0 for life in found)
    for at, a in enumerate(found):
        for b in found[:at]:
            assert a.end <= b.begin or b.end <= a.begin or a.last < b.first or b.last < a.first, (a, b)


def test_a_result_that_nobody_reads_keeps_its_bytes_until_the_wait() -> None:
    """Peers write it as long as the collective runs."""
    with weft.fake_world(4):
        b = StepBuilder()
        shards = [b.input(torch.ones(64)) for _ in range(2)]
        start = b.call(torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default, shards, 4, "dp")
        read = b.call(operator.getitem, start, 1, val=start.meta["val"][1])
        meanwhile = b.call(torch.ops.aten.mul.Tensor, shards[0], 2.0)
        b.returns(meanwhile, b.call(torch.ops.aten.sum.default, b.call(WAIT, read, val=read.meta["val"])))
        step = b.build({"dp": dist.group.WORLD.group_name})
        made = use_transport(step, start, "push")
        positions = arena_layout._StepPositions(step)
        running = positions.interval(made)
        assert running.wait > running.start + 1
        assert positions.region(0, made, 0, None, [running]).last_read == running.wait


def test_barriers_are_not_spent_where_there_is_room(step: StepGraph) -> None:
    """The small members of this step find bytes of their own beside the large ones."""
    assert sum(start.target.opening_barrier for start in starts(step)) <= 5  # type: ignore[union-attr]


def test_products_write_gradients_into_the_arena(step: StepGraph) -> None:
    at = {node: position for position, node in enumerate(step.graph.nodes)}
    placed = [node for node in step.graph.nodes if "arena_slots" in node.meta]
    assert {str(node.target) for node in placed} == {"aten.mm.default"}
    assert len(placed) == 2
    for node in placed:
        (slot,) = node.meta["arena_slots"]
        assert slot == ArenaSlot("world", slot.offset, tuple(node.meta["val"].shape), torch.bfloat16)
        (user,) = [user for user in reached(node) if is_collective(user) and slot.offset in user.target.offsets]  # type: ignore
        assert user.target.kind == "reduce_scatter"  # type: ignore[union-attr]
        # The step before used these bytes: a barrier of this step has been waited for.
        assert any(at[wait] < at[node] for start in starts(step) for wait in waits_of(start))


def test_what_lies_in_the_arena_counts_no_memory() -> None:
    plain, peers = captured(transports={}), captured()
    layouts = lay_out(peers)
    before, after = liveness(plain), liveness(peers)
    assert after.peak < before.peak
    assert after.peak + layouts["world"].size < 1.2 * before.peak
    gathers = [node for node in peers.graph.nodes if getattr(node.target, "in_arena", False)]
    assert gathers
    assert all(not found.size for node in gathers for found in after.of[node])


def test_nothing_is_written_on_the_compute_stream_before_this_steps_first_barrier() -> None:
    """A step that only reduces: its first gradients are copied in when the reduction starts, behind a barrier."""
    with weft.fake_world(WORLD):

        def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            out = torch.empty(a.shape[0] // WORLD, b.shape[1])
            dist.reduce_scatter_tensor(out, a @ b)
            again = torch.empty_like(out)
            dist.reduce_scatter_tensor(again, (a @ (b + out.sum())))
            return out + again

        graph = run_passes(weft.capture(step, torch.randn(16, 4), torch.randn(4, 8)), ATEN_PASSES)
        for node in graph.collectives():
            use_transport(graph, node, "pull")
    (layout,) = lay_out(graph).values()
    products = [node for node in graph.graph.nodes if str(node.target) == "aten.mm.default"]
    assert ["arena_slots" in node.meta for node in products] == [False, True]
    assert layout.opening_barriers == (True, False)
    assert not can_write([], 5)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_what_is_read_by_its_storage_does_not_lie_in_the_arena(added: bool, strided: bool) -> None:
    """A place in a storage is counted from its beginning, which for a part of the arena is that of the arena."""
    with weft.fake_world(WORLD):

        def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            outs = [torch.empty(a.shape[0] // WORLD, b.shape[1]) for _ in range(2)]
            dist.reduce_scatter_tensor(outs[0], a @ b)
            made = a @ (b + outs[0].sum())
            if added:
                made.add_(1.0)
            dist.reduce_scatter_tensor(outs[1], made)
            seen = torch.as_strided(made, (3, 8), (8, 1), 8) if strided else made[1:4]
            return outs[1].sum() + seen.sum()

        graph = run_passes(weft.capture(step, torch.randn(16, 4), torch.randn(4, 8)), ATEN_PASSES)
        for node in graph.collectives():
            use_transport(graph, node, "pull")
    lay_out(graph)
    assert sum("arena_slots" in node.meta for node in graph.graph.nodes) == (not strided)


@pytest.mark.parametrize("part", ["whole", "half", "turned"])
def test_what_is_added_to_in_place_lies_in_the_arena_only_if_it_is_all_of_its_memory(part: str) -> None:
    """Half of a product would take bytes behind its member, and one that is turned is copied over itself."""
    with weft.fake_world(WORLD):

        def scatter(value: torch.Tensor) -> torch.Tensor:
            out = value.new_empty(len(value) // WORLD, value.shape[1])
            dist.reduce_scatter_tensor(out, value)
            return out

        def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            first = scatter(a @ b).sum()
            made = a @ (b + first)
            value = {"whole": made, "half": made[:8], "turned": made.t()}[part]
            value.add_(1.0)
            return first + scatter(value).sum()

        graph = run_passes(weft.capture(step, torch.randn(16, 4), torch.randn(4, 8)), ATEN_PASSES)
        for node in graph.collectives():
            use_transport(graph, node, "pull")
    layouts = lay_out(graph)
    assert any("inplace" in node.meta for node in graph.graph.nodes)
    slots = [slot for node in graph.graph.nodes for slot in node.meta.get("arena_slots", ())]
    assert len(slots) == (part == "whole")
    for slot in slots:
        assert slot.offset + 4 * math.prod(slot.sizes) <= layouts["world"].size


# ---- what cannot be carried


def reason(transport: str, **changes: Any) -> str | None:
    with weft.fake_world(WORLD):

        def step(x: torch.Tensor) -> Any:
            out = torch.empty(WORLD * x.shape[0], dtype=x.dtype)
            if transport in ("push", "copy_engine"):
                dist.all_gather_into_tensor(out, x)
            elif transport == "pull":
                out = torch.empty(x.shape[0] // WORLD, dtype=x.dtype)
                dist.reduce_scatter_tensor(out, x, changes.get("op", dist.ReduceOp.SUM))
            else:
                out = x + 1
                dist.all_reduce(out, changes.get("op", dist.ReduceOp.SUM))
            if changes.get("strided"):
                return torch.as_strided(out, (2,), (1,), 0) + 1
            return out if changes.get("held") else out + 1

        x = torch.ones(changes.get("size", WORLD), dtype=changes.get("dtype", torch.float32))
        if changes.get("dynamic"):
            weft.mark_dynamic(x, 0)
        graph = run_passes(weft.capture(step, x), ATEN_PASSES)
        (node,) = graph.collectives()
        return unsupported_reason(graph, node, changes.get("name", transport))


@pytest.mark.parametrize("transport", ["push", "copy_engine", "pull", "one_shot", "two_shot"])
def test_what_transports_do(transport: str) -> None:
    assert reason(transport) is None
    assert reason(transport, name="nccl") is None
    assert reason(transport, dtype=torch.bfloat16) is None
    assert reason(transport, name="warp") == "there is no transport warp"
    assert not results_in_arena("warp_4")
    other = "pull" if transport != "pull" else "push"
    assert "does not do _c10d_functional" in str(reason(transport, name=other))
    assert reason(transport, size=0) == "a result is empty or has gaps"
    assert reason(transport, dynamic=True, size=2 * WORLD) == "a size is not known before the step runs"


def test_what_transports_do_not() -> None:
    assert reason("push", dtype=torch.bool) == "push does not move torch.bool"
    assert reason("copy_engine", dtype=torch.int64) == "copy_engine does not move torch.int64"
    assert reason("pull", op=dist.ReduceOp.MAX) == "pull does not reduce by max"
    assert reason("one_shot", op=dist.ReduceOp.MAX) is None
    assert reason("one_shot", op=dist.ReduceOp.PRODUCT) == "one_shot does not reduce by product"
    assert "held after the step" in str(reason("push", held=True))
    assert "held after the step" in str(reason("two_shot", held=True))
    assert reason("one_shot", held=True) is None
    assert reason("copy_engine", held=True) is None
    assert "read by its storage" in str(reason("push", strided=True))
    assert reason("copy_engine", strided=True) is None


# ---- CUDA graphs


def test_a_step_over_peers_is_recorded_whole() -> None:
    over_peers = captured("cuda:0")
    lay_out(over_peers)
    assert all(not_recorded(node, over_peers) is None for node in over_peers.graph.nodes if is_wait(node))
    assert all(not_recorded(start, over_peers) is None for start in starts(over_peers))
    with_collectives = [part for part in partition_step(over_peers) if len(part.step.collectives())]
    assert [part.why_not for part in with_collectives] == [None]


def test_on_the_cpu_nothing_is_recorded(step: StepGraph) -> None:
    assert all("on the CPU" in str(not_recorded(start, step)) for start in starts(step))


class Checked:
    """Stands for a call over peers in a program that is replayed."""

    collective = True
    group = "world"

    def __init__(self) -> None:
        self.lost = False
        self.asked = 0

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return inputs

    def check(self) -> None:
        self.asked += 1
        if self.lost:
            raise errors.PeerTimeout(3, "world", "peer_gather of net.0.weight", 2.0)


def test_a_replayed_program_asks_at_each_call_whether_all_ranks_came() -> None:
    graph, peers = captured(), Checked()
    starts(graph)[0].target = peers
    program = GraphedProgram(mock.Mock(**{"boxed.return_value": []}), graph, FakeRecorder())
    inputs = [torch.ones(1) if isinstance(n.meta["val"], torch.Tensor) else 0.1 for n in graph.placeholders]
    for _ in range(4):
        program(*inputs)
    assert program.replays == peers.asked == 2
    peers.lost = True
    with pytest.raises(
        errors.PeerTimeout, match=r"rank 3 \(axis 'world'\) did not come to peer_gather of net.0.weight"
    ):
        program(*inputs)
