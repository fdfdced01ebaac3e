"""Collectives of one kind merged into coalesced calls, across modules.

A wrapper issues one collective a parameter. Each costs a latency on the wire and a launch on the host, so what is
needed, or ready, at about the same time goes together: as torch's coalesced operations, which copy nothing into a flat
buffer and leave every tensor one of its own.

What a larger bucket loses is time: its first member is there, or can go, only with its last. Which members share one
is decided on their lane, which carries one call at a time, by dynamic programming over the places to cut: what matters
is first that no call ends later than it has to after what it gives is needed, then the time of the lane. For
reductions, in the order in which they are ready, this is the problem of MG-WFBP (S. Shi, X. Chu, B. Li, "MG-WFBP:
Efficient Data Communication for Distributed Synchronous SGD Algorithms", INFOCOM 2019); for gathers of shards it is the
same problem read from the end of the step to its beginning, since a gather can be as early as a reduction can be late.
How large a bucket may get at most is the schedule's to choose, see :func:`usual_size`.

Gathers keep their bits. A library may sum more than two numbers in another order for tensors that it is given together.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from weft import torch_adapter
from weft.capture.graph import WAIT, Role, StepGraph, group_of, is_effect, is_wait
from weft.inductor.passes.order import put, reorder, together
from weft.inductor.passes.wire_dtype import WIDENING, WIDENING_COALESCED
from weft.inductor.runtime.geometry import looks_into

Node = torch.fx.Node

_c10d = torch.ops._c10d_functional
COALESCED = {
    _c10d.all_gather_into_tensor.default: _c10d.all_gather_into_tensor_coalesced.default,
    _c10d.reduce_scatter_tensor.default: _c10d.reduce_scatter_tensor_coalesced.default,
    _c10d.all_reduce.default: _c10d.all_reduce_coalesced.default,
    WIDENING: WIDENING_COALESCED,
}
"""Operations on one tensor, and what does the same to several."""
_GATHER = _c10d.all_gather_into_tensor.default

Price = Callable[[int, int], float]

# Members that a bucket may have, and ways to cut that are followed: bounds on the time it takes to choose.
_MEMBERS = 32
_WAYS = 4
_IN_PLACE = {_c10d.all_reduce_.default: _c10d.all_reduce_coalesced_.default}


@dataclass(frozen=True, eq=False)
class Member:
    """A collective that may share a call with others.

    Attributes:
        start: its node.
        at: where it stands in the order of the graph.
        made: from which place on all that it takes is there; a wrapper may let what a block makes wait for its end.
        until: a call that it is part of must stand before this place: there stands the first thing that needs its
            result and cannot move.
        use: where its result is first computed with.
        early: whether it needs no more than shards, so that it may be started anywhere.
    """

    start: Node
    at: int
    made: int
    until: int
    use: int
    early: bool


def sequences(step: StepGraph, *, keep_bits: bool = False) -> list[list[Member]]:
    """The collectives of ``step`` that calls may share: lists of one operation, group and dtype, those that may start
    anywhere in the order of their first use, the others in that in which what they take is made.

    Args:
        keep_bits: leave out reductions over more than two ranks.
    """
    nodes = list(step.graph.nodes)
    place = {node: at for at, node in enumerate(nodes)}
    until, early = _untils(nodes), _from_shards(step)
    found: dict[tuple[Any, ...], list[Member]] = {}
    for at, node in enumerate(nodes):
        if node.target in COALESCED and all(user.target is WAIT for user in node.users):
            if (
                keep_bits
                and node.target is not _GATHER
                and len(torch_adapter.group_ranks(step.groups[group_of(node)])) > 2
            ):
                continue
            is_early = node.all_input_nodes[0] in early
            member = Member(node, at, _made(node, place), until[node], _first_use(node, place), is_early)
            found.setdefault((_kind(node), is_early), []).append(member)
    return [sorted(of, key=lambda m: (m.use if m.early else m.made, m.at)) for of in found.values()]


def partition(
    members: Sequence[Member], clock: Sequence[float], sizes: Sequence[int], price: Price, most: float
) -> list[list[Member]]:
    """Cut one of :func:`sequences` into buckets, each in order: those that are least late, and of these the ones that
    take the lane least. Takes time linear in the members.

    Args:
        clock: by position in the graph, when the compute stream comes there if it never stands (s).
        sizes: bytes of the members.
        price: seconds of a call, of its bytes and its number of members.
        most: bytes that a bucket may have where it is more than one collective.
    """
    early = members[0].early
    if early:  # read backwards, a gather is ready where it is needed, and may end as late as the step begins
        members, sizes = members[::-1], sizes[::-1]
    ready = [-clock[m.use] if early else clock[m.made] for m in members]
    due = [0.0 if early else clock[m.use] for m in members]
    found = [[_Cut(0.0, -math.inf, 0.0, 0, None)]]  # for the first so many members, ways to cut them
    for end in range(1, len(members) + 1):
        ways = []
        for begin in _begins(members, sizes, end, most):
            seconds = price(sum(sizes[begin:end]), end - begin)
            soonest, last = min(due[begin:end]), max(ready[begin:end])
            for before in found[begin]:
                ends = max(before.ends, last) + seconds
                ways.append(_Cut(max(before.late, ends - soonest), ends, before.seconds + seconds, end, before))
        found.append(_best(ways))
    cut: _Cut | None = min(found[-1], key=lambda way: (way.late, way.seconds, way.ends))
    buckets = []
    while cut is not None and cut.before is not None:
        bucket = list(members[cut.before.count : cut.count])
        buckets.append(bucket[::-1] if early else bucket)
        cut = cut.before
    return buckets if early else buckets[::-1]


def usual_size(sizes: Sequence[int], price: Price) -> float:
    """Bytes of a bucket at which the time of one call, which nothing hides at the beginning or the end of a step, and
    what calls of that size lose to their latency have the smallest sum: the square root of the bytes of all members,
    the latency and the bandwidth.

    Args:
        sizes, price: as for :func:`partition`.
    """
    total, latency = sum(sizes), price(0, 1)
    wire = price(total, 1) - latency
    return total * math.sqrt(latency / wire) if wire > 0 else math.inf


def join(step: StepGraph, buckets: Iterable[Sequence[Member]]) -> StepGraph:
    """Let the members of each bucket go as one call. Changes ``step``.

    The call stands where its first member stood, if they are ``early``, else where its last did. Waits for its results
    stand together.
    """
    late: set[Node] = set()
    for bucket in buckets:
        first, last = min(bucket, key=lambda m: m.at).start, max(bucket, key=lambda m: m.at).start
        if len(bucket) > 1:
            with step.graph.inserting_before(first if bucket[0].early else last):
                call = _coalesced(step.graph, [m.start for m in bucket])
            if not bucket[0].early:
                late.add(call)
    reorder(step, together(_settled(step, late)))
    return step


# ---- what may be merged


class _Cut(NamedTuple):
    """A way to cut the first members of a sequence.

    Attributes:
        late: the most seconds by which a call ends after one of its members is due.
        ends: when the lane has carried them all.
        seconds: how long it took.
        count: of members.
        before: the same without the last bucket.
    """

    late: float
    ends: float
    seconds: float
    count: int
    before: _Cut | None


def _begins(members: Sequence[Member], sizes: Sequence[int], end: int, most: float) -> Iterator[int]:
    """Where a bucket that ends with member number ``end - 1`` may begin.

    Between members that need more than shards nothing may stand that cannot move and needs one of them. Then every call
    comes after those that it needs, and all have an order.
    """
    total, until, last = 0, math.inf, -1
    for begin in range(end - 1, max(end - 1 - _MEMBERS, -1), -1):
        member = members[begin]
        total, until, last = total + sizes[begin], min(until, member.until), max(last, member.at)
        if begin < end - 1 and (total > most or (not member.early and last >= until)):
            return
        yield begin


def _best(ways: list[_Cut]) -> list[_Cut]:
    """Those that none is better than in all respects, if they are few; else of the best in each respect the first."""
    kept: list[_Cut] = []
    for way in sorted(ways, key=lambda way: (way.late, way.ends, way.seconds)):
        if all(way.ends < other.ends or way.seconds < other.seconds for other in kept):
            kept.append(way)
    if len(kept) > 2 * _WAYS:
        kept = kept[:_WAYS] + sorted(kept[_WAYS:], key=lambda way: (way.late, way.seconds))[:_WAYS]
    return kept


def _kind(node: Node) -> tuple[Any, ...]:
    """What members of one call have in common."""
    given, *others = node.args
    return node.target, given.meta["val"].dtype, *others, *node.kwargs.items(), node.meta.get("inplace")  # type: ignore


def _untils(nodes: list[Node]) -> dict[Node, int]:
    """For each node, where the first thing stands that needs it and cannot move: a collective or an effect."""
    place = {node: at for at, node in enumerate(nodes)}
    until: dict[Node, int] = {}
    for node in reversed(nodes):
        users = (place[user] if _is_anchored(user) else until[user] for user in node.users)
        until[node] = min(users, default=len(nodes))
    return until


def _from_shards(step: StepGraph) -> set[Node]:
    """What is computed from the model alone: no batch, no collective, nothing random goes into it."""
    model = {entry.name for entry in step.inputs if entry.role in (Role.PARAMETER, Role.BUFFER)}
    found: set[Node] = set()
    for node in step.graph.nodes:
        if node.op == "placeholder":
            early = node.name in model
        else:
            early = not _is_anchored(node) and all(used in found for used in node.all_input_nodes)
        if early:
            found.add(node)
    return found


def _is_anchored(node: Node) -> bool:
    return is_effect(node) and node.op == "call_function" and not is_wait(node)


def _made(start: Node, place: dict[Node, int]) -> int:
    """The place behind the last thing that computes what a collective takes; views of it do not count."""
    shown = list(start.all_input_nodes)
    for node in shown:
        if _shows(node):
            shown += node.all_input_nodes
    return max((place[node] + 1 for node in shown if not _shows(node)), default=0)


def _shows(node: Node) -> bool:
    return looks_into(node) and not is_wait(node)


def _first_use(start: Node, place: dict[Node, int]) -> int:
    """Where something computes with the result of a collective; views of it do not count."""
    views = list(start.users)
    first = len(place) - 1
    for view in views:
        for user in view.users:
            if looks_into(user):
                views.append(user)
            else:
                first = min(first, place[user])
    return first


# ---- the change of the graph


def _coalesced(graph: torch.fx.Graph, starts: list[Node]) -> Node:
    """One call in the place of ``starts``, which are erased."""
    target: Any = starts[0].target
    call = graph.call_function(COALESCED[target], ([s.args[0] for s in starts], *starts[0].args[1:]), starts[0].kwargs)
    call.meta = {**starts[0].meta, "val": [start.meta["val"] for start in starts]}
    call.meta["members"] = tuple(name for start in starts for name in start.meta.get("members", ()))
    call.meta["again"] = sum(start.meta.get("again", 0) for start in starts)
    if "inplace" in call.meta:
        call.meta["inplace"] = _IN_PLACE[call.meta["inplace"]]
    at = call
    for index, start in enumerate(starts):
        with graph.inserting_after(at):
            at = graph.call_function(operator.getitem, (call, index))
        at.meta = {key: value for key, value in start.meta.items() if key != "inplace"}
        start.replace_all_uses_with(at)
        graph.erase_node(start)
    return call


def _settled(step: StepGraph, late: set[Node]) -> list[Node]:
    """The order of the graph, but for what needs a call of ``late``, which goes behind that, and what the other calls
    need, which comes before them."""
    order: dict[Node, None] = {}
    deferred: dict[Node, None] = {}
    missing = late.union(*(call.users for call in late))

    def is_blocked(node: Node) -> bool:
        return any(used in missing or used in deferred for used in node.all_input_nodes)

    for node in step.graph.nodes:
        if node in order:
            continue
        if is_blocked(node):
            deferred[node] = None
            continue
        put(node, order)
        if node in late:
            missing.difference_update((node, *node.users))
            for each in list(deferred):
                if not is_blocked(each):
                    del deferred[each]
                    put(each, order)
    return list(order)
