"""Casts of many tensors to one dtype, in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.inductor.multi_tensor.operation import MultiTensor
from weft.inductor.multi_tensor.plan import Given, Made, Plan, add_walk, by_dtypes
from weft.inductor.multi_tensor.text import Column


@dataclass(frozen=True)
class Cast(MultiTensor):
    """``cast(tensors)``: one list, each of them in ``dtype`` (float32, bfloat16 or float16), in memory of its own."""

    dtype: torch.dtype

    def __call__(self, *arguments: Any) -> list[list[torch.Tensor]]:
        return [[tensor.to(self.dtype, copy=True) for tensor in arguments[0]]]

    def plan(self, arguments: Sequence[Any], number_type: str = "fp32") -> Plan:
        (fakes,) = arguments
        plan = Plan()
        for tensors in by_dtypes(arguments):
            add_walk(
                plan,
                "cast",
                [Column("value", fakes[tensors[0]].dtype), Column("result", self.dtype, False, "value")],
                [(Given(0, at), Made(0, at)) for at in tensors],
                [fakes[at].numel() for at in tensors],
                tensors,
            )
        return plan
