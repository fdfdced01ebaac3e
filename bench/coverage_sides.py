"""On which side of zero the inputs of ReLUs lie, and which pixel each max pool takes: recorded, or given.

A rounding error may change a side, and one side changes all gradients before it. float64 that takes the sides of a run
in float32 has no such jumps: what is left of an error is the implementation's.
"""

from __future__ import annotations

import torch
from torch import nn

Taken = list[torch.Tensor]


class Sides:
    """What the ReLUs and max pools of a model take, in the order of a forward.

    Args:
        given: what they take instead of what their inputs say.
    """

    def __init__(self, given: Taken | None = None) -> None:
        self.taken: Taken = []  # to be emptied before each forward
        self.given = given

    def watch(self, model: nn.Module) -> None:
        """Replace the model's ReLUs and max pools."""
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.ReLU:
                    setattr(parent, name, _ReLU(self))
                elif type(child) is nn.MaxPool2d and not child.return_indices:
                    setattr(parent, name, _MaxPool(self, child))

    def next(self, own: torch.Tensor) -> torch.Tensor:
        """What is given at this place; without that, ``own``."""
        chosen = own if self.given is None else self.given[len(self.taken)]
        self.taken.append(chosen)
        return chosen


class _ReLU(nn.Module):
    def __init__(self, sides: Sides) -> None:
        super().__init__()
        self.sides = sides

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positive = self.sides.next(x.detach() > 0)
        # The operation that the model has, where its own side is taken.
        return torch.relu(x) if self.sides.given is None else x * positive.to(x.dtype)


class _MaxPool(nn.Module):
    def __init__(self, sides: Sides, pool: nn.MaxPool2d) -> None:
        super().__init__()
        self.sides = sides
        self.how = (pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled, at = nn.functional.max_pool2d(x, *self.how, return_indices=True)
        chosen = self.sides.next(at)
        return pooled if self.sides.given is None else x.flatten(2).gather(2, chosen.flatten(2)).view(pooled.shape)
