"""What a schedule decides, in numbers that mean the same on every rank: positions of nodes in equal graphs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from weft.capture.graph import StepGraph
from weft.inductor.comm.buckets import join, sequences
from weft.inductor.comm.members import Names
from weft.inductor.comm.reshard import gather_again, gather_once
from weft.inductor.comm.updates import split_updates
from weft.inductor.kernel_call import KernelCall
from weft.inductor.passes.order import reorder

Node = torch.fx.Node


@dataclass(frozen=True)
class Decisions:
    """How a step becomes its schedule.

    Attributes:
        again: for each gathered value (as :func:`gather_once` numbers them) that is gathered more than once, the uses
            before which it is gathered again.
        buckets: the collectives that go as one call, by their positions in the graph that follows from ``again``.
        order: the positions, in the graph that follows from ``buckets`` (updates are split by them), of the nodes in
            the order of issue.
        transports: what carries each collective, by its position in that graph.
    """

    again: tuple[tuple[int, tuple[int, ...]], ...] = ()
    buckets: tuple[tuple[int, ...], ...] = ()
    order: tuple[int, ...] = ()
    transports: tuple[tuple[int, str], ...] = ()

    def text(self) -> str:
        """As JSON; runs of consecutive positions are written as their first and their length."""
        runs: list[list[int]] = []
        for at in self.order:
            if runs and at == sum(runs[-1]):
                runs[-1][1] += 1
            else:
                runs.append([at, 1])
        return json.dumps({**asdict(self), "order": runs}, separators=(",", ":"))

    @staticmethod
    def read(text: str) -> Decisions:
        """The decisions that :meth:`text` wrote."""
        found = json.loads(text)
        order = tuple(at for begin, length in found["order"] for at in range(begin, begin + length))
        again = tuple((number, tuple(uses)) for number, uses in found["again"])
        transports = tuple((at, name) for at, name in found["transports"])
        return Decisions(again, tuple(map(tuple, found["buckets"])), order, transports)


def regather(step: StepGraph, again: Sequence[tuple[int, tuple[int, ...]]]) -> StepGraph:
    """Gather each value once, and again where ``again`` says so. Changes ``step``.

    Collectives say in ``meta["members"]`` what they are about, and gathers that are not the first of their value in
    ``meta["again"]`` that they are 1 such; where they are merged, all of that is added up.
    """
    cuts = dict(again)
    for number, value in enumerate(gather_once(step)):
        for repeated in gather_again(step, value, cuts.get(number, ()))[1:]:
            repeated.start.meta["again"] = 1
    names = Names(step)
    for start in step.collectives():
        start.meta["members"] = (names.of(start),)
    return step


def apply(step: StepGraph, decisions: Decisions) -> StepGraph:
    """The schedule of ``step``; ``step`` stays as it is.

    Raises:
        MalformedGraph: the decisions were made for another graph.
    """
    step = regather(step.copy(), decisions.again)
    nodes = list(step.graph.nodes)
    members = {member.start: member for sequence in sequences(step) for member in sequence}
    split_updates(join(step, [[members[nodes[at]] for at in bucket] for bucket in decisions.buckets]))
    nodes = list(step.graph.nodes)
    for at, name in decisions.transports:
        nodes[at].meta["transport"] = name
    reorder(step, [nodes[at] for at in decisions.order])
    return step.check()


def structure(step: StepGraph) -> str:
    """A hash of what graphs must have in common for decisions on one to mean the same on the other: what their nodes
    are, and which they read. Sizes are no part of it, nor what kernels compute."""
    place: dict[Node, int] = {}
    content = hashlib.sha256()
    for at, node in enumerate(step.graph.nodes):
        place[node] = at
        kind = "kernel" if isinstance(node.target, KernelCall) else getattr(node.target, "__name__", str(node.target))
        content.update(f"{kind} {[place[used] for used in node.all_input_nodes]}\n".encode())
    return content.hexdigest()
