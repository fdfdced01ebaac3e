"""What the sums of rows by index have in common: the gradient of an embedding, and of a table of position biases."""

from __future__ import annotations

from dataclasses import dataclass

from weft.inductor.multi_tensor.operation import MultiTensor


# Two implementations, chosen by `passes/sum_segments.py`: one-hot products for narrow rows, segments for all others.
@dataclass(frozen=True)
class IndexSum(MultiTensor):
    """A table (size, columns). Row ``k`` is ``base[k]``, or zero, plus ``scale`` times the sum of ``rows[i]`` over all
    ``i`` with ``index[i] == k``. Indices outside the table are ignored; ATen's kernels stop with an assertion there.

    Attributes:
        size: rows of the table.
        skipped: a row of the table that gets no sum (``padding_idx``), -1 for none.
        scale: what sums are multiplied by.
        wraps: whether a negative index counts from the end of the table.
    """

    size: int
    skipped: int = -1
    scale: float = 1.0
    wraps: bool = False
