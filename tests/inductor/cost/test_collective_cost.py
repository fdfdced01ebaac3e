"""What collectives of a graph are, and their times: against measured ones, counted wires, and sums done by hand."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_ops import gathered, operations
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import weft
from weft.capture.graph import StepGraph
from weft.capture.sizes_in_bytes import collective_bytes
from weft.errors import CannotCarry, GroupGone, LinkMissing, UnknownOption
from weft.inductor.cost.cluster import Cluster, Link, TransportModel, load_cluster
from weft.inductor.cost.collective_cost import (
    UNBACKED,
    Collective,
    Transfer,
    collective_of,
    stream_of,
    transfer,
    transports_for,
)
from weft.inductor.graph.collectives import KINDS, WIDENING_REDUCE_SCATTER, CollectiveOp, register
from weft.inductor.transports.peer_calls import PeerGather, call_classes

MIB = 2**20
BF16, F32 = torch.bfloat16, torch.float32
H200 = load_cluster("h200x8")


def collective(
    kind: str, mib: float, ranks: int | tuple[int, ...] = 8, dtype: torch.dtype = BF16, members: int = 1
) -> Collective:
    over = tuple(range(ranks)) if isinstance(ranks, int) else ranks
    return Collective(kind, over, "world", int(mib * MIB), dtype, members)


# ---- against what 8 H200 of one host took: kind, MiB of the whole tensor, dtype, transport, microseconds

MEASURED = [
    ("all_gather", 512, BF16, "nccl", 1404),
    ("all_gather", 512, BF16, "nccl", 1464),
    ("all_gather", 8, BF16, "nccl", 65),
    ("all_gather", 1, BF16, "nccl", 55),
    ("all_gather", 0.06, BF16, "nccl", 42),
    ("all_gather", 0.06, BF16, "nccl", 52),
    ("reduce_scatter", 512, BF16, "nccl", 1410),
    ("reduce_scatter", 1024, F32, "nccl", 2764),
    ("all_reduce", 512, BF16, "nccl", 2653),
    ("all_reduce", 64, BF16, "nccl", 447),
    ("all_reduce", 8, BF16, "nccl", 86),
    ("all_reduce", 1, BF16, "nccl", 296),  # an outlier: eight times the bytes took 86
    ("all_reduce", 1 / 16, BF16, "nccl", 42),
    ("all_to_all", 512, BF16, "nccl", 1529),
    ("all_reduce", 1 / 16, BF16, "two_shot", 15),
    ("all_reduce", 1, BF16, "two_shot", 20),
    ("all_reduce", 8, BF16, "two_shot", 64),
    ("all_reduce", 64, BF16, "two_shot", 413),
    ("all_gather", 512, BF16, "copy_engine", 1375),
    ("all_gather", 64, BF16, "copy_engine", 235),
    ("all_gather", 8, BF16, "copy_engine", 106),
    ("reduce_scatter", 512, BF16, "pull", 1428),
    ("reduce_scatter", 512, BF16, "pull_16", 2587),
    ("all_gather", 512, BF16, "push", 1517),  # 8 thread blocks
    ("all_gather", 512, BF16, "push", 1486),  # 16
    ("all_gather", 512, BF16, "push_32", 1450),
    ("all_gather", 512, BF16, "push_32", 1415),  # 132
]


def off_by(kind: str, mib: float, dtype: torch.dtype, transport: str, microseconds: float) -> float:
    return abs(transfer(H200, collective(kind, mib, 8, dtype), transport).seconds * 1e6 / microseconds - 1)


def test_times_are_those_measured() -> None:
    offs = [off_by(*measured) for measured in MEASURED]
    assert statistics.median(offs) < 0.15
    assert sorted(offs)[-2] < 0.2, "all but the outlier"


def test_large_collectives_are_close() -> None:
    assert max(off_by(*measured) for measured in MEASURED if measured[1] >= 512) < 0.05


def test_nine_parameters_in_one_call() -> None:
    """Of a block of Llama 8B: 1,197 us as one flat tensor, 1,312 us as nine."""
    block = 218_112_000 * 2 / MIB
    flat, nine = (transfer(H200, collective("all_gather", block, members=count)).seconds * 1e6 for count in (1, 9))
    assert flat == pytest.approx(1197, rel=0.05)
    assert nine == pytest.approx(1312, rel=0.05)
    assert nine - flat == pytest.approx(1312 - 1197, rel=0.05)


@pytest.mark.parametrize(
    ("kind", "mib", "dtype", "transport", "beside"),
    [
        ("all_gather", 512, BF16, "nccl", 6144),
        ("reduce_scatter", 512, BF16, "nccl", 6320),
        ("reduce_scatter", 1024, F32, "nccl", 6525),
        ("reduce_scatter", 512, BF16, "pull_16", 6767),
    ],
)
def test_interference_is_that_measured(kind: str, mib: float, dtype: torch.dtype, transport: str, beside: int) -> None:
    """Four matmuls took 5,547 us alone, and ``beside`` with the collective running."""
    found = transfer(H200, collective(kind, mib, 8, dtype), transport)
    assert found.interference * found.seconds * 1e6 == pytest.approx(beside - 5547, rel=0.1)


@pytest.mark.parametrize(
    ("kind", "transport", "lost", "alone"),
    [
        ("all_gather", "copy_engine", 0.39, 17.0),
        ("all_gather", "push_32", 7.22, 20.1 / 1.17),
        ("reduce_scatter", "pull", 7.29 + 16.69, (27.4 + 40.2) / 1.63),
    ],
)
def test_interference_is_that_of_a_step(kind: str, transport: str, lost: float, alone: float) -> None:
    """Milliseconds that products of Llama 8B lost on two GPUs, beside collectives that take ``alone`` by themselves."""
    found = transfer(H200, collective(kind, 512, 8, BF16), transport)
    assert found.interference == pytest.approx(lost / alone, abs=0.05)


@pytest.mark.parametrize(
    ("kind", "transport", "ranks", "lost_us"),
    [("all_gather", "copy_engine", 2, 650), ("reduce_scatter", "copy_sum", 2, 550)],
)
def test_computation_waits_for_kernels_of_a_ranks_own_part(
    kind: str, transport: str, ranks: int, lost_us: float
) -> None:
    """Microseconds without GEMMs in the trace of a step of Llama 8B on two H200, for a bucket of 1.2 GiB."""
    found = transfer(H200, collective(kind, 1229, ranks, BF16), transport)
    assert found.interference * found.seconds * 1e6 == pytest.approx(lost_us, rel=0.15)


@pytest.mark.parametrize(("kind", "transport"), [("all_gather", "copy_engine"), ("reduce_scatter", "copy_sum")])
def test_more_ranks_have_smaller_parts(kind: str, transport: str) -> None:
    found = [transfer(H200, collective(kind, 512, ranks, BF16), transport).interference for ranks in (2, 4, 8)]
    assert found == sorted(found, reverse=True)
    assert found[0] > 1.5 * found[-1]


# ---- topology


def toy(nodes: int = 8, inner: float = 100.0, outer: float = 10.0, latency: float = 0.0) -> Cluster:
    """Bandwidths in bytes a second; nothing has a latency but the links' hops."""
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "send_recv")
    carrier = TransportModel("nccl", kinds, inner, 0.0, 0.5, crosses=True)
    direct = TransportModel("peers", ("all_gather",), inner, 1.0, 0.5, dtypes=("bfloat16",))
    node, network = Link("nvlink", inner, latency), Link("network", outer, 10 * latency)
    gpu = dataclasses.replace(H200.gpu, copy_bandwidth=50.0, launch_latency=1.0)
    return Cluster("toy", nodes, gpu, 1, node, network, (carrier, direct))


def seconds(cluster: Cluster, kind: str, size: int, ranks: tuple[int, ...]) -> float:
    return transfer(cluster, Collective(kind, ranks, "g", size, BF16)).seconds


def load_of_cards(cluster: Cluster, kind: str, ranks: tuple[int, ...], size: float) -> float:
    """Bytes out of the busiest network card, counted chunk by chunk: as many rings as a node has cards of the group.
    Ring j leaves each node at its j-th rank of the group; every rank's chunk travels to all the others."""
    nodes = [list(on) for _, on in itertools.groupby(ranks, key=lambda rank: rank // cluster.gpus_per_node)]
    rings = min(map(len, nodes))
    out: Counter[int] = Counter()
    for ring in range(rings):
        order = [rank for on in nodes for rank in [r for r in on if r != on[ring]] + [on[ring]]]
        for start in range(len(order)):
            chunk = size / rings / len(order)
            for hop in range(len(order) - 1):
                sender, receiver = order[(start + hop) % len(order)], order[(start + hop + 1) % len(order)]
                if sender // cluster.gpus_per_node != receiver // cluster.gpus_per_node:
                    out[sender] += chunk * (2 if kind == "all_reduce" else 1)
    return max(out.values())


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize(
    "ranks",
    [tuple(range(16)), tuple(range(0, 64, 8)), (0, 1, 8, 9, 16, 17), (3, 4, 11), tuple(range(4, 20)), (7, 8)],
)
def test_rings_load_the_cards_as_counted(kind: str, ranks: tuple[int, ...]) -> None:
    cluster = toy(outer=1.0)
    cards = load_of_cards(cluster, kind, ranks, 960)
    assert seconds(cluster, kind, 960, ranks) == pytest.approx(cards / 1.0)
    assert transfer(cluster, Collective(kind, ranks, "g", 960, BF16)).link == "network"


def test_a_group_within_a_node_is_bound_by_its_links_only() -> None:
    ranks = tuple(range(8, 12))
    for outer in (1.0, 1e9):
        cluster = toy(outer=outer)
        assert seconds(cluster, "all_gather", 400, ranks) == pytest.approx(400 * 3 / 4 / 100)
        assert transfer(cluster, Collective("all_gather", ranks, "g", 400, BF16)).link == "nvlink"
    assert seconds(toy(), "all_reduce", 400, ranks) == pytest.approx(2 * 400 * 3 / 4 / 100)
    assert seconds(toy(), "broadcast", 400, ranks) == pytest.approx(400 / 100)
    assert seconds(toy(), "send_recv", 400, ranks) == pytest.approx(400 / 100)


def test_a_group_of_one_rank_a_node_uses_the_network_only() -> None:
    ranks = tuple(range(3, 64, 8))
    for inner in (0.001, 1e9):
        assert seconds(toy(inner=inner), "all_gather", 400, ranks) == pytest.approx(400 * 7 / 8 / 10)


def test_the_slower_of_both_links_bounds_a_group_on_whole_nodes() -> None:
    ranks = tuple(range(16))
    through_cards = Collective("all_gather", ranks, "g", 1600, BF16)
    assert transfer(toy(outer=10.0), through_cards) == Transfer(1500 / 80, "nccl:g:gather", "network", 0.5)
    assert transfer(toy(outer=20.0), through_cards) == Transfer(1500 / 100, "nccl:g:gather", "nvlink", 0.5)


def test_an_exchange_sends_each_part_over_its_own_wire() -> None:
    """16 ranks of 2 nodes: of 16 parts of 100 bytes one stays, 7 go within the node, 8 out of it by one card."""
    assert seconds(toy(outer=10.0), "all_to_all", 1600, tuple(range(16))) == pytest.approx(800 / 10)
    assert seconds(toy(outer=1000.0), "all_to_all", 1600, tuple(range(16))) == pytest.approx(700 / 100)
    assert seconds(toy(), "all_to_all", 800, tuple(range(8))) == pytest.approx(700 / 100)


def test_latency_is_that_of_the_hops() -> None:
    """A hop is 1 within a node and 10 between nodes; there is nothing to send."""
    cluster = toy(latency=1.0)
    whole, strided = tuple(range(32)), tuple(range(0, 256, 8))
    assert seconds(cluster, "all_gather", 0, tuple(range(8))) == 7
    assert seconds(cluster, "all_reduce", 0, tuple(range(8))) == 14
    assert seconds(cluster, "all_gather", 0, whole) == 28 + 3 * 10
    assert seconds(cluster, "all_reduce", 0, whole) == 2 * (7 + 2 * 10), "a tree of 4 nodes has 2 levels"
    assert seconds(cluster, "all_gather", 0, strided) == 5 * 10, "of 32 nodes 5"
    assert seconds(cluster, "broadcast", 0, strided) == 31 * 10, "NCCL broadcasts in rings"
    peers = Collective("all_gather", tuple(range(8)), "g", 0, BF16)
    assert transfer(cluster, peers, "peers").seconds == 1, "every GPU reads every other, without hops"


def test_a_small_all_reduce_takes_the_tree_and_a_large_one_the_ring() -> None:
    cluster = toy(latency=1.0)
    ranks = tuple(range(32))
    ring = 2 * (28 + 3 * 10) + 2 * 31 / 32 * 10**6 / 80
    assert seconds(cluster, "all_reduce", 0, ranks) < 2 * (28 + 3 * 10)
    assert seconds(cluster, "all_reduce", 10**6, ranks) == pytest.approx(ring)


def test_a_group_of_one_rank_copies() -> None:
    alone = Collective("all_gather", (5,), "g", 100, BF16)
    assert transfer(toy(), alone) == Transfer(1.0 + 2 * 100 / 50, "nccl:g:gather", "memory", 0.0)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "send_recv"])
@pytest.mark.parametrize("ranks", [tuple(range(8)), tuple(range(32)), tuple(range(0, 512, 8))])
def test_more_bytes_never_take_less(kind: str, ranks: tuple[int, ...]) -> None:
    times = [seconds(H200, kind, 3**power, ranks) for power in range(22)]
    assert times == sorted(times)
    assert times[0] < times[-1]


@pytest.mark.parametrize(
    ("kind", "stream"),
    [
        ("all_gather", "gather"),
        ("broadcast", "gather"),
        ("reduce_scatter", "reduce"),
        ("all_reduce", "reduce"),
        ("all_to_all", "exchange"),
        ("send_recv", "exchange"),
    ],
)
def test_streams_of_collective_kinds(kind: str, stream: str) -> None:
    assert transfer(H200, collective(kind, 1)).stream == f"nccl:world:{stream}"


def test_which_transports_serve() -> None:
    assert transports_for(H200, collective("all_gather", 1)) == ["nccl", "copy_engine", "push", "push_32"]
    assert transports_for(H200, collective("all_gather", 1, 16)) == ["nccl"]
    assert transports_for(H200, collective("all_gather", 1, (7, 8))) == ["nccl"]
    assert transports_for(H200, collective("reduce_scatter", 1)) == ["nccl", "pull", "pull_16", "copy_sum"]
    assert transports_for(H200, collective("reduce_scatter", 1, dtype=F32)) == ["nccl"]
    assert transports_for(load_cluster("l40sx8"), collective("all_reduce", 1)) == ["nccl"]
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        for name in transports_for(H200, collective(kind, 1)):
            stream = transfer(H200, collective(kind, 1), name).stream
            of_all = {"copy_engine": "copy_engine:gather", "push": "push:gather", "push_32": "push:gather"}
            assert stream.startswith("nccl:world:" if name == "nccl" else of_all.get(name, "peers:reduce"))


def test_mistakes() -> None:
    with pytest.raises(CannotCarry, match=r"pull does not carry all_gather of torch.bfloat16 over 'world'"):
        transfer(H200, collective("all_gather", 1), "pull")
    with pytest.raises(CannotCarry, match="on 2 nodes"):
        transfer(H200, collective("all_gather", 1, 16), "push")
    with pytest.raises(UnknownOption, match="transport='pigeon'"):
        transfer(H200, collective("all_gather", 1), "pigeon")
    one_node = dataclasses.replace(H200, network=None)
    assert transfer(one_node, collective("all_gather", 1)) == transfer(H200, collective("all_gather", 1))
    with pytest.raises(LinkMissing, match=r"'world' has 16 ranks on 2 nodes.*no \[network\].*gpus_per_node"):
        transfer(one_node, collective("all_gather", 1, 16))
    with pytest.raises(LinkMissing, match=r"no \[node\]"):
        transfer(dataclasses.replace(H200, node=None), collective("all_gather", 1))


# ---- graphs


@pytest.fixture
def world() -> Iterator[dist.DeviceMesh]:
    """Rank 11 of 16 on two nodes, with a mesh of both and of the ranks of a node."""
    with weft.fake_world(16, rank=11):
        yield dist.init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))


def step_of(mesh: dist.DeviceMesh, operation: Any, *args: Any) -> tuple[StepGraph, torch.fx.Node]:
    """A graph of one collective; the group, by its axis, stands among ``args``."""
    groups = {axis: mesh[axis].get_group().group_name for axis in ("replicate", "shard")}
    graph = torch.fx.Graph()
    nodes: list[Any] = []

    def place(arg: Any) -> Any:
        if isinstance(arg, list) and arg and isinstance(arg[0], torch.Tensor):
            return [place(item) for item in arg]
        if not isinstance(arg, torch.Tensor):
            return arg
        nodes.append(graph.placeholder(f"in_{len(nodes)}"))
        nodes[-1].meta["val"] = arg
        return nodes[-1]

    node = graph.call_function(operation, tuple(place(arg) for arg in args))
    node.meta["val"] = operation(*(groups.get(arg, arg) if isinstance(arg, str) else arg for arg in args))
    return StepGraph(graph, [], [], groups), node


ops = torch.ops._c10d_functional
NODE, ACROSS = tuple(range(8, 16)), (3, 11)


def test_every_operation_of_a_graph(world: dist.DeviceMesh) -> None:
    part, other = torch.empty(4, 6), torch.empty(10, dtype=BF16)
    whole, more = torch.empty(32, 6), torch.empty(80)
    for expected, operation, *args in [
        (Collective("all_gather", NODE, "shard", 8 * 96, F32), ops.all_gather_into_tensor, part, 8, "shard"),
        (
            Collective("all_gather", ACROSS, "replicate", 2 * (96 + 20), F32, 2),
            ops.all_gather_into_tensor_coalesced, [part, other], 2, "replicate",
        ),
        (Collective("reduce_scatter", NODE, "shard", 768, F32), ops.reduce_scatter_tensor, whole, "sum", 8, "shard"),
        (
            Collective("reduce_scatter", NODE, "shard", 768 + 320, F32, 2),
            ops.reduce_scatter_tensor_coalesced, [whole, more], "avg", 8, "shard",
        ),
        (Collective("all_reduce", NODE, "shard", 20, BF16), ops.all_reduce, other, "sum", "shard"),
        (
            Collective("all_reduce", NODE, "shard", 20 + 96 + 320, BF16, 3),
            ops.all_reduce_coalesced, [other, part, more], "sum", "shard",
        ),
        (Collective("broadcast", ACROSS, "replicate", 20, BF16), ops.broadcast, other, 0, "replicate"),
        (
            Collective("all_to_all", NODE, "shard", 768, F32),
            ops.all_to_all_single, whole, [1] * 8, [4] * 8, "shard",
        ),
        (
            Collective("all_to_all", ACROSS, "replicate", 3 * 96, F32),
            ops.all_to_all_single, part, [4, 8], [0, 4], "replicate",
        ),
    ]:  # fmt: skip
        step, node = step_of(world, operation.default, *args)
        assert collective_of(step, node) == expected, operation


def test_sends_and_receives(world: dist.DeviceMesh) -> None:
    for name, count, *args in [
        ("isend", 1, torch.empty(10), 0, 0, "replicate"),
        ("irecv", 1, torch.empty(10), 0, 0, "replicate"),
        ("batch_p2p_ops", 2, ["isend", "irecv"], [0, 0], [0, 0], [torch.empty(6), torch.empty(4)], "replicate"),
    ]:
        if not hasattr(ops, name):
            continue
        tensors = args[3] if count == 2 else args[0]
        graph = torch.fx.Graph()
        held = [graph.placeholder(f"in_{at}") for at in range(count)]
        for node, tensor in zip(held, tensors if count == 2 else [tensors], strict=True):
            node.meta["val"] = tensor
        placed = [held if arg is tensors and count == 2 else held[0] if arg is tensors else arg for arg in args]
        node = graph.call_function(getattr(ops, name).default, tuple(placed))
        node.meta["val"] = tensors
        step = StepGraph(graph, [], [], {"replicate": world["replicate"].get_group().group_name})
        assert collective_of(step, node) == Collective("send_recv", ACROSS, "replicate", 40, F32, count)


def test_sizes_that_only_the_data_decides(world: dist.DeviceMesh) -> None:
    mode = torch._subclasses.FakeTensorMode(shape_env=ShapeEnv())
    size = mode.shape_env.create_unbacked_symint()
    with mode:
        rows, known = torch.empty(size, 6), torch.empty(32, 6)
    groups = {"shard": world["shard"].get_group().group_name}

    def node_of(operation: Any, sent: torch.Tensor, received: torch.Tensor, *args: Any) -> tuple[StepGraph, Any]:
        graph = torch.fx.Graph()
        held = graph.placeholder("x")
        held.meta["val"] = sent
        node = graph.call_function(operation, (held, *args, "shard"))
        node.meta["val"] = received
        return StepGraph(graph, [], [], groups), node

    reduced = node_of(ops.all_reduce.default, rows, rows, "sum")
    assert collective_of(*reduced).bytes == UNBACKED * 6 * 4
    exchanged = node_of(ops.all_to_all_single.default, known, rows, [4] * 8, [4] * 8)
    assert collective_of(*exchanged).bytes == 32 * 6 * 4, "the side that is known"


def test_a_captured_step(world: dist.DeviceMesh) -> None:
    """A model sharded within nodes and replicated between them: bytes as ``capture`` counts them, ranks as in torch."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 48))
    weft.fully_shard(model, mesh=world)

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()

    graph = weft.capture(step, torch.randn(4, 64))
    found = [(collective_of(graph, node), node) for node in graph.collectives()]
    assert {each.kind for each, _ in found} == {"all_gather", "reduce_scatter", "all_reduce"}
    for each, node in found:
        assert each.bytes == collective_bytes(node)
        assert each.ranks == (NODE if each.kind in ("all_gather", "reduce_scatter") else ACROSS)
        assert transfer(H200, each).link == ("nvlink" if each.ranks == NODE else "network")


def test_a_group_that_is_gone() -> None:
    with weft.fake_world(16):
        mesh = dist.init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))
        step, node = step_of(mesh, ops.all_reduce.default, torch.empty(4), "sum", "shard")
    with pytest.raises(GroupGone, match=r"'shard'.*fake_world"):
        collective_of(step, node)


def test_bytes_and_members_are_those_of_the_payload(world: dist.DeviceMesh) -> None:
    """A tensor that is given twice is sent twice; one that is not communicated is not sent."""
    step, node = step_of(world, ops.all_reduce_coalesced.default, [torch.empty(4, 6)] * 2, "sum", "shard")
    (given, _), _, _ = node.args
    node.args = ([given, given], "sum", "shard")
    assert collective_of(step, node) == Collective("all_reduce", NODE, "shard", 192, F32, members=2)
    scaled = lambda tensor, scale, size, group: gathered(tensor, size)
    with operations(scaled=("(Tensor input, Tensor scale, int group_size, str group_name) -> Tensor", scaled)) as made:
        register(CollectiveOp(made.scaled.default, KINDS["all_gather"]))
        step, node = step_of(world, scaled, torch.empty(4, 6), torch.empty(1000), 8, "shard")
        node.target = made.scaled.default
        assert collective_of(step, node) == Collective("all_gather", NODE, "shard", 768, F32, members=1)


def test_a_prediction_has_the_streams_of_the_launches() -> None:
    for name, call in call_classes().items():
        made = call.made(name, "world", 8, 0, "")
        sent = collective(made.kind, 1)
        if name in transports_for(H200, sent):
            assert transfer(H200, sent, name).stream == made.stream_name


# ---- sums that are wider than what is sent


def test_a_sum_wider_than_the_wire() -> None:
    """bfloat16 gradients summed in float32: NCCL has to send float32, a transport that sums by itself does not."""
    narrow = collective("reduce_scatter", 512)
    wide = dataclasses.replace(narrow, wider=F32)
    assert transfer(H200, wide, "nccl") == transfer(H200, collective("reduce_scatter", 1024, dtype=F32))
    assert transfer(H200, wide, "pull") == transfer(H200, narrow, "pull")
    assert transports_for(H200, wide) == ["nccl", "pull", "pull_16", "copy_sum"]
    ratio = transfer(H200, wide, "nccl").seconds / transfer(H200, wide, "pull").seconds
    assert ratio == pytest.approx(2764 / 1428, rel=0.05)


def test_operations_of_weft_that_sum_wider(world: dist.DeviceMesh) -> None:
    for operation, sent, size in [
        (WIDENING_REDUCE_SCATTER.op, torch.empty(32, 6, dtype=BF16), 384),
        (WIDENING_REDUCE_SCATTER.coalesced, [torch.empty(32, 6, dtype=BF16), torch.empty(8, dtype=BF16)], 400),
    ]:
        step, node = step_of(world, operation, sent, "sum", 8, "shard", F32)
        found = collective_of(step, node)
        members = len(sent) if isinstance(sent, list) else 1
        assert found == Collective("reduce_scatter", NODE, "shard", size, BF16, members, wider=F32)


def test_calls_over_peers(world: dist.DeviceMesh) -> None:
    part = torch.empty(4, 6)
    step, node = step_of(world, lambda *_: [torch.empty(32, 6)], [part])
    node.target = PeerGather("shard", 8)
    assert collective_of(step, node) == Collective("all_gather", NODE, "shard", 768, F32)
    assert stream_of(node) == "gather"


def test_oversubscribed_networks_slow_groups_with_few_nodes_in_a_pod() -> None:
    """Pods of 32 ranks, four nodes. The network's bandwidth bounds all times: latencies are left out."""
    network = dataclasses.replace(H200.network, latency=0.0, bandwidth=1e9)
    slow = dataclasses.replace(network, oversubscription=4.0, leaf_gpus=4, rails=8)
    entries = tuple(dataclasses.replace(entry, latency=0.0) for entry in H200.transports)
    flat, fat = (dataclasses.replace(H200, network=link, transports=entries) for link in (network, slow))

    def ratio(kind: str, ranks: tuple[int, ...]) -> float:
        sent = collective(kind, 512, ranks)
        return transfer(fat, sent).seconds / transfer(flat, sent).seconds

    for kind in ("all_gather", "reduce_scatter"):
        assert ratio(kind, tuple(range(32))) == 1  # one pod
        assert ratio(kind, tuple(range(256))) == 1  # four nodes in each pod, as many as the oversubscription
        assert ratio(kind, tuple(range(0, 256, 8))) == 1  # one rank of each node: four nodes in each pod
        assert ratio(kind, tuple(range(0, 256, 16))) == pytest.approx(2)  # two nodes in each pod
        assert ratio(kind, tuple(range(0, 256, 32))) == pytest.approx(4)  # one node in each pod
    assert ratio("all_to_all", tuple(range(32))) == 1
    # 224 of 256 partners are in other pods, 248 on other nodes.
    assert ratio("all_to_all", tuple(range(256))) == pytest.approx(4 * 224 / 248, rel=1e-3)
