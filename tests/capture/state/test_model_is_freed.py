"""A compiled step keeps nothing alive: the user's model goes when the user lets go of it and of the step."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from harness import run_ranks


def left(rank: int, world: int, sharded: bool) -> list[str]:
    """What is left of a model and a step that were trained with, once nobody has them."""

    def trained() -> dict[str, weakref.ref]:
        net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        if sharded:
            policy = weft.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            weft.fully_shard(net, mesh=mesh, mp_policy=policy)
        else:
            weft.replicate(net, mesh=mesh)
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)

        @weft.compile
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for _ in range(2):
            step(torch.randn(4, 8))
        entry = step.entries[0]
        kept = {"model": net, "step": step, "graph": entry.captured.graph, "program": entry.program}
        kept |= {"optimizer": optimizer, **dict(net.named_parameters())}
        return {name: weakref.ref(thing) for name, thing in kept.items()}

    found = trained()
    for _ in range(3):  # what autograd's nodes held goes with them, and is found the next time
        gc.collect()
    return [name for name, thing in found.items() if thing() is not None]


@pytest.mark.gloo
@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
def test_a_model_whose_step_was_compiled_is_freed(sharded: bool) -> None:
    assert run_ranks(left, 2, sharded) == [[], []]
