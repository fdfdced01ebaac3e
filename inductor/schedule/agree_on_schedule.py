"""One schedule on all ranks: rank 0 decides, the other ranks apply its decisions.

Costs follow from sizes, and batches and uneven shards have other sizes on other ranks. Ranks that decided on their own
could issue their collectives in different orders and would hang. Ranks communicate through the store of the process
group, never through a collective.

Before anything is decided, ranks compare the structure of their graphs: decisions are positions in a graph and are
valid only for an equal graph. If structures differ, because kernels were fused differently for different sizes,
collectives are issued one by one in the order in which they were captured, which is the same on all ranks.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from weft import errors, knobs, torch_adapter
from weft.capture.agreement.store_rendezvous import StoreRendezvous
from weft.capture.fake.fake_world import current_fake_world
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import group_of, is_collective
from weft.inductor.cost import cluster_file
from weft.inductor.cost.cluster import Cluster
from weft.inductor.graph.escapes import escaping
from weft.inductor.graph.node_order import put, reorder, together
from weft.inductor.graph.pass_runner import PassRunner, changes_bits, keeps_bits, required
from weft.inductor.schedule.decisions import Decisions, schedule_passes, structure
from weft.inductor.schedule.planner import follow, schedule
from weft.inductor.schedule.returned_numbers import without_returned_numbers
from weft.inductor.schedule.schedule_result import Schedule
from weft.inductor.schedule.verify import verifier
from weft.inductor.transports.apply_transports import unreachable, use_transports
from weft.inductor.transports.peer_calls import is_held
from weft.inductor.transports.rendezvous import peer_rendezvous
from weft.rank_watch import listed
from weft.transport_rows import LIBRARY

log = logging.getLogger(__name__)

Node = torch.fx.Node


def scheduled(
    step: StepGraph,
    cluster: Cluster,
    memory_limit: int | None = None,
    *,
    keep_bits: bool = False,
    runner: PassRunner | None = None,
) -> tuple[StepGraph, Schedule | None]:
    """The step in the order of issue that all ranks share, with its transports; and its schedule, None if the ranks'
    kernels differ. ``step`` is not changed.

    All ranks must call it for the same steps in the same order. They communicate over the store. Peer access is tested
    only after a schedule wants it. If some ranks lack it, another schedule is made without those groups.

    Args:
        cluster, memory_limit, keep_bits: see :func:`weft.inductor.schedule.planner.schedule`.
        runner: runs the passes that apply the schedule.

    Raises, on every rank:
        MemoryLimitUnreachable: no schedule of rank 0's step fits ``memory_limit``.
        ScheduleTimeout, ScheduleLost, StoreLost: see :func:`decided`.
    """
    whole = without_returned_numbers(step)
    step = whole.step
    verify = None if (checks := verifier(step)) is None else checks.check
    runner, unreachable_groups = runner or PassRunner(), known_unreachable()
    # All ranks add the same groups, and each round adds at least one, so the loop ends on all ranks alike.
    while True:
        chosen = _common_schedule(step, cluster, memory_limit, keep_bits, unreachable_groups)
        if chosen is None:
            base = runner.run("schedule", step.copy(), [in_captured_order], verify)
            break
        # Every rank runs the graph that the same passes make from the decisions. Rank 0 does not run its planner's
        # graph: it applies its decisions while the other ranks do.
        if chosen.replayed:
            base = chosen.step.copy()
        else:
            base = runner.run("schedule", step.copy(), schedule_passes(chosen.decisions), verify)
        # A failed probe costs one more schedule, once per process group and process. Probing first would make ranks
        # wait for each other before any of them knows that it needs the answer.
        more = find_unreachable_groups(chosen.step)
        if not more:
            break
        unreachable_groups += more
    # The arena is laid out for the order of issue, which no later pass may change.
    found = runner.run("schedule", base, [apply_transports], verify)
    return whole.joined(found), chosen


def _common_schedule(
    step: StepGraph, cluster: Cluster, memory_limit: int | None, keep_bits: bool, unreachable_groups: list[str]
) -> Schedule | None:
    """The schedule that rank 0 makes; None if the ranks' kernels differ."""
    made: list[Schedule] = []

    def decide(held: Collection[int]) -> Decisions:
        # Another rank may return a result that this one does not. A transport that leaves it in the arena would be
        # supported here and not there.
        for at, node in enumerate(step.graph.nodes):
            if at in held:
                node.meta["held"] = True
        made.append(schedule(step, cluster, memory_limit, keep_bits=keep_bits, unreachable_groups=unreachable_groups))
        return made[0].decisions

    escaped = escaping(step)
    held = [at for at, node in enumerate(step.graph.nodes) if is_collective(node) and is_held(node, escaped)]
    decisions = agree_on_decisions(structure(step), decide, held)
    if decisions is None:
        return None
    # Behind the decision, so that a rank that has failed does not leave the others here without an answer.
    cluster = cluster_of_rank_0(cluster)
    return made[0] if made else follow(step, cluster, decisions, memory_limit)


def cluster_of_rank_0(cluster: Cluster) -> Cluster:
    """The cluster description of rank 0, on which the decisions are based. Other machines can have calibrated their
    own."""
    # Predictions in reports only. With its own description, a rank would explain rank 0's decisions by other numbers
    # than those that made them.
    own = cluster_file.text(cluster)
    text = from_rank_0("cluster", lambda: own)
    return cluster if text == own else cluster_file.parse(text, Cluster, "the description of rank 0")


# By default group: groups in which some rank lacks peer access. All ranks hold the same list, because it is part of
# what the schedule depends on.
_unreachable_groups: WeakKeyDictionary[Any, list[str]] = WeakKeyDictionary()


def known_unreachable() -> list[str]:
    """The groups of which it is known that some rank lacks peer access. The list that is kept: what is appended is
    known from then on."""
    return _unreachable_groups.setdefault(dist.group.WORLD, []) if _has_peers() else []


def from_rank_0(about: str, make: Callable[[], str]) -> str:
    """The text that ``make`` returns on rank 0, on all ranks. All ranks must call this in the same order.

    Raises:
        errors.PeersUnreachable: it did not arrive within ``knobs.peer_timeout_s`` seconds.
    """
    if not _has_peers():
        return make()
    rendezvous = _world_rendezvous(about)
    return rendezvous.broadcast(make() if rendezvous.at == 0 else "")


def _has_peers() -> bool:
    return torch_adapter.world_size() > 1 and current_fake_world() is None


def _world_rendezvous(about: str) -> StoreRendezvous:
    """A rendezvous of all ranks."""
    return peer_rendezvous("the world", torch_adapter.world_group_name(), about)


def find_unreachable_groups(step: StepGraph, also: Sequence[str] = ()) -> list[str]:
    """The groups in which some rank lacks peer access, of those with a symmetric-memory transport in a schedule and of
    those that are named ``also``.

    All ranks must call this with the same schedule, and all get the same result.
    """
    carried = lambda node: node.meta.get("transport", LIBRARY) != LIBRARY or group_of(node) in also
    wanted = {group_of(node): node for node in step.collectives() if carried(node)}
    if not wanted or not _has_peers():
        return []
    # In the order of the graph, the same on all ranks: `unreachable` is a rendezvous of the group's ranks.
    unreachable_here = {group: why for group, node in wanted.items() if (why := unreachable(step, node)) is not None}
    for group, why in unreachable_here.items():
        first = torch_adapter.group_ranks(step.groups[group])[0]
        level = logging.WARNING if dist.get_rank() == first else logging.DEBUG  # all of them have found the same
        log.log(level, "%s carries all collectives over %s, as with WEFT_TRANSPORTS=nccl: %s", LIBRARY, group, why)
    # A failure can be local to one rank: all ranks must drop the group, or they would run different collectives.
    every = [json.loads(text) for text in _world_rendezvous("schedule").gather(json.dumps([*unreachable_here]))]
    return [group for group in wanted if any(group in one for one in every)]


@changes_bits("transports over peers add what the ranks have in the order of the ranks, in float32")
def apply_transports(step: StepGraph) -> StepGraph:
    """Replace every collective by a call of its transport. Changes ``step``.

    In a fake world it does nothing: there are no peers, and nothing runs.
    """
    if current_fake_world() is None:
        use_transports(step)
    return step


@required
@keeps_bits
def in_captured_order(step: StepGraph) -> StepGraph:
    """Reorder ``step`` so that its collectives are issued in the captured order. Changes ``step``.

    Raises:
        ScheduleMismatch: no such order exists, because a kernel was fused from nodes before and after a collective.
    """
    waiting = deque(sorted(step.collectives(), key=lambda start: start.meta["capture_order"]))
    order: dict[Node, None] = {}
    for node in step.graph.nodes:
        # In front of a collective come those that were captured before it, each behind what it needs.
        while waiting and is_collective(node) and node not in order:
            put(waiting.popleft(), order)
        put(node, order)
    # A kernel that was fused across a collective can need a later one before it. `put` then pulls that one ahead.
    issued = [node.meta["capture_order"] for node in order if is_collective(node)]
    if issued != sorted(issued):
        raise errors.ScheduleMismatch
    reorder(step, together(order))
    return step


def agree_on_decisions(
    own: str, decide: Callable[[Collection[int]], Decisions], held: Collection[int] = ()
) -> Decisions | None:
    """The decisions of rank 0, on every rank; None on all ranks if the structures of their graphs differ.

    All ranks of the default group must call this for the same steps in the same order. In a fake world, and at world
    size 1, a rank decides for itself.

    Args:
        own: the structure of this rank's graph, see :func:`weft.inductor.schedule.decisions.structure`.
        decide: called on rank 0 only, with the positions that any rank holds.
        held: positions of the collectives of which a result needs memory of its own on this rank.

    Raises, on every rank:
        errors.ScheduleTimeout: a rank did not arrive within ``knobs.peer_timeout_s`` seconds.
        errors.StoreLost: the process that hosts the store is gone.
        errors.MemoryLimitUnreachable: ``decide`` raised it.
        errors.ScheduleLost: ``decide`` raised another error; rank 0 raises that one.
    """
    if torch_adapter.world_size() == 1 or current_fake_world() is not None:
        return decide(held)
    # Three messages per rank, whatever the world size: each posts the structure of its graph; rank 0 reads all of them,
    # decides, and posts one reply; each reads the reply. Nobody decides before all have arrived, and no collective is
    # involved: that would hang where ranks differ.
    rank, started = dist.get_rank(), time.monotonic()

    def late(keys: list[str]) -> Exception:
        missing = [int(key.partition("/")[2] or 0) for key in keys]  # what is not a rank's structure is rank 0's
        return errors.ScheduleTimeout(rank, listed(missing), knobs.peer_timeout_s)

    ranks = range(dist.get_world_size())
    rendezvous = StoreRendezvous("schedule", ranks, rank, knobs.peer_timeout_s, late)
    # Rank 0 alone reads all structures, and they are hashes: the store serves one message per rank and answer, not one
    # per pair of ranks.
    rendezvous.post(f"structure/{rank}", json.dumps([own, [*held]]))
    if rank == 0:
        decisions = _lead(rendezvous, decide)
    else:
        # The timeout covers rank 0's search as well.
        decisions = _follow(json.loads(rendezvous.read_all(["decisions"])[0]))
    rendezvous.leave([f"structure/{rank}"], ["decisions"])
    log.debug("schedule %d: decided after %.2f s", rendezvous.number, time.monotonic() - started)
    return decisions


def _lead(rendezvous: StoreRendezvous, decide: Callable[[Collection[int]], Decisions]) -> Decisions | None:
    # Posted in `finally`, whatever happens: ranks that get no answer would wait until the timeout.
    reply: dict[str, Any] = {"failed": "rank 0 stopped"}
    try:
        # Before the search, which can take seconds and would be in vain.
        posted = [json.loads(text) for text in rendezvous.read_all([f"structure/{rank}" for rank in rendezvous.ranks])]
        structures = [own for own, _ in posted]
        if len(set(structures)) > 1:
            reply = {"differ": True}
            log.warning("%s", _difference(structures))
            return None
        decisions = decide(frozenset[int]().union(*(held for _, held in posted)))
        reply = {"decisions": decisions.text()}
        return decisions
    except errors.MemoryLimitUnreachable as error:
        reply = _limit_reply(error)
        raise
    except Exception as error:
        reply = {"failed": f"{type(error).__name__}: {error}"}
        raise
    finally:
        rendezvous.post("decisions", json.dumps(reply))


def _limit_reply(error: errors.MemoryLimitUnreachable) -> dict[str, Any]:
    # The fields of the error, in the order of its constructor, so that every rank can raise the same one.
    return {"limit_error": [error.limit, error.peak, error.task, error.inputs, error.held, error.certain]}


def _follow(reply: dict[str, Any]) -> Decisions | None:
    if "limit_error" in reply:
        raise errors.MemoryLimitUnreachable(*reply["limit_error"])
    if "failed" in reply:
        raise errors.ScheduleLost(reply["failed"])
    return Decisions.read(reply["decisions"]) if "decisions" in reply else None


def _difference(structures: list[str]) -> str:
    most_common = max(dict.fromkeys(structures), key=structures.count)
    others = [rank for rank, own in enumerate(structures) if own != most_common]
    return (
        f"the kernels of {listed(others)} are others than those of the rest, since sizes differ between ranks, or what "
        "a rank computes or prints alone: collectives are issued in the order of the step, one by one, and overlap "
        "less. Pad batches to one size, mark the size that differs with weft.mark_dynamic, and print on all ranks or "
        "after the step"
    )
