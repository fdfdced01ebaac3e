"""Calibration: what is measured on a CPU, and that it finds the figures of a machine whose clock is a cost model."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import run_ranks
from weft.errors import MulticastNotOff
from weft.inductor.cost import calibrate as calibration
from weft.inductor.cost.calibrate import FULL, TINY, Calibration, calibrate
from weft.inductor.cost.cluster import Cluster, Gpu, Link, load_cluster, save_cluster
from weft.inductor.cost.collective_cost import Collective, transfer
from weft.inductor.cost.measure_gpu import Work, elapsed, measure_gpu, seconds_of
from weft.inductor.cost.nccl_benchmarks import BenchmarkGroup, CollectiveBenchmark, torch_benchmarks
from weft.inductor.cost.symm_mem_benchmarks import peer_benchmarks

CPU = torch.device("cpu")
KINDS = ["all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "send_recv"]


def test_the_rates_of_a_cpu() -> None:
    gpu = measure_gpu(CPU, Work(1 << 22, ((128, 128, 128), (64, 128, 64)), ((64, 64, 64),), 128, 2))
    assert gpu.name.startswith("CPU")
    assert gpu.multiprocessors == os.cpu_count()
    assert 1e8 < gpu.copy_bandwidth < 1e13
    assert 1e-8 < gpu.launch_latency < 1e-2
    assert list(gpu.matmul) == ["bfloat16", "float16", "float32"]
    assert all(1e7 < rate < 1e14 for rate in (*gpu.matmul.values(), gpu.attention_forward, gpu.attention_backward))


def test_a_call_is_timed_by_the_clock() -> None:
    assert 0.002 <= seconds_of(lambda: time.sleep(0.002), CPU) < 0.2
    assert 0.006 <= elapsed(lambda: time.sleep(0.002), CPU, calls=3) < 0.6


def test_alone_only_the_gpu_is_measured(tmp_path: Path) -> None:
    found = calibrate(CPU, TINY)
    assert found.cluster.gpus_per_node == 1
    assert (found.base, found.transports, found.network) == (None, (), False)
    save_cluster(found.cluster, tmp_path / "alone.toml")
    assert load_cluster(tmp_path / "alone.toml") == found.cluster


# ---- on processes


def measured(rank: int, world: int, per_node: int) -> tuple[Calibration, int]:
    os.environ["LOCAL_WORLD_SIZE"] = str(per_node)
    return calibrate(CPU, TINY), dist.get_rank()


@pytest.mark.gloo
def test_two_processes() -> None:
    (found, _), (other, _) = run_ranks(measured, 2, 2)
    assert found == other, "all ranks have what rank 0 measured"
    assert found.base is None
    assert not found.network
    cluster = found.cluster
    assert cluster.gpus_per_node == 2
    assert cluster.network is None
    assert [transport.kinds for transport, _ in found.transports] == [(kind,) for kind in KINDS]
    assert cluster.node is not None
    assert cluster.node.bandwidth == max(transport.bandwidth for transport in cluster.transports)
    for kind in KINDS:
        seconds = transfer(cluster, Collective(kind, (0, 1), "g", 1 << 14, torch.float32), "gloo").seconds
        assert 1e-6 < seconds < 1.0


def measured_unequal(rank: int, world: int) -> Gpu:
    """The description's GPU, where rank 1 computes half as fast and copies twice as fast as rank 0."""
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    speed = 1 + rank
    known = load_cluster("h200x8").gpu
    own = dataclasses.replace(
        known,
        copy_bandwidth=known.copy_bandwidth * speed,
        launch_latency=known.launch_latency * speed,
        matmul={name: rate / speed for name, rate in known.matmul.items()},
    )
    calibration.measure_gpu = lambda device, work: own
    return calibrate(CPU, TINY).cluster.gpu


@pytest.mark.gloo
def test_calibration_takes_the_slowest_rank() -> None:
    known = load_cluster("h200x8").gpu
    for found in run_ranks(measured_unequal, 2):
        assert found.copy_bandwidth == pytest.approx(known.copy_bandwidth, rel=1e-3)
        assert found.launch_latency == pytest.approx(2 * known.launch_latency, rel=1e-3)
        assert found.matmul["bfloat16"] == pytest.approx(known.matmul["bfloat16"] / 2, rel=1e-3)
        assert found.attention_forward == pytest.approx(known.attention_forward, rel=1e-3)


@pytest.mark.gloo
def test_three_processes_on_two_nodes(tmp_path: Path) -> None:
    """Of two ranks and of one: the network is measured, and all ranks get it."""
    answers = [found for found, _ in run_ranks(measured, 3, 2)]
    assert answers[0] == answers[1] == answers[2]
    cluster = answers[0].cluster
    assert answers[0].network
    assert cluster.gpus_per_node == 2
    assert cluster.network is not None
    assert cluster.node is not None
    save_cluster(cluster, tmp_path / "three.toml")
    assert load_cluster(tmp_path / "three.toml") == cluster
    across = transfer(cluster, Collective("all_gather", (0, 2), "g", 1 << 14, torch.float32), "gloo")
    assert across.link == "network"
    assert 1e-6 < across.seconds < 1.0


@pytest.mark.gloo
def test_two_nodes_of_one_rank() -> None:
    cluster = run_ranks(measured, 2, 1)[0][0].cluster
    assert cluster.gpus_per_node == 1
    assert cluster.node is None
    assert transfer(cluster, Collective("all_reduce", (0, 1), "g", 1 << 14, torch.float32), "gloo").link == "network"


# ---- against a machine that is known


def truth() -> Cluster:
    """What the machine below is like; hops within a node cannot be measured, and have no latency here."""
    h200 = load_cluster("h200x8")
    carriers = [t for t in h200.transports if t.name == "nccl" and "float32" not in t.dtypes]
    carriers = [dataclasses.replace(t, name="gloo") for t in carriers]
    return dataclasses.replace(
        h200, gpus_per_node=4, node=Link("node", 1.0, 0.0), network=Link("network", 4e10, 5e-6), transports=carriers
    )


def measured_by_a_model(rank: int, world: int) -> Calibration:
    """``calibrate`` with the clock of the cost model on ``truth`` in place of the collectives and the products."""
    os.environ["LOCAL_WORLD_SIZE"] = "4"
    machine = truth()

    def modelled(benchmark: CollectiveBenchmark, peers: BenchmarkGroup, size: int, members: int = 1) -> float:
        return transfer(
            machine, Collective(benchmark.kind, peers.ranks, "", size, benchmark.dtype, members), "gloo"
        ).seconds

    def slowed(benchmark: CollectiveBenchmark, peers: BenchmarkGroup, *_: Any) -> float:
        return transfer(machine, Collective(benchmark.kind, peers.ranks, "", 1, benchmark.dtype), "gloo").interference

    calibration._seconds = modelled
    calibration._interference = slowed
    listed = [dataclasses.replace(benchmark, coalesces=True) for benchmark in torch_benchmarks("gloo")]
    calibration.collective_benchmarks = lambda backend: listed
    scale = dataclasses.replace(TINY, sizes=FULL.sizes)
    return calibrate(CPU, scale)


@pytest.mark.gloo
def test_a_known_machine_is_found_again() -> None:
    """8 processes on two nodes of four."""
    found, wanted = run_ranks(measured_by_a_model, 8)[0], truth()
    assert found.cluster.network is not None
    assert wanted.network is not None
    assert found.cluster.network.bandwidth == pytest.approx(wanted.network.bandwidth, rel=1e-3)
    assert found.cluster.network.latency == pytest.approx(wanted.network.latency, rel=1e-2)
    for transport, worst in found.transports:
        (kind,) = transport.kinds
        known = wanted.transport_model("gloo", kind, torch.float32)
        assert known is not None
        assert worst < 1e-6
        assert transport.bandwidth == pytest.approx(known.bandwidth, rel=1e-3)
        assert transport.latency == pytest.approx(known.latency, rel=1e-3)
        assert transport.interference == pytest.approx(known.interference, rel=1e-3)
        assert transport.per_member == pytest.approx(known.per_member, rel=1e-3)
    assert len(found.transports) == len(KINDS)


def test_values_that_are_not_measured_come_from_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = load_cluster("h200x8")
    gpu = dataclasses.replace(h200.gpu, copy_bandwidth=4.123456e12)
    monkeypatch.setattr(calibration, "measure_gpu", lambda device, work: gpu)
    found = calibrate(CPU, TINY)
    assert found.base == h200
    assert found.cluster.gpu.copy_bandwidth == 4.123e12
    wanted = dataclasses.replace(h200, name="h200x8-calibrated", gpu=found.cluster.gpu)
    assert found.cluster == wanted


def symmetric_way(rank: int, world: int) -> str:
    (benchmark, *_) = torch_benchmarks("gloo")
    calibration.collective_benchmarks = lambda backend: [dataclasses.replace(benchmark, symmetric=True)]
    os.environ.pop("NCCL_NVLS_ENABLE", None)
    try:
        calibrate(CPU, TINY)
    except MulticastNotOff as error:
        return str(error)
    return ""


@pytest.mark.gloo
def test_symmetric_memory_is_refused_where_multicast_may_be_on() -> None:
    for refusal in run_ranks(symmetric_way, 2):
        assert "NCCL_NVLS_ENABLE=0" in refusal


def test_ways_over_nccl() -> None:
    """What a graph holds is timed in the dtypes that training uses, and sums in float32 by themselves."""
    listed = [
        (benchmark.kind, benchmark.dtype, benchmark.dtypes, benchmark.coalesces)
        for benchmark in torch_benchmarks("nccl")
    ]
    assert listed[0] == ("reduce_scatter", torch.float32, ("float32",), True)
    assert [kind for kind, *_ in listed[1:]] == KINDS
    assert {dtype for _, dtype, *_ in listed[1:]} == {torch.bfloat16}


def over_peers(rank: int, world: int) -> list[str]:
    """Start each benchmark over peers, twice, with one tensor and with three, and wait."""
    peers = BenchmarkGroup(dist.group.WORLD, (0, 1), CPU)
    for benchmark in peer_benchmarks():
        for members in (1, 3):
            start = benchmark.prepare(peers, 1 << 12, members)
            start()()
            start()()
    return [f"{benchmark.kind} {benchmark.transport}" for benchmark in peer_benchmarks()]


@pytest.mark.gloo
def test_ways_over_peers_run_and_have_a_cost() -> None:
    names = {name.split()[1] for name in run_ranks(over_peers, 2, timeout=120)[0]}
    assert names >= {"push", "copy_engine", "pull", "copy_sum", "one_shot", "two_shot"}


@pytest.mark.gpu(2)
def test_gpus() -> None:
    found = run_ranks(measured_on_gpus, 2, backend="nccl")[0]
    assert {transport.name for transport, _ in found.transports} == {
        "nccl",
        *(benchmark.transport for benchmark in peer_benchmarks()),
    }
    assert all(transport.bandwidth > 1e9 for transport, _ in found.transports)
    assert set(found.cluster.gpu.matmul) == {"bfloat16", "float16", "float32", "tf32"}


def measured_on_gpus(rank: int, world: int) -> Calibration:
    return calibrate(torch.device("cuda", rank), dataclasses.replace(TINY, sizes=FULL.sizes[:4]))
