"""Train adapters of a sharded model whose own weights stay as they are; evaluate it, and generate from it.

    torchrun --nproc-per-node 2 examples/lora_fsdp.py --steps 60

The model learns to count upwards modulo 16.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import weft

SYMBOLS = 16


class Adapted(nn.Module):
    """A linear layer that stays as it is, and a product of two thin matrices beside it that is trained."""

    def __init__(self, width: int, out: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, out).requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's result, with the adapters' part."""
        return self.base(x) + self.up(self.down(x))


def counting(count: int, device: torch.device) -> torch.Tensor:
    """Rows that count upwards from a random number: int64 [count, 9]."""
    begins = torch.randint(SYMBOLS, (count, 1), device=device)
    return (begins + torch.arange(9, device=device)) % SYMBOLS


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]),))
    torch.manual_seed(0)  # the same first weights on all ranks
    model = nn.Sequential(nn.Embedding(SYMBOLS, 32), Adapted(32, 64, 8), nn.GELU(), Adapted(64, SYMBOLS, 8)).to(device)
    for layer in (model[1], model[3]):
        weft.fully_shard(layer, mesh=mesh)
    weft.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-2, fused=True)
    torch.manual_seed(1 + dist.get_rank())

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    @weft.compile
    def train_step(ids: torch.Tensor) -> torch.Tensor:
        loss = loss_of(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    @weft.compile
    def evaluate(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return loss_of(ids)

    test = counting(64, device)
    before = evaluate(test).item()
    for _ in range(options.steps):
        train_step(counting(32, device))
    after = evaluate(test).item()

    ids = torch.tensor([[3]], device=device)
    with torch.no_grad():
        for _ in range(6):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)  # all ranks: forward gathers the weights
    if dist.get_rank() == 0:
        print(f"test loss {before:.2f} -> {after:.2f}; counting from 3: {ids[0].tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
