"""Norms of a list of tensors: sums by chunk in one pass, then a small kernel that adds them, always in one order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.inductor.multi_tensor.operation import MultiTensor
from weft.inductor.multi_tensor.plan import (
    BLOCK,
    Further,
    Given,
    Made,
    Plan,
    Scratch,
    Table,
    add_launch,
    add_walk,
    by_dtypes,
    chunk_ranges,
)
from weft.inductor.multi_tensor.text import POINTERS, TRITON_DTYPES, Column, function

aten = torch.ops.aten

# What is summed, and what becomes of the sum.
_TERMS = {1.0: "tl.abs(value)", 2.0: "value * value"}
_ENDS = {1.0: "{}", 2.0: "tl.sqrt_rn({})"}
ORDERS = tuple(_TERMS)


@dataclass(frozen=True)
class Norm(MultiTensor):
    """``norm(tensors)``: one list of one, the 1-d tensor of their norms, of the dtype of the first.

    Attributes:
        order: 1.0 or 2.0.
    """

    order: float

    def __call__(self, *arguments: Any) -> list[list[torch.Tensor]]:
        return [[torch.stack(aten._foreach_norm.Scalar(arguments[0], self.order))]]

    def plan(self, arguments: Sequence[Any], number_type: str = "fp32") -> Plan:
        plan = Plan()
        for tensors in by_dtypes(arguments):
            self._add(plan, tensors, arguments[0], arguments[0][0].dtype)
        return plan

    def _add(self, plan: Plan, tensors: list[int], fakes: Sequence[Any], result: torch.dtype) -> None:
        sizes = [fakes[at].numel() for at in tensors]
        partials = f"partials{len(plan.launches)}"
        chunk = add_walk(
            plan,
            "partial_norms",
            [Column("value", fakes[tensors[0]].dtype)],
            [(Given(0, at),) for at in tensors],
            sizes,
            tensors,
            further=[Further("partials", "*fp32", Scratch(partials))],
            setup=["total = tl.zeros([BLOCK], tl.float32)"],
            body=[f"total += {_TERMS[self.order]}"],
            finish=["tl.store(partials + tl.program_id(0), tl.sum(total, 0))"],
        )
        ranges = chunk_ranges(sizes, tensors, chunk)
        table = f"ranges{len(plan.launches)}"
        plan.tables[table] = ranges
        plan.scratch[partials] = (int(ranges[:, 1].sum()), torch.float32)
        total = _ENDS[self.order].format("tl.sum(total, 0)")
        lines = [
            "row = ranges + tl.program_id(0) * 4",
            "partial = partials + tl.load(row)",
            "count = tl.load(row + 1)",
            "total = tl.zeros([BLOCK], tl.float32)",
            "for first in range(0, count, BLOCK):",
            "    at = first + tl.arange(0, BLOCK)",
            "    total += tl.load(partial + at, mask=at < count, other=0.0)",
            f"tl.store(norms + tl.load(row + 2), ({total}).to({TRITON_DTYPES[result]}))",
        ]
        signature = {"ranges": "*i32", "partials": "*fp32", "norms": POINTERS[result]}
        text = function("norms_of_partials", [*signature, "BLOCK: tl.constexpr"], lines)
        places = (Table(table), Scratch(partials), Made(0, 0))
        add_launch(plan, "norms_of_partials", text, signature, places, len(tensors), {"BLOCK": BLOCK})
