"""Train with accelerate's launcher, data and gathering, and a compiled step.

accelerate launch --num_processes 2 examples/accelerate_ddp.py --steps 40
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    x = torch.randn(64 * options.steps, 16)
    loader = accelerator.prepare(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=32))
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
    model = weft.replicate(model.to(accelerator.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    @weft.compile
    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for number, batch in enumerate(loader, 1):
        loss = train_step(*batch)
        if number % max(1, options.steps // 5) == 0:
            mean = accelerator.gather(loss[None]).mean()
            accelerator.print(f"step {number}: loss {mean.item():.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
