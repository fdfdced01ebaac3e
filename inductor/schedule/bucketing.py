"""Bucketing: collectives of one kind are merged into coalesced calls, across modules.

A wrapper issues one collective per parameter. Each costs a latency on the wire and a launch on the host. Collectives
whose operands are ready, or whose results are needed, at about the same time are therefore merged into one of torch's
coalesced operations, which copies nothing into a flat buffer and leaves every tensor its own memory.

A larger bucket costs time: it starts when its last operand is ready, and its first result is there only when all are.
Buckets are cut on a stream, which runs one call at a time, by dynamic programming over the places to cut. It minimises
first the largest lateness of a result, then the time on the stream. For reductions, in the order in which gradients
become ready, this is the problem of MG-WFBP (S. Shi, X. Chu, B. Li, "MG-WFBP: Efficient Data Communication for
Distributed Synchronous SGD Algorithms", INFOCOM 2019). A reduction cannot start before its gradient is ready, and is
due at its first use. An all-gather of parameters can start at any time before it is due. So these gathers are cut on
the reversed time axis; gathers of computed values are cut as reductions are. The planner chooses how large a bucket can
get, see :func:`balanced_bucket_bytes`.

Gathers keep their bits. A library may sum more than two numbers in another order when tensors are merged.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from weft import torch_adapter
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import WAIT, group_of, is_effect, is_wait
from weft.capture.node_meta import meta_of
from weft.capture.step_interface import Role
from weft.inductor.graph.aliasing import looks_into, readers_of, storages
from weft.inductor.graph.collectives import collective_op, reduction_of, single_calls
from weft.inductor.graph.node_order import put, reorder, together
from weft.inductor.schedule.reshard import writes_of

Node = torch.fx.Node

# Seconds of a call, from its bytes and its number of tensors.
Price = Callable[[int, int], float]

# Tensors in one bucket, and half of the partial cuts that dynamic programming keeps per position: bounds of its time.
# Choices.
_MAX_BUCKET_TENSORS = 32
_MAX_CUTS = 4


@dataclass(frozen=True, eq=False)
class BucketEntry:
    """A collective that can share a call with others. Positions are indices of nodes in the graph.

    Attributes:
        start: its node.
        position: of ``start``.
        ready_at: index after the last producer of its operand. This can be far before ``position``: a wrapper may issue
            the collectives of a block at its end.
        latest: a merged call must come before this position: that of the first node that needs its result and cannot
            move, or that writes to its operand. Infinity if there is none.
        first_use: position of the first computation with its result.
        depends_on_model_only: whether it depends on parameters and buffers only, so that it can be started anywhere.
    """

    start: Node
    position: int
    ready_at: int
    latest: float
    first_use: int
    depends_on_model_only: bool


def bucketable_sequences(step: StepGraph, *, keep_bits: bool = False) -> list[list[BucketEntry]]:
    """The collectives of ``step`` that calls can share: one list per operation, group, dtype, further arguments (such
    as the reduction) and in-place form; gathers that depend on the model only apart from the others.

    Collectives that depend on the model only can start anywhere, and are in the order of their first use. All others
    are in the order in which their operands are ready.

    Args:
        keep_bits: leave out reductions over more than two ranks, whose sums can have other bits in a merged call.
    """
    nodes = list(step.graph.nodes)
    place = {node: at for at, node in enumerate(nodes)}
    # Collectives count as effects here. Waits may move: they follow their collective.
    anchored = {node for node in nodes if node.op == "call_function" and is_effect(node) and not is_wait(node)}
    until, model_only, writes = _untils(place, anchored), _depends_on_model_only(step, anchored), writes_of(nodes)[1]
    sequences: dict[tuple[Any, ...], list[BucketEntry]] = {}
    for node in single_calls(step):
        at = place[node]
        if collective_op(node.target).coalesced and all(user.target is WAIT for user in node.users):  # type: ignore
            # The sum of two numbers does not depend on their order. Of more, a library adds in an order that depends on
            # the element's place in the buffer, which merging changes.
            if keep_bits and reduction_of(node) and len(torch_adapter.group_ranks(step.groups[group_of(node)])) > 2:
                continue
            # Part of the key below: in a bucket with a computed operand, a gather of a shard could no longer start
            # before that is computed.
            movable = node.all_input_nodes[0] in model_only
            # A write to the operand before the call has ended could not be in place.
            overwritten = (_first_after(at, writes.get(key, ())) for key in storages(node.all_input_nodes[0]))
            last = min([until[node], *overwritten])
            member = BucketEntry(node, at, _ready_at(node, place), last, _first_use(node, place), movable)
            sequences.setdefault((_kind(node), movable), []).append(member)
    return [
        # A bucket is a run of neighbours in this order. Members that are ready, or needed, at about the same time are
        # neighbours, which is what makes cutting one-dimensional.
        sorted(of, key=lambda m: (m.first_use if m.depends_on_model_only else m.ready_at, m.position))
        for of in sequences.values()
    ]


def cut_into_buckets(
    members: Sequence[BucketEntry], clock: Sequence[float], sizes: Sequence[int], price: Price, max_bytes: float
) -> list[list[BucketEntry]]:
    """Cut one of :func:`bucketable_sequences` into buckets, each in order, with little lateness; of those, with little
    time on the stream. Only the best few cuts of each prefix are kept, so that the time is linear in the members.

    Args:
        clock: by position in the graph, when the compute stream comes there if it never stalls (s).
        sizes: bytes of the members.
        price: of a call.
        max_bytes: largest bucket in bytes. A single collective can exceed it; with 0 none share a bucket.
    """
    # On the reversed time axis a gather is ready at its first use. All are due at time 0, the start of the step, so the
    # lateness is the exposed time there.
    is_reversed = members[0].depends_on_model_only
    if is_reversed:
        members, sizes = members[::-1], sizes[::-1]
    ready = [-clock[m.first_use] if is_reversed else clock[m.ready_at] for m in members]
    due = [0.0 if is_reversed else clock[m.first_use] for m in members]
    # cuts_of[n]: Pareto-optimal cuts of the first n members. One objective is not enough: a cut that ends sooner can
    # make a later bucket less late.
    # The first cut has lateness 0: ending before the due time counts as on time, not as a gain to be traded for more
    # calls.
    cuts_of = [[_Cut(0.0, -math.inf, 0.0, 0, None)]]
    for end in range(1, len(members) + 1):
        cuts: list[tuple[float, float, float, int, _Cut | None]] = []
        soonest, last = math.inf, -math.inf
        # At most `_MAX_BUCKET_TENSORS` beginnings with `2 * _MAX_CUTS` cuts each: a few hundred candidates per member.
        for begin, total in _begins(members, sizes, end, max_bytes):
            seconds = price(total, end - begin)
            # A bucket starts when its last member is ready and the stream is free; its first result is due soonest.
            soonest, last = min(soonest, due[begin]), max(last, ready[begin])
            for before in cuts_of[begin]:  # the innermost loop of the planner: no call of `max`
                latest, ended, spent, _, _ = before
                ends = (ended if ended > last else last) + seconds
                lateness = ends - soonest
                cuts.append((latest if latest > lateness else lateness, ends, spent + seconds, end, before))
        cuts_of.append(_best(cuts))
    # Among equally late cuts the stream's time decides: it is what the stream has left for other buckets of its group.
    cut: _Cut | None = min(cuts_of[-1], key=lambda candidate: (candidate.lateness, candidate.seconds, candidate.ends))
    buckets = []
    while cut is not None and cut.before is not None:
        bucket = list(members[cut.before.count : cut.count])
        buckets.append(bucket[::-1] if is_reversed else bucket)
        cut = cut.before
    return buckets if is_reversed else buckets[::-1]


def balanced_bucket_bytes(sizes: Sequence[int], price: Price) -> float:
    """The bucket size in bytes that balances two costs: the time of one call, which is exposed at the beginning or end
    of a step, and the latencies of all calls.

    With B bytes in all, a seconds of a call without bytes (the planner's price of it, which is more than the latency of
    the link) and bandwidth b, the sum s/b + a B/s is smallest at s = sqrt(a b B). At most B; infinity where bytes cost
    nothing.

    Args:
        sizes, price: as for :func:`cut_into_buckets`.
    """
    total, latency = sum(sizes), price(0, 1)
    wire = price(total, 1) - latency
    return total * min(math.sqrt(latency / wire), 1.0) if wire > 0 else math.inf


def merge_buckets(step: StepGraph, buckets: Iterable[Sequence[BucketEntry]]) -> StepGraph:
    """Merge the members of each bucket into one coalesced call. Changes ``step``.

    The call takes the place of its first member if they depend on the model only, otherwise of its last. The waits for
    its results are adjacent.
    """
    at_last_member: set[Node] = set()
    for bucket in buckets:
        first, last = min(bucket, key=lambda m: m.position).start, max(bucket, key=lambda m: m.position).start
        if len(bucket) > 1:
            # A gather of shards can move ahead with its operands, and the first member's readers need it there. A call
            # of computed operands can come no earlier than the last of them.
            with step.graph.inserting_before(first if bucket[0].depends_on_model_only else last):
                call = _coalesced(step.graph, [m.start for m in bucket])
            if not bucket[0].depends_on_model_only:
                at_last_member.add(call)
    reorder(step, together(_order_after_merge(step, at_last_member)))
    return step


# ---- the dynamic program


class _Cut(NamedTuple):
    """A partial solution: a cut of the first members of a sequence into buckets.

    Attributes:
        lateness: the largest of all calls, in seconds: by how much a call ends after one of its members is due.
        ends: when the stream has finished all calls (s).
        seconds: the sum of the times of all calls.
        count: number of members.
        before: the cut without the last bucket.
    """

    lateness: float
    ends: float
    seconds: float
    count: int
    before: _Cut | None


def _begins(
    members: Sequence[BucketEntry], sizes: Sequence[int], end: int, max_bytes: float
) -> Iterator[tuple[int, int]]:
    """The indices at which a bucket that ends with member ``end - 1`` can begin, from the last to the first; each with
    the bytes of the bucket.

    The merged call of computed operands takes the place of the last member. So no immovable node that needs a member
    can come before that place. Otherwise two calls could need each other, and the graph would have no order.
    """
    # `until` is the earliest bound of any member, `last` the place of the merged call.
    total, until, last = 0, math.inf, -1
    for begin in range(end - 1, max(end - 1 - _MAX_BUCKET_TENSORS, -1), -1):
        member = members[begin]
        total, until, last = total + sizes[begin], min(until, member.latest), max(last, member.position)
        # Larger buckets only get worse, so stop at the first that is not valid. One collective alone always is.
        if begin < end - 1 and (total > max_bytes or (not member.depends_on_model_only and last >= until)):
            return
        yield begin, total


def _best(cuts: Iterable[tuple[float, float, float, int, _Cut | None]]) -> list[_Cut]:
    """The Pareto-optimal ones of many cuts, given as plain tuples. If there are more than ``2 * _MAX_CUTS``: the first
    ``_MAX_CUTS`` by lateness, then end, and of the others the first ``_MAX_CUTS`` by lateness, then time on the
    stream."""
    kept: list[_Cut] = []
    # In ascending lateness, a cut is dominated if an earlier one is at least as good in both other respects. Those that
    # an even earlier one dominates need no comparison: `front` has the ends and the seconds of the others.
    front: list[tuple[float, float]] = []
    for cut in sorted(cuts, key=operator.itemgetter(0, 1, 2)):
        _, ends, seconds, *_ = cut
        for other_ends, other_seconds in front:
            if other_ends <= ends and other_seconds <= seconds:
                break
        else:
            kept.append(_Cut(*cut))
            front = [other for other in front if other[0] < ends or other[1] < seconds]
            front.append((ends, seconds))
    if len(kept) > 2 * _MAX_CUTS:
        kept = kept[:_MAX_CUTS] + sorted(kept[_MAX_CUTS:], key=lambda cut: (cut.lateness, cut.seconds))[:_MAX_CUTS]
    return kept


# ---- what may be merged


def _kind(node: Node) -> tuple[Any, ...]:
    """The key of collectives that can share a call: operation, dtype, group and all other arguments."""
    operand, *others = node.args
    # A call has one in-place form for all members: a bucket of both kinds would overwrite operands that are still read.
    return node.target, operand.meta["val"].dtype, *others, *node.kwargs.items(), node.meta.get("inplace")  # type: ignore


def _untils(place: dict[Node, int], anchored: set[Node]) -> dict[Node, int]:
    """By node, the position of the first ``anchored`` node that needs it, directly or not."""
    until: dict[Node, int] = {}
    for node in reversed(place):
        # Reverse order: the positions of all users are known. Other users can be moved behind the merged call, and only
        # what needs them in turn can forbid that.
        users = [place[user] if user in anchored else until[user] for user in node.users]
        until[node] = min(users, default=len(place))
    return until


def _first_after(at: int, places: Sequence[int]) -> float:
    """The first of the sorted ``places`` after ``at``; infinity if there is none."""
    next_one = bisect_right(places, at)
    return places[next_one] if next_one < len(places) else math.inf


def _depends_on_model_only(step: StepGraph, anchored: set[Node]) -> set[Node]:
    """The nodes that depend on parameters and buffers only: on no batch, collective, effect or random draw."""
    model = {entry.name for entry in step.inputs if entry.role in (Role.PARAMETER, Role.BUFFER)}
    nodes: set[Node] = set()
    for node in step.graph.nodes:
        if node.op == "placeholder":
            is_one = node.name in model
        else:
            is_one = node not in anchored and nodes.issuperset(node.all_input_nodes)
        if is_one:
            nodes.add(node)
    return nodes


def _ready_at(start: Node, place: dict[Node, int]) -> int:
    """Index after the last producer of the collective's operand. Views do not count: they move with the collective."""
    # The loop grows the list it walks, through chains of views.
    shown = list(start.all_input_nodes)
    for node in shown:
        if _shows(node):
            shown += node.all_input_nodes
    return max((place[node] + 1 for node in shown if not _shows(node)), default=0)


def _shows(node: Node) -> bool:
    return looks_into(node) and not is_wait(node)


def _first_use(start: Node, place: dict[Node, int]) -> int:
    """The position of the first computation with the result of a collective. Views do not count: they move with it."""
    # A result that nothing computes with is needed by the output at the latest.
    return min(map(place.__getitem__, readers_of(start)), default=len(place) - 1)


# ---- rewriting the graph


def _coalesced(graph: torch.fx.Graph, starts: list[Node]) -> Node:
    """Insert one coalesced call at the graph's insertion point, with a getitem per result. Erases ``starts``."""
    # `_kind` guarantees that all members have the arguments and the in-place form of the first.
    row: Any = collective_op(starts[0].target)
    call = graph.call_function(row.coalesced, ([s.args[0] for s in starts], *starts[0].args[1:]), starts[0].kwargs)
    call.meta = meta_of(starts, val=[start.meta["val"] for start in starts])
    if "inplace" in starts[0].meta:
        call.meta["inplace"] = row.coalesced_in_place
    at = call
    for index, start in enumerate(starts):
        with graph.inserting_after(at):
            at = graph.call_function(operator.getitem, (call, index))
        at.meta = meta_of(start, val=start.meta["val"])
        start.replace_all_uses_with(at)
        graph.erase_node(start)
    return call


def _order_after_merge(step: StepGraph, at_last_member: set[Node]) -> list[Node]:
    """The order of the graph, made valid after merging: users of a call in ``at_last_member`` come after it, and
    operands of the other merged calls come before them. All other nodes keep their order."""
    order: dict[Node, None] = {}
    deferred: dict[Node, None] = {}
    # Members that came first have readers in front of the merged call. These readers are put behind it.
    missing = at_last_member.union(*(call.users for call in at_last_member))

    def is_blocked(node: Node) -> bool:
        return any(used in missing or used in deferred for used in node.all_input_nodes)

    for node in step.graph.nodes:
        if node in order:
            continue
        if is_blocked(node):
            deferred[node] = None
            continue
        put(node, order)
        if node in at_last_member:
            missing.difference_update((node, *node.users))
            for each in list(deferred):
                if not is_blocked(each):
                    del deferred[each]
                    put(each, order)
    return list(order)
