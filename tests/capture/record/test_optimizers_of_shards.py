"""Optimizers as users write them, over sharded parameters: by default torch steps DTensors one by one, with numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from norm_scaled import NormScaled
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import weft
from harness import run_ranks
from weft.branching_form import BranchingForm

OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {}),
    ("AdamW", {"foreach": True}),
    ("AdamW", {"amsgrad": True}),
    ("Adam", {"weight_decay": 0.1}),
    ("NAdam", {}),
    ("Adamax", {}),
    ("SGD", {"momentum": 0.9}),
    ("RMSprop", {}),
    ("Adafactor", {}),
    ("RAdam", {}),
    ("ASGD", {}),
    ("NormScaled", {"lr": 0.1}),
]
KINDS = vars(torch.optim) | {"NormScaled": NormScaled}
WRAPPERS = {"fully_shard": weft.fully_shard, "replicate": weft.replicate}


def test_state_is_made_of_shards_and_never_of_whole_parameters() -> None:
    # A whole parameter has 4 TiB, a shard of it 64 MiB: torch would fail to allocate the former.
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2**16)
    try:
        mesh = init_device_mesh("cpu", (2**16,))
        shard = DTensor.from_local(torch.zeros(16, 2**20), mesh, [Shard(0)], run_check=False)
        weight = nn.Parameter(shard)
        optimizer = torch.optim.AdamW([weight], fused=True)

        def step() -> None:
            weight.grad = weight.detach().clone()
            optimizer.step()

        graph = weft.capture(step)
    finally:
        dist.destroy_process_group()
    assert any("_fused_adamw" in str(node.target) for node in graph.graph.nodes)
    assert optimizer.state[weight]["exp_avg"].to_local().shape == (16, 2**20)


def trained(
    rank: int, world: int, wrapper: str, name: str, options: dict[str, Any], compiled: bool
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(7, 16), nn.GELU(), nn.Linear(16, 5))
    WRAPPERS[wrapper](net, mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)))
    optimizer = KINDS[name](net.parameters(), **options)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = weft.compile(step) if compiled else step
    data = torch.Generator().manual_seed(rank)
    losses = [run(torch.randn(4, 7, generator=data)) for _ in range(8)]
    if compiled and wrapper == "replicate":
        assert len(run.captures) <= 3, (name, run.captures)  # type: ignore[attr-defined]
    return [*losses, *(getattr(each, "_local_tensor", each) for each in net.parameters())]


def both(rank: int, world: int, wrapper: str) -> None:
    for name, options in OPTIMIZERS:
        if name == "Adafactor" and wrapper == "fully_shard":
            continue  # torch's own takes no shards: DTensor has no rule for one of its operations
        eager, compiled = (trained(rank, world, wrapper, name, options, compiled) for compiled in (False, True))
        torch.testing.assert_close(compiled, eager, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.gloo
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_training_by_any_optimizer_is_eager_training(wrapper: str) -> None:
    run_ranks(both, 2, wrapper, timeout=150)


def captured_again_and_again(rank: int, world: int) -> list[tuple[int, int]]:
    """How many captures and how many forms with branches each of several compiled steps of one process has."""
    found = []
    for _ in range(6):
        torch.manual_seed(0)
        net = weft.fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (world,)))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)

        def step(x: torch.Tensor, net: Any = net, optimizer: Any = optimizer) -> torch.Tensor:
            loss = net(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run: Any = weft.compile(step)
        for _ in range(2):
            run(torch.randn(4, 8))
        found.append((len(run.captures), sum(isinstance(form, BranchingForm) for form in run.entries)))
    return found


@pytest.mark.gloo
def test_numbers_of_earlier_captures_are_no_questions_of_later_ones() -> None:
    """Torch 2.11 compares the numbers of an operation on DTensors with those in its table of placements."""
    assert run_ranks(captured_again_and_again, 1) == [[(1, 0)] * 6]


def accumulated(rank: int, world: int, compiled: bool) -> list[torch.Tensor]:
    """Gradients of three steps that no optimizer takes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(7, 16), nn.GELU(), nn.Linear(16, 5))
    weft.fully_shard(net, mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)))

    def step(x: torch.Tensor) -> None:
        net(x).square().mean().backward()

    run = weft.compile(step) if compiled else step
    data = torch.Generator().manual_seed(rank)
    for _ in range(3):
        run(torch.randn(4, 7, generator=data))
    return [parameter.grad.to_local() for parameter in net.parameters()]  # type: ignore[union-attr]


def both_accumulated(rank: int, world: int) -> None:
    eager, compiled = (accumulated(rank, world, compiled) for compiled in (False, True))
    torch.testing.assert_close(compiled, eager, rtol=0, atol=0)


@pytest.mark.gloo
def test_gradients_that_one_bucket_brought_are_accumulated() -> None:
    """The first step leaves them in one buffer, each in a part of its own."""
    run_ranks(both_accumulated, 2, timeout=60)
