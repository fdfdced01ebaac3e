"""The verifier of schedules accepts what the planner makes, and finds every fault that is planted."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peer_steps import PASSES
from torch import nn

import weft
from step_builder import StepBuilder
from weft import errors, knobs
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import is_collective, is_random, is_wait
from weft.capture.record.streams import StreamCall
from weft.capture.step_interface import Role
from weft.inductor.cost.cluster import load_cluster
from weft.inductor.graph.node_order import waits_of
from weft.inductor.graph.retarget import retarget
from weft.inductor.passes.fuse_optimizer import fuse_optimizer
from weft.inductor.passes.pipeline import run_passes
from weft.inductor.schedule.communicators import assign_communicators
from weft.inductor.schedule.planner import Schedule, schedule
from weft.inductor.schedule.verify import ScheduleVerifier, verifier
from weft.inductor.transports.apply_transports import use_transports
from weft.inductor.transports.arena_layout import ArenaSlot
from weft.inductor.transports.peer_calls import PeerCall

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
Node = torch.fx.Node

H200 = load_cluster("h200x8")
# Where the library is slow, peers carry whatever they can.
SLOW_LIBRARY = dataclasses.replace(
    H200, transports=tuple(dataclasses.replace(t, latency=1e-3) if t.crosses else t for t in H200.transports)
)
# ---- the steps that faults are planted in


def effect(value: torch.Tensor) -> None:
    """A call with an effect."""


def written_by_hand() -> StepGraph:
    """Gathers and reductions over two groups, an update in place, effects, random draws and a call on streams."""
    b = StepBuilder()
    batch = b.input(torch.ones(8, 8), Role.BATCH)
    shards = [b.input(torch.ones(1, 8)) for _ in range(3)]

    def waited(start: Node) -> Node:
        return b.call(c10d.wait_tensor.default, start, val=start.meta["val"])

    whole = [waited(b.call(c10d.all_gather_into_tensor.default, shard, 8, "dp")) for shard in shards]
    used = [b.call(aten.mm.default, batch, each) for each in whole]
    noise = [b.call(aten.rand_like.default, each) for each in used]
    for each in used[:2]:
        b.effect(effect, each)
    scaled = [b.call(aten.mul.Tensor, batch, factor) for factor in (0.5, 0.25)]
    reduced = [waited(b.call(c10d.reduce_scatter_tensor.default, each, "sum", 8, "dp")) for each in scaled]
    summed = waited(b.call(c10d.all_reduce.default, scaled[0], "sum", "other"))
    changed = b.write(aten.add_.Scalar, scaled[0], 1.0)
    b.effect(StreamCall("event_record", None))
    b.update(shards[0], b.write(aten.add_.Tensor, shards[0], reduced[0], alpha=-0.1))
    b.update(shards[1], b.write(aten.add_.Tensor, shards[1], reduced[1], alpha=-0.1))
    b.returns(*used, *noise, summed, changed)
    return b.build({"dp": dist.group.WORLD.group_name, "other": dist.group.WORLD.group_name})


def training() -> StepGraph:
    """A sharded training step of eight ranks in bfloat16, on GPUs."""
    mesh = dist.init_device_mesh("cpu", (8,))
    blocks = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(3)]
    net = nn.Sequential(*blocks)
    policy = weft.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in (*net, net):
        weft.fully_shard(block, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = net(x).float().square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    graph = weft.capture(step, torch.randn(16, 64))
    return run_passes(retarget(graph.copy(), "cuda:0"), [*PASSES, fuse_optimizer])


@dataclasses.dataclass
class Case:
    """A step, its verifier, and its schedule, with the transports applied where there are any over peers."""

    checks: ScheduleVerifier
    found: Schedule
    transported: StepGraph


def case(step: StepGraph, transports: str) -> Case:
    checks = ScheduleVerifier(step)
    with knobs.override(transports=transports):
        found = schedule(step, SLOW_LIBRARY)
    transported = found.step.copy()
    use_transports(transported, unreachable=lambda step, node: None)
    return Case(checks, found, transported)


def case_without_buckets(step: StepGraph) -> Case:
    """Many small collectives over peers, whose arena is used again and again."""
    with mock.patch("weft.inductor.schedule.planner._BUCKET_SCALES", (0.0,)):
        return case(step, "push,pull")


@pytest.fixture(scope="module")
def cases() -> Iterator[dict[str, Case]]:
    with weft.fake_world(8):
        step = training()
        yield {
            "hand": case(written_by_hand(), "nccl"),
            "library": case(step, "nccl"),
            "push": case(step, "push,pull"),
            "copies": case(step, "copy_engine,copy_sum"),
            "alone": case_without_buckets(step),
        }


# ---- what nodes there are


def place(step: StepGraph) -> dict[Node, int]:
    return {node: at for at, node in enumerate(step.graph.nodes)}


def calls(step: StepGraph, target: Any) -> list[Node]:
    return step.graph.find_nodes(op="call_function", target=target)


def buckets(step: StepGraph, kind: str = "") -> list[Node]:
    """Coalesced collectives of more than one tensor."""
    starts = (node for node in step.collectives() if isinstance(node.meta["val"], list) and len(node.meta["val"]) > 1)
    return [start for start in starts if kind in str(start.target)]


def peer_starts(step: StepGraph) -> list[Node]:
    return [node for node in step.graph.nodes if isinstance(node.target, PeerCall)]


def after_all_its_operands(step: StepGraph, node: Node, target: Node) -> None:
    """Move ``node`` and all that needs it, and stands before ``target``, behind ``target``."""
    moved: dict[Node, None] = {node: None}
    for each in step.graph.nodes:
        if any(used in moved for used in each.all_input_nodes) and each.op != "output":
            moved[each] = None
    at = place(step)
    for each in reversed([each for each in moved if at[each] < at[target]]):
        target.append(each)


# ---- faults: each changes a copy of a step, and says which words of the error show that it was understood

Fault = Callable[[StepGraph], None]
FAULTS: dict[str, tuple[str, str, Fault]] = {}


def fault(where: str, message: str) -> Callable[[Fault], Fault]:
    def register(plant: Fault) -> Fault:
        FAULTS[plant.__name__] = where, message, plant
        return plant

    return register


@fault("library", "without a wait")
def dropped_wait(step: StepGraph) -> None:
    wait = next(node for node in step.graph.nodes if is_wait(node) and node.users)
    wait.replace_all_uses_with(wait.args[0])
    step.graph.erase_node(wait)


@fault("hand", "nothing waits for|without a wait")
def dropped_only_wait_of_a_collective(step: StepGraph) -> None:
    (start,) = calls(step, c10d.all_reduce.default)
    (wait,) = waits_of(start)
    wait.replace_all_uses_with(start)
    step.graph.erase_node(wait)


@fault("library", "comes before its operand")
def wait_behind_its_reader(step: StepGraph) -> None:
    wait = next(node for node in step.graph.nodes if is_wait(node) and node.users)
    at = place(step)
    min(wait.users, key=at.__getitem__).append(wait)


@fault("library", "comes before its operand")
def wait_before_its_start(step: StepGraph) -> None:
    start = step.collectives()[-1]
    start.prepend(waits_of(start)[0])


@fault("library", "comes before its operand")
def swapped_dependent_nodes(step: StepGraph) -> None:
    node = next(iter(calls(step, aten.gelu.default)), None) or calls(step, aten.mm.default)[0]
    user = min(node.users, key=place(step).__getitem__)
    user.append(node)


@fault("hand", "inputs are not those|behind other nodes")
def inputs_in_another_order(step: StepGraph) -> None:
    first, second = step.placeholders[:2]
    second.append(first)


@fault("library", "is a bucket of|gives|computes|communicated|gathers")
def lost_bucket_member(step: StepGraph) -> None:
    bucket = buckets(step)[0]
    bucket.args = (bucket.args[0][:-1], *bucket.args[1:])  # type: ignore[index]


@fault("library", "is a bucket of")
def bucket_member_that_nobody_reads(step: StepGraph) -> None:
    """The last element, where all its readers get the first."""
    bucket = buckets(step)[0]
    element = max((user for user in bucket.users), key=lambda user: user.args[1])
    for wait in list(element.users):
        wait.replace_all_uses_with(waits_of(bucket)[0])
        step.graph.erase_node(wait)
    step.graph.erase_node(element)


@fault("library", "is a bucket of")
def bucket_element_picked_twice(step: StepGraph) -> None:
    first, second = list(buckets(step)[0].users)[:2]
    second.args = first.args


@fault("library", "no longer computes|is not the tensor")
def swapped_bucket_elements(step: StepGraph) -> None:
    first, second = list(buckets(step, "reduce_scatter")[0].users)[:2]
    first.args, second.args = second.args, first.args
    first.meta, second.meta = second.meta, first.meta


@fault("hand", "no longer computes|communicated|not gather")
def swapped_operands_of_equal_shape(step: StepGraph) -> None:
    """Sums of the wrong gradients: no shape, dtype or count shows it."""
    (bucket,) = buckets(step, "reduce_scatter")
    one, other = bucket.args[0]  # type: ignore[misc]
    bucket.args = ([other, one], *bucket.args[1:])


@fault("hand", "communicated|not gather")
def bucket_over_two_groups(step: StepGraph) -> None:
    (bucket,) = buckets(step, "reduce_scatter")
    bucket.args = (*bucket.args[:-1], "other")


@fault("library", "tensors of several kinds")
def bucket_of_two_dtypes(step: StepGraph) -> None:
    bucket = buckets(step, "all_gather")[0]
    first, *others = bucket.args[0]  # type: ignore[misc]
    with step.graph.inserting_before(bucket):
        wide = step.graph.call_function(aten._to_copy.default, (first,), {"dtype": torch.float64})
    wide.meta = {**first.meta, "val": first.meta["val"].to(torch.float64)}
    bucket.args = ([wide, *others], *bucket.args[1:])


@fault("hand", "communicated")
def another_reduction(step: StepGraph) -> None:
    (start,) = calls(step, c10d.all_reduce.default)
    start.args = (start.args[0], "avg", start.args[2])


@fault("hand", "communicated 2 times, not 1")
def reduction_done_twice(step: StepGraph) -> None:
    (start,) = calls(step, c10d.all_reduce.default)
    (wait,) = waits_of(start)
    with step.graph.inserting_after(wait):
        copy = step.graph.node_copy(start)
    with step.graph.inserting_after(copy):
        other = step.graph.node_copy(wait, lambda used: copy)
    copy.meta = other.meta = {**start.meta, "val": start.meta["val"].clone()}


@fault("library", "no longer gathered|does not gather|communicated|no longer computes")
def gather_of_another_shard(step: StepGraph) -> None:
    bucket = buckets(step, "all_gather")[0]
    first, _, *others = bucket.args[0]  # type: ignore[misc]
    bucket.args = ([first, first, *others], *bucket.args[1:])


@fault("hand", "whose memory another node has written to")
def gather_after_the_update_of_its_shard(step: StepGraph) -> None:
    gather = next(node for node in step.collectives() if "all_gather" in str(node.target))
    update = calls(step, aten.add.Tensor)[0]
    after_all_its_operands(step, gather, update)
    # Effects and draws would move too: only the read of the shard is at fault.
    step.outputs, results = step.outputs[:2], step.results[:2]
    step.graph.output_node().args = (results,)


@fault("hand", "before any wait for it")
def operand_overwritten_before_the_wait(step: StepGraph) -> None:
    (start,) = calls(step, c10d.all_reduce.default)
    (wait,) = waits_of(start)
    (write,) = calls(step, aten.add.Scalar)
    write.append(wait)


@fault("hand", "call with an effect")
def swapped_effects(step: StepGraph) -> None:
    first, second = calls(step, effect)
    second.append(first)


@fault("hand", "call with an effect")
def effect_on_another_value(step: StepGraph) -> None:
    first, second = calls(step, effect)
    first.args = second.args if place(step)[second.args[0]] < place(step)[first] else first.args  # type: ignore[index]
    second.args = (calls(step, aten.mm.default)[0],)


@fault("hand", "call with an effect")
def swapped_random_draws(step: StepGraph) -> None:
    first, second = [node for node in step.graph.nodes if is_random(node)][:2]
    second.append(first)


@fault("hand", "which it has to follow")
def node_behind_a_call_on_streams(step: StepGraph) -> None:
    (call,) = [node for node in step.graph.nodes if isinstance(node.target, StreamCall)]
    (write,) = calls(step, aten.add.Scalar)
    call.append(write)


@fault("hand", "which it has to follow")
def node_in_front_of_a_call_on_streams(step: StepGraph) -> None:
    (call,) = [node for node in step.graph.nodes if isinstance(node.target, StreamCall)]
    call.prepend(calls(step, aten.add.Tensor)[0])


@fault("library", "no longer computes")
def swapped_outputs(step: StepGraph) -> None:
    results = list(step.results)
    results[0], results[1] = results[1], results[0]
    step.graph.output_node().args = (tuple(results),)


@fault("library", "does not have")
def unknown_group(step: StepGraph) -> None:
    start = buckets(step, "all_gather")[0]
    start.args = (*start.args[:-1], "nowhere")


@fault("library", "is no communicator of its group")
def communicator_of_another_lane(step: StepGraph) -> None:
    assign_communicators(step)
    start = buckets(step, "all_gather")[0]
    start.args = tuple("world/reduce" if argument == "world/gather" else argument for argument in start.args)


@fault("push", "library's wait for a collective over peers")
def library_wait_for_a_peer_call(step: StepGraph) -> None:
    waits_of(peer_starts(step)[0])[0].target = c10d.wait_tensor.default


@fault("push", "in the arena for")
def missing_place_in_the_arena(step: StepGraph) -> None:
    start = peer_starts(step)[0]
    start.target = dataclasses.replace(start.target, offsets=start.target.offsets[:-1])  # type: ignore


@fault("push", "overlaps one of")
def overlapping_members_of_one_call(step: StepGraph) -> None:
    start = next(node for node in peer_starts(step) if len(node.target.offsets) > 1)  # type: ignore
    first, _, *others = start.target.offsets  # type: ignore
    start.target = dataclasses.replace(start.target, offsets=(first, first, *others))  # type: ignore


@fault("alone", "overlaps one of")
def overlapping_members_of_two_calls(step: StepGraph) -> None:
    """A gather into the bytes of the gather before it, which are still read."""
    gathers = [node for node in peer_starts(step) if node.target.in_arena]  # type: ignore
    gathers[1].target = dataclasses.replace(
        gathers[1].target,  # type: ignore
        offsets=(gathers[0].target.offsets[0], *gathers[1].target.offsets[1:]),  # type: ignore
    )


@fault("push", "before any barrier of this step")
def first_collective_without_a_barrier(step: StepGraph) -> None:
    start = peer_starts(step)[0]
    assert start.target.opening_barrier  # type: ignore
    start.target = dataclasses.replace(start.target, opening_barrier=False)  # type: ignore


@fault("alone", "overlaps one of|before any barrier")
def all_barriers_dropped(step: StepGraph) -> None:
    for start in peer_starts(step):
        start.target = dataclasses.replace(start.target, opening_barrier=False)  # type: ignore


@fault("alone", "overlaps one of")
def arena_value_read_after_its_bytes_are_used_again(step: StepGraph) -> None:
    """A reader added after the arena was laid out, behind a gather that uses the bytes again."""
    gathers = [node for node in peer_starts(step) if node.target.in_arena]  # type: ignore
    reused = next(
        gather
        for gather in gathers
        if any(gather.target.offsets == later.target.offsets for later in gathers if later is not gather)  # type: ignore
    )
    value = waits_of(reused)[0]
    with step.graph.inserting_before(step.graph.output_node()):
        late = step.graph.call_function(aten.view.default, (value, list(value.meta["val"].shape)))
    late.meta = dict(value.meta)


@fault("push", "writes to byte")
def operand_written_beside_its_place(step: StepGraph) -> None:
    node = next(node for node in step.graph.nodes if any(node.meta.get("arena_slots", ())))
    node.meta["arena_slots"] = tuple(
        dataclasses.replace(slot, offset=slot.offset + 4096) if isinstance(slot, ArenaSlot) else slot
        for slot in node.meta["arena_slots"]
    )


@fault("push", "communicated|no longer computes")
def peer_reduction_by_another_operation(step: StepGraph) -> None:
    start = next(node for node in peer_starts(step) if node.target.kind == "reduce_scatter")  # type: ignore
    other = "sum" if start.target.op == "avg" else "avg"  # type: ignore
    start.target = dataclasses.replace(start.target, op=other)  # type: ignore


@fault("push", "all_reduce is communicated 0 times, not 1")
def norm_without_one_gradient(step: StepGraph) -> None:
    norm = next(node for node in step.graph.nodes if type(node.target).__name__ == "NormOfSquares")
    norm.args = (norm.args[0][:-1], *norm.args[1:])  # type: ignore[index]


@fault("library", "no longer computes")
def update_with_another_gradient(step: StepGraph) -> None:
    update = next(node for node in step.graph.nodes if getattr(node.target, "updated", ()))
    lists = list(update.args)
    at = next(n for n, each in enumerate(lists) if isinstance(each, list) and len(each) > 1 and each[0] is not each[1])
    first, second, *others = lists[at]  # type: ignore[misc]
    lists[at] = [second, first, *others]
    update.args = tuple(lists)


@pytest.mark.fake
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(cases: dict[str, Case], name: str) -> None:
    where, message, plant = FAULTS[name]
    step = cases[where].transported.copy()
    cases[where].checks.check(step, "applying transports")
    plant(step)
    with pytest.raises(errors.MalformedSchedule, match=message) as caught:
        cases[where].checks.check(step, "a planted fault")
    assert "malformed after a planted fault" in str(caught.value)
    assert "-->" in str(caught.value)  # the neighbourhood, with the node


@pytest.mark.fake
@pytest.mark.parametrize("where", ["hand", "library", "push", "copies", "alone"])
def test_a_peak_above_the_limit_or_the_prediction_is_found(cases: dict[str, Case], where: str) -> None:
    checks, step = cases[where].checks, cases[where].transported
    peak = cases[where].found.simulation.peak
    checks.check(step, "applying transports", limit=peak, predicted_peak=peak)
    with pytest.raises(errors.MalformedSchedule, match="1 more than the limit"):
        checks.check(step, "applying transports", limit=peak - 1)
    with pytest.raises(errors.MalformedSchedule, match=f"{peak - 512:,} were predicted"):
        checks.check(step, "applying transports", predicted_peak=peak - 512)


@pytest.mark.fake
def test_the_cases_have_what_faults_are_planted_in(cases: dict[str, Case]) -> None:
    kinds = {where: {node.target.kind for node in peer_starts(cases[where].transported)} for where in cases}  # type: ignore
    assert kinds["push"] == kinds["copies"] == {"all_gather", "reduce_scatter"}
    assert not kinds["library"]
    assert buckets(cases["library"].found.step)
    assert all(is_collective(node) for node in buckets(cases["hand"].found.step))
    assert len(FAULTS) > 30
    assert operator.getitem in {user.target for user in buckets(cases["hand"].found.step)[0].users}


@pytest.mark.fake
def test_verifiers_run_where_the_knob_asks_for_them(cases: dict[str, Case]) -> None:
    with knobs.override(verify_graphs=False):
        assert verifier(cases["hand"].found.step) is None
    with knobs.override(verify_graphs=True):
        assert verifier(cases["hand"].found.step) is not None
