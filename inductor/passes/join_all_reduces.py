"""All-reduces whose results are added to each other become one all-reduce of the sum.

Under tensor parallelism an activation that several projections read (query, key and value; gate and up) gets a partial
gradient from each, and each is reduced over the ranks before they are added: in the backward of a transformer's layer
five all-reduces, where two are enough. Likewise, a layer that adds the outputs of attention and feed-forward of one
activation (a parallel residual) has two in forward, where one is enough. By linearity::

    all_reduce(a) + all_reduce(b)   is   all_reduce(a + b)

also where other terms are added in between. The sum of products then accumulates in the epilogues of the GEMMs
(``accumulate_matmuls``). No more memory is needed: ``a`` is alive where its reduction was. A reduction that something
else reads too would have to run all the same, and stays. So does one of float16, where ``a + b`` on one rank may exceed
a range that the sum over the ranks is within.

Sums of reduce-scatters are left alone. There ``a`` is as many times larger as there are ranks, and FSDP reduces each
microbatch by itself so that no rank holds it.

Changes results: the ranks' parts of several sums are added before they are reduced, not after.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from weft.capture.graph import StepGraph
from weft.capture.node_kinds import WAIT, group_of
from weft.inductor.graph.collectives import ALL_REDUCE, payload_of, reduction_of
from weft.inductor.graph.emitter import emitter
from weft.inductor.graph.pass_runner import changes_bits
from weft.inductor.graph.sizes import layout_text

Node = torch.fx.Node

aten = torch.ops.aten

_LINEAR = ("sum", "avg")
# Dtypes with at least the exponent range of float32: a sum of gradients does not overflow.
_WIDE = (torch.bfloat16, torch.float32, torch.float64)


@changes_bits("the parts of several sums on a rank are added before they are reduced, not after")
def join_all_reduces(step: StepGraph) -> StepGraph:
    """Join the all-reduces whose results are only added to each other. Changes ``step``."""
    place = {node: at for at, node in enumerate(step.graph.nodes)}
    seen: set[Node] = set()
    for total in reversed(list(step.graph.nodes)):
        if total in seen or not _is_sum(total):
            continue
        alike: dict[tuple[str, str], list[Node]] = {}
        for wait in _reduced_terms(total, seen):
            (start,) = wait.all_input_nodes
            alike.setdefault((group_of(start), reduction_of(start)), []).append(wait)
        for waits in alike.values():
            waits.sort(key=lambda wait: place[wait.args[0]])  # type: ignore[index]
            for first, last in itertools.pairwise(waits):
                _join(step.graph, first, last)
    return step


def _is_sum(node: Node) -> bool:
    """Whether a node adds two tensors of one layout, which its result has too."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
        return False
    vals = [each.meta["val"] for each in (node, *node.all_input_nodes)]
    return all(isinstance(val, torch.Tensor) for val in vals) and len(set(map(layout_text, vals))) == 1


def _reduced_terms(total: Node, seen: set[Node]) -> Iterator[Node]:
    """The waits for all-reduces among the terms of a sum of sums; ``seen`` gets the sums."""
    sums = [total]
    for each in sums:
        seen.add(each)
        for term in each.all_input_nodes:
            if len(term.users) == 1 and _is_sum(term):
                sums.append(term)
            elif len(term.users) == 1 and term.target is WAIT and _is_linear(term.all_input_nodes[0]):
                yield term


def _is_linear(start: Node) -> bool:
    """Whether a collective is an all-reduce by a linear reduction, of a wide dtype, that only its wait reads."""
    if start.target is not ALL_REDUCE.op or len(start.users) != 1 or reduction_of(start) not in _LINEAR:
        return False
    vals = [start.meta["val"], *(each.meta["val"] for each in payload_of(start))]
    return vals[0].dtype in _WIDE and len(set(map(layout_text, vals))) == 1


def _join(graph: torch.fx.Graph, first: Node, last: Node) -> None:
    """Add the operand of the all-reduce that ``first`` waits for to that of ``last``, and drop the first one."""
    (dropped,), (start,) = first.all_input_nodes, last.all_input_nodes
    (one,), (other,) = payload_of(dropped), payload_of(start)
    with graph.inserting_before(start):
        both = emitter(graph, start)(aten.add.Tensor, one, other)
    start.replace_input_with(other, both)
    start.meta["members"] = dropped.meta.get("members", ()) + start.meta.get("members", ())
    (total,) = first.users
    (rest,) = (term for term in total.all_input_nodes if term is not first)
    total.replace_all_uses_with(rest)
    for node in (total, first, dropped):
        graph.erase_node(node)
