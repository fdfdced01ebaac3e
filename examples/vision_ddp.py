"""Train an image classifier on every rank, replicated: DDP with one compiled step.

    torchrun --nproc-per-node 2 examples/vision_ddp.py --steps 50

Images are drawn at random with a bright square whose place is the label, so that nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

import weft


def images(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise with a bright quarter: float32 [count, 3, 16, 16], and which quarter it is: int64 [count]."""
    labels = torch.randint(4, (count,), device=device)
    pictures = torch.randn(count, 3, 16, 16, device=device)
    for quarter in range(4):
        row, column = 8 * (quarter // 2), 8 * (quarter % 2)
        pictures[labels == quarter, :, row : row + 8, column : column + 8] += 1.0
    return pictures, labels


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group()
    torch.manual_seed(dist.get_rank())  # other images on each rank; replicate gives all ranks the same weights
    layers = [nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    model = weft.replicate(nn.Sequential(*layers, nn.Linear(64, 4)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    @weft.compile
    def train_step(pictures: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = model(pictures)
        loss = nn.functional.cross_entropy(scores, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), (scores.argmax(1) == labels).float().mean()

    for number in range(options.steps):
        loss, right = train_step(*images(64, device))
        if dist.get_rank() == 0 and (number + 1) % max(1, options.steps // 5) == 0:
            print(f"step {number + 1}: loss {loss.item():.3f}, {right.item():.0%} right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
