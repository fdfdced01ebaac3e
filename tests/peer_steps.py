"""Training steps whose collectives run over memory that the ranks share, as `weft.compile` would make them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from both_ways import detached
from weft import MixedPrecisionPolicy
from weft.capture.graph import StepGraph
from weft.inductor.compiler import make_kernels
from weft.inductor.passes.common_subexpressions import common_subexpressions
from weft.inductor.passes.drop_noops import drop_noops
from weft.inductor.passes.drop_unused_gathers import drop_unused_gathers
from weft.inductor.passes.fold_casts import fold_casts
from weft.inductor.passes.group_casts import group_casts
from weft.inductor.passes.pipeline import run_passes
from weft.inductor.passes.schedule_waits import schedule_waits
from weft.inductor.passes.wire_dtype import wire_dtype
from weft.inductor.runtime.aten import compile_aten
from weft.inductor.runtime.piecewise_cudagraph import Program, compile_recorded
from weft.inductor.schedule.bucketing import BucketEntry, bucketable_sequences, merge_buckets
from weft.inductor.schedule.split_optimizer import split_updates
from weft.inductor.transports.apply_transports import use_transports
from weft.inductor.transports.instantiate import bind
from weft.inductor.transports.peer_calls import unsupported_reason

PASSES = [drop_noops, drop_unused_gathers, fold_casts, common_subexpressions, wire_dtype, group_casts]

KERNELS = ["push", "pull", "two_shot"]
COPIES = ["copy_engine", "copy_sum_3", "one_shot"]


def transported(
    step: StepGraph, transports: Sequence[str], kernels: bool = False, passes: Sequence[Any] = PASSES
) -> StepGraph:
    """``step`` with neighbouring collectives merged, each carried by the first of ``transports`` that can, laid out."""
    made = run_passes(step, passes)
    if kernels:
        made = make_kernels(made)
    for members in bucketable_sequences(made):
        merge_buckets(made, in_fours(members))
    schedule_waits(split_updates(made))
    for node in made.collectives():
        node.meta["transport"] = next(
            (name for name in transports if unsupported_reason(made, node, name) is None), dist.get_backend()
        )
    use_transports(made, dist.get_backend())
    return made.check()


def in_fours(members: Sequence[BucketEntry]) -> list[list[BucketEntry]]:
    """Buckets of up to four neighbours."""
    buckets: list[list[BucketEntry]] = []
    for member in members:
        joined = [*buckets[-1], member] if buckets else []
        fits = 2 <= len(joined) <= 4
        if fits and (member.depends_on_model_only or max(m.position for m in joined) < min(m.latest for m in joined)):
            buckets[-1].append(member)
        else:
            buckets.append([member])
    return buckets


def over_peers(
    step: Callable[..., Any],
    transports: Sequence[str],
    kernels: bool = False,
    recorded: bool = False,
    planned: bool = False,
    passes: Sequence[Any] = PASSES,
) -> Any:
    """``weft.compile`` of a step, as CUDA graphs where ``recorded``, or only with its memory ``planned`` as for those;
    its programs are in ``programs``."""

    def compile_graph(graph: StepGraph, *how: Any, **more: Any) -> Program:
        make = compile_recorded if recorded else partial(compile_aten, planned=planned)
        wrapped.programs.append(make(bind(transported(graph, transports, kernels, passes))))
        return wrapped.programs[-1]

    sys.modules["weft.program_form"].compile_graph = compile_graph  # type: ignore[attr-defined]
    wrapped = weft.compile(step)
    wrapped.programs = []
    return wrapped


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def device() -> torch.device:
    """Where this rank trains."""
    return torch.device("cuda", dist.get_rank()) if dist.get_backend() == "nccl" else torch.device("cpu")


def model(width: int = 7, hidden: int = 13, blocks: int = 2) -> nn.Sequential:
    """By default of sizes that no world divides."""
    torch.manual_seed(0)
    inner = [Block(width, hidden) for _ in range(blocks)]
    return nn.Sequential(nn.Embedding(11, width), *inner, nn.Linear(width, 11)).to(device())


def sharded(net: nn.Sequential, bf16: bool = False) -> nn.Module:
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for block in net[1:-1]:
        weft.fully_shard(block, mesh=mesh, mp_policy=policy)
    return weft.fully_shard(net, mesh=mesh, mp_policy=policy)


# Not Adam: it divides by the size of the gradient, and makes a last bit of a tiny one a large step.
PLAIN = partial(torch.optim.SGD, lr=0.1)


def step_of(
    net: nn.Module, clip: float | None = 1.0, make: Callable[..., torch.optim.Optimizer] = PLAIN
) -> Callable[[torch.Tensor], torch.Tensor]:
    optimizer = make(net.parameters())

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(net(ids).flatten(0, 1).float(), ids.roll(1, 1).flatten())
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def train(
    step: Callable[[torch.Tensor], torch.Tensor], net: nn.Module, rank: int, steps: int = 2, length: int = 5
) -> Any:
    """Losses, and what the parameters are in the end on this rank."""
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randint(0, 11, (4, length), generator=generator).to(device()) for _ in range(steps)]
    losses = [step(batch).item() for batch in batches]
    state = {name: getattr(value, "to_local", lambda value=value: value)() for name, value in net.state_dict().items()}
    return losses, detached(state)
