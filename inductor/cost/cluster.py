"""Cluster descriptions: the speed of a GPU, the links between GPUs, and the transports of collectives.

A description is a TOML file whose keys are the fields of the classes below, all in bytes, seconds, and bytes or
operations per second. Descriptions of common clusters are in ``clusters/``. ``weft calibrate`` measures the machine it
runs on and writes another.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated

import torch

from weft import cache_folder, knobs
from weft.argument_checks import ArgumentChecks
from weft.errors import InvalidCluster, NoClusterFile, NoClusterHere, UnknownOption
from weft.inductor.cost import cluster_file
from weft.inductor.cost.cluster_file import LessThan
from weft.inductor.graph.collectives import KINDS
from weft.transport_rows import TRANSPORTS, transport_row

log = logging.getLogger(__name__)

SHIPPED = knobs.SHIPPED_CLUSTERS

DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
"""Names of the dtypes that a GPU can have rates for."""

# Relative difference of memory between a GPU and its description. Torch reports a little less than the data sheet;
# models of one name with other memory (40 and 80 GB) differ by more.
_MEMORY_TOLERANCE = 0.1


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    Attributes:
        name: the part of torch's device name that identifies it ("H200" of "NVIDIA H200").
        arch: Triton's number of the architecture: 90 for sm_90; 0 for a CPU.
        memory: bytes.
        copy_bandwidth: bytes per second of a large copy, reads plus writes.
        launch_latency: seconds that any kernel takes at least.
        matmul: operations per second of large GEMMs, by dtype; "tf32" is float32 in tensor cores.
        attention_forward: operations per second of causal attention in bfloat16, the masked half not counted.
        attention_backward: the same for its backward, which does five GEMMs; forward does two.
        multiprocessors: number of multiprocessors; of a CPU, its cores.
        stated_peak: dense bfloat16 operations per second of the data sheet, which MFU refers to; 0 if unknown.
        clock_beside_links: the part of its clock that the GPU keeps in steps with collectives: transfers take a part of
            the power that the limit allows. It scales the rates of GEMMs and attention.
    """

    name: str
    arch: int
    memory: int
    copy_bandwidth: float
    launch_latency: Annotated[float, LessThan(1)]
    matmul: Mapping[Annotated[str, (*DTYPES, "tf32")], float]
    attention_forward: float
    attention_backward: float
    multiprocessors: int
    stated_peak: float = 0.0
    clock_beside_links: float = 1.0


@dataclass(frozen=True)
class Link:
    """A link between GPUs.

    Attributes:
        name: of the link whose bandwidth collectives share ("nvlink", "pcie", "network").
        bandwidth: bytes per second that one GPU can send and, at the same time, receive.
        latency: seconds of one hop from GPU to GPU.
        oversubscription: of a network: bandwidth of a leaf switch towards GPUs over that towards other switches.
        leaf_gpus: of a network: GPUs that one leaf switch joins; 0 if one joins all.
        rails: of a network: leaf switches that the GPUs of a node are spread over. ``leaf_gpus * rails`` consecutive
            ranks are a *pod*: they reach each other without leaving their leaf switches.
    """

    name: str
    bandwidth: float
    latency: Annotated[float, LessThan(1)]
    oversubscription: float = 1.0
    leaf_gpus: int = 0
    rails: int = 1


@dataclass(frozen=True)
class TransportModel:
    """The performance of a transport for some kinds of collective.

    A cluster can have several entries of one name. The first that serves a collective's kind and dtype counts.

    Attributes:
        name: one of :data:`weft.transport_rows.TRANSPORTS`, with a number of programs ("push_32") or without.
        kinds: the kinds of collective it serves.
        bandwidth: bytes per second that a GPU sends within a node, in large collectives.
        latency: seconds that a collective takes at least, without the hops of links.
        interference: seconds of computation lost per second of communication, but for that of ``blocking``.
        dtypes: names of the dtypes it carries ("bfloat16"); all if empty.
        crosses: whether it works between nodes, in rings or trees. If not, every GPU reads or writes the memory of
            every other GPU directly.
        per_member: seconds for each tensor of a coalesced collective after the first.
        ctas: thread blocks that it occupies; 0 if none, or if the library chooses.
        own_part, all_parts: bytes of this GPU's memory that a kernel of the transport moves, for each byte of a rank's
            part of the whole tensor, and for each byte of the whole tensor.
        blocking: seconds of computation lost for each second that this kernel takes alone.
    """

    name: str
    kinds: tuple[Annotated[str, tuple(KINDS)], ...]
    bandwidth: float
    latency: Annotated[float, LessThan(1)]
    interference: Annotated[float, LessThan(1)]
    dtypes: tuple[Annotated[str, DTYPES], ...] = ()
    crosses: bool = False
    per_member: Annotated[float, LessThan(1)] = 0.0
    ctas: int = 0
    own_part: float = 0.0
    all_parts: float = 0.0
    blocking: float = 1.0


@dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs. The link ``node`` joins GPUs of one node, ``network`` joins nodes.

    Attributes:
        name: of the description.
        gpus_per_node: consecutive ranks on one node: 0 to ``gpus_per_node - 1`` are on the first.
        gpu: the GPU; all are alike.
        hosts_per_node: machines that the link of a node joins (18 in an NVL72).
        node: None if a node has one GPU.
        network: None if there is one node.
        transports: in order of preference for one name.
        residuals: the smallest and the largest ratio of measured to predicted times of steps on this cluster; empty if
            none were measured.
    """

    name: str
    gpus_per_node: int
    gpu: Gpu
    hosts_per_node: int = 1
    node: Link | None = None
    network: Link | None = None
    transports: tuple[TransportModel, ...] = ()
    residuals: tuple[float, ...] = ()

    def transport_model(self, transport: str, kind: str, dtype: torch.dtype) -> TransportModel | None:
        """The entry of a transport for a kind of collective and a dtype, None if it does not serve them.

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
    """Read a description: a shipped one by its name ("h200x8") or by its GPU ("H200"), or a TOML file by path.

    Raises:
        UnknownOption: neither a known name nor a file.
        InvalidCluster: a key of the file is unknown, missing, or has a value that it cannot have.
        InvalidArgumentType: neither a text nor a path.
    """
    checks, remedy = ArgumentChecks("load_cluster"), 'Write a name of docs/clusters.md, such as "h200x8"'
    checks.kind("cluster", name, (str, os.PathLike), "the name of a cluster or the path of a .toml file", remedy)
    shipped = {file.stem: file for file in _files(SHIPPED)}
    path = shipped.get(str(name), Path(name))
    if not path.is_file() and (found := _with_gpu(str(name))) is not None:
        return found
    if path.suffix != ".toml" and not path.is_file():
        raise UnknownOption("cluster", str(name), [*shipped, "a path to a .toml file"])
    if not path.is_file():
        raise NoClusterFile(str(path))
    cluster = cluster_file.read(path, Cluster)
    _check(cluster, str(path))
    return cluster


def _with_gpu(name: str) -> Cluster | None:
    """The shipped description of a GPU that has most of them on a node, where one has a GPU called ``name``."""
    same = [cluster for cluster in shipped_clusters() if cluster.gpu.name.lower() == name.lower()]
    return max(same, key=lambda cluster: cluster.gpus_per_node, default=None)


def _check(cluster: Cluster, file: str) -> None:
    """What the values of a description must be to one another and to weft. Raises InvalidCluster."""
    if cluster.residuals and (len(cluster.residuals) != 2 or cluster.residuals[0] > cluster.residuals[1]):
        what = "must be two numbers, the smallest and the largest ratio"
        raise InvalidCluster(file, f"residuals is {list(cluster.residuals)}, and {what}")
    if cluster.gpus_per_node % cluster.hosts_per_node:
        what = f"must divide gpus_per_node, which is {cluster.gpus_per_node}"
        raise InvalidCluster(file, f"hosts_per_node is {cluster.hosts_per_node}, and {what}")
    for at, transport in enumerate(cluster.transports):
        if transport_row(transport.name) is None:
            known = ", ".join(TRANSPORTS)
            raise InvalidCluster(file, f"transports[{at}].name is {transport.name!r}, and must be one of {known}")


def save_cluster(cluster: Cluster, path: Path, comment: str = "") -> None:
    """Write a description to a TOML file that ``load_cluster`` reads back as an equal object; ``comment`` comes first.

    Creates missing folders. Raises OSError.
    """
    _fitting.cache_clear()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(cluster_file.text(cluster, comment))


@cache
def shipped_clusters() -> tuple[Cluster, ...]:
    """All shipped descriptions, sorted by name."""
    return tuple(load_cluster(file.stem) for file in _files(SHIPPED))


def shipped_gpu(name: str) -> Gpu | None:
    """The GPU of a shipped description whose name occurs in torch's device name ("NVIDIA H200"), or None."""
    fitting = [cluster.gpu for cluster in shipped_clusters() if cluster.gpu.name in name]
    return max(fitting, key=lambda gpu: len(gpu.name), default=None)  # "GB200" before "B200"


def cluster_here() -> Cluster:
    """The description of this machine: the one that ``knobs.cluster`` names, else one that fits its GPUs. Calibrated
    descriptions take precedence over shipped ones.

    ``gpus_per_node`` follows from the number of processes that torchrun started here, without torchrun from the number
    of visible GPUs. The result can differ between machines that were calibrated separately, so ranks must agree on that
    of rank 0. Descriptions that were calibrated are read once in a process: what ranks have compared stays true.

    Raises:
        NoClusterHere: there is no GPU, or no description of it.
        UnknownOption, InvalidCluster: as ``load_cluster``.
    """
    if knobs.cluster:
        return load_cluster(knobs.cluster)
    if not torch.cuda.is_available():
        raise NoClusterHere("no GPU")
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    best = _fitting(device.name, device.total_memory, calibrated_folder())
    if best is None:
        raise NoClusterHere(f"{device.name} with {device.total_memory} bytes")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", torch.cuda.device_count()))
    return replace(best, gpus_per_node=here * best.hosts_per_node)


@cache
def _fitting(name: str, memory: int, calibrated: Path) -> Cluster | None:
    """The description of a GPU with torch's name for it and bytes of memory; None where there is none."""
    fitting = [
        cluster
        for cluster in (*_calibrated(calibrated), *shipped_clusters())
        if cluster.gpu.name in name and abs(memory - cluster.gpu.memory) <= _MEMORY_TOLERANCE * cluster.gpu.memory
    ]
    # The longest name is the most specific ("GB200" before "B200"); of equal ones the first, which is the calibrated
    # one.
    return max(fitting, key=lambda cluster: len(cluster.gpu.name), default=None)


def is_described() -> bool:
    """Whether :func:`cluster_here` finds a description. A file that the knob names is read where it is used."""
    if knobs.cluster:
        return True
    try:
        cluster_here()
    except NoClusterHere:
        return False
    return True


def calibrated_folder() -> Path:
    """The folder of the descriptions that ``weft calibrate`` writes."""
    return Path(knobs.cache_dir).expanduser() / "clusters"


def _calibrated(where: Path) -> list[Cluster]:
    """The descriptions in the folder of those that were measured here. A file that others can write to, or that is
    none, is left out with a warning: the cache must not end a run."""
    found = []
    for file in _files(where) if cache_folder.usable() else []:
        content = cache_folder.read_own(file)
        try:
            if content is not None:
                found.append(cluster_file.parse(content.decode(), Cluster, str(file)))
        except (InvalidCluster, UnicodeDecodeError) as error:
            log.warning("%s is left out: %s", file, error)
    return found


def _files(where: Path) -> list[Path]:
    return sorted(where.glob("*.toml"))
