"""Norms of a list of tensors: sums by chunk in one pass, then a small kernel that adds them, always in one order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.inductor.multi_tensor.operation import MultiTensor
from weft.inductor.multi_tensor.plan import (
    BLOCK,
    Argument,
    Further,
    Given,
    Made,
    Plan,
    Pointers,
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
        together: whether nobody reads one of the norms for itself, but only the norm of them all.
    """

    order: float
    together: bool = False

    def __call__(self, *arguments: Any) -> list[list[torch.Tensor]]:
        return [[torch.stack(aten._foreach_norm.Scalar(arguments[0], self.order))]]

    def plan(self, arguments: Sequence[Any], number_type: str = "fp32") -> Plan:
        plan = Plan()
        _add_norms(plan, 0, arguments[0], self.order, arguments[0][0].dtype)
        return plan


@dataclass(frozen=True)
class NormOfSquares(MultiTensor):
    """``norm(squares, tensors)``: a 1-d tensor whose 2-norm is that of all ``tensors``, and of more of which somebody
    has the sums of the squares: in ``squares``, each a 1-d float32 tensor of sums to be added.

    Attributes:
        count: elements of the result, no fewer than there are ``squares`` and ``tensors``.
        dtype: of the result.
    """

    count: int
    dtype: torch.dtype

    def __call__(self, *arguments: Any) -> list[list[torch.Tensor]]:
        squares, tensors = arguments
        norms = [torch.linalg.vector_norm(tensor, dtype=self.dtype) for tensor in tensors]
        norms += [sums.sum().sqrt().to(self.dtype) for sums in squares]
        return [[torch.nn.functional.pad(torch.stack(norms), (0, self.count - len(norms)))]]

    def plan(self, arguments: Sequence[Any], number_type: str = "fp32") -> Plan:
        squares, tensors = arguments
        plan = Plan()
        _add_norms(plan, 1, tensors, 2.0, self.dtype)
        none = self.count - len(tensors) - len(squares)
        plan.pointers["sums"] = [(Given(0, at),) for at in (*range(len(squares)), *[0] * none)]
        plan.tables["counts"] = torch.tensor([sums.numel() for sums in squares] + [0] * none, dtype=torch.int32)
        lines = [
            "partial = tl.load(sums + tl.program_id(0) * 2).to(tl.pointer_type(tl.float32))",
            "count = tl.load(counts + tl.program_id(0))",
            *_added(),
            f"tl.store(norms + {len(tensors)} + tl.program_id(0), {_end(2.0, self.dtype)})",
        ]
        signature = {"sums": "*i64", "counts": "*i32", "norms": POINTERS[self.dtype]}
        places = (Pointers("sums"), Table("counts"), Made(0, 0))
        _add_small(plan, "norms_of_squares", signature, places, lines, len(squares) + none)
        return plan


def _add_norms(plan: Plan, list_: int, fakes: Sequence[Any], order: float, result: torch.dtype) -> None:
    """Add launches that write the norms of ``fakes``, which are argument ``list_``, to the first of the results."""
    for tensors in by_dtypes([fakes]):
        sizes = [fakes[at].numel() for at in tensors]
        partials = f"partials{len(plan.launches)}"
        chunk = add_walk(
            plan,
            "partial_norms",
            [Column("value", fakes[tensors[0]].dtype)],
            [(Given(list_, at),) for at in tensors],
            sizes,
            tensors,
            further=[Further("partials", "*fp32", Scratch(partials))],
            setup=["total = tl.zeros([BLOCK], tl.float32)"],
            body=[f"total += {_TERMS[order]}"],
            finish=["tl.store(partials + tl.program_id(0), tl.sum(total, 0))"],
        )
        ranges = chunk_ranges(sizes, tensors, chunk)
        table = f"ranges{len(plan.launches)}"
        plan.tables[table] = ranges
        plan.scratch[partials] = (int(ranges[:, 1].sum()), torch.float32)
        lines = [
            "row = ranges + tl.program_id(0) * 4",
            "partial = partials + tl.load(row)",
            "count = tl.load(row + 1)",
            *_added(),
            f"tl.store(norms + tl.load(row + 2), {_end(order, result)})",
        ]
        signature = {"ranges": "*i32", "partials": "*fp32", "norms": POINTERS[result]}
        places = (Table(table), Scratch(partials), Made(0, 0))
        _add_small(plan, "norms_of_partials", signature, places, lines, len(tensors))


def _added() -> list[str]:
    """Lines that add ``count`` values from ``partial`` on."""
    return [
        "total = tl.zeros([BLOCK], tl.float32)",
        "for first in range(0, count, BLOCK):",
        "    at = first + tl.arange(0, BLOCK)",
        "    total += tl.load(partial + at, mask=at < count, other=0.0)",
    ]


def _end(order: float, result: torch.dtype) -> str:
    return f"({_ENDS[order].format('tl.sum(total, 0)')}).to({TRITON_DTYPES[result]})"


def _add_small(
    plan: Plan, name: str, signature: dict[str, str], places: tuple[Argument, ...], lines: list[str], grid: int
) -> None:
    text = function(name, [*signature, "BLOCK: tl.constexpr"], lines)
    add_launch(plan, name, text, signature, places, grid, {"BLOCK": BLOCK})
