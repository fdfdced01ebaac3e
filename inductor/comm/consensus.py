"""One schedule on all ranks: rank 0 decides, the others do as it says.

Costs follow from sizes, and batches and uneven shards have sizes of their own on every rank, so ranks that decided by
themselves could decide differently, and their collectives would not meet. Ranks talk over the store of the process
group, never through a collective. They say what structure their graphs have before anything is decided: decisions are
positions in a graph, and mean the same only where that is the same. Where it is not, since kernels were fused
differently over different sizes, collectives are issued one by one in the order they were captured in, which is the
same on all ranks.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from weft import errors, knobs, torch_adapter
from weft.capture.agreement import listed
from weft.capture.fake_world import current_fake_world
from weft.capture.graph import StepGraph, group_of, is_collective
from weft.inductor.comm import cluster_file
from weft.inductor.comm.carry import carry, unreachable
from weft.inductor.comm.choose import LIBRARY
from weft.inductor.comm.cluster import Cluster
from weft.inductor.comm.decisions import Decisions, structure
from weft.inductor.comm.lanes import give_lanes
from weft.inductor.comm.meeting import Meeting
from weft.inductor.comm.schedule import Schedule, follow, schedule, tell
from weft.inductor.graph_cache import remembered
from weft.inductor.passes.order import put, reorder, together

log = logging.getLogger(__name__)

Node = torch.fx.Node


def scheduled(
    step: StepGraph, cluster: Cluster, memory_limit: int | None = None, *, keep_bits: bool = False
) -> tuple[StepGraph, Schedule | None]:
    """The step in the order of issue that all ranks have, each lane on a communicator of its own; and its schedule,
    None where ranks run other kernels than each other. ``step`` stays as it is.

    Collective, but not through collectives: all ranks call it for the same steps in the same order. Whether ranks can
    share memory is asked once a schedule wants it; where some cannot, another is made.

    Args:
        cluster, memory_limit, keep_bits: see :func:`weft.inductor.comm.schedule.schedule`.

    Raises, on every rank:
        MemoryLimitUnreachable: no schedule of rank 0's step fits ``memory_limit``.
        ScheduleTimeout, ScheduleLost, StoreLost: see :func:`decided`.
    """
    apart = _apart.setdefault(dist.group.WORLD, []) if _has_peers() else []
    while (found := _agreed(step, cluster, memory_limit, keep_bits, apart)) is not None:
        more = _found_apart(found.step)
        if not more:
            return give_lanes(_carried(found.step.copy())), found
        apart += more
    return give_lanes(_carried(in_captured_order(step))), None


def _agreed(
    step: StepGraph, cluster: Cluster, memory_limit: int | None, keep_bits: bool, apart: list[str]
) -> Schedule | None:
    """The schedule that rank 0 makes, or has made before; None where ranks run other kernels than each other."""
    made: list[Schedule] = []
    own = structure(step)

    def make() -> str:
        try:
            made.append(schedule(step, cluster, memory_limit, keep_bits=keep_bits, apart=apart))
        except errors.MemoryLimitUnreachable as error:
            return json.dumps(_unreachable(error))
        return json.dumps({"decisions": made[0].decisions.text(), "warnings": made[0].warnings})

    def decide() -> Decisions:
        ranks = {name: torch_adapter.group_ranks(group) for name, group in sorted(step.groups.items())}
        asked = [cluster_file.text(cluster), memory_limit, keep_bits, ranks, apart]
        said = json.loads(remembered(step, own + json.dumps(asked), make))
        decisions = _follow(said)
        assert decisions is not None
        if not made:
            tell(said["warnings"])
            made.append(follow(step, cluster, decisions, memory_limit))
        return decisions

    decisions = decided(own, decide)
    if decisions is None:
        return None
    cluster = _of_rank_0(cluster)
    return made[0] if made else follow(step, cluster, decisions, memory_limit)


def _of_rank_0(cluster: Cluster) -> Cluster:
    """The description that the decisions were made by: machines may have calibrated by themselves."""
    own = cluster_file.text(cluster)
    text = of_first_rank("cluster", lambda: own)
    return cluster if text == own else cluster_file.parse(text, Cluster, "the description of rank 0")


# Groups of which some rank's cannot share memory, as all ranks have found out.
_apart: WeakKeyDictionary[Any, list[str]] = WeakKeyDictionary()


def of_first_rank(about: str, make: Callable[[], str]) -> str:
    """What rank 0 makes, on all ranks, which call this in the same order.

    Raises errors.PeersUnreachable where it does not come within ``knobs.peer_timeout_s``.
    """
    if not _has_peers():
        return make()
    meeting = _meeting(about)
    return meeting.lead(make() if meeting.rank == 0 else "")


def _has_peers() -> bool:
    return torch_adapter.world_size() > 1 and current_fake_world() is None


def _meeting(about: str) -> Meeting:
    """Of all ranks."""
    return Meeting("the world", torch_adapter.world_group_name(), about)


def _found_apart(step: StepGraph) -> list[str]:
    """The groups over which something in a schedule runs over memory that their ranks, on some rank, cannot share.

    Every rank calls this with the same schedule, and all get the same.
    """
    wanted = {group_of(node): node for node in step.collectives() if node.meta.get("transport", LIBRARY) != LIBRARY}
    if not wanted or not _has_peers():
        return []
    found = {group: why for group, node in wanted.items() if (why := unreachable(step, node)) is not None}
    for group, why in found.items():
        first = torch_adapter.group_ranks(step.groups[group])[0]
        level = logging.WARNING if dist.get_rank() == first else logging.DEBUG  # all of them have found the same
        log.log(level, "%s carries all collectives over %s, as with WEFT_TRANSPORTS=nccl: %s", LIBRARY, group, why)
    every = [json.loads(text) for text in _meeting("schedule").exchange(json.dumps([*found]))]
    return [group for group in wanted if any(group in one for one in every)]


def _carried(step: StepGraph) -> StepGraph:
    """``step`` with every collective as a call of its transport. Changes ``step``.

    In a fake world there are no peers to share memory with, and nothing runs.
    """
    if current_fake_world() is None:
        carry(step, {node: node.meta.get("transport", LIBRARY) for node in step.collectives()})
    return step


def number(step: StepGraph) -> None:
    """Number the collectives of a captured step, in ``meta["number"]``: what :func:`in_captured_order` goes by."""
    for at, start in enumerate(step.collectives()):
        start.meta["number"] = at


def in_captured_order(step: StepGraph) -> StepGraph:
    """A copy of ``step`` that issues its collectives in the order they were captured in.

    Raises:
        ScheduleMismatch: a kernel, fused from what stood before and after a collective, allows no such order.
    """
    step = step.copy()
    waiting = deque(sorted(step.collectives(), key=lambda start: start.meta["number"]))
    order: dict[Node, None] = {}
    for node in step.graph.nodes:
        while waiting and is_collective(node) and node not in order:
            put(waiting.popleft(), order)
        put(node, order)
    issued = [node.meta["number"] for node in order if is_collective(node)]
    if issued != sorted(issued):
        raise errors.ScheduleMismatch
    reorder(step, together(order))
    return step.check()


def decided(own: str, decide: Callable[[], Decisions]) -> Decisions | None:
    """What rank 0 decides, on every rank; None on all where the structures of their graphs differ.

    All ranks of the default group call this for the same steps in the same order. In a fake world, and alone, a rank
    decides for itself.

    Args:
        own: the structure of this rank's graph, see :func:`weft.inductor.comm.decisions.structure`.
        decide: called on rank 0 only.

    Raises, on every rank:
        errors.ScheduleTimeout: a rank did not come within ``knobs.schedule_timeout_s``.
        errors.StoreLost: the process that holds the store is gone.
        errors.MemoryLimitUnreachable: ``decide`` raised it.
        errors.ScheduleLost: ``decide`` raised something else, which rank 0 raises as it is.
    """
    if torch_adapter.world_size() == 1 or current_fake_world() is not None:
        return decide()
    rank, world = dist.get_rank(), dist.get_world_size()
    meetings = dist.PrefixStore("weft/schedule", torch_adapter.default_store())
    number = meetings.add(f"calls/{rank}", 1)
    store = dist.PrefixStore(str(number), meetings)
    started = time.monotonic()
    store.set(f"structure/{rank}", own)
    found = _lead(store, world, decide) if rank == 0 else _follow(json.loads(_read(store, ["decisions"], rank)[0]))
    store.delete_key(f"structure/{rank}")
    if store.add("left", 1) == world:
        store.delete_key("decisions")
        store.delete_key("left")
    log.debug("schedule %d: decided after %.2f s", number, time.monotonic() - started)
    return found


def _lead(store: dist.Store, world: int, decide: Callable[[], Decisions]) -> Decisions | None:
    said: dict[str, Any] = {"failed": "rank 0 stopped"}
    try:
        structures = _read(store, [f"structure/{rank}" for rank in range(world)], 0)
        if len(set(structures)) > 1:
            said = {"differ": True}
            log.warning("%s", _difference(structures))
            return None
        found = decide()
        said = {"decisions": found.text()}
        return found
    except errors.MemoryLimitUnreachable as error:
        said = _unreachable(error)
        raise
    except Exception as error:
        said = {"failed": f"{type(error).__name__}: {error}"}
        raise
    finally:
        store.set("decisions", json.dumps(said))


def _unreachable(error: errors.MemoryLimitUnreachable) -> dict[str, Any]:
    return {"unreachable": [error.limit, error.peak, error.task, error.inputs, error.held]}


def _follow(said: dict[str, Any]) -> Decisions | None:
    if "unreachable" in said:
        raise errors.MemoryLimitUnreachable(*said["unreachable"])
    if "failed" in said:
        raise errors.ScheduleLost(said["failed"])
    return Decisions.read(said["decisions"]) if "decisions" in said else None


def _read(store: dist.Store, keys: list[str], rank: int) -> list[str]:
    """The values of keys once all are set."""
    try:
        store.wait(keys, timedelta(seconds=knobs.schedule_timeout_s))
    except dist.DistNetworkError as error:
        raise errors.StoreLost("the schedule", rank) from error
    except RuntimeError as error:  # stores have several ways to say that time is up
        missing = [at for at, key in enumerate(keys) if not store.check([key])]
        if missing:
            raise errors.ScheduleTimeout(rank, listed(missing), knobs.schedule_timeout_s) from error
    return [store.get(key).decode() for key in keys]


def _difference(structures: list[str]) -> str:
    usual = max(dict.fromkeys(structures), key=structures.count)
    others = [rank for rank, found in enumerate(structures) if found != usual]
    return (
        f"the kernels of {listed(others)} are others than those of the rest, since sizes differ between ranks: "
        "collectives are issued in the order of the step, one by one, and overlap less. Pad batches to one size, or "
        "mark the size that differs with weft.mark_dynamic"
    )
