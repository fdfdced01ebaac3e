"""Casts of many tensors to one dtype, in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.inductor.graph.serializable import serializable
from weft.inductor.multi_tensor.chunked_kernel import Column
from weft.inductor.multi_tensor.launch_plan import (
    CallArgument,
    CallResult,
    LaunchPlan,
    add_chunked_launch,
    group_by_dtypes,
)
from weft.inductor.multi_tensor.operation import MultiTensor


@serializable
@dataclass(frozen=True)
class Cast(MultiTensor):
    """``cast(tensors)``: one list, each of them in ``dtype`` (float32, bfloat16 or float16), in memory of its own."""

    dtype: torch.dtype

    def __call__(self, *arguments: Any) -> list[list[torch.Tensor]]:
        # `copy`: without it a tensor that has the dtype would be returned itself, and an update of it would change
        # the result.
        return [[tensor.to(self.dtype, copy=True) for tensor in arguments[0]]]

    def plan(self, arguments: Sequence[Any]) -> LaunchPlan:
        """One launch for each dtype among the tensors."""
        (fakes,) = arguments
        plan = LaunchPlan.on_device_of(arguments)
        # The dtype of a column is part of the kernel's text.
        for tensors in group_by_dtypes(arguments):
            add_chunked_launch(
                plan,
                "cast",
                # Through float32 registers, which hold every value of these dtypes: one rounding, by the store.
                [Column("value", fakes[tensors[0]].dtype), Column("result", self.dtype, False, "value")],
                [(CallArgument(0, at), CallResult(0, at)) for at in tensors],
                [fakes[at].numel() for at in tensors],
                tensors,
            )
        return plan
