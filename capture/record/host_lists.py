"""What a step gets for a list of numbers that is one leaf of the arguments.

The step can make a tensor of the list, and ask for its length. All else needs the numbers one by one: it ends the
attempt, and the list is a structure again, with a form for each length.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.capture.record.unread_arguments import UnreadValue, ValuesOfArguments
from weft.capture.state.containers import StatePlace


class HostList(UnreadValue):
    """What the step gets for such a list; ``tensor`` is the input with the numbers."""

    def __init__(self, place: StatePlace, found: ValuesOfArguments, mode: Any, tensor: torch.Tensor) -> None:
        super().__init__(place, list, found, mode)
        vars(self).update(weft_tensor=tensor)


def tensor_of_list(numbers: HostList, options: dict[str, Any]) -> torch.Tensor:
    """``torch.tensor(numbers, **options)``."""
    options = dict(options)
    found, requires_grad = numbers.weft_tensor, options.pop("requires_grad", False)
    default = torch.int64 if found.dtype is torch.int64 else torch.get_default_dtype()
    dtype = options.pop("dtype", None) or default
    device = options.pop("device", None) or torch.get_default_device()
    if dtype.is_floating_point:
        found = found.to(torch.float64)  # as Python's integers become floats
    made = found.to(dtype=dtype, device=device, copy=True)
    return made.requires_grad_() if requires_grad else made
