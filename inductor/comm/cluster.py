"""What a cluster of GPUs can do, in numbers: how fast a GPU computes, what joins the GPUs, what carries a collective.

A description is a TOML file whose keys are the fields of the classes below, all in bytes, seconds and operations a
second. Those of common clusters are in ``clusters/``; ``weft calibrate`` writes one of the machine it runs on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated

import torch

from weft import knobs
from weft.errors import NoClusterHere, UnknownOption
from weft.inductor.comm import cluster_file

SHIPPED = Path(__file__).parent / "clusters"

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "send_recv")
"""Kinds of collective."""

DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
"""Names of dtypes that rates may be given for."""

# Two GPUs of one name and generation differ in memory by more than this where they are not the same.
_MEMORY_TOLERANCE = 0.1


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    Attributes:
        name: what of torch's name for it tells it from others ("H200" of "NVIDIA H200").
        arch: as triton numbers architectures: 90 for sm_90; 0 for a CPU.
        memory: bytes.
        copy_bandwidth: bytes a second, read and written, of a large copy.
        launch_latency: seconds that any kernel takes at least.
        matmul: operations a second of large matrix products by dtype; "tf32" is float32 in tensor cores.
        attention_forward: operations a second of causal attention in bfloat16, the masked half not counted.
        attention_backward: of its backward, which does five products where forward does two.
        multiprocessors: how many blocks of a large kernel run at once; of a CPU, its cores.
    """

    name: str
    arch: int
    memory: int
    copy_bandwidth: float
    launch_latency: float
    matmul: Mapping[Annotated[str, (*DTYPES, "tf32")], float]
    attention_forward: float
    attention_backward: float
    multiprocessors: int


@dataclass(frozen=True)
class Link:
    """What joins GPUs.

    Attributes:
        name: of the wires that collectives share ("nvlink", "pcie", "network").
        bandwidth: bytes a second that one GPU can send and, at the same time, receive.
        latency: seconds from one GPU to the next.
    """

    name: str
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Transport:
    """A way to carry some kinds of collective.

    A cluster may have several of one name: the first that serves a collective's kind and dtype is meant.

    Attributes:
        name: "nccl", or one of :mod:`weft.inductor.comm.transports`.
        kinds: of collectives it serves.
        bandwidth: bytes a second that a GPU sends within a node, in large collectives.
        latency: seconds that a collective takes at least, links left out.
        interference: seconds of work that computation loses in a second of communication.
        dtypes: names of the dtypes it carries ("bfloat16"); all where empty.
        sums: how it sums: "wire" in the dtype it sends, "float32" in float32 whatever it sends, "" not at all.
        crosses: whether it works between nodes, where it goes around in rings; otherwise every GPU reads or writes the
            memory of every other directly.
        per_member: seconds for each member of a coalesced collective after the first.
        ctas: thread blocks that it keeps busy; 0 for none, or where it chooses by itself.
    """

    name: str
    kinds: tuple[Annotated[str, KINDS], ...]
    bandwidth: float
    latency: float
    interference: float
    dtypes: tuple[Annotated[str, DTYPES], ...] = ()
    sums: Annotated[str, ("wire", "float32", "")] = ""
    crosses: bool = False
    per_member: float = 0.0
    ctas: int = 0


@dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs: those of one node are joined by the link ``node``, those of different nodes by ``network``.

    Attributes:
        gpus_per_node: ranks 0 to this one less are the first node, and so on.
        node: None where a node is one GPU.
        network: None where there is one node.
        hosts_per_node: machines that the link of a node joins (18 in an NVL72).
    """

    name: str
    gpus_per_node: int
    gpu: Gpu
    hosts_per_node: int = 1
    node: Link | None = None
    network: Link | None = None
    transports: tuple[Transport, ...] = ()

    def node_of(self, rank: int) -> int:
        """The node that a rank is on."""
        return rank // self.gpus_per_node

    def carrier(self, transport: str, kind: str, dtype: torch.dtype) -> Transport | None:
        """The transport of that name for a kind of collective and a dtype, None where it does not serve them.

        Raises:
            UnknownOption: the cluster has no transport of that name.
        """
        named = [known for known in self.transports if known.name == transport]
        if not named:
            raise UnknownOption("transport", transport, list(dict.fromkeys(known.name for known in self.transports)))
        wanted = str(dtype).removeprefix("torch.")
        fitting = (each for each in named if kind in each.kinds and (not each.dtypes or wanted in each.dtypes))
        return next(fitting, None)


def load_cluster(name: str | os.PathLike[str]) -> Cluster:
    """A description by the name of one that weft ships ("h200x8"), or by the path of a TOML file.

    Raises:
        UnknownOption: neither a known name nor a file.
        InvalidCluster: a key of the file is unknown, missing, or has a value that it cannot have.
    """
    shipped = {file.stem: file for file in _files(SHIPPED)}
    path = shipped.get(str(name), Path(name))
    if path.suffix != ".toml" and not path.is_file():
        raise UnknownOption("cluster", str(name), [*shipped, "a path to a .toml file"])
    return cluster_file.read(path, Cluster)


def save_cluster(cluster: Cluster, path: Path, comment: str = "") -> None:
    """Write a description so that ``load_cluster`` reads the very same; ``comment`` goes on top of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(cluster_file.text(cluster, comment))


@cache
def shipped_clusters() -> tuple[Cluster, ...]:
    """The descriptions that weft ships, by name."""
    return tuple(load_cluster(file.stem) for file in _files(SHIPPED))


def shipped_gpu(name: str) -> Gpu | None:
    """The GPU of a shipped description whose name occurs in ``name`` (as torch has it: "NVIDIA H200"), or None."""
    fitting = [cluster.gpu for cluster in shipped_clusters() if cluster.gpu.name in name]
    return max(fitting, key=lambda gpu: len(gpu.name), default=None)  # "GB200" before "B200"


def cluster_here() -> Cluster:
    """The description of this machine: what ``knobs.cluster`` names, else what fits its GPUs, calibrated ones first.

    ``gpus_per_node`` is how many processes torchrun started here, without it how many GPUs torch sees. Machines of one
    job may have calibrated by themselves: to plan alike, ranks must take one description, that of rank 0.

    Raises:
        NoClusterHere: there is no GPU, or no description of it.
        UnknownOption, InvalidCluster: as ``load_cluster``.
    """
    if knobs.cluster:
        return load_cluster(knobs.cluster)
    if not torch.cuda.is_available():
        raise NoClusterHere("no GPU")
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    calibrated = [load_cluster(file) for file in _files(calibrated_folder())]
    fitting = [
        cluster
        for cluster in (*calibrated, *shipped_clusters())
        if cluster.gpu.name in device.name
        and abs(device.total_memory - cluster.gpu.memory) <= _MEMORY_TOLERANCE * cluster.gpu.memory
    ]
    if not fitting:
        raise NoClusterHere(f"{device.name} with {device.total_memory} bytes")
    found = max(fitting, key=lambda cluster: len(cluster.gpu.name))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", torch.cuda.device_count()))
    return replace(found, gpus_per_node=here * found.hosts_per_node)


def calibrated_folder() -> Path:
    """Where ``weft calibrate`` leaves what it measured."""
    return Path(knobs.cache_dir).expanduser() / "clusters"


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.toml"))
