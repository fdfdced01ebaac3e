"""Norms of gradients from sums of squares that reductions over peers make on their way.

A norm of tensors that a kernel has just summed would read all of them once more. The kernel that sums them can add up
their squares as well, which takes nothing: it waits for memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from weft.capture.graph import StepGraph, is_wait
from weft.inductor.comm.layout import whole
from weft.inductor.comm.transports import PeerReduceScatter, PeerSquares, call_of
from weft.inductor.multi_tensor.norm import Norm, NormOfSquares
from weft.inductor.passes.order import start_of

Node = torch.fx.Node


def use_squares(step: StepGraph) -> None:
    """Let norms of which only all together are read take what reductions over peers know. Changes ``step``.

    A reduction counts where the norm is of all its results: its sums are of all of them.
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
    of_all = [
        start for start, found in waits.items() if len({wait.args[0] for wait in found}) == len(start.meta["val"])
    ]
    if len(set(results.values())) < len(results) or len(set(tensors)) < len(tensors) or not of_all:
        return
    squares = []
    for start in of_all:
        call = call_of(start)
        assert isinstance(call, PeerReduceScatter)
        start.target = replace(call, squares=True)
        (first, *_) = (wait for wait in results.values() if start_of(wait) is start)
        with graph.inserting_before(node):
            squares.append(graph.call_function(PeerSquares(), (first,)))
        squares[-1].meta = {key: node.meta[key] for key in ("frames", "module", "stage") if key in node.meta}
        squares[-1].meta["val"] = first.meta["val"].new_empty(call.sums, dtype=torch.float32)
    others = [tensor for tensor in tensors if tensor not in results or start_of(results[tensor]) not in of_all]
    ((norms,),) = node.meta["val"]
    # The node stays, so that it is known by its name; its list is another one, by which prices are remembered.
    node.target, node.args = NormOfSquares(len(norms), norms.dtype), (squares, others)
    node.meta["val"] = [[norms]]


def _result(tensor: Node) -> Node | None:
    """The wait for the result of a reduce-scatter over peers that ``tensor`` shows whole; None where it is another."""
    found = whole(tensor)
    if not is_wait(found) or found.meta["val"].numel() != tensor.meta["val"].numel():
        return None
    return found if isinstance(start_of(found).target, PeerReduceScatter) else None
