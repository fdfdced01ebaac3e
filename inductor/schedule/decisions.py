"""The decisions of a schedule, as positions of nodes in graphs that are equal on all ranks, and the passes that apply
them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from weft.capture.graph import StepGraph, neighbourhood
from weft.capture.node_kinds import is_collective, is_wait
from weft.errors import MalformedSchedule
from weft.inductor.codegen.kernel_call import KernelCall
from weft.inductor.graph.collectives import shared_operands, waits_for_gather
from weft.inductor.graph.escapes import escaping
from weft.inductor.graph.node_order import reorder
from weft.inductor.graph.pass_runner import Pass, changes_bits, is_enabled, keeps_bits, required
from weft.inductor.graph.serializable import check_fields
from weft.inductor.passes.wire_dtype import library_casts
from weft.inductor.schedule.bucketing import bucketable_sequences, merge_buckets
from weft.inductor.schedule.param_names import Names
from weft.inductor.schedule.reshard import add_gathers, gather_once
from weft.inductor.schedule.split_optimizer import split_updates

Node = torch.fx.Node

# Longer orders are refused when a file is read: a damaged length would take all memory.
_MOST_NODES = 1 << 24


@dataclass(frozen=True)
class Decisions:
    """How a step becomes its schedule.

    Attributes:
        regathers: pairs of a gathered value (its index in the result of :func:`gather_once`) and the indices of the
            uses before which it is gathered again.
        bucket_positions: the collectives of each coalesced call, as positions in the graph after ``regathers``.
        transports: pairs of a collective and the name of its transport; the collective as its position in the graph
            after merging buckets and splitting updates.
        order: the nodes in order of issue, as positions in the graph after inserting the casts of libraries.
    """

    regathers: tuple[tuple[int, tuple[int, ...]], ...] = ()
    bucket_positions: tuple[tuple[int, ...], ...] = ()
    transports: tuple[tuple[int, str], ...] = ()
    order: tuple[int, ...] = ()

    def text(self) -> str:
        """The decisions as JSON. Runs of consecutive positions are written as (first, length)."""
        # Most nodes keep their neighbours. Every rank reads this text from one store at the same moment, so it should
        # be short.
        runs: list[list[int]] = []
        for at in self.order:
            if runs and at == sum(runs[-1]):
                runs[-1][1] += 1
            else:
                runs.append([at, 1])
        return json.dumps({**asdict(self), "order": runs}, separators=(",", ":"))

    @staticmethod
    def read(text: str) -> Decisions:
        """The decisions that :meth:`text` wrote.

        Raises:
            ValueError, LookupError, TypeError: it did not write ``text``.
        """
        found = json.loads(text)
        if sum(length for _, length in found["order"]) > _MOST_NODES:
            raise ValueError("an order of more nodes than any graph has")
        order = tuple(at for begin, length in found["order"] for at in range(begin, begin + length))
        regathers = tuple((number, tuple(uses)) for number, uses in found["regathers"])
        transports = tuple((at, name) for at, name in found["transports"])
        fields = regathers, tuple(map(tuple, found["bucket_positions"])), transports, order
        # The text may come from a file. Anything but integers and names would fail later, on some ranks and inside a
        # pass.
        check_fields(Decisions, fields)
        return Decisions(*fields)


def regather(step: StepGraph, regathers: Sequence[tuple[int, tuple[int, ...]]]) -> StepGraph:
    """Gather each value once, and again before the uses that ``regathers`` lists. Changes ``step``.

    Sets ``meta["param_names"]`` of every collective, and ``meta["regathers"] = 1`` of gathers that are not the first of
    their value. Merging concatenates the names and adds the counts.
    """
    # Values are numbered in the order in which `gather_once` finds them in the graph, which all ranks share.
    cuts = dict(regathers)
    for number, value in enumerate(gather_once(step)):
        for repeated in add_gathers(step, value, cuts.get(number, ()))[1:]:
            repeated.start.meta["regathers"] = 1
    # Before buckets: names are found by walking from one tensor to its parameter, and merging joins them.
    names = Names(step)
    for start in step.collectives():
        start.meta["param_names"] = names.of(start)
    return step


def apply(step: StepGraph, decisions: Decisions) -> StepGraph:
    """A copy of ``step`` after :func:`schedule_passes`.

    Raises:
        MalformedGraph: the decisions were made for another graph.
    """
    return _applied(step, schedule_passes(decisions)).check()


def before_order(step: StepGraph, decisions: Decisions) -> StepGraph:
    """A copy of ``step`` after :func:`schedule_passes` but the last: the graph whose positions ``Decisions.order``
    lists.

    Raises:
        MalformedGraph: the decisions were made for another graph.
    """
    *passes, _ = schedule_passes(decisions)
    return _applied(step, passes)


def _applied(step: StepGraph, passes: Sequence[Pass]) -> StepGraph:
    step = step.copy()
    # A disabled pass is disabled on all ranks: the knob is part of what they compare before they compile.
    for pass_ in filter(is_enabled, passes):
        step = pass_(step)
    return step


def schedule_passes(decisions: Decisions) -> list[Pass]:
    """The passes that turn a step into its schedule. They decide nothing: rank 0 has."""
    # The order of `_Planner.applied`: each list of positions refers to the graph that the passes before it leave.
    return [
        Reshard(decisions.regathers),
        MergeBuckets(decisions.bucket_positions),
        split_updates,
        SelectTransports(decisions.transports),
        library_casts,
        IssueOrder(decisions.order),
    ]


@required
@keeps_bits
class Reshard:
    """A pass that gathers each sharded value once, and again before the uses of ``Decisions.regathers``."""

    __name__ = "reshard"

    def __init__(self, regathers: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        self.regathers = regathers

    def __call__(self, step: StepGraph) -> StepGraph:
        """See :func:`regather`. Changes ``step``."""
        return regather(step, self.regathers)


@changes_bits("a library may sum an element in another order at another place of a buffer")
class MergeBuckets:
    """A pass that merges the collectives at the positions of ``Decisions.bucket_positions`` into one call each."""

    __name__ = "merge_buckets"

    def __init__(self, positions: Sequence[Sequence[int]] = ()) -> None:
        self.positions = positions

    def __call__(self, step: StepGraph) -> StepGraph:
        """See :func:`weft.inductor.schedule.bucketing.merge_buckets`. Changes ``step``.

        Raises:
            MalformedSchedule: the collectives of a bucket cannot share a call.
        """
        nodes, buckets = list(step.graph.nodes), []
        # Without `keep_bits`: that is a question of what to choose. Here it only matters what can share a call at all.
        sequences = [{entry.start: entry for entry in sequence} for sequence in bucketable_sequences(step)]
        for bucket in self.positions:
            starts = [nodes[at] for at in bucket]
            # A call has one operation, group and dtype: those of its first member would be taken for all.
            entries = next((of for of in sequences if of.keys() >= set(starts)), None)
            if entries is None:
                what = f"the collectives {[start.name for start in starts]} cannot share a call"
                raise MalformedSchedule("scheduling", what, neighbourhood(nodes, starts[0]))
            # In the order of the decision, which is that of the results in the call: it must be the same on all ranks.
            buckets.append([entries[start] for start in starts])
        return merge_buckets(step, buckets)


@required
@keeps_bits
class SelectTransports:
    """A pass that writes the transport of each collective into its metadata, by ``Decisions.transports``."""

    __name__ = "select_transports"

    def __init__(self, transports: Sequence[tuple[int, str]]) -> None:
        self.transports = transports

    def __call__(self, step: StepGraph) -> StepGraph:
        """Set ``meta["transport"]``. Changes ``step``."""
        nodes = list(step.graph.nodes)
        for at, name in self.transports:
            nodes[at].meta["transport"] = name
        return step


@required
@keeps_bits
class IssueOrder:
    """A pass that puts the nodes into the order of ``Decisions.order``."""

    __name__ = "issue_order"

    def __init__(self, order: Sequence[int]) -> None:
        self.order = order

    def __call__(self, step: StepGraph) -> StepGraph:
        """Reorder the nodes. Changes ``step``."""
        nodes = list(step.graph.nodes)
        # `reorder` links nodes one behind the other: a position that is missing or repeated would silently drop a node.
        if sorted(self.order) != list(range(len(nodes))):
            raise MalformedSchedule("scheduling", f"the order is none of the {len(nodes)} nodes", "")
        reorder(step, [nodes[at] for at in self.order])
        return step


def structure(step: StepGraph) -> str:
    """A hash of the operations of a graph, of the nodes that each of them reads, of all that a collective is given
    beside its tensors, and of the gathered values that the caller gets.

    Decisions for one graph are valid for all graphs with this hash: collectives at the same positions are of one kind,
    group and dtype. Sizes and the contents of kernels are not part of it, because they can differ between ranks; nor is
    what else a rank returns.
    """
    place: dict[Node, int] = {}
    escaped = escaping(step)
    content = hashlib.sha256()
    for at, node in enumerate(step.graph.nodes):
        place[node] = at
        # By position, not by name: names of nodes depend on what passes did on the way.
        kind = "kernel" if isinstance(node.target, KernelCall) else getattr(node.target, "__name__", str(node.target))
        read = [place[used] for used in node.all_input_nodes if node.op != "output"]
        more: tuple[Any, ...] = ()
        if is_collective(node):  # which of them are in place follows from what reads their operands
            more = shared_operands(node), node.meta.get("inplace")
        elif is_wait(node) and waits_for_gather(node):  # what escapes is not gathered again
            more = (node in escaped,)
        content.update(f"{kind} {read} {more}\n".encode())
    return content.hexdigest()
