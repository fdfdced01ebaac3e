"""Cases of ``model_coverage.py``: the two smallest models by name of each family of timm, at their smallest input."""

from __future__ import annotations

import functools
from typing import Any

import timm  # type: ignore[missing-import] - of the machine that measures
import torch
import torch.nn.functional as F
from coverage_case import CALLS, Case, Trained

CLASSES, LARGEST = 4, 30e6


def timm_cases() -> dict[str, Case]:
    """Two cases for each module of timm that defines models, one where it defines one."""
    found: dict[str, Case] = {}
    for family in timm.list_modules():
        names = sorted(timm.list_models(module=family), key=lambda name: (_size_rank(name), len(name), name))
        for name in names[:2]:
            found[f"{family}/{name}"] = functools.partial(_case, name)
    return found


def _size_rank(name: str) -> int:
    """Names of small models first: timm writes sizes as words."""
    words = ("pico", "atto", "femto", "nano", "tiny", "xxs", "_xs", "small", "_s", "b0", "18", "mini")
    return next((at for at, word in enumerate(words) if word in name), len(words))


def _case(name: str) -> Trained:
    model = _small(name).train()
    if sum(each.numel() for each in model.parameters()) > LARGEST:
        raise ValueError("too large for a case")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(0)
    size = model.default_cfg.get("tested_size", model.default_cfg["input_size"])
    batches = [
        (torch.randn(2, *size, generator=draw), torch.randint(0, CLASSES, (2,), generator=draw)) for _ in range(CALLS)
    ]

    def loss_of(batch: Any) -> torch.Tensor:
        out = model(batch[0])
        out = out[0] if isinstance(out, tuple) else out
        return F.cross_entropy(out, batch[1])

    def step(batch: Any) -> torch.Tensor:
        loss = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Trained(step, batches, lambda: dict(model.state_dict()), model, loss_of)


def _small(name: str) -> Any:
    """The model for images of 64 x 64 where its family takes a size, else as it is."""
    try:
        model = timm.create_model(name, num_classes=CLASSES, img_size=64, drop_rate=0.1)
        model.default_cfg = {**model.default_cfg, "tested_size": (3, 64, 64)}
    except (TypeError, AssertionError, ValueError, RuntimeError):
        model = timm.create_model(name, num_classes=CLASSES)
        channels, height, width = model.default_cfg["input_size"]
        if not model.default_cfg.get("fixed_input_size", False):
            model.default_cfg = {**model.default_cfg, "tested_size": (channels, min(height, 96), min(width, 96))}
    return model
