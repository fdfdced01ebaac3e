"""The training step of a Llama of 8 B parameters, in few layers, sharded over fake GPUs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import weft
from weft.capture.graph import StepGraph
from weft.inductor.graph.retarget import retarget

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
from llama import SHAPES, Llama


def llama_step(layers: int, *, clip: bool) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The step of one rank of the fake world that is open: blocks sharded over all ranks, gathered in bfloat16 and
    reduced in float32, AdamW, with clipping by the norm or without."""
    shape = type(SHAPES["8b"])(**{**vars(SHAPES["8b"]), "layers": layers})
    with torch.device("meta"):
        model = Llama(shape)
    mesh = dist.init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("dp",))
    policy = weft.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        weft.fully_shard(module, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = model(ids, labels)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def sharded_llama(layers: int, tokens: int, *, clip: bool) -> StepGraph:
    """:func:`llama_step`, captured and moved to GPUs."""
    ids = torch.zeros(1, tokens, dtype=torch.long, device="cuda")
    return retarget(weft.capture(llama_step(layers, clip=clip), ids, ids))
