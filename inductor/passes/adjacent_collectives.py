"""Collectives that would run back to back anyway, found in a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch

from weft import knobs
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import WAIT, is_collective
from weft.inductor.graph.aliasing import looks_into
from weft.inductor.graph.operations import op_name
from weft.inductor.graph.sizes import node_bytes

Node = torch.fx.Node

_CASTS = ("aten::_to_copy", "weft::unpad_shard")


def runs(step: StepGraph, can_join: Callable[[Node], bool]) -> list[list[Node]]:
    """Runs of two or more collectives of one kind, group and dtype, none of which needs another's result.

    A run holds up to ``knobs.bucket_mib`` of inputs. It ends at a collective of another kind, and where the step begins
    to compute with what a member gave: gathers of one module join, those of the next come when their turn is. Waits,
    views and casts of results may stand between; merging moves them behind the last member (``dependents_before``).
    """
    collected: list[list[Node]] = [[]]
    # Results of members, directly or through light nodes. The run ends where the step computes with one of them.
    dependents: set[Node] = set()
    run_bytes = 0
    for node in step.graph.nodes:
        if any(used in dependents or used in collected[-1] for used in node.all_input_nodes):
            dependents.add(node)
            # The step computes with a result: a member behind this node would make it wait for a larger call.
            if not _is_light(node):
                collected.append([])
                dependents, run_bytes = set(), 0
        if not is_collective(node):
            continue
        bytes_in = sum(node_bytes(used) for used in node.all_input_nodes)
        able = can_join(node)
        joins = able and collected[-1] and node not in dependents and _kind(node) == _kind(collected[-1][0])
        if not joins or run_bytes + bytes_in > knobs.bucket_mib << 20:
            collected.append([])
            dependents, run_bytes = set(), 0
        if able:
            collected[-1].append(node)
            run_bytes += bytes_in
    return [run for run in collected if len(run) > 1]


def dependents_before(run: list[Node]) -> list[Node]:
    """Nodes between the first and the last member that need a result of one, in order."""
    members, dependents = set(run), dict[Node, None]()
    node = run[0]
    while node is not run[-1]:
        if any(used in members or used in dependents for used in node.all_input_nodes):
            dependents[node] = None
        node = node.next
    return list(dependents)


def _is_light(node: Node) -> bool:
    """Waits, elements, views and casts."""
    name = op_name(node)
    return node.target in (WAIT, operator.getitem) or looks_into(node) or name in _CASTS


def _kind(node: Node) -> tuple[object, ...]:
    return (node.target, node.meta["val"].dtype, *node.args[1:], *node.kwargs.values())
