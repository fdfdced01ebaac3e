"""Measure the machine that this runs on, and describe it as a cluster.

Run on every rank (or alone, without a process group). Each collective is timed at some sizes, over the ranks of a
node; a latency and a bandwidth are fitted so that ``collective_cost.transfer`` gives these times again. Between nodes
an all-gather over one rank of each is timed. What is not measured is taken from the shipped description of the same
GPU, where there is one.
"""

from __future__ import annotations

import logging
import math
import os
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from weft.inductor.comm.cluster import Cluster, Gpu, Link, Transport, shipped_clusters
from weft.inductor.comm.collective_cost import Collective, transfer
from weft.inductor.comm.fit import fit
from weft.inductor.comm.measure_gpu import LARGE, Work, elapsed, measure_gpu, seconds_of
from weft.inductor.comm.peer_ways import AXIS, peer_ways
from weft.inductor.comm.symmetric import reachable, refuse_multicast
from weft.inductor.comm.ways import Peers, Wait, Way, torch_ways

log = logging.getLogger(__name__)

# Members of the coalesced collective that is compared with a flat one: the parameters of a Llama block.
_MEMBERS = 9
# Computation is slowed by so many collectives, takes this many times as long as they do, and begins so much before.
_BESIDE = 3
_COVER = 3
_LEAD = 0.5
_ROUNDS = 5
# A computation that got nothing done beside a collective would never end in a simulation.
_MOST_INTERFERENCE = 0.95
_DIGITS = 4


@dataclass(frozen=True)
class Scale:
    """How much is done to measure: what a GPU computes, and bytes of the tensors that are communicated."""

    work: Work
    sizes: tuple[int, ...]


FULL = Scale(LARGE, (1 << 16, 1 << 20, 1 << 23, 1 << 26, 1 << 29))
"""For GPUs: well under a minute."""

TINY = Scale(Work(1 << 20, ((64, 64, 64),), ((64, 64, 64),), 64, 2), (1 << 12, 1 << 14, 1 << 16))
"""For CPUs, and for tests."""


@dataclass(frozen=True)
class Calibration:
    """What was measured.

    Attributes:
        cluster: the description.
        base: the shipped one of the same GPU, from which comes what was not measured; None where there is none.
        transports: those measured, each with the largest relative error of its fit.
        network: whether the network between nodes was measured.
    """

    cluster: Cluster
    base: Cluster | None
    transports: tuple[tuple[Transport, float], ...]
    network: bool


def calibrate(device: torch.device, scale: Scale) -> Calibration:
    """Measure ``device`` (this rank's), and what joins the ranks of the default process group if there is one.

    All ranks return what rank 0 measured, but for the rates of the GPU: those of the slowest rank, which a step of all
    goes by.

    Raises:
        MulticastNotOff: ways over symmetric memory are to be timed, and NVLink multicast is not switched off.
    """
    gpu = _rounded_gpu(measure_gpu(device, scale.work))
    base = next((cluster for cluster in shipped_clusters() if cluster.gpu.name == gpu.name), None)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Calibration(_alone(gpu, base), base, (), False)
    world = dist.get_world_size()
    gpu = _slowest(gpu, world)
    hosts = base.hosts_per_node if base else 1
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world)) * hosts
    within, across = _groups(world, per_node, device)
    # Hops within a node cannot be told from a transport's latency by one group.
    link = base.node if base and base.node else Link("node", 1.0, 0.0)
    draft = Cluster(_name(gpu, per_node), per_node, gpu, hosts, link, Link("network", 1.0, 0.0))
    peers = within if per_node > 1 or across is None else across
    # A last node that is not full may have one rank; what counts is what rank 0 measures.
    measured = _transports(draft, peers, scale) if len(peers.ranks) > 1 else []
    network = _network(draft, measured, across, scale) if across else None
    result: list[Calibration | None] = [None]
    if dist.get_rank() == 0:
        found = _completed(draft, base, [transport for transport, _ in measured], network)
        result = [Calibration(found, base, tuple(measured), network is not None)]
    dist.broadcast_object_list(result, 0)
    assert result[0] is not None
    return result[0]


def _slowest(gpu: Gpu, world: int) -> Gpu:
    """``gpu`` with the slowest of each figure that the ranks measured. Of one host, products differ by up to 5%."""
    found: list[Gpu | None] = [None] * world
    dist.all_gather_object(found, gpu)
    gpus = [each for each in found if each is not None]
    return replace(
        gpu,
        copy_bandwidth=min(each.copy_bandwidth for each in gpus),
        launch_latency=max(each.launch_latency for each in gpus),
        matmul={name: min(each.matmul.get(name, rate) for each in gpus) for name, rate in gpu.matmul.items()},
        attention_forward=min(each.attention_forward for each in gpus),
        attention_backward=min(each.attention_backward for each in gpus),
    )


def _name(gpu: Gpu, per_node: int) -> str:
    return re.sub(r"[^a-z0-9]+", "-", gpu.name.lower()) + f"x{per_node}-calibrated"


def _alone(gpu: Gpu, base: Cluster | None) -> Cluster:
    return replace(base, name=_name(gpu, base.gpus_per_node), gpu=gpu) if base else Cluster(_name(gpu, 1), 1, gpu)


def _completed(draft: Cluster, base: Cluster | None, measured: list[Transport], network: Link | None) -> Cluster:
    """``draft`` with what was measured, and what ``base`` says where nothing was."""
    node = base.node if base else None
    if draft.node is not None and draft.gpus_per_node > 1:  # the ranks that were measured are those of a node
        node = replace(draft.node, bandwidth=max(transport.bandwidth for transport in measured))
    names = {transport.name for transport in measured}
    others = [transport for transport in base.transports if transport.name not in names] if base else []
    known = network or (base.network if base else None)
    return replace(draft, node=node, network=known, transports=(*measured, *others))


def _groups(world: int, per_node: int, device: torch.device) -> tuple[Peers, Peers | None]:
    """The ranks of this one's node, and the first ranks of all nodes (None on other ranks, and where one node is
    all)."""
    if per_node >= world:
        assert isinstance(dist.group.WORLD, dist.ProcessGroup)
        return Peers(dist.group.WORLD, tuple(range(world)), device), None
    nodes = [tuple(range(first, min(first + per_node, world))) for first in range(0, world, per_node)]
    firsts = tuple(ranks[0] for ranks in nodes)
    # Every rank makes every group, in the same order.
    groups = [(ranks, dist.new_group(list(ranks))) for ranks in (*nodes, firsts)]
    mine = [Peers(group, ranks, device) for ranks, group in groups if isinstance(group, dist.ProcessGroup)]
    across = mine[-1] if dist.get_rank() in firsts else None
    return mine[0], across


def ways(backend: str) -> list[Way]:
    """All that is timed on process groups of ``backend``."""
    return [*torch_ways(backend), *(peer_ways() if backend == "nccl" else [])]


# ---- within a node


def _transports(draft: Cluster, peers: Peers, scale: Scale) -> list[tuple[Transport, float]]:
    """Each way over ``peers`` as a transport, with the largest relative error of its fit."""
    listed = ways(str(dist.get_backend(peers.group)))
    if any(way.symmetric for way in listed):
        refuse_multicast()
        why = reachable(AXIS, peers.group.group_name, peers.device)
        if why is not None:
            log.warning("transports over symmetric memory are not measured: %s", why)
            listed = [way for way in listed if not way.symmetric]
    return [_transport(draft, way, peers, scale) for way in listed]


def _transport(draft: Cluster, way: Way, peers: Peers, scale: Scale) -> tuple[Transport, float]:
    times = [_seconds(way, peers, size) for size in scale.sizes]
    hops = _probe(draft, way, peers, 0)
    points = [
        (_probe(draft, way, peers, size) - hops, seconds) for size, seconds in zip(scale.sizes, times, strict=True)
    ]
    line = fit(points)
    transport = Transport(
        name=way.transport,
        kinds=(way.kind,),
        bandwidth=_rounded(line.bandwidth),
        latency=_rounded(max(0.0, line.latency - hops)),
        interference=_rounded(_interference(way, peers, scale, times[-1])),
        dtypes=way.dtypes,
        sums=way.sums,
        crosses=way.crosses,
        per_member=_rounded(_per_member(way, peers, scale.sizes[-2])) if way.coalesces else 0.0,
        ctas=way.ctas,
    )
    return transport, line.worst(points)


def _probe(draft: Cluster, way: Way, peers: Peers, size: int) -> float:
    """What the cost model makes of a collective where a byte takes a second and nothing has a latency but the links:
    seconds of hops, and bytes that a rank sends."""
    unit = Transport(way.transport, (way.kind,), 1.0, 0.0, 0.0, crosses=way.crosses)
    collective = Collective(way.kind, peers.ranks, "", size, way.dtype)
    return transfer(replace(draft, transports=(unit,)), collective, way.transport).seconds


def _seconds(way: Way, peers: Peers, size: int, members: int = 1) -> float:
    """How long a collective takes by itself."""
    start = way.prepare(peers, size, members)
    dist.barrier(peers.group)
    return seconds_of(lambda: start()(), peers.device, ahead=True)


def _per_member(way: Way, peers: Peers, size: int) -> float:
    flat, several = (_seconds(way, peers, size, members) for members in (1, _MEMBERS))
    return max(0.0, several - flat) / (_MEMBERS - 1)


def _interference(way: Way, peers: Peers, scale: Scale, seconds: float) -> float:
    """Seconds of matrix products that are lost in a second of the collective, which takes ``seconds`` by itself."""
    pairs = [
        [torch.randn(shape, device=peers.device, dtype=torch.bfloat16) for shape in ((m, k), (k, n))]
        for m, k, n in scale.work.beside
    ]

    def compute(rounds: int = 1) -> None:
        for a, b in pairs * rounds:
            a @ b

    one = seconds_of(compute, peers.device)
    lead, count = (math.ceil(times * _BESIDE * seconds / one) for times in (_LEAD, _COVER))
    start, waits = way.prepare(peers, scale.sizes[-1], 1), list[Wait]()

    def products(collectives: int) -> None:
        compute(lead)  # until the host has given all the rest, and all ranks are there
        waits.extend(start() for _ in range(collectives))
        compute(count)

    def measured(collectives: int) -> float:
        dist.barrier(peers.group)
        found = elapsed(lambda: products(collectives), peers.device)
        while waits:
            waits.pop()()
        return found

    # In turn, since a GPU's clock drifts while it is busy.
    lost = [measured(_BESIDE) - measured(0) for _ in range(_ROUNDS)]
    return min(max(0.0, statistics.median(lost) / (_BESIDE * seconds)), _MOST_INTERFERENCE)


# ---- between nodes


def _network(draft: Cluster, measured: Sequence[tuple[Transport, float]], across: Peers, scale: Scale) -> Link:
    """The link between nodes, from all-gathers over one rank of each: those use nothing else."""
    (way,) = (way for way in ways(str(dist.get_backend(across.group))) if way.kind == "all_gather" and way.crosses)
    inner = [transport.latency for transport, _ in measured if way.kind in transport.kinds and transport.crosses]
    line = fit([(_probe(draft, way, across, size), _seconds(way, across, size)) for size in scale.sizes])
    hops = _probe(replace(draft, network=Link("network", 1.0, 1.0)), way, across, 0)
    latency = max(0.0, line.latency - sum(inner)) / hops
    return Link("network", _rounded(line.bandwidth), _rounded(latency))


# ---- digits


def _rounded(number: float) -> float:
    """To as many digits as a measurement may claim."""
    return float(f"{number:.{_DIGITS}g}")


def _rounded_gpu(gpu: Gpu) -> Gpu:
    return replace(
        gpu,
        copy_bandwidth=_rounded(gpu.copy_bandwidth),
        launch_latency=_rounded(gpu.launch_latency),
        matmul={name: _rounded(rate) for name, rate in gpu.matmul.items()},
        attention_forward=_rounded(gpu.attention_forward),
        attention_backward=_rounded(gpu.attention_backward),
    )
