"""Train a LightningModule with manual optimization and a compiled step, replicated on two devices.

python examples/lightning_ddp.py --steps 40
"""

from __future__ import annotations

import argparse

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft


class Regression(lightning.LightningModule):
    """The optimizer is an attribute: `self.optimizers()` makes a new wrapper at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))

    def configure_model(self) -> None:
        weft.replicate(self.net)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2, fused=True)
        return self.optimizer

    def training_step(self, batch: list[torch.Tensor], index: int) -> None:
        x, y = batch
        loss = self.one_step(x, y)  # type: ignore[bad-argument-type]  # checked without lightning, its base is unknown
        self.log("loss", loss)
        if self.global_rank == 0 and (index + 1) % 8 == 0:
            print(f"step {index + 1}: loss {loss.item():.3f}", flush=True)

    @weft.compile
    def one_step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    lightning.seed_everything(0, verbose=False)
    x = torch.randn(64 * options.steps, 16)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=32)
    trainer = lightning.Trainer(
        max_epochs=1, devices=2, strategy="ddp", logger=False, enable_progress_bar=False, enable_checkpointing=False
    )
    trainer.fit(Regression(), loader)


if __name__ == "__main__":
    main()
