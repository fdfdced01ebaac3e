"""What tensor parallelism costs the host in an eager step: torch's styles and weft's, on one core, without a network.

    python bench/tensor_parallel_host.py --layers 32 --ranks 2

The model is a small decoder on the CPU, so that the time is that of Python and of dispatch, as it is for a host that
feeds a GPU. Collectives are those of torch's fake process group, which does nothing. A step is forward and backward.
``plain`` is the model of one rank's sizes without any style: what neither can save. Prints the median over ``--steps``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from types import ModuleType

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as torch_tp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import weft

WIDTH, HEADS, HIDDEN, LENGTH = 64, 8, 128, 16


class Attention(nn.Module):
    def __init__(self, share: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH // share, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH // share, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, length, WIDTH]."""
        heads = (*x.shape[:2], -1, WIDTH // HEADS)
        query, key, value = (layer(x).view(heads).transpose(1, 2) for layer in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, share: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN // share, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN // share, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, length, WIDTH]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, share: int) -> None:
        super().__init__()
        self.attention_norm, self.feed_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.feed = Attention(share), FeedForward(share)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, length, WIDTH]."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed(self.feed_norm(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.ranks)
    mesh = init_device_mesh("cpu", (options.ranks,), mesh_dim_names=("tp",))
    for sequence in (False, True):
        length = LENGTH // options.ranks if sequence else LENGTH
        models = {
            name: parallel(by, mesh, options.layers, sequence) for name, by in (("torch", torch_tp), ("weft", weft))
        }
        models["plain"] = nn.Sequential(*(Block(options.ranks) for _ in range(options.layers)))
        times = milliseconds(models, length, options.steps)
        print(
            f"{'sequence parallel' if sequence else 'tensor parallel':18} torch {times['torch']:7.2f} ms  "
            f"weft {times['weft']:7.2f} ms  {times['weft'] / times['torch']:.3f} of torch's  "
            f"plain {times['plain']:7.2f} ms",
            flush=True,
        )


def parallel(by: ModuleType, mesh: DeviceMesh, layers: int, sequence: bool) -> nn.Module:
    """The model with the styles of ``by``; with ``sequence`` each rank has its part of the activations' rows."""
    model = nn.Sequential(*(Block(1) for _ in range(layers)))
    shared = {"output_layouts": Shard(1)} if sequence else {}
    plan = {
        **{f"attention.{name}": by.ColwiseParallel() for name in ("query", "key", "value")},
        "attention.out": by.RowwiseParallel(**shared),
        **{f"feed.{name}": by.ColwiseParallel() for name in ("gate", "up")},
        "feed.down": by.RowwiseParallel(**shared),
    }
    if sequence:
        gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        plan |= {name: by.SequenceParallel() for name in ("attention_norm", "feed_norm")}
        plan |= {name: by.PrepareModuleInput(**gathered) for name in ("attention", "feed")}
    for block in model:
        by.parallelize_module(block, mesh, plan)
    return model


def milliseconds(models: dict[str, nn.Module], length: int, steps: int) -> dict[str, float]:
    """The median processor time of forward and backward, of steps that alternate between the models."""
    x = torch.randn(1, length, WIDTH)
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(steps + 3):
        for name, model in models.items():
            began = time.process_time()
            model(x).square().mean().backward()
            times[name].append((time.process_time() - began) * 1e3)
            model.zero_grad()
    return {name: statistics.median(each[3:]) for name, each in times.items()}


if __name__ == "__main__":
    main()
