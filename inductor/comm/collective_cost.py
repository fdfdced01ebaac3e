"""What a collective of a graph is, and how long it takes on a cluster.

A collective takes a fixed latency, a hop's latency for each link on its longest way, and its bytes at the bandwidth of
the slowest link on it. In a ring (NCCL) every rank sends (n - 1)/n of the tensor to the next one; an all-reduce goes
around twice, or up and down a tree, whichever is faster. Rings enter and leave a node through as many network cards as
the group has ranks there. See NCCL's tuning model (``src/graph/tuning.cc``) and "bus bandwidth" in nccl-tests.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

import torch

from weft import torch_adapter
from weft.capture.graph import StepGraph, group_of, is_collective
from weft.errors import CannotCarry, GroupGone, LinkMissing
from weft.inductor.comm.cluster import Cluster, Link, Transport

Node = torch.fx.Node

# Names of operations (weft_c10d has torch's), without what says how they get and give tensors.
_KINDS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "isend": "send_recv",
    "irecv": "send_recv",
    "batch_p2p_ops": "send_recv",
}

UNBACKED = 4096
"""What a size counts as that only the data decides."""

_LANES = {
    "all_gather": "gather",
    "broadcast": "gather",
    "reduce_scatter": "reduce",
    "all_reduce": "reduce",
    "all_to_all": "exchange",
    "send_recv": "exchange",
}


@dataclass(frozen=True)
class Collective:
    """What is communicated, of all that a node of a graph says.

    Attributes:
        kind: one of ``weft.inductor.comm.cluster.KINDS``.
        ranks: of the group, in its order, as ranks of the world.
        group: the name of the group in the graph.
        bytes: of the whole tensors, as a rank has them: what a gather gives, what a reduce-scatter takes, the larger
            side of an exchange.
        dtype: of these tensors.
        members: tensors that are handed over together.
        guessed: sizes that only the data decides, as the graph writes them.
        wider: the dtype to sum in where it is not ``dtype``. A transport that sums in what it sends has to send that.
    """

    kind: str
    ranks: tuple[int, ...]
    group: str
    bytes: int
    dtype: torch.dtype
    members: int = 1
    guessed: tuple[str, ...] = ()
    wider: torch.dtype | None = None


@dataclass(frozen=True)
class Transfer:
    """What a transport makes of a collective.

    Attributes:
        seconds: alone on its lane and its link.
        lane: carries one collective at a time.
        link: the wires it shares with collectives of other lanes: the slowest of those it uses.
        interference: seconds of work that computation loses in a second of it.
    """

    seconds: float
    lane: str
    link: str
    interference: float


def collective_of(step: StepGraph, node: Node, unbacked: int = UNBACKED) -> Collective:
    """The collective that ``node`` of ``step`` starts.

    The group must exist in this process (in a fake world, too). Sizes are those of the captured call. A size that only
    the data decides counts as ``unbacked`` where neither side of the collective is known; ``guessed`` has it anyway.

    Raises:
        GroupGone: this process has no such process group.
    """
    assert is_collective(node)
    name = group_of(node)
    try:
        ranks = torch_adapter.group_ranks(step.groups[name])
    except RuntimeError as error:
        raise GroupGone(name) from error
    sent, received = _tensors([used.meta["val"] for used in node.all_input_nodes]), _tensors(node.meta["val"])
    guessed: dict[str, None] = {}
    sides = [_bytes(tensors, unbacked, guessed) for tensors in (sent, received)]
    known = [size for size, certain in sides if certain]
    kind, made = _kind(node), received[0].dtype
    dtype = made if kind == "all_gather" else sent[0].dtype  # shards may be cast on their way
    return Collective(
        kind=kind,
        ranks=ranks,
        group=name,
        bytes=max(known or [size for size, _ in sides]),
        dtype=dtype,
        members=len(sent),
        guessed=tuple(guessed),
        wider=None if made == dtype else made,
    )


def transfer(cluster: Cluster, collective: Collective, transport: str = "nccl") -> Transfer:
    """How long ``collective`` takes by ``transport``, and what it shares with others.

    A coalesced collective takes the time of one tensor of all its bytes and ``per_member`` for each further tensor. A
    group of one rank copies its tensor.

    Raises:
        UnknownOption: the cluster has no transport of that name.
        CannotCarry: the transport does not serve such a collective.
        LinkMissing: the cluster does not say what joins the ranks of the group.
    """
    lane = f"{transport}:{collective.group}:{_LANES[collective.kind]}"
    if len(collective.ranks) == 1:
        gpu = cluster.gpu
        return Transfer(gpu.launch_latency + 2 * collective.bytes / gpu.copy_bandwidth, lane, "memory", 0.0)
    sent, carrier = _carried(cluster, collective, transport)
    spread = _Spread.of(cluster, collective)
    if carrier is None or (spread.nodes > 1 and not carrier.crosses):
        raise CannotCarry(transport, collective.kind, str(collective.dtype), collective.group, spread.nodes)
    seconds, link = _way(spread, sent, carrier)
    seconds += carrier.per_member * (collective.members - 1)
    if not carrier.crosses:
        lane = _lane_over_peers(transport, collective.kind)
    return Transfer(seconds, lane, link, carrier.interference)


def _carried(cluster: Cluster, collective: Collective, transport: str) -> tuple[Collective, Transport | None]:
    """What a transport sends for a collective, and its entry in the cluster, None where it does not serve it."""
    carrier = cluster.carrier(transport, collective.kind, collective.dtype)
    wider = collective.wider
    if wider is None or (carrier is not None and carrier.sums == "float32"):
        return collective, carrier
    size = collective.bytes // collective.dtype.itemsize * wider.itemsize
    return replace(collective, bytes=size, dtype=wider), cluster.carrier(transport, collective.kind, wider)


def _lane_over_peers(transport: str, kind: str) -> str:
    """Over peers one stream carries all that reduces, be its group and its transport which they may, and one what each
    transport gathers, with however many programs."""
    carries = _LANES[kind]
    return f"peers:{carries}" if carries == "reduce" else f"{transport.rstrip('_0123456789')}:{carries}"


def lane_of(node: Node) -> str:
    """The lane of a collective among those of its group: what :func:`transfer` ends its lanes with."""
    return _LANES[_kind(node)]


def transports_for(cluster: Cluster, collective: Collective) -> list[str]:
    """Names of the transports of ``cluster`` that can carry ``collective``, as its file lists them."""
    nodes = len({cluster.node_of(rank) for rank in collective.ranks})
    names = dict.fromkeys(known.name for known in cluster.transports)
    carriers = {name: _carried(cluster, collective, name)[1] for name in names}
    return [name for name, carrier in carriers.items() if carrier is not None and (nodes == 1 or carrier.crosses)]


# ---- what the node says


def _kind(node: Node) -> str:
    kind = getattr(node.target, "kind", None)
    if kind is not None:  # a callable of weft's
        return kind
    operation = node.target.name().partition("::")[2].partition(".")[0]  # type: ignore[union-attr]
    return _KINDS[operation.rstrip("_").removesuffix("_out").removesuffix("_coalesced")]


def _tensors(value: object) -> list[torch.Tensor]:
    """The tensors of a value; split sizes that are symbols are none."""
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return [value] if isinstance(value, torch.Tensor) else []


def _bytes(tensors: list[torch.Tensor], unbacked: int, guessed: dict[str, None]) -> tuple[int, bool]:
    """Bytes of ``tensors``, and whether no size had to be guessed."""
    total, certain = 0, True
    for tensor in tensors:
        sizes = [torch_adapter.hint(size) for size in tensor.shape]
        for size, known in zip(tensor.shape, sizes, strict=True):
            if known is None:
                guessed[str(size)] = None
                certain = False
        total += math.prod(unbacked if known is None else known for known in sizes) * tensor.dtype.itemsize
    return total, certain


# ---- how long it takes


@dataclass(frozen=True)
class _Spread:
    """How the ranks of a group lie on the nodes.

    Attributes:
        ranks, nodes: how many.
        most, fewest: ranks of the group on one node.
        inner, outer: the links, None where the group does not use them.
    """

    ranks: int
    nodes: int
    most: int
    fewest: int
    inner: Link | None
    outer: Link | None

    @staticmethod
    def of(cluster: Cluster, collective: Collective) -> _Spread:
        on_node = Counter(cluster.node_of(rank) for rank in collective.ranks).values()
        most, fewest, nodes = max(on_node), min(on_node), len(on_node)
        for needed, link, name in ((most > 1, cluster.node, "node"), (nodes > 1, cluster.network, "network")):
            if needed and link is None:
                raise LinkMissing(cluster.name, name, collective.group, len(collective.ranks), nodes)
        inner = cluster.node if most > 1 else None
        outer = cluster.network if nodes > 1 else None
        return _Spread(len(collective.ranks), nodes, most, fewest, inner, outer)

    def hops(self, inner: int, outer: int) -> float:
        """Seconds of so many hops within a node and between nodes."""
        within = inner * self.inner.latency if self.inner else 0.0
        return within + (outer * self.outer.latency if self.outer else 0.0)

    def wires(self, inner: float, outer: float, carrier: Transport, cards: int) -> tuple[float, str]:
        """Seconds to send ``inner`` bytes within a node and ``outer`` bytes out of it through ``cards`` network cards,
        at the same time; and the link that takes longer."""
        times = []
        if self.outer:
            times.append((outer / (cards * self.outer.bandwidth), self.outer.name))
        if self.inner:
            times.append((inner / carrier.bandwidth, self.inner.name))
        return max(times, key=lambda time: time[0])


def _way(spread: _Spread, collective: Collective, carrier: Transport) -> tuple[float, str]:
    """Seconds of the fastest way that a transport knows, and the link that bounds it."""
    size = collective.bytes
    if collective.kind == "send_recv":
        return _added(carrier.latency + spread.hops(1, 1), spread.wires(size, size, carrier, 1))
    if collective.kind == "all_to_all":
        return _exchange(spread, size, carrier)
    if collective.kind == "all_reduce" and carrier.name.startswith("one_shot"):  # every rank reads all of the others'
        read = size * (spread.ranks - 1)
        return _added(carrier.latency, spread.wires(read, read, carrier, spread.fewest))
    ways = [_ring(spread, collective.kind, size, carrier)]
    # NCCL has trees for all-reduces, and PAT, a tree of another form, for groups of one rank a node.
    if spread.nodes > 1 and (collective.kind == "all_reduce" or (spread.most == 1 and collective.kind != "broadcast")):
        ways.append(_tree(spread, collective.kind, size, carrier))
    return min(ways, key=lambda way: way[0])


def _ring(spread: _Spread, kind: str, size: int, carrier: Transport) -> tuple[float, str]:
    laps = 2 if kind == "all_reduce" else 1
    sent = size if kind == "broadcast" else laps * size * (spread.ranks - 1) / spread.ranks
    hops = spread.hops(laps * (spread.ranks - spread.nodes), laps * (spread.nodes - 1)) if carrier.crosses else 0.0
    return _added(carrier.latency + hops, spread.wires(sent, sent, carrier, spread.fewest))


def _tree(spread: _Spread, kind: str, size: int, carrier: Transport) -> tuple[float, str]:
    """Up and down a tree of nodes, along a chain within each."""
    laps = 2 if kind == "all_reduce" else 1
    sent = laps * size if kind == "all_reduce" else size * (spread.ranks - 1) / spread.ranks
    hops = spread.hops(laps * (spread.most - 1), laps * (spread.nodes - 1).bit_length())
    return _added(carrier.latency + hops, spread.wires(sent, sent, carrier, spread.fewest))


def _exchange(spread: _Spread, size: int, carrier: Transport) -> tuple[float, str]:
    """Every rank sends every other its part, through a network card of its own; each costs a hop to set up."""
    inner = size * (spread.most - 1) / spread.ranks
    outer = size * (spread.ranks - spread.fewest) / spread.ranks
    return _added(carrier.latency + spread.hops(spread.ranks - 1, 1), spread.wires(inner, outer, carrier, 1))


def _added(latency: float, wires: tuple[float, str]) -> tuple[float, str]:
    return latency + wires[0], wires[1]
