"""What type checkers see of the public names. ``tests/test_typing.py`` runs pyrefly and mypy on this file; it is never
imported. ``assert_type`` fails where a name has another type, ``Any`` too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, assert_type

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.tensorboard import SummaryWriter

import weft


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sum()


def plain(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return x * scale


@weft.compile
def bare(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return x * scale


@weft.compile(mode="bitwise", memory_limit=45)
def called(x: torch.Tensor, *, count: int) -> list[torch.Tensor]:
    return [x] * count


class Trainer:
    @weft.compile
    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x

    @weft.compile(dynamic=True)
    def other(self, x: torch.Tensor, count: int = 1) -> int:
        return count


@weft.opaque
def write(loss: torch.Tensor, name: str) -> int:
    return 3


def check(x: torch.Tensor, trainer: Trainer, mesh: DeviceMesh, writer: SummaryWriter) -> None:
    weft.log_to("out/log.jsonl", print, writer, ranks="all")
    assert_type(bare(x, scale=2.0), torch.Tensor)
    assert_type(called(x, count=3), list[torch.Tensor])
    assert_type(trainer.step(x), torch.Tensor)
    assert_type(trainer.other(x, count=2), int)
    assert_type(weft.compile(plain)(x), torch.Tensor)
    assert_type(bare.captures, list[str])
    assert_type(write(x, "loss"), None)

    net = Net()
    assert_type(weft.fully_shard(net), Net)
    assert_type(weft.fully_shard([net, net]), list[Net])
    assert_type(weft.replicate(net), Net)
    assert_type(weft.replicate([net, net]), list[Net])
    assert_type(weft.materialize(net, device="cpu"), Net)
    assert_type(weft.parallelize(net, mesh, {"layer": weft.ColwiseParallel()}), Net)
    assert_type(weft.parallelize_module(net, mesh, weft.ColwiseParallel()), Net)
    assert_type(weft.compile(net)(x), Any)  # what nn.Module.__call__ returns
    assert_type(weft.metrics(bare, tokens=3), dict[str, float])
    assert_type(weft.plan(plain, x, cluster="h200x8").step_seconds, float)
    assert_type(weft.capture(plain, x), weft.StepGraph)
    assert_type(weft.explain(bare, x).on("H200").nodes, int)
    assert_type(weft.knobs.bucket_mib, int)
    assert_type(weft.__version__, str)
    assert_type(weft.errors.MetaParameters, type[weft.errors.MetaParameters])
    with weft.fake_world(8) as world:
        assert_type(world.rank, int)


def mistakes(x: torch.Tensor, trainer: Trainer) -> None:
    """Each line is an error; the comments say so, and the checkers report a comment that hides none."""
    bare("x")  # type: ignore
    bare(x, size=3)  # type: ignore
    called(x)  # type: ignore
    trainer.step()  # type: ignore
    weft.compile(mode="fast")  # type: ignore
    weft.compile(fallback="none")  # type: ignore
    weft.materialize("model")  # type: ignore
    write(x)  # type: ignore
    weft.log_to(3)  # type: ignore
    weft.parallelize(x, trainer, {})  # type: ignore


takes_step: Callable[[torch.Tensor], torch.Tensor] = bare
