"""Models built on the meta device get the values that building them without sharding gives."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from harness import run_ranks
from weft import errors
from weft.distributed.ddp import replicate
from weft.distributed.fsdp import fully_shard
from weft.distributed.materialize import materialize


class Rotary(nn.Module):
    """A buffer that is not saved and is computed, not drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.empty(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.angles = torch.arange(4) / 10


class Net(nn.Module):
    """Different ways to initialize: a reset that reaches into a child, computed buffers, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.attention = nn.MultiheadAttention(6, 2)
        self.rotary = Rotary()
        self.norm = nn.BatchNorm1d(6)
        self.lstm = nn.LSTM(6, 5)
        self.head = nn.Linear(6, 10)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * (1 + self.rotary.angles.sum())
        x = x + self.attention(x, x, x)[0]
        return self.head(self.norm(x) + nn.functional.pad(self.lstm(x)[0], (0, 1)))


def real() -> Net:
    torch.manual_seed(0)
    return Net()


def on_meta() -> Net:
    with torch.device("meta"):
        return Net()


def body(rank: int, world: int) -> None:
    reference, model = real(), on_meta()
    after = torch.rand(1).item()
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(model.attention, mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    fully_shard(model, mesh=mesh)
    torch.manual_seed(0)
    assert materialize(model) is model
    assert torch.rand(1).item() == after, "another number of random numbers was drawn"
    assert model.head.weight is model.embed.weight
    for (name, want), (_, got) in zip(reference.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(got.full_tensor(), want), name
        assert got.requires_grad
    for (name, want), (_, got) in zip(reference.named_buffers(), model.named_buffers(), strict=True):
        assert torch.equal(got, want), name
    outputs = [net(torch.arange(3)) for net in (reference, model)]
    assert torch.equal(*outputs)


@pytest.mark.gloo
def test_values_are_those_of_an_unsharded_model() -> None:
    run_ranks(body, 3)


def replicated_body(rank: int, world: int) -> torch.Tensor:
    model = on_meta()
    replicate(model, mesh=init_device_mesh("cpu", (world,)))
    torch.manual_seed(rank)
    materialize(model)
    return model.embed.weight.detach().clone()


@pytest.mark.gloo
def test_a_replicated_model_takes_the_values_of_its_first_rank() -> None:
    first, second = run_ranks(replicated_body, 2)
    assert torch.equal(first, real().embed.weight)
    assert torch.equal(second, first)


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=4096)
    yield init_device_mesh("cpu", (4096,))
    dist.destroy_process_group()


@pytest.mark.fake
def test_on_fakes_nothing_is_allocated(mesh: Any) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1 << 17, 1 << 17) for _ in range(4)))
    fully_shard(model, mesh=mesh)
    with FakeTensorMode():
        materialize(model, "cpu")
    for param in model.parameters():
        assert isinstance(param, DTensor)
        assert isinstance(param.to_local(), FakeTensor)
        assert param.to_local().shape[0] == 32


class Peak(TorchDispatchMode):
    """Most bytes that were alive at one time of what was allocated while this is active."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[Any, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not isinstance(out, DTensor) and out.device.type == "cpu":
            storage = out.untyped_storage()
            self.alive[storage._cdata] = (
                torch.multiprocessing.reductions.StorageWeakRef(storage),
                storage.nbytes(),
            )
            self.alive = {k: v for k, v in self.alive.items() if not v[0].expired()}
            self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return out


@pytest.mark.fake
def test_one_module_is_whole_at_a_time(mesh: Any) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(16)))
    fully_shard(model, mesh=mesh)
    gc.collect()
    with Peak() as peak:
        materialize(model)
    one = (256 * 256 + 256) * 4
    assert peak.peak < 1.5 * one


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.inner = nn.Linear(2, 2)


@pytest.mark.fake
def test_a_module_that_cannot_initialize_itself_is_named() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"fine": nn.Linear(2, 2), "bare": Bare()})
    with pytest.raises(errors.CannotInitialize, match=r"on the meta device and no reset_parameters: bare"):
        materialize(model)
    assert model["fine"].weight.is_meta, "nothing may be changed before the error"


class Forgetful(Rotary):
    def reset_parameters(self) -> None:
        pass


@pytest.mark.fake
def test_a_buffer_that_nothing_fills_is_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Forgetful())
    with pytest.raises(errors.CannotInitialize, match=r"memory but no values.*: 1\.angles"):
        materialize(model)


@pytest.mark.fake
def test_what_has_memory_is_left_alone(mesh: Any) -> None:
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0] = nn.Linear(2, 2)
    fully_shard(model, mesh=mesh)
    before = model[0].weight
    materialize(model)
    assert model[0].weight is before
    assert not model[1].weight.to_local().is_meta
