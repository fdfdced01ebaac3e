"""Numbers that operations return: ``-> bool``, ``-> int``, ``(Tensor, int)``.

An operation may read its tensors to make such a number. What its fake implementation returns in the place of it is
then of no call. So each number is a symbol that the node of the operation computes. Torch's own operations return
numbers that follow from layouts, but for those that it marks as dependent on data: ``torch.equal``, ``torch.allclose``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.node_kinds import COLLECTIVE_NAMESPACES
from weft.capture.user_code import user_line
from weft.errors import CannotCapture
from weft.torch_adapter import OpOverload

_OF_TORCH = {"aten", "prim", "prims", "profiler", "quantized", "c10d", "weft", *COLLECTIVE_NAMESPACES}
_TENSORS = ("Tensor", "Optional[Tensor]", "List[Tensor]")
# By types of results in schemas. Torch asks for the value of a float before Python gets it.
_DTYPES = {"bool": torch.bool, "int": torch.int64, "SymInt": torch.int64, "number": None}
_REMEDY = "Return a tensor of one element, and call .item() on it in the step"


def number_results(op: OpOverload) -> bool:
    """Whether an operation returns other things than tensors, which may depend on the numbers in tensors. Of torch's,
    ``item`` is recorded otherwise."""
    if op.namespace in _OF_TORCH:
        return torch.Tag.data_dependent_output in op.tags and op._schema.returns[0].type.kind() == "BoolType"
    return any(str(each.type) not in _TENSORS for each in op._schema.returns)


def with_symbols(op: OpOverload, compute: Callable[[], Any], shape_env: Any) -> Any:
    """What ``compute()``, the fake implementation of ``op``, returns, with a symbol for each plain number.

    It is not asked where all results are numbers of a known type: then there need not be one.

    Raises:
        CannotCapture: a result is a float, a list of numbers or the like.
    """
    kinds = [str(each.type) for each in op._schema.returns]
    for kind in kinds:
        if kind not in (*_TENSORS, *_DTYPES):
            reason = f"the operation {op} returns a {kind}, which may depend on the numbers in its tensors"
            raise CannotCapture(user_line(), reason, _REMEDY)
    plain = all(kind in ("bool", "int") for kind in kinds)
    out: Any = (False,) * len(kinds) if plain else compute() if len(kinds) > 1 else (compute(),)
    parts = [_symbol(shape_env, kind, part) if kind in _DTYPES else part for kind, part in zip(kinds, out, strict=True)]
    return tuple(parts) if len(kinds) > 1 else parts[0]


def _symbol(shape_env: Any, kind: str, value: Any) -> Any:
    """A symbol in the place of a plain number; what is symbolic already follows from sizes, or is of no call."""
    if not isinstance(value, (bool, int, float)):
        return value
    dtype = _DTYPES[kind] or {bool: torch.bool, int: torch.int64, float: torch.float64}[type(value)]
    return torch_adapter.fresh_number(shape_env, dtype)
