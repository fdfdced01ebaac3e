"""Descriptions of clusters: what ships is sound, what a file says is checked, what is written reads back the same."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft import cache_folder, knobs
from weft.errors import InvalidCluster, InvalidKnob, NoClusterFile, NoClusterHere, UnknownOption
from weft.inductor.cost import cluster as cluster_module
from weft.inductor.cost.cluster import (
    DTYPES,
    SHIPPED,
    Cluster,
    Gpu,
    Link,
    TransportModel,
    cluster_here,
    is_described,
    load_cluster,
    save_cluster,
    shipped_clusters,
    shipped_gpu,
)
from weft.inductor.cost.roofline import gpu_called
from weft.inductor.graph.collectives import KINDS

NAMES = ["a100x8", "b200x8", "gb200x72", "h100x8", "h200x8", "l40sx8"]

# What no GPU of its generation exceeds: bytes a second of memory, dense bfloat16 operations a second (data sheets).
PEAKS = {
    "A100": (2.04e12, 3.12e14),
    "H100": (3.36e12, 9.9e14),
    "H200": (4.9e12, 9.9e14),
    "L40S": (8.64e11, 3.63e14),
    "B200": (8.0e12, 2.25e15),
    "GB200": (8.0e12, 2.5e15),
}


def test_shipped_clusters_are_named_as_their_files() -> None:
    assert (
        [cluster.name for cluster in shipped_clusters()] == NAMES == [file.stem for file in sorted(SHIPPED.iterdir())]
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_cluster_is_sound(name: str) -> None:
    cluster = load_cluster(name)
    gpu = cluster.gpu
    copy, products = PEAKS[gpu.name]
    assert 0.7 * copy < gpu.copy_bandwidth < copy
    assert 0.6 * products < gpu.matmul["bfloat16"] < products
    assert gpu.attention_backward < gpu.attention_forward < gpu.matmul["bfloat16"]
    assert gpu.matmul["float32"] < gpu.matmul["tf32"] < gpu.matmul["float16"]
    assert cluster.node is not None
    assert cluster.network is not None
    assert cluster.network.bandwidth < cluster.node.bandwidth
    assert cluster.gpus_per_node % cluster.hosts_per_node == 0
    for kind in KINDS:
        for dtype in (torch.bfloat16, torch.float32, torch.int64):
            carrier = cluster.transport_model("nccl", kind, dtype)
            assert carrier is not None
            assert carrier.crosses
            assert carrier.bandwidth < cluster.node.bandwidth
    for transport in cluster.transports:
        assert 0 < transport.interference < 1


@pytest.mark.parametrize("name", NAMES)
def test_every_rate_says_where_it_is_from(name: str) -> None:
    """In a comment of its own where it was measured, else in the rule on top of the file."""
    text = (SHIPPED / f"{name}.toml").read_text()
    if name == "h200x8":
        assert not re.findall(r"^\w+ = \d[\d.]*(?:e-?\d+|\.\d+)\s*$", text, re.MULTILINE)
    else:
        assert text.startswith("# Nodes of" if name != "gb200x72" else "# Racks of")
        assert "# Nothing here was measured." in text


def test_a_gpu_is_found_by_the_longest_name() -> None:
    assert shipped_gpu("NVIDIA B200") == load_cluster("b200x8").gpu
    assert shipped_gpu("NVIDIA GB200") == load_cluster("gb200x72").gpu
    assert gpu_called("NVIDIA H100 80GB HBM3") == load_cluster("h100x8").gpu
    assert shipped_gpu("AMD Instinct MI300X") is None
    with pytest.raises(UnknownOption, match=r"gpu='MI300X'.*'H200'"):
        gpu_called("MI300X")


def test_first_transport_that_serves_a_dtype_is_meant() -> None:
    cluster = load_cluster("h200x8")
    floats = cluster.transport_model("nccl", "reduce_scatter", torch.float32)
    halves = cluster.transport_model("nccl", "reduce_scatter", torch.bfloat16)
    assert floats is not None
    assert halves is not None
    assert floats.interference < halves.interference
    assert cluster.transport_model("pull", "reduce_scatter", torch.float32) is None
    assert cluster.transport_model("copy_engine", "all_reduce", torch.float32) is None
    with pytest.raises(UnknownOption, match=r"transport='pigeon'.*'nccl', 'copy_engine'"):
        cluster.transport_model("pigeon", "all_gather", torch.float32)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownOption, match=r"cluster='h300x8' is not known.*'h200x8'.*path"):
        load_cluster("h300x8")


def edited(folder: Path, old: str, new: str) -> Path:
    """A copy of h200x8.toml with one thing else."""
    text = (SHIPPED / "h200x8.toml").read_text()
    assert old in text
    file = folder / "mine.toml"
    file.write_text(text.replace(old, new, 1))
    return file


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("gpus_per_node = 8\n", "", "gpus_per_node is missing"),
        ("gpus_per_node = 8\n", "gpus_per_node = 0\n", "gpus_per_node is 0, and must be positive"),
        ("gpus_per_node = 8\n", "gpus_per_node = 8.0\n", "gpus_per_node is 8.0, and must be a whole number"),
        ("gpus_per_node = 8\n", "gpus_per_node = true\n", "gpus_per_node is True, and must be a whole number"),
        ("gpus_per_node = 8\n", "gpus = 8\n", "gpus is not known; known are name, gpus_per_node"),
        ("copy_bandwidth = 4.28e12", "copy_bandwidth = -4.28e12", "gpu.copy_bandwidth is -4.*, and must be positive"),
        ("copy_bandwidth = 4.28e12", "copy_bandwidth = nan", "gpu.copy_bandwidth is nan"),
        ("copy_bandwidth = 4.28e12", "copy_bandwidth = inf", "gpu.copy_bandwidth is inf"),
        ("tf32 = 3.60e14", "tf32 = 'fast'", "gpu.matmul.tf32 is 'fast', and must be a number"),
        ('name = "nvlink"', "name = 4", "node.name is 4, and must be a text"),
        ('name = "nvlink"\n', "", "node.name is missing"),
        ("interference = 0.45", "interference = -0.45", r"transports\[0\].interference .* must not be negative"),
        ("crosses = true", "crosses = 1", r"transports\[0\].crosses is 1, and must be true or false"),
        ("ctas = 8\n", "cta = 8\n", r"transports\[6\].cta is not known"),
        ('kinds = ["reduce_scatter"]', 'kinds = "reduce_scatter"', r"transports\[1\].kinds .* must be a list"),
        ('kinds = ["all_gather"]', 'kinds = ["gather"]', r"transports\[5\].kinds\[0\] is 'gather', .* 'all_gather'"),
        ('name = "push"', 'name = "ring"', r"transports\[.\].name is 'ring', and must be one of nccl"),
        ("bfloat16 = 7.20e14", "bf16 = 7.20e14", "a key of gpu.matmul is 'bf16', and must be one of 'bfloat16'"),
        ("[gpu]", "[gpu", "it cannot be read"),
    ],
)
def test_a_mistake_in_a_file_names_the_key_and_the_file(tmp_path: Path, old: str, new: str, words: str) -> None:
    file = edited(tmp_path, old, new)
    with pytest.raises(InvalidCluster, match=f"^{re.escape(str(file))}: {words}"):
        load_cluster(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NoClusterFile, match=r"no.toml' is no file"):
        load_cluster(tmp_path / "no.toml")


@pytest.mark.parametrize("name", NAMES)
def test_a_written_description_reads_back_the_same(tmp_path: Path, name: str) -> None:
    cluster = load_cluster(name)
    save_cluster(cluster, tmp_path / "folder" / "mine.toml", "Written by a test,\nin two lines.")
    assert load_cluster(tmp_path / "folder" / "mine.toml") == cluster
    assert (tmp_path / "folder" / "mine.toml").read_text().startswith("# Written by a test,\n# in two lines.\n\nname")


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False)
at_most_one = st.floats(min_value=0, max_value=1, exclude_max=True)
gpus = st.builds(
    Gpu,
    name=texts,
    arch=st.integers(0, 200),
    memory=st.integers(1, 1 << 50),
    copy_bandwidth=positive,
    launch_latency=at_most_one,
    matmul=st.dictionaries(st.sampled_from([*DTYPES, "tf32"]), positive),
    attention_forward=positive,
    attention_backward=positive,
    multiprocessors=st.integers(1, 1000),
)
links = st.builds(Link, texts, positive, at_most_one)
transports = st.builds(
    TransportModel,
    name=st.sampled_from(["nccl", "push_32", "two_shot"]),
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1).map(tuple),
    bandwidth=positive,
    latency=at_most_one,
    interference=at_most_one,
    dtypes=st.lists(st.sampled_from(DTYPES)).map(tuple),
    crosses=st.booleans(),
    per_member=at_most_one,
    ctas=st.integers(0, 200),
)


@given(
    cluster=st.builds(
        Cluster,
        name=texts,
        gpus_per_node=st.sampled_from([12, 24, 72]),
        gpu=gpus,
        hosts_per_node=st.sampled_from([1, 2, 6]),
        node=st.none() | links,
        network=st.none() | links,
        transports=st.lists(transports, max_size=3).map(tuple),
    )
)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_written_reads_back_the_same(tmp_path: Path, cluster: Cluster) -> None:
    save_cluster(cluster, tmp_path / "mine.toml")
    assert load_cluster(tmp_path / "mine.toml") == cluster


# ---- this machine


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A machine of eight GPUs, as torch shows it; nothing has been calibrated."""
    device = SimpleNamespace(name="NVIDIA H200", total_memory=int(139.8 * 2**30))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with knobs.override(cache_dir=str(tmp_path), cluster=""):
        yield device


def test_here_is_the_shipped_cluster_of_the_gpu(machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cluster_here() == load_cluster("h200x8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert cluster_here() == dataclasses.replace(load_cluster("h200x8"), gpus_per_node=4)
    machine.name, machine.total_memory = "NVIDIA GB200", 197_900_000_000
    assert cluster_here() == load_cluster("gb200x72")


def test_here_is_the_calibrated_cluster_where_there_is_one(machine: SimpleNamespace, tmp_path: Path) -> None:
    shipped = load_cluster("h200x8")
    mine = dataclasses.replace(shipped, name="mine", gpu=dataclasses.replace(shipped.gpu, copy_bandwidth=4.0e12))
    save_cluster(mine, tmp_path / "clusters" / "h200x8.toml")
    save_cluster(load_cluster("b200x8"), tmp_path / "clusters" / "a.toml")
    assert cluster_here() == mine
    # A calibrated B200 does not describe a GB200, though its name occurs there.
    machine.name, machine.total_memory = "NVIDIA GB200", 197_900_000_000
    assert cluster_here().name == "gb200x72"


@pytest.mark.parametrize("content", [b"", b"\xff", b"name = 1", b"[" * 5000])
def test_a_damaged_calibration_is_left_out(content: bytes, machine: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "h200x8.toml").write_bytes(content)
    assert cluster_here() == load_cluster("h200x8")


def test_a_calibration_that_others_can_change_is_left_out(machine: SimpleNamespace, tmp_path: Path) -> None:
    shipped = load_cluster("h200x8")
    mine = dataclasses.replace(shipped, name="mine", gpu=dataclasses.replace(shipped.gpu, copy_bandwidth=4.0e12))
    save_cluster(mine, tmp_path / "clusters" / "h200x8.toml")
    assert cluster_here() == mine
    cluster_module._fitting.cache_clear()
    (tmp_path / "clusters" / "h200x8.toml").chmod(0o666)
    assert cluster_here() == shipped


def test_calibrations_are_read_once_in_a_process(
    machine: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every capture asks for them, and ranks that have compared the answer rely on it."""
    mine = dataclasses.replace(load_cluster("h200x8"), name="mine")
    save_cluster(mine, tmp_path / "clusters" / "h200x8.toml")
    assert is_described()
    monkeypatch.setattr(cache_folder, "read_own", lambda file: pytest.fail(f"{file} is read again"))
    assert is_described()
    assert cluster_here() == mine


def test_the_knob_names_the_cluster_of_this_machine(machine: SimpleNamespace, tmp_path: Path) -> None:
    save_cluster(load_cluster("a100x8"), tmp_path / "mine.toml")
    with knobs.override(cluster="l40sx8"):
        assert cluster_here() == load_cluster("l40sx8")
    with knobs.override(cluster=str(tmp_path / "mine.toml")):
        assert cluster_here() == load_cluster("a100x8")
    with pytest.raises(InvalidKnob, match="mine"), knobs.override(cluster="mine"):
        cluster_here()


def test_no_description_of_another_gpu(machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.total_memory = 80 * 2**30
    with pytest.raises(NoClusterHere, match=r"NVIDIA H200 with 85899345920 bytes.*weft calibrate"):
        cluster_here()
    machine.name = "NVIDIA T4"
    with pytest.raises(NoClusterHere, match="NVIDIA T4"):
        cluster_here()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NoClusterHere, match="no GPU"):
        cluster_here()
