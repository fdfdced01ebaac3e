"""The activation pattern of a model: which inputs of its ReLUs are positive, and which element each max pool selects.

A rounding error may change one sign, which changes all gradients before it. Where a float64 run replays the pattern of
a float32 run, what is left of the error is that of the implementation.
"""

from __future__ import annotations

import torch
from torch import nn

Pattern = list[torch.Tensor]


class ActivationPattern:
    """Records the pattern of each forward, or replays one.

    Args:
        replayed: the pattern to use instead of the model's own.
    """

    def __init__(self, replayed: Pattern | None = None) -> None:
        self.recorded: Pattern = []  # to be emptied before each forward
        self.replayed = replayed

    def attach(self, model: nn.Module) -> None:
        """Replace the model's ReLUs and max pools."""
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.ReLU:
                    setattr(parent, name, _ReLU(self))
                elif type(child) is nn.MaxPool2d and not child.return_indices:
                    setattr(parent, name, _MaxPool(self, child))

    def next(self, own: torch.Tensor) -> torch.Tensor:
        """The replayed entry of the next ReLU or max pool; without a replayed pattern, ``own``."""
        chosen = own if self.replayed is None else self.replayed[len(self.recorded)]
        self.recorded.append(chosen)
        return chosen


class _ReLU(nn.Module):
    def __init__(self, pattern: ActivationPattern) -> None:
        super().__init__()
        self.pattern = pattern

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positive = self.pattern.next(x.detach() > 0)
        # While recording, the operation of the original module.
        return torch.relu(x) if self.pattern.replayed is None else x * positive.to(x.dtype)


class _MaxPool(nn.Module):
    def __init__(self, pattern: ActivationPattern, pool: nn.MaxPool2d) -> None:
        super().__init__()
        self.pattern = pattern
        self.arguments = (pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled, indices = nn.functional.max_pool2d(x, *self.arguments, return_indices=True)
        chosen = self.pattern.next(indices)
        return pooled if self.pattern.replayed is None else x.flatten(2).gather(2, chosen.flatten(2)).view(pooled.shape)
