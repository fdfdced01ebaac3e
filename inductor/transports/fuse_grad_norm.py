"""Fuses the norm of gradients into peer-access reduce-scatters, which sum the squares of their results on the way.

A separate norm kernel would read all gradients from memory once more. The reduce-scatter has them in registers and is
bound by memory, so the additional arithmetic costs no time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from weft.capture.graph import StepGraph
from weft.capture.node_kinds import is_wait
from weft.capture.node_meta import meta_of
from weft.inductor.graph.node_order import start_of
from weft.inductor.multi_tensor.norm import Norm, NormOfSquares
from weft.inductor.transports.arena_layout import whole_source
from weft.inductor.transports.peer_calls import PeerReduceScatter, PeerSquares, call_of

Node = torch.fx.Node


def fuse_grad_norm(step: StepGraph) -> None:
    """Make norms over several tensors use the sums of squares of peer-access reduce-scatters. Changes ``step``.

    A reduce-scatter is used only if the norm covers all of its results, because it sums the squares of all of them. A
    norm is changed only if it is the total of its tensors, not one value per tensor.
    """
    for node in list(step.graph.nodes):
        if isinstance(node.target, Norm) and node.target.together:
            _use_squares(step.graph, node)


def _use_squares(graph: torch.fx.Graph, node: Node) -> None:
    tensors: Any = node.args[0]
    results = {tensor: found for tensor in tensors if (found := _result(tensor)) is not None}
    waits: dict[Node, set[Node]] = {}
    for wait in results.values():
        waits.setdefault(start_of(wait), set()).add(wait)
    # The kernel sums over all results of its call. Where the norm leaves one out, that sum is of no use.
    of_all = [
        start for start, found in waits.items() if len({wait.args[0] for wait in found}) == len(start.meta["val"])
    ]
    # A tensor that is counted twice, or a result in two views, would be counted once by the kernel.
    if len(set(results.values())) < len(results) or len(set(tensors)) < len(tensors) or not of_all:
        return
    squares = []
    for start in of_all:
        call = call_of(start)
        assert isinstance(call, PeerReduceScatter)
        start.target = replace(call, squares=True)
        # Any wait of the call: all results complete together, and the sums with them.
        (first, *_) = (wait for wait in results.values() if start_of(wait) is start)
        with graph.inserting_before(node):
            squares.append(graph.call_function(PeerSquares(), (first,)))
        squares[-1].meta = meta_of(node, val=first.meta["val"].new_empty(call.sums, dtype=torch.float32))
    # What no peers have reduced: replicated parameters, and buckets that NCCL carries.
    others = [tensor for tensor in tensors if tensor not in results or start_of(results[tensor]) not in of_all]
    ((norms,),) = node.meta["val"]
    # The node stays, so that its name stays valid. Its argument list is a new object, because cost estimates
    # are cached by it.
    node.target, node.args = NormOfSquares(len(norms), norms.dtype), (squares, others)
    node.meta["val"] = [[norms]]


def _result(tensor: Node) -> Node | None:
    """The wait for a peer-access reduce-scatter of whose result ``tensor`` has all elements; None for other tensors."""
    found = whole_source(tensor)
    if not is_wait(found) or found.meta["val"].numel() != tensor.meta["val"].numel():
        return None
    return found if isinstance(start_of(found).target, PeerReduceScatter) else None
