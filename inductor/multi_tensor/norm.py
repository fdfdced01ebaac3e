"""Norms of a list of tensors: one pass computes a partial sum for each chunk, a small kernel adds the partial sums.

Partial sums are added in a fixed order, so the norm has the same bits at every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.inductor.codegen.triton_text import dtype_name, pointer_type
from weft.inductor.graph.serializable import serializable
from weft.inductor.multi_tensor.chunked_kernel import Column
from weft.inductor.multi_tensor.launch_plan import (
    BLOCK,
    CallArgument,
    CallResult,
    ConstantTable,
    LaunchPlan,
    PointerParameter,
    PointerTable,
    Scratch,
    add_chunked_launch,
    add_launch,
    chunk_ranges,
    group_by_dtypes,
)
from weft.inductor.multi_tensor.operation import MultiTensor

aten = torch.ops.aten

# For each order, the term of an element and the function of the sum.
# Other orders stay with ATen.
_TERMS = {1.0: "tl.abs(value)", 2.0: "value * value"}
_ENDS = {1.0: "{}", 2.0: "tl.sqrt_rn({})"}
ORDERS = tuple(_TERMS)


@serializable
@dataclass(frozen=True)
class Norm(MultiTensor):
    """``norm(tensors)``: one list of one, the 1-d tensor of their norms, of the dtype of the first.

    Attributes:
        order: 1.0 or 2.0.
        together: whether only the norm of all norms is read, and no single one.
    """

    order: float
    # Read by passes only (`passes/shard_norms.py` and the like): the kernels are the same.
    together: bool = False

    def __call__(self, *arguments: Any) -> list[list[torch.Tensor]]:
        return [[torch.stack(aten._foreach_norm.Scalar(arguments[0], self.order))]]

    def plan(self, arguments: Sequence[Any]) -> LaunchPlan:
        """Two launches for each dtype: partial sums by chunk, then one norm for each tensor."""
        plan = LaunchPlan.on_device_of(arguments)
        _add_norms(plan, 0, arguments[0], self.order, arguments[0][0].dtype)
        return plan


@serializable
@dataclass(frozen=True)
class NormOfSquares(MultiTensor):
    """``norm(squares, tensors)``: a 1-d tensor whose 2-norm is that of all ``tensors`` and of further tensors.

    Of the further tensors only sums of squares are known, such as those that reduce-scatter kernels compute: each of
    ``squares`` is a 1-d float32 tensor of sums to be added. The result has the norm of each of ``tensors``, the square
    root of each sum, and zeros.

    Attributes:
        count: elements of the result, at least as many as ``squares`` and ``tensors`` together.
        dtype: of the result.
    """

    count: int
    dtype: torch.dtype

    def __call__(self, *arguments: Any) -> list[list[torch.Tensor]]:
        squares, tensors = arguments
        norms = [torch.linalg.vector_norm(tensor, dtype=self.dtype) for tensor in tensors]
        norms += [sums.sum().sqrt().to(self.dtype) for sums in squares]
        # Zeros change no norm of norms, and keep the size that the graph has recorded for the result.
        return [[torch.nn.functional.pad(torch.stack(norms), (0, self.count - len(norms)))]]

    def plan(self, arguments: Sequence[Any]) -> LaunchPlan:
        """The launches of :class:`Norm`, and one for the square roots of the sums in ``squares``."""
        squares, tensors = arguments
        plan = LaunchPlan.on_device_of(arguments)
        _add_norms(plan, 1, tensors, 2.0, self.dtype)
        # Elements without a tensor get a row of the table too: 0 sums, whose root is 0.
        none = self.count - len(tensors) - len(squares)
        # Their address is never used, but a row must have one: that of the first sum.
        plan.pointers["sums"] = [(CallArgument(0, at),) for at in (*range(len(squares)), *[0] * none)]
        plan.tables["counts"] = torch.tensor([sums.numel() for sums in squares] + [0] * none, dtype=torch.int32)
        lines = [
            # Two words a row: the address and the flag of alignment.
            "partial = tl.load(sums + tl.program_id(0) * 2).to(tl.pointer_type(tl.float32))",
            "count = tl.load(counts + tl.program_id(0))",
            *_added(),
            f"tl.store(norms + {len(tensors)} + tl.program_id(0), {_end(2.0, self.dtype)})",
        ]
        signature = {"sums": "*i64", "counts": "*i32", "norms": pointer_type(self.dtype)}
        places = (PointerTable("sums"), ConstantTable("counts"), CallResult(0, 0))
        add_launch(plan, "norms_of_squares", lines, signature, places, len(squares) + none, {"BLOCK": BLOCK})
        return plan


def _add_norms(plan: LaunchPlan, list_: int, fakes: Sequence[Any], order: float, result: torch.dtype) -> None:
    """Add the launches that write the norms of ``fakes`` (argument ``list_`` of the call) to the first result."""
    for tensors in group_by_dtypes([fakes]):
        sizes = [fakes[at].numel() for at in tensors]
        # One partial sum for each program of the first launch, which is each chunk.
        partials = f"partials{len(plan.launches)}"
        chunk = add_chunked_launch(
            plan,
            "partial_norms",
            [Column("value", fakes[tensors[0]].dtype)],
            [(CallArgument(list_, at),) for at in tensors],
            sizes,
            tensors,
            further=[PointerParameter("partials", "*fp32", Scratch(partials))],
            # A sum for each position of a block: threads exchange values once a chunk, not once a block.
            setup=["total = tl.zeros([BLOCK], tl.float32)"],
            body=[f"total += {_TERMS[order]}"],
            finish=["tl.store(partials + tl.program_id(0), tl.sum(total, 0))"],
        )
        # The partial sums of one tensor are neighbours, as its chunks are.
        ranges = chunk_ranges(sizes, tensors, chunk)
        table = f"ranges{len(plan.launches)}"
        plan.tables[table] = ranges
        # As many as chunks; the launch before this one writes each of them.
        plan.scratch[partials] = (int(ranges[:, 1].sum()), torch.float32)
        lines = [
            "row = ranges + tl.program_id(0) * 4",
            "partial = partials + tl.load(row)",
            "count = tl.load(row + 1)",
            *_added(),
            # The label is the tensor's position in the call, so groups of dtypes write into one result.
            f"tl.store(norms + tl.load(row + 2), {_end(order, result)})",
        ]
        signature = {"ranges": "*i32", "partials": "*fp32", "norms": pointer_type(result)}
        places = (ConstantTable(table), Scratch(partials), CallResult(0, 0))
        add_launch(plan, "norms_of_partials", lines, signature, places, len(tensors), {"BLOCK": BLOCK})


def _added() -> list[str]:
    """Lines that add ``count`` values from ``partial`` on."""
    return [
        "total = tl.zeros([BLOCK], tl.float32)",
        "for first in range(0, count, BLOCK):",
        "    at = first + tl.arange(0, BLOCK)",
        "    total += tl.load(partial + at, mask=at < count, other=0.0)",
    ]


def _end(order: float, result: torch.dtype) -> str:
    # The only rounding to the result's dtype; the sum and its root are float32.
    return f"({_ENDS[order].format('tl.sum(total, 0)')}).to({dtype_name(result)})"
