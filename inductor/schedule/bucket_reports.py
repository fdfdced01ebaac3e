"""The reports on the collectives of a scheduled step: their parameters, transports and predicted times, and the number
that each decision followed from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from weft.capture.graph import StepGraph
from weft.capture.node_kinds import is_collective
from weft.capture.sizes_in_bytes import tensor_bytes
from weft.inductor.cost.cluster import Cluster
from weft.inductor.cost.collective_cost import Collective, collective_of, transfer
from weft.inductor.cost.simulate import Simulation
from weft.inductor.graph.collectives import payload_of
from weft.inductor.schedule.schedule_tables import BucketReport, bucket_report
from weft.transport_rows import LIBRARY

Node = torch.fx.Node


def bucket_reports(
    step: StepGraph, cluster: Cluster, simulation: Simulation, nodes: Sequence[Node]
) -> list[BucketReport]:
    """A report on each collective of ``step``, in the order of the graph.

    Args:
        step: scheduled, its collectives with ``meta["param_names"]``.
        simulation: of the step with its transports.
        nodes: the node of each task of ``simulation``.
    """
    reports = []
    for at, node in enumerate(nodes):
        if is_collective(node):
            sent = collective_of(step, node)
            reports.append(
                bucket_report(
                    simulation,
                    at,
                    kind=sent.kind,
                    group=sent.group,
                    members=node.meta["param_names"],
                    bytes=sent.bytes,
                    transport=node.meta.get("transport", LIBRARY),
                    why=_why(cluster, sent, node, node.meta.get("transport", LIBRARY)),
                )
            )
    return reports


def _why(cluster: Cluster, sent: Collective, node: Node, transport: str) -> str:
    """The time that a bucket saves, and how many of its all-gathers are regathers."""
    words = []
    if sent.members > 1:
        # The bytes of a call are shared out by operand size: what each member would send alone, in the dtype that is
        # sent.
        sizes = [tensor_bytes(used.meta["val"]) or 0 for used in payload_of(node)]
        alone = [replace(sent, bytes=sent.bytes * size // max(sum(sizes), 1), members=1) for size in sizes]
        seconds = [transfer(cluster, each, transport).seconds for each in (*alone, sent)]
        # By the transport that carries the bucket, not by that which each member alone would get.
        saved = sum(seconds[:-1]) - seconds[-1]
        words.append(f"{saved * 1e6:.0f} us less than one call each")
    if regathers := node.meta.get("regathers", 0):
        words.append("gathered again" if regathers == sent.members else f"{regathers} gathered again")
    return ", ".join(words)
