"""Misuses of knobs, of the options of ``torch.compile(backend="weft")``, of ``fake_world`` and of cluster files."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import weft
from clear_errors import Misuse, faults
from weft import knobs
from weft.backend import weft as backend
from weft.inductor.cost.cluster import SHIPPED, Cluster, load_cluster

T, V = TypeError, ValueError


def override(**values: Any) -> None:
    with knobs.override(**values):
        pass


def environment(**variables: str) -> None:
    knobs.read_environment(variables)


def compile_with(**values: Any) -> None:
    with knobs.override(**values):
        weft.compile(lambda x: x * 2)(torch.ones(3))


def through_dynamo(**options: Any) -> Any:
    traced = torch.fx.symbolic_trace(nn.Linear(3, 3))
    return backend(traced, [torch.ones(2, 3)], **options)


def world(*args: Any, **options: Any) -> None:
    with weft.fake_world(*args, **options):
        pass


def cluster(find: str, replacement: str) -> Cluster:
    """The description of h200x8 with one change."""
    text = (SHIPPED / "h200x8.toml").read_text()
    assert re.search(find, text, re.MULTILINE)
    changed = re.sub(find, replacement, text, count=1, flags=re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.toml"
        path.write_text(changed)
        return load_cluster(path)


KNOBS = [
    Misuse("override(nope=1)", "nope", "docs/knobs.md"),
    Misuse("override(bucket_mb=1)", "bucket_mb", "bucket_mib"),
    Misuse("override(verify='no')", "verify", "'no'", V),
    Misuse("override(verify=1)", "verify", "1", V),
    Misuse("override(verify=None)", "verify", "None", V),
    Misuse("override(bucket_mib=-1)", "bucket_mib", "-1", V),
    Misuse("override(bucket_mib=0)", "bucket_mib", "0", V),
    Misuse("override(bucket_mib=2.5)", "bucket_mib", "2.5", V),
    Misuse("override(bucket_mib='256')", "bucket_mib", "'256'", V),
    Misuse("override(prefetch_mib=-5)", "prefetch_mib", "-5", V),
    Misuse("override(recapture_limit=-1)", "recapture_limit", "-1", V),
    Misuse("override(recapture_limit=True)", "recapture_limit", "True", V),
    Misuse("override(agreement_timeout_s=-1.0)", "agreement_timeout_s", "-1.0", V),
    Misuse("override(agreement_timeout_s=0)", "agreement_timeout_s", "0", V),
    Misuse("override(agreement_timeout_s=float('nan'))", "agreement_timeout_s", "nan", V),
    Misuse("override(peer_timeout_s=float('inf'))", "peer_timeout_s", "inf", V),
    Misuse("override(peer_timeout_s='10')", "peer_timeout_s", "'10'", V),
    Misuse("override(transports='nvshmem')", "transports", "nvshmem", V),
    Misuse("override(transports='push,pul')", "transports", "pul", V),
    Misuse("override(transports='push_many')", "transports", "push_many", V),
    Misuse("override(transports='all,push')", "transports", "all", V),
    Misuse("override(transports=['push'])", "transports", "['push']", V),
    Misuse("override(cluster='/nonexistent/mine.toml')", "cluster", "/nonexistent/mine.toml", V),
    Misuse("override(cluster='h900x8')", "cluster", "h900x8", V),
    Misuse("override(cluster='/')", "cluster", "'/'", V),
    Misuse("override(cache_dir=3)", "cache_dir", "3", V),
    Misuse("override(dump_dir=None)", "dump_dir", "None", V),
    Misuse("compile_with(disable_passes='nope')", "disable_passes", "'nope'", V),
    Misuse("compile_with(dump_dir='/dev/null/dumps')", "WEFT_DUMP_DIR", "/dev/null/dumps", OSError),
    Misuse("environment(WEFT_VERIFY='maybe')", "WEFT_VERIFY", "'maybe'", V),
    Misuse("environment(WEFT_BUCKET_MIB='-1')", "WEFT_BUCKET_MIB", "-1", V),
    Misuse("environment(WEFT_BUCKET_MIB='1e3')", "WEFT_BUCKET_MIB", "'1e3'", V),
    Misuse("environment(WEFT_RECAPTURE_LIMIT='')", "WEFT_RECAPTURE_LIMIT", "''", V),
    Misuse("environment(WEFT_AGREEMENT_TIMEOUT_S='nan')", "WEFT_AGREEMENT_TIMEOUT_S", "nan", V),
    Misuse("environment(WEFT_PEER_TIMEOUT_S='10s')", "WEFT_PEER_TIMEOUT_S", "'10s'", V),
    Misuse("environment(WEFT_PEER_TIMEOUT_S='inf')", "WEFT_PEER_TIMEOUT_S", "inf", V),
    Misuse("environment(WEFT_TRANSPORTS='nvlink')", "WEFT_TRANSPORTS", "nvlink", V),
    Misuse("environment(WEFT_CLUSTER='/nonexistent/mine.toml')", "WEFT_CLUSTER", "/nonexistent/mine.toml", V),
]

BACKEND = [
    Misuse("through_dynamo(mode='fast')", "mode", "'fast'", V),
    Misuse("through_dynamo(mode='reduce-overhead')", "mode", "'reduce-overhead'", V),
    Misuse("through_dynamo(options={'nope': 1})", "nope", "docs/knobs.md"),
    Misuse("through_dynamo(options={'bucket_mib': -1})", "bucket_mib", "-1", V),
    Misuse("through_dynamo(options={'transports': 'nvshmem'})", "transports", "nvshmem", V),
    Misuse("through_dynamo(options=3)", "options", "3", T),
    Misuse("through_dynamo(options=['verify'])", "options", "['verify']", T),
    Misuse("through_dynamo(options={3: 1})", "options", "3", T),
]

FAKE_WORLD = [
    Misuse("world(4.5)", "world_size", "4.5", T),
    Misuse("world('4')", "world_size", "'4'", T),
    Misuse("world(True)", "world_size", "True", T),
    Misuse("world(None)", "world_size", "None", T),
    Misuse("world([4])", "world_size", "[4]", T),
    Misuse("world(0)", "world_size", "0", V),
    Misuse("world(-8)", "world_size", "-8", V),
    Misuse("world(4, 4)", "rank", "4", V),
    Misuse("world(4, -1)", "rank", "-1", V),
    Misuse("world(4, 1.0)", "rank", "1.0", T),
    Misuse("world(4, '0')", "rank", "'0'", T),
    Misuse("world(4, device='cuda')", "device", "'cuda'", V),
    Misuse("world(4, device=3)", "device", "3", V),
    Misuse("world(4, target_device='tpu')", "target_device", "'tpu'", V),
    Misuse("world(4, target_device=None)", "target_device", "None", V),
    Misuse("world(4, target_device='cuda:1')", "target_device", "'cuda:1'", V),
    Misuse("world(4, local_world_size=0)", "local_world_size", "0", V),
    Misuse("world(4, local_world_size=2.0)", "local_world_size", "2.0", T),
    Misuse("world(4, local_world_size='2')", "local_world_size", "'2'", T),
    Misuse("with weft.fake_world(4): world(2)", "fake world", "rank 0 of"),
    Misuse(
        "with weft.fake_world(4): torch.distributed.DeviceMesh('cpu', torch.arange(4))", "shape (4,)", "nested lists"
    ),
]

CLUSTERS = [
    Misuse("load_cluster('nowhere')", "cluster", "'nowhere'", V),
    Misuse("load_cluster('/nonexistent/mine.toml')", "cluster", "/nonexistent/mine.toml", V),
    Misuse("load_cluster('/')", "cluster", "'/'", V),
    Misuse("load_cluster(3)", "cluster", "3", T),
    Misuse("load_cluster(None)", "cluster", "None", T),
    Misuse("load_cluster(__file__)", "test_settings.py", "cannot be read", V),
    Misuse(r"cluster(r'interference = .*', 'interference = 5.0')", "interference", "5.0", V),
    Misuse(r"cluster(r'interference = .*', 'interference = -0.1')", "interference", "-0.1", V),
    Misuse(r"cluster(r'interference = .*', 'interference = nan')", "interference", "nan", V),
    Misuse(r"cluster(r'^bandwidth = .*', 'bandwidth = 0')", "bandwidth", "0", V),
    Misuse(r"cluster(r'^bandwidth = .*', 'bandwidth = inf')", "bandwidth", "inf", V),
    Misuse(r"cluster(r'^bandwidth = .*', 'bandwidth = \"fast\"')", "bandwidth", "'fast'", V),
    Misuse(r"cluster(r'^bandwidth = .*', 'bandwith = 1e9')", "bandwith", "known", V),
    Misuse(r"cluster(r'^latency = .*', 'latency = -1e-6')", "latency", "-1e-06", V),
    Misuse(r"cluster(r'^latency = .*', 'latency = 12.0')", "latency", "12.0", V),
    Misuse(r"cluster(r'^gpus_per_node = .*', 'gpus_per_node = 0')", "gpus_per_node", "0", V),
    Misuse(r"cluster(r'^gpus_per_node = .*', 'gpus_per_node = 7.5')", "gpus_per_node", "7.5", V),
    Misuse(r"cluster(r'^gpus_per_node = .*', 'gpus_per_node = true')", "gpus_per_node", "True", V),
    Misuse(r"cluster(r'^gpus_per_node = .*', '')", "gpus_per_node", "missing", V),
    Misuse(r"cluster(r'^gpus_per_node = .*', 'gpus_per_node = 8\nhosts_per_node = 3')", "hosts_per_node", "3", V),
    Misuse(r"cluster(r'kinds = .*', 'kinds = []')", "kinds", "[]", V),
    Misuse(r"cluster(r'kinds = .*', 'kinds = [\"gather\"]')", "kinds", "'gather'", V),
    Misuse(r"cluster(r'kinds = .*', 'kinds = \"all_gather\"')", "kinds", "'all_gather'", V),
    Misuse(r"cluster(r'name = \"push.*', 'name = \"shove\"')", "transports", "'shove'", V),
    Misuse(r"cluster(r'^gpus_per_node', 'gpus_per_node = = 3')", "mine.toml", "cannot be read", V),
    Misuse(r"cluster(r'^\[gpu\]', '[gpus]')", "gpu", "mine.toml", V),
    Misuse(r"cluster(r'^memory = .*', 'memory = 141.0')", "memory", "141.0", V),
]

NAMES = {
    **{"torch": torch, "weft": weft, "override": override, "environment": environment, "compile_with": compile_with},
    **{"through_dynamo": through_dynamo, "world": world, "cluster": cluster, "load_cluster": load_cluster},
    "__file__": __file__,
}


@pytest.mark.parametrize("misuse", [*KNOBS, *BACKEND, *FAKE_WORLD, *CLUSTERS], ids=str)
def test_the_error_is_clear(misuse: Misuse) -> None:
    by_torch = "DeviceMesh" in misuse.source  # torch's function, which a fake world replaces
    assert not faults(misuse, NAMES, public=misuse not in KNOBS + CLUSTERS and not by_torch)
