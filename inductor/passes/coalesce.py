"""Neighbouring all-gathers on GPUs become one call, and so do neighbouring reduce-scatters.

A per-parameter wrapper issues one collective a parameter. Each costs a launch on the host and a latency on the wire, so
those that would run back to back anyway are handed over together, as torch's coalesced operations: no copies into a
flat buffer, every tensor still gathered or reduced by itself, bit for bit as alone. On the CPU see ``pack``.
"""

from __future__ import annotations

import operator

import torch

from weft.capture.graph import StepGraph
from weft.inductor.passes.runs import dependents_before, runs

Node = torch.fx.Node

_c10d = torch.ops._c10d_functional
_COALESCED = {
    _c10d.all_gather_into_tensor.default: _c10d.all_gather_into_tensor_coalesced.default,
    _c10d.reduce_scatter_tensor.default: _c10d.reduce_scatter_tensor_coalesced.default,
}


def coalesce(step: StepGraph) -> StepGraph:
    """Merge runs of collectives of one kind and group, up to ``knobs.bucket_mib`` of inputs a run. Changes ``step``."""
    for run in runs(step, _can_join):
        _merge(step.graph, run)
    return step


def _can_join(node: Node) -> bool:
    return node.target in _COALESCED and node.meta["val"].device.type == "cuda"


def _merge(graph: torch.fx.Graph, run: list[Node]) -> None:
    last = run[-1]
    late = dependents_before(run)
    with graph.inserting_after(last):
        coalesced = _COALESCED[last.target]  # type: ignore[index]
        merged = graph.call_function(coalesced, ([node.args[0] for node in run], *last.args[1:]), dict(last.kwargs))
    merged.meta = {**last.meta, "val": [node.meta["val"] for node in run]}
    at = merged
    for index, node in enumerate(run):
        with graph.inserting_after(at):
            at = graph.call_function(operator.getitem, (merged, index))
        at.meta = dict(node.meta)
        node.replace_all_uses_with(at)
    for node in late:
        at.append(node)
        at = node
    for node in run:
        graph.erase_node(node)
