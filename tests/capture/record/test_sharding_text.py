"""What inputs of a graph say of their sharding: along which process groups of the graph they are replicated."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

import weft


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(self.up(x)))


PLAN: dict[str, Any] = {"up": weft.ColwiseParallel(), "down": weft.RowwiseParallel()}


def axes(step: Any, *args: Tensor) -> dict[str, dict[str, bool]]:
    return {each.path: dict(each.axes) for each in weft.capture(step, *args).inputs}


def test_parameters_say_along_which_groups_they_are_replicated() -> None:
    with weft.fake_world(8):
        mesh = dist.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        model = weft.parallelize(Model(), mesh["tp"], PLAN)
        alone = axes(lambda x: model(x).sum().backward(), torch.zeros(4, 8))
        weft.fully_shard(model, mesh=mesh["dp"])
        both = axes(lambda x: model(x).sum().backward(), torch.zeros(4, 8))
    # Only groups over which something is communicated have names in the graph.
    assert alone["args[0]"] == {}
    assert alone["model.up.weight"] == {"tp": False}
    assert alone["model.norm.weight"] == {"tp": True}
    assert both["model.norm.weight"] == {"dp": False, "tp": True}
    assert both["model.down.weight"] == {"dp": False, "tp": False}


def test_partial_values_are_not_replicated_and_other_groups_have_other_names() -> None:
    with weft.fake_world(4):
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        found = {}
        for placements in ([Replicate(), Partial()], [Replicate(), Replicate()]):
            held = nn.Parameter(DTensor.from_local(torch.zeros(4), mesh, placements, run_check=False))

            def step(x: Tensor, held: Any = held) -> Tensor:
                dist.all_reduce(x, group=mesh["tp"].get_group())
                return x + held.to_local()

            (found[str(placements[1])],) = filter(None, axes(step, torch.zeros(4)).values())
    assert found == {"P(sum)": {"tp": False}, "R": {"tp": True}}
