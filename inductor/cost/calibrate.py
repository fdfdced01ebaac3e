"""Measure this machine and describe it as a cluster.

Runs on every rank, or in one process without a process group. Each collective is timed at several sizes over the ranks
of a node. A latency and a bandwidth are fitted so that ``collective_cost.transfer`` reproduces these times. Between
nodes, an all-gather over one rank of each node is timed. What is not measured comes from the shipped description of the
same GPU, if there is one.
"""

from __future__ import annotations

import logging
import math
import os
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from weft.inductor.cost.cluster import Cluster, Gpu, Link, TransportModel, shipped_clusters
from weft.inductor.cost.collective_cost import Collective, transfer
from weft.inductor.cost.fit_latency_bandwidth import fit
from weft.inductor.cost.measure_gpu import LARGE, Work, elapsed, measure_gpu, seconds_of
from weft.inductor.cost.nccl_benchmarks import BenchmarkGroup, CollectiveBenchmark, Wait, torch_benchmarks
from weft.inductor.cost.symm_mem_benchmarks import AXIS, peer_benchmarks
from weft.inductor.transports.symmetric_memory import reachable, refuse_multicast

log = logging.getLogger(__name__)

# Tensors of the coalesced collective that is compared with a flat one: the number of parameters of a Llama block.
_BLOCK_PARAMETERS = 9
# Interference is measured with _BESIDE collectives and computation that takes _COVER times as long and starts earlier
# by _LEAD; the median of _INTERFERENCE_RUNS counts. Choices.
_BESIDE = 3
_COVER = 3
_LEAD = 0.5
_INTERFERENCE_RUNS = 5
# At interference 1, computation beside a collective would never end in a simulation.
_MOST_INTERFERENCE = 0.95
_DIGITS = 4  # significant digits in the file
_RATES = ("copy_bandwidth", "attention_forward", "attention_backward")  # of a GPU, beside those by dtype


@dataclass(frozen=True)
class Scale:
    """The amount of work of a calibration: GEMMs and copies, and the sizes in bytes of the collectives."""

    work: Work
    sizes: tuple[int, ...]


FULL = Scale(LARGE, (1 << 16, 1 << 20, 1 << 23, 1 << 26, 1 << 29))
"""For GPUs: well under a minute."""

TINY = Scale(Work(1 << 20, ((64, 64, 64),), ((64, 64, 64),), 64, 2), (1 << 12, 1 << 14, 1 << 16))
"""For CPUs, and for tests."""


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration.

    Attributes:
        cluster: the description.
        base: the shipped description of the same GPU, the source of everything not measured; None if there is none.
        transports: the measured ones, each with the largest relative error of its fit.
        network: whether the network between nodes was measured.
    """

    cluster: Cluster
    base: Cluster | None
    transports: tuple[tuple[TransportModel, float], ...]
    network: bool


def calibrate(device: torch.device, scale: Scale) -> Calibration:
    """Measure ``device``, that of this rank, and the links and transports of the default process group, if there is
    one.

    All ranks must call it, and all return the same: the measurements of rank 0, with the rates of the slowest GPU, that
    determines the time of a step.

    Raises:
        MulticastNotOff: transports over symmetric memory are to be timed, and NVLink multicast is not switched off.
    """
    gpu = _rounded_gpu(measure_gpu(device, scale.work))
    base = next((cluster for cluster in shipped_clusters() if cluster.gpu.name == gpu.name), None)
    # One GPU has no links to measure.
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
        described = _completed(draft, base, [transport for transport, _ in measured], network)
        result = [Calibration(described, base, tuple(measured), network is not None)]
    dist.broadcast_object_list(result, 0)
    assert result[0] is not None
    return result[0]


def _slowest(gpu: Gpu, world: int) -> Gpu:
    """``gpu`` with the slowest value of each rate over all ranks. On one host, rates of GEMMs differ by up to 5%."""
    # The slowest GPU sets the pace of a step, because every collective waits for all ranks.
    gathered: list[Gpu | None] = [None] * world
    dist.all_gather_object(gathered, gpu)
    gpus = [each for each in gathered if each is not None]
    matmul = {name: min(each.matmul.get(name, rate) for each in gpus) for name, rate in gpu.matmul.items()}
    rates: dict[str, Any] = {name: min(getattr(each, name) for each in gpus) for name in _RATES}
    return replace(gpu, launch_latency=max(each.launch_latency for each in gpus), matmul=matmul, **rates)


def _name(gpu: Gpu, per_node: int) -> str:
    return re.sub(r"[^a-z0-9]+", "-", gpu.name.lower()) + f"x{per_node}-calibrated"


def _alone(gpu: Gpu, base: Cluster | None) -> Cluster:
    return replace(base, name=_name(gpu, base.gpus_per_node), gpu=gpu) if base else Cluster(_name(gpu, 1), 1, gpu)


def _completed(draft: Cluster, base: Cluster | None, measured: list[TransportModel], network: Link | None) -> Cluster:
    """``draft`` with the measurements, and with the values of ``base`` for everything else."""
    node = base.node if base else None
    if draft.node is not None and draft.gpus_per_node > 1:  # the ranks that were measured are those of a node
        node = replace(draft.node, bandwidth=max(transport.bandwidth for transport in measured))
    names = {transport.name for transport in measured}
    others = [transport for transport in base.transports if transport.name not in names] if base else []
    known = network or (base.network if base else None)
    return replace(draft, node=node, network=known, transports=(*measured, *others))


def _groups(world: int, per_node: int, device: torch.device) -> tuple[BenchmarkGroup, BenchmarkGroup | None]:
    """The group of this rank's node, and the group of the first ranks of all nodes. The second is None on other ranks,
    and if there is one node."""
    if per_node >= world:
        assert isinstance(dist.group.WORLD, dist.ProcessGroup)
        return BenchmarkGroup(dist.group.WORLD, tuple(range(world)), device), None
    nodes = [tuple(range(first, min(first + per_node, world))) for first in range(0, world, per_node)]
    firsts = tuple(ranks[0] for ranks in nodes)
    # Every rank makes every group, in the same order.
    groups = [(ranks, dist.new_group(list(ranks))) for ranks in (*nodes, firsts)]
    own = [BenchmarkGroup(group, ranks, device) for ranks, group in groups if isinstance(group, dist.ProcessGroup)]
    across = own[-1] if dist.get_rank() in firsts else None
    return own[0], across


def collective_benchmarks(backend: str) -> list[CollectiveBenchmark]:
    """Everything that is timed on process groups of ``backend``."""
    return [*torch_benchmarks(backend), *(peer_benchmarks() if backend == "nccl" else [])]


# ---- within a node


def _transports(draft: Cluster, peers: BenchmarkGroup, scale: Scale) -> list[tuple[TransportModel, float]]:
    """Every benchmark over ``peers`` as a transport, with the largest relative error of its fit."""
    benchmarks = collective_benchmarks(str(dist.get_backend(peers.group)))
    if any(benchmark.symmetric for benchmark in benchmarks):
        refuse_multicast()
        reason = reachable(AXIS, peers.group.group_name, peers.device)
        if reason is not None:
            log.warning("transports over symmetric memory are not measured: %s", reason)
            benchmarks = [benchmark for benchmark in benchmarks if not benchmark.symmetric]
    return [_transport(draft, benchmark, peers, scale) for benchmark in benchmarks]


def _transport(
    draft: Cluster, benchmark: CollectiveBenchmark, peers: BenchmarkGroup, scale: Scale
) -> tuple[TransportModel, float]:
    times = [_seconds(benchmark, peers, size) for size in scale.sizes]
    # Without bytes the model gives the hops alone; the difference to it is what a bandwidth divides.
    hops = _probe(draft, benchmark, peers, 0)
    points = [
        (_probe(draft, benchmark, peers, size) - hops, seconds)
        for size, seconds in zip(scale.sizes, times, strict=True)
    ]
    line = fit(points)
    transport = TransportModel(
        name=benchmark.transport,
        kinds=(benchmark.kind,),
        bandwidth=_rounded(line.bandwidth),
        latency=_rounded(max(0.0, line.latency - hops)),
        interference=_rounded(_interference(benchmark, peers, scale, times[-1])),
        dtypes=benchmark.dtypes,
        crosses=benchmark.crosses,
        per_member=_rounded(_per_member(benchmark, peers, scale.sizes[-2])) if benchmark.coalesces else 0.0,
        ctas=benchmark.ctas,
    )
    return transport, line.worst(points)


def _probe(draft: Cluster, benchmark: CollectiveBenchmark, peers: BenchmarkGroup, size: int) -> float:
    """The cost model's result at a bandwidth of 1 byte per second, without latency of the transport: seconds of all
    hops plus the bytes that a rank sends. The fit needs both to solve the model for bandwidth and latency."""
    unit = TransportModel(benchmark.transport, (benchmark.kind,), 1.0, 0.0, 0.0, crosses=benchmark.crosses)
    collective = Collective(benchmark.kind, peers.ranks, "", size, benchmark.dtype)
    return transfer(replace(draft, transports=(unit,)), collective, benchmark.transport).seconds


def _seconds(benchmark: CollectiveBenchmark, peers: BenchmarkGroup, size: int, members: int = 1) -> float:
    """Seconds of a collective alone on the GPU."""
    start = benchmark.prepare(peers, size, members)
    dist.barrier(peers.group)
    return seconds_of(lambda: start()(), peers.device, ahead=True)


def _per_member(benchmark: CollectiveBenchmark, peers: BenchmarkGroup, size: int) -> float:
    flat, several = (_seconds(benchmark, peers, size, members) for members in (1, _BLOCK_PARAMETERS))
    return max(0.0, several - flat) / (_BLOCK_PARAMETERS - 1)


def _interference(benchmark: CollectiveBenchmark, peers: BenchmarkGroup, scale: Scale, seconds: float) -> float:
    """Seconds of GEMMs lost per second of the collective, which takes ``seconds`` alone."""
    pairs = [
        [torch.randn(shape, device=peers.device, dtype=torch.bfloat16) for shape in ((m, k), (k, n))]
        for m, k, n in scale.work.beside
    ]

    def compute(rounds: int = 1) -> None:
        for a, b in pairs * rounds:
            a @ b

    one = seconds_of(compute, peers.device)
    lead, count = (math.ceil(times * _BESIDE * seconds / one) for times in (_LEAD, _COVER))
    start, waits = benchmark.prepare(peers, scale.sizes[-1], 1), list[Wait]()

    def gemms(collectives: int) -> None:
        compute(lead)  # covers the launches of all the rest, and ranks that arrive late
        waits.extend(start() for _ in range(collectives))
        compute(count)

    def measured(collectives: int) -> float:
        dist.barrier(peers.group)
        seconds_taken = elapsed(lambda: gemms(collectives), peers.device)
        while waits:
            waits.pop()()
        return seconds_taken

    # Alternating, because a GPU's clock drifts while it is busy.
    lost = [measured(_BESIDE) - measured(0) for _ in range(_INTERFERENCE_RUNS)]
    return min(max(0.0, statistics.median(lost) / (_BESIDE * seconds)), _MOST_INTERFERENCE)


# ---- between nodes


def _network(
    draft: Cluster, measured: Sequence[tuple[TransportModel, float]], across: BenchmarkGroup, scale: Scale
) -> Link:
    """The link between nodes, from all-gathers over one rank of each node, which use no other link."""
    (benchmark,) = (
        benchmark
        for benchmark in collective_benchmarks(str(dist.get_backend(across.group)))
        if benchmark.kind == "all_gather" and benchmark.crosses
    )
    # The latency of the library itself is known from within the node: what is left is that of the network's hops.
    inner = [transport.latency for transport, _ in measured if benchmark.kind in transport.kinds and transport.crosses]
    line = fit([(_probe(draft, benchmark, across, size), _seconds(benchmark, across, size)) for size in scale.sizes])
    # At a hop latency of 1 s the model's result is the number of hops.
    hops = _probe(replace(draft, network=Link("network", 1.0, 1.0)), benchmark, across, 0)
    latency = max(0.0, line.latency - sum(inner)) / hops
    return Link("network", _rounded(line.bandwidth), _rounded(latency))


# ---- digits


def _rounded(number: float) -> float:
    """``number`` rounded to the significant digits of a measurement."""
    return float(f"{number:.{_DIGITS}g}")


def _rounded_gpu(gpu: Gpu) -> Gpu:
    numbers: dict[str, Any] = {name: _rounded(getattr(gpu, name)) for name in (*_RATES, "launch_latency")}
    return replace(gpu, matmul={name: _rounded(rate) for name, rate in gpu.matmul.items()}, **numbers)
