"""An optimizer that asks for a number of each parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import optim


class NormScaled(optim.Optimizer):
    """The rate of each parameter is relative to its norm, as in Adafactor of transformers, which asks for that too."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["norm"] = p.norm(2) / p.numel() ** 0.5
                p.sub_(p.grad * (max(1e-3, self.state[p]["norm"]) * group["lr"]))
