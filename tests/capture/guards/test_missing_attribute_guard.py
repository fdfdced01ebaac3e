"""Attributes that a step looks for on tensors, before and after the program puts them there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import weft
from harness import run_ranks


class Weights:
    """Tensors of a program."""

    def __init__(self) -> None:
        self.plain = torch.ones(3)
        self.trained = nn.Parameter(torch.ones(3))


def results(compiled: bool) -> tuple[list[torch.Tensor], list[str]]:
    """What a step gives while attributes come and go."""
    weights = Weights()

    def step(x: torch.Tensor) -> torch.Tensor:
        for tensor in (weights.plain, weights.trained):
            x = x * getattr(tensor, "scale", 2) + (1 if hasattr(tensor, "shift") else 0)
        return x

    run: Any = weft.compile(step) if compiled else step
    found = [run(torch.ones(3)), run(torch.ones(3))]
    weights.plain.unrelated = 1  # type: ignore[attr-defined]
    found.append(run(torch.ones(3)))
    weights.trained.scale = 5  # type: ignore[attr-defined]
    found.append(run(torch.ones(3)))
    weights.plain.shift = None  # type: ignore[attr-defined]
    found.append(run(torch.ones(3)))
    del weights.trained.scale
    return [*found, run(torch.ones(3))], run.captures if compiled else []


def test_attributes_that_were_missing_are_noticed_and_others_are_not() -> None:
    expected, _ = results(False)
    found, captures = results(True)
    assert all(map(torch.equal, found, expected))
    assert captures[1:3] == [
        "weights.trained.scale is there, and was missing",
        "weights.plain.shift is there, and was missing",
    ]
    assert len(captures) == 4


def local(rank: int, world: int) -> list[bool]:
    """Attributes of the tensor inside a DTensor."""
    mesh = init_device_mesh("cpu", (world,))

    def found(compiled: bool, at_first: bool) -> list[torch.Tensor]:
        weight = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
        inner = weight._local_tensor

        def step(x: torch.Tensor) -> torch.Tensor:
            return x * getattr(weight._local_tensor, "scale", 2)

        run: Callable[..., torch.Tensor] = weft.compile(step) if compiled else step
        if at_first:
            inner.scale = 3
        results = [run(torch.ones(3))]
        inner.scale = 4
        results.append(run(torch.ones(3)))
        del inner.scale
        return [*results, run(torch.ones(3))]

    return [
        torch.equal(one, other)
        for at_first in (False, True)
        for one, other in zip(found(True, at_first), found(False, at_first), strict=True)
    ]


@pytest.mark.gloo
def test_attributes_of_local_tensors_are_noticed() -> None:
    assert run_ranks(local, 1) == [[True] * 6]
