"""The verifier of schedules: what must hold of a step once its collectives are merged, placed and ordered.

A schedule moves every collective, so a fault in it gives wrong sums, a hang, or memory that is read while a peer writes
it, and no error. The verifier compares a scheduled step with the step it was made from. It is independent of the
planner: it reads the graph that will run. Every rank runs it, and it runs again after each rewrite that follows.

Checked are:

- the order: operands before users, inputs first, the output last, calls with effects and random draws as they were;
- waits: no result of a collective is read before a wait, and no operand is overwritten before it;
- reads: no node reads memory that another node has written over in the meantime;
- values: every output computes what it did (:mod:`weft.inductor.schedule.value_numbers`), every reduction is done as
  often as it was, and no other collective is done;
- buckets: tensors of a coalesced call that the schedule made have one dtype and one device, and each is read exactly
  once. A call that the step was captured with may have others, as torch allows it;
- communicators: each collective runs over the ranks of its group, and is waited for by its own kind of wait;
- memory: the peak is the one that was predicted, and within the limit;
- the arena: see :mod:`weft.inductor.schedule.verify_arena`.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator
from typing import Any

import torch

from weft import knobs, torch_adapter
from weft.capture.graph import StepGraph, neighbourhood
from weft.capture.node_kinds import WAIT, group_of, is_collective, is_wait
from weft.capture.record.streams import StreamCall
from weft.errors import MalformedSchedule
from weft.inductor.cost.build_task_graph import set_aside
from weft.inductor.cost.collective_cost import stream_of
from weft.inductor.graph.aliasing import looks_into
from weft.inductor.graph.collectives import is_coalesced, payload_of, results_of
from weft.inductor.graph.liveness import Liveness, LiveRange, liveness
from weft.inductor.graph.node_order import start_of, waits_of
from weft.inductor.schedule.value_numbers import StepValues, ValueNumbering
from weft.inductor.schedule.verify_arena import arena_faults
from weft.inductor.transports.peer_calls import PeerCall, PeerWait
from weft.inductor.transports.peer_launch import BoundPeerCall, BoundWait

Node = torch.fx.Node

# Collectives over peers, before and after they have their memory.
_PEER_CALLS = (PeerCall, BoundPeerCall)
_PEER_WAITS = (PeerWait, BoundWait)


class ScheduleVerifier:
    """Compares a step, after each rewrite of its schedule, with what it was before.

    Args:
        step: the step before it is scheduled. It is read now, and may change afterwards.
    """

    def __init__(self, step: StepGraph) -> None:
        with torch_adapter.only_mode():  # that of a fake world makes every look at a fake slow
            self._numbering = ValueNumbering()
            self._values = self._numbering.values(step)
            memory = liveness(step)
            # What the captured step does already is not the schedule's fault: only new faults count.
            self._stale = {key for key, _ in _stale_reads(step, memory)}
            self._overwriting = {node.name for node, _ in _overwritten_operands(step, memory)}
            self._before_fences = _order_at_fences(step)
            # The user has put these nodes on a side stream and ordered that stream with others.
            self._streams = {node.name: node.meta["stream"] for node in step.graph.nodes if node.meta.get("stream")}
            self._groups = dict(step.groups)

    def check(
        self, step: StepGraph, stage: str, *, limit: int | None = None, predicted_peak: int | None = None
    ) -> StepGraph:
        """Return ``step`` where it is a valid schedule of the step that this verifier was made for.

        Takes time linear in the nodes, and quadratic in the tensors of one group that lie in its arena.

        Args:
            stage: the rewrite that made it, for the message.
            limit: bytes that the peak of a step with its transports may not exceed; None: any.
            predicted_peak: bytes that the simulator says the peak is; None: not compared.

        Raises:
            MalformedSchedule: it is not.
        """
        with torch_adapter.only_mode():
            for node, what in self._faults(step, limit, predicted_peak):
                raise MalformedSchedule(stage, what, neighbourhood(step.graph.nodes, node))
        return step

    def _faults(self, step: StepGraph, limit: int | None, predicted_peak: int | None) -> Iterator[tuple[Node, str]]:
        # What follows reads operands by position, so an order that does not run is found first.
        yield from _order_faults(step)
        yield from _wait_faults(step)
        yield from _list_faults(step)
        values = self._numbering.values(step)
        yield from self._bucket_faults(step, values)
        yield from self._communicator_faults(step)
        memory = liveness(step)
        for node, what in _overwritten_operands(step, memory):
            if node.name not in self._overwriting:
                yield node, what
        for key, node in _stale_reads(step, memory):
            if key not in self._stale:
                yield node, f"reads {key[1]}, whose memory another node has written to since"
        yield from self._effect_faults(step, values.effects)
        yield from self._value_faults(step, values)
        for fault in arena_faults(step, memory):
            yield fault.node, fault.what
        if limit is not None or predicted_peak is not None:
            yield from _memory_faults(step, memory, limit, predicted_peak)

    # ---- compared with the step before

    def _value_faults(self, step: StepGraph, now: StepValues) -> Iterator[tuple[Node, str]]:
        before = self._values
        nodes = {node.name: node for node in step.graph.nodes}
        output = step.graph.output_node()

        def named(number: int) -> Node:
            name = now.names.get(number) or before.names.get(number, "")
            return nodes.get(name, output)

        def of(number: int) -> str:
            return before.names.get(number) or now.names.get(number, "a collective")

        # Gathers may be repeated or merged, so only the set is compared. A gather that is lost leaves its readers with
        # another value, which would show below as well, with a message that says less.
        for number in now.gathers - before.gathers:
            yield named(number), f"{of(number)} gathers what the step does not gather"
        for number in before.gathers - now.gathers:
            yield named(number), f"{of(number)} is no longer gathered"
        # Lost collectives come before unexpected ones, in graph order, so that the first fault is the same in each run.
        for number in dict.fromkeys([*before.counted, *now.counted]):
            done, wanted = now.counted[number], before.counted[number]
            if done != wanted:
                yield named(number), f"{of(number)} is communicated {done} times, not {wanted}"
        for at, (had, has) in enumerate(zip(before.outputs, now.outputs, strict=True)):
            if had != has:
                result = step.results[at]
                yield (
                    result if isinstance(result, Node) else output,
                    f"output {at} no longer computes what it did",
                )

    def _effect_faults(self, step: StepGraph, now: list[tuple[str, Hashable]]) -> Iterator[tuple[Node, str]]:
        nodes = {node.name: node for node in step.graph.nodes}
        for had, has in zip(self._values.effects, now, strict=False):
            if had != has:
                what = "has other operands than it had" if had[0] == has[0] else f"comes where {had[0]} did"
                yield nodes[has[0]], f"call with an effect {what}"
        if len(now) != len(self._values.effects):
            yield step.graph.output_node(), f"{len(now)} calls have effects, not {len(self._values.effects)}"
        known: set[str] = set()
        for node in step.graph.nodes:
            before = self._before_fences.get(node.name, frozenset())
            # Only at a fence: the names of all nodes so far, for each node, would take quadratic time.
            if missing := (before - known) & nodes.keys():
                yield node, f"comes before {min(missing)}, which it has to follow"
            known.add(node.name)
            if node.name in self._streams and node.meta.get("stream") != self._streams[node.name]:
                yield node, "is no longer on the stream that it was issued on"

    def _bucket_faults(self, step: StepGraph, now: StepValues) -> Iterator[tuple[Node, str]]:
        captured = set(self._values.coalesced.values())
        for start, numbers in now.coalesced.items():
            picked, results = _picked(start), results_of(start)
            if numbers not in captured:  # the schedule made it
                kinds = {(used.meta["val"].dtype, used.meta["val"].device) for used in payload_of(start)}
                if len(kinds) > 1:
                    yield start, f"is one call on tensors of several kinds: {sorted(map(str, kinds))}"
                # An element that nothing reads is a gradient or parameter that was lost in the merge; one that is read
                # twice stands in for another.
                if picked != list(range(len(results))):
                    yield start, f"is a bucket of {len(results)} tensors of which elements {picked} are read"
            for element in start.users:
                at: Any = element.args[1] if element.target is operator.getitem else None
                if at is not None and not _same_layout(element.meta["val"], results[at]):
                    yield element, f"is not the tensor that {start.name} gives at {at}"

    def _communicator_faults(self, step: StepGraph) -> Iterator[tuple[Node, str]]:
        for node in step.collectives():
            group = group_of(node)
            if group not in step.groups:
                yield node, f"runs over {group!r}, which the step does not have"
                continue
            # Before `assign_communicators` the group is that of the user; behind it, the stream's communicator.
            base = group.removesuffix(f"/{stream_of(node)}")
            if group not in self._groups and base not in self._groups:
                yield node, f"runs over {group!r}, which is no communicator of its group"
            elif group not in self._groups:
                # Compared by ranks, in any order: a communicator of other ranks would hang, or sum other gradients.
                ranks, wanted = _ranks(step, group), _ranks(step, base)
                if ranks != wanted:
                    yield node, f"runs over ranks {ranks}, not {wanted}"


def verifier(step: StepGraph) -> ScheduleVerifier | None:
    """A verifier for schedules of ``step`` where ``knobs.verify_graphs`` asks for it; else None."""
    return ScheduleVerifier(step) if knobs.verify_graphs else None


def _ranks(step: StepGraph, group: str) -> tuple[int, ...]:
    return tuple(sorted(torch_adapter.group_ranks(step.groups[group])))


# ---- the order


def _order_faults(step: StepGraph) -> Iterator[tuple[Node, str]]:
    nodes = list(step.graph.nodes)
    place = {node: at for at, node in enumerate(nodes)}
    inputs_end = sum(node.op == "placeholder" for node in nodes)
    for at, node in enumerate(nodes):
        for used in node.all_input_nodes:
            if used not in place:
                yield node, f"reads {used.name}, which is not in the graph"
            elif place[used] >= at:
                yield node, f"comes before its operand {used.name}"
        if node.op == "placeholder" and at >= inputs_end:
            yield node, "is an input behind other nodes"
        if node.op == "output" and at != len(nodes) - 1:
            yield node, "is the output, and not the last node"
    # The program's arguments are positional.
    if [node.name for node in nodes[:inputs_end]] != [entry.name for entry in step.inputs]:
        yield nodes[0], "inputs are not those of the step, in their order"


def _order_at_fences(step: StepGraph) -> dict[str, frozenset[str]]:
    """What calls that order the step with streams outside it (fences) say about its order: by the name of a node, the
    names of nodes that it has to follow. A fence follows all nodes that were before it, and a node the last fence."""
    names: list[str] = []
    fence = frozenset[str]()
    found: dict[str, frozenset[str]] = {}
    for node in step.graph.nodes:
        # Collectives, their waits and elements are made anew by buckets, so only other nodes have lasting names.
        lasts = node.op == "call_function" and not (is_collective(node) or is_wait(node) or looks_into(node))
        if node.meta.get("fence") or isinstance(node.target, StreamCall):
            found[node.name] = frozenset(names)
            fence = frozenset([node.name])
        elif lasts and fence:
            found[node.name] = fence
        if lasts:
            names.append(node.name)
    return found


# ---- waits


def _wait_faults(step: StepGraph) -> Iterator[tuple[Node, str]]:
    for start in step.collectives():
        elements = [user for user in start.users if user.target is operator.getitem]
        # torch hands out an AsyncCollectiveTensor that waits by itself; in a graph nothing waits unless a node does.
        waits = waits_of(start)
        if not waits:
            yield start, "is a collective that nothing waits for"
        # A wait of the other kind would return at once: it knows nothing of this collective.
        over_peers = isinstance(start.target, _PEER_CALLS)
        for wait in waits:
            if over_peers and not isinstance(wait.target, _PEER_WAITS):
                yield wait, f"is a library's wait for a collective over peers, {start.name}"
            if not over_peers and wait.target is not WAIT:
                yield wait, f"is a wait over peers for a library's collective, {start.name}"
        for value in (start, *elements):
            for user in value.users:
                if not is_wait(user) and user not in elements:
                    yield user, f"reads {value.name}, the result of a collective, without a wait"


def _overwritten_operands(step: StepGraph, memory: Liveness) -> Iterator[tuple[Node, str]]:
    """Operands and results of collectives that are written to between their start and their first wait."""
    # All results of a call complete together, so its first wait ends the use of all its operands.
    under_way: dict[LiveRange, dict[Node, int]] = {}  # collectives that use a storage, and waits that are to come
    for node in memory.order:
        # The communication stream still reads, or writes, this memory, and nothing but a wait orders this node behind
        # it.
        for written in _writes(node, memory):
            for start, left in under_way.get(written, {}).items():
                if left:
                    yield node, f"writes to memory that {start.name} communicates, before any wait for it"
        if is_collective(node):
            values = [*node.all_input_nodes, node]
            for found in dict.fromkeys(found for value in values for found in memory.of[value]):
                under_way.setdefault(found, {})[node] = 1
        elif is_wait(node) and is_collective(start_of(node)):
            start = start_of(node)
            for value in (*start.all_input_nodes, start):
                for found in memory.of[value]:
                    under_way[found][start] = 0


# ---- reads


def _writes(node: Node, memory: Liveness) -> list[LiveRange]:
    """The storages that a node writes to and has not made."""
    if node.op != "call_function" or looks_into(node):
        return []
    return [found for found in memory.of[node] if found.maker is not node]


def _stale_reads(step: StepGraph, memory: Liveness) -> Iterator[tuple[tuple[str, str], Node]]:
    """Reads of values whose memory another node has written to in the meantime: the names of the reader and the value,
    and the reader. A collective is named by what it is, since merging renames it.

    A captured step may have such reads: the program then keeps a copy of the value. What a schedule must not do is add
    one, because the program relies on the order in which its writes in place were found to be safe.
    """
    current: dict[LiveRange, Node] = {}  # by storage, the node that wrote to it last
    version: dict[tuple[Node, LiveRange], Node] = {}  # by value and storage, the write that the value shows
    # As in SSA form: each write makes a new version of a storage, a value shows the version that its node made or
    # viewed, and a read is stale where the storage has a newer version.
    for node in memory.order:
        written = _writes(node, memory)
        name = "a collective" if is_collective(node) else "a wait" if is_wait(node) else node.name
        reads = list(node.all_input_nodes) if node.target is not operator.getitem else []
        # A wait reads for its collective: until then the operands are in use.
        if is_wait(node) and is_collective(start_of(node)):
            mine = memory.of[start_of(node)]  # a collective in place has written to its operand itself
            reads += [used for used in start_of(node).all_input_nodes if set(mine).isdisjoint(memory.of[used])]
        for used in reads:
            for found in memory.of[used]:
                if version[used, found] is not current[found]:
                    yield (name, used.name), node
        for found in memory.of.get(node, ()):
            if found.maker is node or found in written:
                current[found] = version[node, found] = node
            else:  # a view shows the version of what it is a view of
                shown = (version[used, found] for used in node.all_input_nodes if (used, found) in version)
                version[node, found] = next(shown, current[found])


# ---- buckets


def _list_faults(step: StepGraph) -> Iterator[tuple[Node, str]]:
    """Faults of coalesced calls: lists of other lengths than they say, and elements that are not in them."""
    for start in step.collectives():
        if not is_coalesced(start):
            continue
        payload, results = payload_of(start), results_of(start)
        if len(payload) != len(results):
            yield start, f"gives {len(results)} tensors for {len(payload)}"
        # Merging concatenates names, so a tensor that a merge dropped shows here as well.
        members = start.meta.get("param_names")
        if members is not None and len(members) != len(payload):
            yield start, f"names {len(members)} parameters, and has {len(payload)}"
        if any(at not in range(len(results)) for at in _picked(start)):
            yield start, f"is a bucket of {len(results)} tensors of which elements {_picked(start)} are read"


def _picked(start: Node) -> list[int]:
    return sorted(user.args[1] for user in start.users if user.target is operator.getitem)  # type: ignore[type-var]


def _same_layout(one: Any, other: Any) -> bool:
    # Strides are compared by the graph's verifier.
    return one.dtype == other.dtype and tuple(one.shape) == tuple(other.shape)


# ---- memory


def _memory_faults(
    step: StepGraph, memory: Liveness, limit: int | None, predicted_peak: int | None
) -> Iterator[tuple[Node, str]]:
    over_time = _held_over_time(memory)
    peak_at = max(range(len(over_time)), key=over_time.__getitem__)
    # Equality, not a tolerance: both count the same storages of the same graph, so any difference is a fault of one of
    # the two.
    peak = over_time[peak_at] + set_aside(step)
    # Only rank 0 checks the limit: it planned with its sizes. Another rank may have a larger batch.
    if limit is not None and peak > limit:
        yield memory.order[peak_at], f"{peak:,} bytes are held here, {peak - limit:,} more than the limit"
    if predicted_peak is not None and peak != predicted_peak:
        yield memory.order[peak_at], f"the step holds {peak:,} bytes here, and {predicted_peak:,} were predicted"


def _held_over_time(memory: Liveness) -> list[int]:
    """Bytes held while each node runs, from live ranges found anew: a storage is held from the node that makes it
    through the last node that reads it, or waits for a collective that reads it."""
    place = {node: at for at, node in enumerate(memory.order)}
    change = [0] * (len(place) + 1)
    for found in memory.ranges:
        # Deliberately not `LiveRange.end`: the walk that computes it is what the planner has used.
        end = len(place) - 1 if found.is_input else place[found.maker]
        for value in found.values:
            end = max(end, place[value])
            # An element of a list reads nothing: with it counted, all tensors of a bucket would be held for the first.
            for user in value.users:
                if user.target is not operator.getitem:
                    end = max(end, place[user])
                if is_collective(user):
                    end = max([end, *(place[wait] for wait in waits_of(user))])
        change[place[found.maker]] += found.size
        change[end + 1] -= found.size
    held, over_time = 0, []
    for delta in change[:-1]:
        held += delta
        over_time.append(held)
    return over_time
