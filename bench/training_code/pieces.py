"""How a piece of training code is registered, and the small models and batches that most pieces share."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from coverage_case import CALLS, Case, Trained
from torch import nn

PIECES: dict[str, Case] = {}


def piece(*variants: Any) -> Callable[[Callable[..., Trained]], Callable[..., Trained]]:
    """Register a function that makes a step; with ``variants``, once for each of them, as its argument."""

    def register(make: Callable[..., Trained]) -> Callable[..., Trained]:
        name = f"{make.__module__.rpartition('.')[2]}/{make.__name__}"
        if not variants:
            PIECES[name] = make
        for variant in variants:
            label = getattr(variant, "__name__", None) or (variant[0] if isinstance(variant, tuple) else variant)
            PIECES[f"{name}[{label}]"] = functools.partial(make, variant)
        return make

    return register


def mlp(*sizes: int, dropout: float = 0.0) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes[:-1]):
        layers += [nn.Linear(before, after), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))


def convnet(classes: int = 4) -> nn.Sequential:
    """Two convolutions with batch norm, for images of 3 x 16 x 16."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes)),
    )


def adamw(*modules: nn.Module, **options: Any) -> torch.optim.AdamW:
    """AdamW over all parameters of the modules."""
    return torch.optim.AdamW([each for module in modules for each in module.parameters()], **{"lr": 1e-2, **options})


def features(rows: int = 8, size: int = 8, calls: int = CALLS) -> list[Any]:
    """Batches of (features, targets in 0 to 3)."""
    draw = torch.Generator().manual_seed(2)
    return [
        (torch.randn(rows, size, generator=draw), torch.randint(0, 4, (rows,), generator=draw)) for _ in range(calls)
    ]


def images(rows: int = 4, calls: int = CALLS) -> list[Any]:
    """Batches of (images of 3 x 16 x 16, classes in 0 to 3)."""
    draw = torch.Generator().manual_seed(3)
    return [
        (torch.randn(rows, 3, 16, 16, generator=draw), torch.randint(0, 4, (rows,), generator=draw))
        for _ in range(calls)
    ]


def tokens(rows: int = 4, length: int = 12, vocabulary: int = 32, calls: int = CALLS) -> list[Any]:
    """Batches of token ids."""
    draw = torch.Generator().manual_seed(4)
    return [torch.randint(1, vocabulary, (rows, length), generator=draw) for _ in range(calls)]


def trained(
    step: Callable[..., Any], batches: list[Any], *holders: Any, also: Callable[[], Any] = lambda: None
) -> Trained:
    """A piece whose state is that of modules and optimizers, and what ``also`` returns."""

    def state() -> Any:
        return [_state(each) for each in holders], also()

    return Trained(step, batches, state)


def _state(holder: Any) -> Any:
    if isinstance(holder, torch.optim.Optimizer):
        return holder.state_dict()
    if isinstance(holder, nn.Module):
        return dict(holder.state_dict())
    if isinstance(holder, Iterable):
        return list(holder)
    return holder.state_dict() if hasattr(holder, "state_dict") else dict(vars(holder))
