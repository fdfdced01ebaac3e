"""Run multi-tensor calls by their kernels, in triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.inductor.multi_tensor.operation import MultiTensor
from weft.inductor.runtime.bound_plan import BoundLaunches

Tensor = torch.Tensor


class Symbol(float):
    """Stands for a symbolic number: no constant for the text of a kernel, yet one that ATen takes."""


def interpret(call: MultiTensor, arguments: Sequence[Any]) -> list[Tensor]:
    """Run the kernels of `call` on CPU tensors, in place; returns the results, flat."""
    plan = call.plan(arguments)
    new = call(*arguments)
    fresh = [[_unwritten(t) for t in list_] for list_ in new[: len(new) - len(call.updated)]]
    held = [float(argument) if isinstance(argument, Symbol) else argument for argument in arguments]
    bound = BoundLaunches(plan, torch.device("cpu"))
    bound.bind(held, fresh)
    bound.launch()
    return [tensor for list_ in (*fresh, *(arguments[at] for at in call.updated)) for tensor in list_]


def _unwritten(like: Tensor) -> Tensor:
    """Holds what no kernel writes."""
    return torch.full_like(like, torch.nan if like.is_floating_point() else -1)


def assert_close(ours: Sequence[Tensor], theirs: Sequence[Tensor], ulps: float = 4.0) -> None:
    """Within `ulps` units in the last place; of 0.5 where values are smaller, since sums cancel."""
    for a, b in zip(ours, theirs, strict=True):
        far = (a.double() - b.double()).abs() / b.double().abs().clamp(min=0.5)
        assert not a.isnan().any()
        assert far.numel() == 0 or far.max() <= ulps * torch.finfo(a.dtype).eps, far.max()
