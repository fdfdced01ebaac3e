"""In-place operations that compute in another dtype than that of the tensor they write to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.capture.record.functional_ops import WrittenArguments
from weft.capture.record.operands import argument_of, tensors_in
from weft.torch_adapter import OpOverload

aten = torch.ops.aten


class WidenedWrites:
    """Tells which operations do so, for the dtypes of their operands.

    Args:
        results: computes fake results.
    """

    def __init__(self, results: Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        self._results = results
        self._same_dtype: dict[Any, bool] = {}

    def result(
        self, op: OpOverload, writes: WrittenArguments, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        """The fake result of the functional form where its dtype is not that of the tensor it replaces, else None.

        ``a.add_(b)`` of a bfloat16 ``a`` and a float32 ``b`` computes in float32 and rounds at the end; ``a.eq_(b)``
        makes numbers of the answers.
        """
        first = argument_of(args, kwargs, *writes.writes[0])
        if not isinstance(first, torch.Tensor) or not isinstance(writes.functional, OpOverload):
            return None
        if op is aten.copy_.default:
            return None
        tensors = tensors_in((args, kwargs))
        key = op, *[(t.dtype, t.dim() == 0) for t in tensors]
        if self._same_dtype.get(key):
            return None
        result = self._results(writes.functional, args, kwargs)
        widened = isinstance(result, torch.Tensor) and result.dtype != first.dtype
        self._same_dtype[key] = not widened
        return result if widened else None
