"""A small training step for demonstrations: two sharded layers, a loss, SGD.

``python -m weft.capture`` and ``python -m weft.inductor`` print what they make of it. The code of this file counts as
user code.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.capture.fake.fake_world import fake_world
from weft.capture.graph import StepGraph
from weft.capture.record.tracer import capture_step
from weft.distributed.fsdp import fully_shard


def capture_toy(world_size: int = 4, width: int = 8) -> StepGraph:
    """The graph of one rank's step, sharded over ``world_size`` simulated ranks; no memory is allocated for tensors.

    ``width`` is the number of features.
    """
    with fake_world(world_size, target_device="cpu"):
        mesh = dist.init_device_mesh("cpu", (world_size,), mesh_dim_names=("data",))
        model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(inputs: Tensor, targets: Tensor) -> Tensor:
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return capture_step(step, (torch.randn(4, width), torch.randn(4, 1))).graph
