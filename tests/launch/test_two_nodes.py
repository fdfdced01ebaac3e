"""Two nodes on one host: network namespaces, joined by a pair of virtual devices, with two ranks in each."""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from harness import run_ranks

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, os, sys, time
import torch, torch.distributed as dist, weft
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.GELU(), torch.nn.Linear(10, 3))
weft.fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

@weft.compile
def train_step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

samples = torch.randn(4, world, 5, 6, generator=torch.Generator().manual_seed(1))
losses = [train_step(samples[step, rank]).item() for step in range(4)]
everything = [None] * world
dist.all_gather_object(everything, [os.environ["GROUP_RANK"], os.environ["LOCAL_WORLD_SIZE"], losses])
if rank == 0:
    json.dump(everything, open(sys.argv[1], "w"))
for step in range(int(sys.argv[2])):
    train_step(samples[0, rank])
    time.sleep(0.02)
    if step == 15:
        open(f"{sys.argv[1]}.ready{rank}", "w").close()
dist.destroy_process_group()
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def namespaces() -> Iterator[list[str]]:
    """Two namespaces with the addresses 10.79.0.1 and 10.79.0.2."""
    names = [f"weft{os.getpid()}n{at}" for at in range(2)]
    if shutil.which("ip") is None:
        pytest.skip("there is no ip command")
    try:
        ip("netns", "add", names[0])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no right to make network namespaces: {error.stderr.decode().strip()}")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", "veth0", "netns", names[0], "type", "veth", "peer", "name", "veth0", "netns", names[1])
        for at, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.79.0.{at + 1}/24", "dev", "veth0")
            for device in ("lo", "veth0"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)


def start(node: int, name: str, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """`weft launch` of one node, inside its namespace."""
    launch = [sys.executable, "-m", "weft.launch", "launch", str(folder / "train.py"), "--processes", "2"]
    launch += [
        "--nodes",
        "2",
        "--node",
        str(node),
        "--address",
        "10.79.0.1:29511",
        "--logs",
        str(folder / f"runs{node}"),
    ]
    return subprocess.Popen(
        ["ip", "netns", "exec", name, *launch, "--", *arguments],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "veth0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def one_node_of_four(rank: int, world: int, script: str, out: str) -> None:
    """The script in processes that have torch loaded already, and a process group."""
    sys.argv = [script, out, "0"]
    os.environ["GROUP_RANK"] = "0"
    dist.init_process_group = lambda *_, **__: None
    dist.destroy_process_group = lambda *_: None
    runpy.run_path(script, run_name="__main__")


@pytest.mark.gloo
def test_two_nodes_compute_what_one_does_and_end_when_one_is_cut_off(namespaces: list[str], tmp_path: Path) -> None:
    """Two nodes of two ranks against one of four. Then one node loses its link: the other one names its ranks."""
    (tmp_path / "train.py").write_text(SCRIPT)
    nodes = [start(at, name, tmp_path, str(tmp_path / "two"), "4000") for at, name in enumerate(namespaces)]
    try:
        run_ranks(one_node_of_four, 4, str(tmp_path / "train.py"), str(tmp_path / "one"), timeout=120)
        until = time.monotonic() + 100
        while not (tmp_path / "two.ready3").exists() and time.monotonic() < until:
            time.sleep(0.1)
        ip("-n", namespaces[1], "link", "set", "veth0", "down")
        printed = nodes[0].communicate(timeout=75)[0]
        assert nodes[0].returncode != 0
        assert re.search("(ranks 2-3|rank 2|rank 3) did not answer", printed), printed
    finally:
        end(nodes, namespaces)
    two_nodes: Any = json.loads((tmp_path / "two").read_text())
    one_node: Any = json.loads((tmp_path / "one").read_text())
    assert [node for node, _, _ in two_nodes] == ["0", "0", "1", "1"]
    assert {local for _, local, _ in two_nodes} == {"2"}
    assert [losses for _, _, losses in two_nodes] == [losses for _, _, losses in one_node]


def end(nodes: list[subprocess.Popen[str]], namespaces: list[str]) -> None:
    """Kill all processes of both nodes."""
    for name in namespaces:
        listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
        for pid in listed.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), 9)
    for node in nodes:
        node.communicate()
