"""State of sharded modules: state dicts, checkpoints at another world size, and from and to torch's FSDP2."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from harness import run_ranks
from weft.distributed import fsdp as weft_fsdp

pytestmark = pytest.mark.gloo

WRAPPERS: dict[str, Callable[..., Any]] = {"torch": torch_fully_shard, "weft": weft_fsdp.fully_shard}


def build(seed: int, scalar: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(11, 7), nn.Linear(7, 13), nn.BatchNorm1d(13), nn.Linear(13, 5, bias=False))
    if scalar:
        model.register_parameter("temperature", nn.Parameter(torch.tensor(1.5)))
    return model


def wrapped(wrapper: str, world: int, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    model = build(seed)
    mesh = init_device_mesh("cpu", (world,))
    WRAPPERS[wrapper](model[1], mesh=mesh)  # type: ignore[index]
    WRAPPERS[wrapper](model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> torch.Tensor:
    """One step on the same batch everywhere, so that the world size does not matter to the values."""
    torch.manual_seed(seed)
    loss = model(torch.randint(0, 11, (8,))).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {k: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for k, v in model.state_dict().items()}


def save(rank: int, world: int, wrapper: str, folder: str) -> Any:
    warnings.simplefilter("ignore")
    model, optimizer = wrapped(wrapper, world, seed=0)
    for at in range(3):
        step(model, optimizer, at)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    return whole(model), step(model, optimizer, 3), whole(model)


def load(rank: int, world: int, wrapper: str, folder: str) -> Any:
    warnings.simplefilter("ignore")
    model, optimizer = wrapped(wrapper, world, seed=1)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return whole(model), step(model, optimizer, 3), whole(model)


@pytest.mark.parametrize(
    ("saver", "writers", "loader", "readers"),
    [("weft", 2, "weft", 3), ("torch", 2, "weft", 2), ("weft", 2, "torch", 2), ("weft", 1, "weft", 2)],
)
def test_checkpoints_cross(saver: str, writers: int, loader: str, readers: int, tmp_path: Path) -> None:
    """Saved by one, loaded by the other or on more ranks: same values, and the next step is the same.

    On another number of ranks the mean of equal gradients is the same gradient only up to rounding.
    """
    saved = run_ranks(save, writers, saver, str(tmp_path))[0]
    for loaded in run_ranks(load, readers, loader, str(tmp_path)):
        assert list(loaded[0]) == list(build(0).state_dict())
        for name in saved[0]:
            assert torch.equal(loaded[0][name], saved[0][name]), name
        exact = {} if writers == readers else {"rtol": 1e-5, "atol": 1e-6}
        for name in saved[2]:
            torch.testing.assert_close(loaded[2][name], saved[2][name], **(exact or {"rtol": 0, "atol": 0}))


def state_dict_body(rank: int, world: int) -> None:
    warnings.simplefilter("ignore")
    reference = build(0, scalar=True)
    model: Any = build(0, scalar=True)
    mesh = init_device_mesh("cpu", (world,))
    weft_fsdp.fully_shard(model[1], mesh=mesh)
    weft_fsdp.fully_shard(model, mesh=mesh)
    assert list(model.state_dict()) == list(reference.state_dict())
    for name, value in model.state_dict().items():
        if "running" in name or "tracked" in name:
            continue
        assert isinstance(value, DTensor), name
        assert value.placements == ((Replicate(),) if name == "temperature" else (Shard(0),))
        assert torch.equal(value.full_tensor(), reference.state_dict()[name])

    # between forward and backward the root is gathered; its state dict holds shards all the same
    loss = model(torch.arange(8)).square().mean() * model.temperature
    assert isinstance(model.state_dict()["3.weight"], DTensor)
    loss.backward()

    # plain load, and one that exchanges the parameters
    other = build(1, scalar=True)
    for assign in (False, True):
        source = {k: v.clone() for k, v in model.state_dict().items()}
        for value in source.values():
            value.add_(1)
        model.load_state_dict(source, assign=assign)
        assert torch.equal(whole(model)["1.weight"], source["1.weight"].full_tensor())
        want = nn.functional.linear(torch.ones(1, 7), source["1.weight"].full_tensor(), source["1.bias"].full_tensor())
        assert torch.equal(model[1](torch.ones(1, 7)), want)
        model.reset_iter_state()

    # from and to an unsharded model
    options = StateDictOptions(full_state_dict=True)
    full = get_model_state_dict(model, options=options)
    other.load_state_dict(full)
    assert torch.equal(other.state_dict()["0.weight"], whole(model)["0.weight"])

    # another dtype
    model.to(torch.float64)
    assert model(torch.arange(8)).dtype == torch.float64
    model.reset_iter_state()
    assert all(isinstance(p, DTensor) and p.dtype == torch.float64 for p in model.parameters())


def test_state_dicts() -> None:
    run_ranks(state_dict_body, 2)


def alive_after_the_model(rank: int, world: int, wrapper: str, kept: str, train: bool) -> set[str]:
    """The names of the parameters that are alive when the model is gone and one part of it is kept."""
    model, optimizer = wrapped(wrapper, world, 0)
    if train:
        step(model, optimizer, 1)
    parameters = {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}
    part = model.get_parameter(kept) if kept.endswith("weight") else model.get_submodule(kept)
    del model, optimizer
    gc.collect()
    assert part is not None
    return {name for name, parameter in parameters.items() if parameter() is not None}


@pytest.mark.parametrize("train", [False, True], ids=["not trained", "trained"])
@pytest.mark.parametrize("kept", ["3", "1.weight"])
def test_a_part_that_outlives_the_model_keeps_its_own_parameters_only(kept: str, train: bool) -> None:
    own = {"3": {"3.weight"}}.get(kept, {kept})
    assert run_ranks(alive_after_the_model, 2, "weft", kept, train) == [own, own]
    by_torch = run_ranks(alive_after_the_model, 2, "torch", kept, train)
    assert all(own <= names for names in by_torch)


def alive_without_a_backward(rank: int, world: int) -> dict[str, bool]:
    """Whether the result of a wrapped module that ends in an operation is alive when the user has let it go."""
    found = {}
    for name, last in {"softmax": nn.Softmax(-1), "sigmoid": nn.Sigmoid(), "scaled": nn.LeakyReLU()}.items():
        module = nn.Sequential(nn.Linear(4, 4), last)
        weft_fsdp.fully_shard(module, mesh=init_device_mesh("cpu", (world,)), reshard_after_forward=True)
        result = weakref.ref(module(torch.randn(2, 4)))
        gc.collect()
        found[name] = result() is not None
    return found


def test_what_a_module_returned_is_freed_without_a_backward() -> None:
    """Operations that save their own result: no cycle keeps the graph of a forward that nothing follows."""
    assert run_ranks(alive_without_a_backward, 1) == [{"softmax": False, "sigmoid": False, "scaled": False}]
