"""The time of a collective on a cluster, by a latency-bandwidth model.

A collective takes a fixed latency, the latency of each hop on its longest path, and its bytes divided by the bandwidth
of the slowest link on that path. In a ring (NCCL) every rank sends (n - 1)/n of the tensor to the next one. An
all-reduce goes around twice, or up and down a tree, whichever is faster. Rings enter and leave a node through as many
network cards as the group has ranks there. See NCCL's tuning model (``src/graph/tuning.cc``) and "bus bandwidth" in
nccl-tests.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import group_of, is_collective
from weft.errors import CannotCarry, GroupGone, LinkMissing
from weft.inductor.cost.cluster import Cluster, Link, TransportModel
from weft.inductor.graph.collectives import (
    KINDS,
    CollectiveKind,
    NcclTree,
    Traffic,
    kind_of,
    payload_of,
    results_of,
)
from weft.transport_rows import LIBRARY, peer_stream, transport_row

Node = torch.fx.Node

UNBACKED = 4096
"""Assumed value of a data-dependent size (an unbacked symbol), in elements. A guess."""


@dataclass(frozen=True)
class Collective:
    """The properties of a collective that its time depends on.

    Attributes:
        kind: a name of ``weft.inductor.graph.collectives.KINDS``.
        ranks: of the group, in its order, as global ranks.
        group: the name of the group in the graph.
        bytes: of the unsharded tensors: the result of an all-gather, the operand of a reduce-scatter, the larger side
            of an all-to-all.
        dtype: of these tensors.
        members: number of tensors in a coalesced collective.
        wider: the dtype of the result, in which it is summed, if that differs from ``dtype``. A transport that sums in
            the dtype it sends has to send this one.
    """

    kind: str
    ranks: tuple[int, ...]
    group: str
    bytes: int
    dtype: torch.dtype
    members: int = 1
    wider: torch.dtype | None = None


@dataclass(frozen=True)
class Transfer:
    """The cost of a collective over one transport.

    Attributes:
        seconds: alone on its stream and its link.
        stream: name of the CUDA stream that it occupies, which runs one collective at a time. NCCL has one for each
            communicator, which is a group and a stream of :class:`CollectiveKind` ("nccl:world:reduce").
        link: the slowest link that it uses. Concurrent collectives of other streams share its bandwidth.
        interference: seconds of computation lost per second of the collective.
    """

    seconds: float
    stream: str
    link: str
    interference: float


# At an interference of 1, computation beside a collective would never end in a simulation.
_MOST_INTERFERENCE = 0.95


def collective_of(step: StepGraph, node: Node) -> Collective:
    """The collective that ``node`` of ``step`` starts.

    The group must exist in this process (in a fake world, too). Sizes are those of the captured call. A data-dependent
    size counts as ``UNBACKED`` elements if neither side of the collective is known.

    Raises:
        GroupGone: this process has no such process group.
    """
    assert is_collective(node)
    name = group_of(node)
    try:
        ranks = torch_adapter.group_ranks(step.groups[name])
    except RuntimeError as error:
        raise GroupGone(name) from error
    sent, received = [used.meta["val"] for used in payload_of(node)], results_of(node)
    sides = [_bytes(tensors) for tensors in (sent, received)]
    # If the size of one side depends on the data, the other side's size is better than a guess. Otherwise the larger
    # side is the unsharded one, for every kind of collective.
    known = [size for size, certain in sides if certain]
    kind, result_dtype = kind_of(node), received[0].dtype
    dtype = result_dtype if kind.sends_result_dtype else sent[0].dtype
    return Collective(
        kind=kind.name,
        ranks=ranks,
        group=name,
        bytes=max(known or [size for size, _ in sides]),
        dtype=dtype,
        members=len(sent),
        wider=None if result_dtype == dtype else result_dtype,
    )


def transfer(cluster: Cluster, collective: Collective, transport: str = LIBRARY) -> Transfer:
    """The time of ``collective`` over ``transport``, and the stream and link that it shares with others.

    A coalesced collective takes the time of one tensor of all its bytes, plus ``per_member`` seconds for each further
    tensor. A group of one rank copies its tensor.

    Raises:
        UnknownOption: the cluster has no transport of that name.
        CannotCarry: the transport does not serve such a collective.
        LinkMissing: the cluster does not say what joins the ranks of the group.
    """
    # By identity, as `_placements`: a step has hundreds of collectives with one cost, and each is priced many times.
    of = collective.kind, collective.group, collective.bytes, collective.dtype, collective.members, collective.wider
    key = id(cluster), id(collective.ranks), transport, of
    if key not in _transfers:
        if len(_transfers) >= _MOST_TRANSFERS:
            _transfers.clear()
        _transfers[key] = cluster, collective.ranks, _transfer(cluster, collective, transport)
    return _transfers[key][2]


def _transfer(cluster: Cluster, collective: Collective, transport: str) -> Transfer:
    stream = f"{transport}:{collective.group}:{KINDS[collective.kind].stream}"
    if len(collective.ranks) == 1:
        gpu = cluster.gpu
        # A read and a write of each byte.
        return Transfer(gpu.launch_latency + 2 * collective.bytes / gpu.copy_bandwidth, stream, "memory", 0.0)
    sent, model = _transported(cluster, collective, transport)
    topology = _GroupTopology.of(cluster, collective)
    if model is None or (topology.nodes > 1 and not model.crosses):
        raise CannotCarry(transport, collective.kind, str(collective.dtype), collective.group, topology.nodes)
    seconds, link = _fastest(topology, sent, model)
    seconds += model.per_member * (collective.members - 1)
    # NCCL has a stream per communicator; transports over symmetric memory share streams among all groups.
    if not model.crosses:
        stream = peer_stream(transport, KINDS[collective.kind].stream)
    lost = model.blocking * _local_seconds(cluster, sent, model)
    interference = min(model.interference + lost / seconds, _MOST_INTERFERENCE) if lost else model.interference
    return Transfer(seconds, stream, link, interference)


def _local_seconds(cluster: Cluster, collective: Collective, model: TransportModel) -> float:
    """Seconds of the kernel that copies or sums within this GPU's memory, alone. They are a loss of computation, and no
    part of the time of the link. The fewer ranks there are, the larger is the part of each."""
    moved = model.own_part / len(collective.ranks) + model.all_parts
    return moved * collective.bytes / cluster.gpu.copy_bandwidth


def _transported(cluster: Cluster, collective: Collective, transport: str) -> tuple[Collective, TransportModel | None]:
    """The collective as a transport sends it, and the transport's cluster entry, None if it does not serve it."""
    model = cluster.transport_model(transport, collective.kind, collective.dtype)
    wider = collective.wider
    # A transport that sums in float32 sends the narrow dtype. NCCL sums in the dtype on the wire, so it must be given
    # tensors cast to the wider one, which take more bytes.
    row = transport_row(transport)
    if wider is None or (model is not None and row is not None and row.sums_in_float32):
        return collective, model
    # The wider dtype may have an entry of its own, with other interference.
    size = collective.bytes // collective.dtype.itemsize * wider.itemsize
    return replace(collective, bytes=size, dtype=wider), cluster.transport_model(transport, collective.kind, wider)


def stream_of(node: Node) -> str:
    """The stream of a collective among those of its group, see :class:`CollectiveKind`: not the CUDA stream, of which
    :func:`transfer` gives the name, and not ``meta["stream"]``, which is a stream of the user's."""
    return kind_of(node).stream


def transports_for(cluster: Cluster, collective: Collective) -> list[str]:
    """Names of the transports of ``cluster`` that can carry ``collective``, as its file lists them."""
    nodes, _, _ = _on_nodes(collective.ranks, cluster.gpus_per_node)
    names = dict.fromkeys(known.name for known in cluster.transports)
    models = {name: _transported(cluster, collective, name)[1] for name in names}
    return [name for name, model in models.items() if model is not None and (nodes == 1 or model.crosses)]


_transfers: dict[tuple[int, int, str, tuple[Any, ...]], tuple[Cluster, tuple[int, ...], Transfer]] = {}
_MOST_TRANSFERS = 65_536


# ---- operands and sizes of the node


def _bytes(tensors: list[torch.Tensor]) -> tuple[int, bool]:
    """Bytes of ``tensors``, and whether all sizes are known."""
    total, certain = 0, True
    for tensor in tensors:
        if type(numel := tensor.numel()) is int:
            total += numel * tensor.dtype.itemsize
            continue
        sizes = [torch_adapter.hint(size) for size in tensor.shape]
        certain = certain and None not in sizes
        total += math.prod(UNBACKED if known is None else known for known in sizes) * tensor.dtype.itemsize
    return total, certain


# ---- time


@dataclass(frozen=True)
class _GroupTopology:
    """How the ranks of a group are placed on nodes.

    Attributes:
        ranks, nodes: their numbers.
        most, fewest: the largest and smallest number of ranks of the group on one node.
        inner, outer: the links within and between nodes; None if the group does not use them.
        between_pods: of the network's bandwidth, what a ring has from one pod to the next.
        outside: of a rank's partners, those in other pods.
    """

    ranks: int
    nodes: int
    most: int
    fewest: int
    inner: Link | None
    outer: Link | None
    between_pods: float = 1.0
    outside: float = 0.0

    @staticmethod
    def of(cluster: Cluster, collective: Collective) -> _GroupTopology:
        nodes, most, fewest = _on_nodes(collective.ranks, cluster.gpus_per_node)
        for needed, link, name in ((most > 1, cluster.node, "node"), (nodes > 1, cluster.network, "network")):
            if needed and link is None:
                raise LinkMissing(cluster.name, name, collective.group, len(collective.ranks), nodes)
        inner = cluster.node if most > 1 else None
        outer = cluster.network if nodes > 1 else None
        between_pods, outside = _through_spine(cluster, collective.ranks, fewest) if outer else (1.0, 0.0)
        return _GroupTopology(len(collective.ranks), nodes, most, fewest, inner, outer, between_pods, outside)

    def hops(self, inner: int, outer: int) -> float:
        """Seconds of ``inner`` hops within a node and ``outer`` hops between nodes."""
        within = inner * self.inner.latency if self.inner else 0.0
        return within + (outer * self.outer.latency if self.outer else 0.0)

    def wires(self, inner: float, outer: float, model: TransportModel, cards: int) -> tuple[float, str]:
        """Seconds to send ``inner`` bytes within a node and, at the same time, ``outer`` bytes out of it through
        ``cards`` network cards; and the name of the link that takes longer."""
        times = []
        if self.outer:
            times.append((outer / (cards * self.outer.bandwidth * self.between_pods), self.outer.name))
        if self.inner:
            times.append((inner / model.bandwidth, self.inner.name))
        # Both links carry the traffic at the same time, in a pipeline, so the slower one counts.
        return max(times, key=lambda time: time[0])


# By identity of the ranks, which the entry keeps alive: thousands of collectives have the same tuple of up to 16,384
# ranks, and hashing it would take most of the time of pricing them.
_placements: dict[tuple[int, int], tuple[tuple[int, ...], tuple[int, int, int]]] = {}
_MOST_PLACEMENTS = 256


def _on_nodes(ranks: tuple[int, ...], gpus_per_node: int) -> tuple[int, int, int]:
    """How many nodes a group is on, and the most and the fewest of its ranks on one."""
    key = id(ranks), gpus_per_node
    if key not in _placements:
        # Cleared as a whole: a step has a handful of groups, and only a search over many worlds ever fills it.
        if len(_placements) >= _MOST_PLACEMENTS:
            _placements.clear()
        counts = Counter(rank // gpus_per_node for rank in ranks).values()
        _placements[key] = ranks, (len(counts), max(counts), min(counts))
    return _placements[key][1]


def _through_spine(cluster: Cluster, ranks: tuple[int, ...], per_node: int) -> tuple[float, float]:
    """What an oversubscribed network leaves a group whose ranks are in several pods: see ``_GroupTopology``.

    A ring that is placed in the order of ranks leaves a pod through one node's network cards, and may use the part of
    the pod's uplinks that its nodes there have: all of its bandwidth, if the group has as many nodes in each pod as the
    network is oversubscribed.
    """
    network = cluster.network
    assert network is not None
    if not network.leaf_gpus:
        return 1.0, 0.0
    pods, _, fewest = _on_nodes(ranks, network.leaf_gpus * network.rails)
    if pods == 1:
        return 1.0, 0.0
    return min(1.0, fewest / per_node / network.oversubscription), 1 - fewest / len(ranks)


def _fastest(topology: _GroupTopology, collective: Collective, model: TransportModel) -> tuple[float, str]:
    """Seconds of the fastest algorithm that a transport has, and the name of the link that bounds it."""
    size, kind = collective.bytes, KINDS[collective.kind]
    if kind.traffic is Traffic.POINT_TO_POINT:
        return _total(model.latency + topology.hops(1, 1), topology.wires(size, size, model, 1))
    if kind.traffic is Traffic.PAIRWISE:
        return _exchange(topology, size, model)
    row = transport_row(model.name)
    if row is not None and row.reads_all:  # every rank reads the whole tensor of every other rank
        read = size * (topology.ranks - 1)
        return _total(model.latency, topology.wires(read, read, model, topology.fewest))
    # NCCL chooses by its own estimate of the same kind, so the faster one is assumed to run.
    algorithms = [_ring(topology, kind, size, model)]
    has_tree = kind.tree is NcclTree.ALWAYS or (kind.tree is NcclTree.ONE_RANK_PER_NODE and topology.most == 1)
    if topology.nodes > 1 and has_tree:
        algorithms.append(_tree(topology, kind, size, model))
    return min(algorithms, key=lambda way: way[0])


def _ring(topology: _GroupTopology, kind: CollectiveKind, size: int, model: TransportModel) -> tuple[float, str]:
    """``laps`` times around a ring of all ranks. The node with the fewest ranks has the fewest network cards, so it
    bounds the ring. Transports over symmetric memory access all peers directly and pay no hops."""
    # An all-reduce is two laps: every rank sends (n - 1)/n of the tensor in each.
    laps = kind.laps
    sent = laps * size if kind.sends_all else laps * size * (topology.ranks - 1) / topology.ranks
    inner, outer = laps * (topology.ranks - topology.nodes), laps * (topology.nodes - 1)
    hops = topology.hops(inner, outer) if model.crosses else 0.0
    return _total(model.latency + hops, topology.wires(sent, sent, model, topology.fewest))


def _tree(topology: _GroupTopology, kind: CollectiveKind, size: int, model: TransportModel) -> tuple[float, str]:
    """``laps`` passes through a binary tree of nodes, with a chain of ranks within each node."""
    laps = kind.laps
    sent = laps * size if laps > 1 else size * (topology.ranks - 1) / topology.ranks
    hops = topology.hops(laps * (topology.most - 1), laps * (topology.nodes - 1).bit_length())
    return _total(model.latency + hops, topology.wires(sent, sent, model, topology.fewest))


def _exchange(topology: _GroupTopology, size: int, model: TransportModel) -> tuple[float, str]:
    """Every rank sends a part to every other rank, through its own network card. Each message costs the
    latency of a hop to set up."""
    # Messages to the other ranks of the fullest node, and to those outside of the emptiest: the slowest rank of each
    # kind.
    inner = size * (topology.most - 1) / topology.ranks
    outer = size * (topology.ranks - topology.fewest) / topology.ranks
    if topology.outer:  # messages to other pods share the uplinks with those of all ranks of their own
        outer = max(outer, size * topology.outside * topology.outer.oversubscription) * topology.between_pods
    return _total(model.latency + topology.hops(topology.ranks - 1, 1), topology.wires(inner, outer, model, 1))


def _total(latency: float, wires: tuple[float, str]) -> tuple[float, str]:
    return latency + wires[0], wires[1]
