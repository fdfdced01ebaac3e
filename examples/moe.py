"""Train a mixture of experts, sharded over all ranks: each token goes to one expert, so sizes depend on the data.

    torchrun --nproc-per-node 2 examples/moe.py --steps 60

Tokens count upwards in steps of one to four; each expert can learn one step.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import weft

SYMBOLS, EXPERTS = 31, 4


class Experts(nn.Module):
    """A gate chooses one expert for each token; its weight multiplies what the expert gives."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(EXPERTS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weight, choice = self.gate(tokens).softmax(-1).max(-1)
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(choice == number)  # as many as the data says
            result = result.index_add(0, rows, expert(tokens[rows]) * weight[rows, None])
        return x + result.view_as(x)


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(SYMBOLS, width), nn.Embedding(SYMBOLS, width)
        self.experts = Experts(width)
        self.head = nn.Linear(width, SYMBOLS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Scores of the third symbol on, from the two before: float32 [batch, length - 1, SYMBOLS]."""
        return self.head(self.experts(self.first(ids[:, :-1]) + self.second(ids[:, 1:])))


def counting(rows: int, device: torch.device) -> torch.Tensor:
    """Rows that count upwards from anywhere by one to four: int64 [rows, 12]."""
    start, step = torch.randint(SYMBOLS, (rows, 1), device=device), torch.randint(1, 5, (rows, 1), device=device)
    return (start + step * torch.arange(12, device=device)) % SYMBOLS


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
    model = Model(48).to(device)
    weft.fully_shard(model.experts, mesh=mesh)
    weft.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    torch.manual_seed(1 + dist.get_rank())

    @weft.compile
    def train_step(ids: torch.Tensor) -> torch.Tensor:
        scores = model(ids[:, :-1])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), ids[:, 2:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for number in range(options.steps):
        loss = train_step(counting(64, device))
        if dist.get_rank() == 0 and (number + 1) % max(1, options.steps // 5) == 0:
            print(f"step {number + 1}: loss {loss.item():.3f}, captured {len(train_step.captures)} times")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
