"""``weft.mark_dynamic`` and its relatives: which sizes of a tensor argument stay symbolic in a captured graph.

A mark is an attribute of the tensor object. The capture reads it from the arguments of the call.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.argument_checks import ArgumentChecks
from weft.capture.record.dynamic_sizes import MARKS
from weft.errors import NoSuchDimension
from weft.short_tracebacks import shortens_tracebacks


@shortens_tracebacks
def mark_dynamic(tensor: torch.Tensor, dim: int | list[int] | tuple[int, ...]) -> None:
    """Keep these dimensions of an argument symbolic. It is an error if the step fixes one of them to a number.

    Raises:
        NoSuchDimension: an IndexError; the tensor has no such dimension.
        InvalidArgumentType, InvalidArgument: the first is no tensor, or the second names no dimension.
    """
    _mark("mark_dynamic", tensor, dim, "dynamic")


@shortens_tracebacks
def maybe_mark_dynamic(tensor: torch.Tensor, dim: int | list[int] | tuple[int, ...]) -> None:
    """Like :func:`mark_dynamic`, but a dimension that the step fixes to a number becomes static, with a log line."""
    _mark("maybe_mark_dynamic", tensor, dim, "maybe")


@shortens_tracebacks
def mark_static(tensor: torch.Tensor, dim: int | list[int] | tuple[int, ...] | None = None) -> None:
    """Capture these dimensions (default: all) as numbers, however often they change."""
    every = dim is None and isinstance(tensor, torch.Tensor)
    _mark("mark_static", tensor, range(tensor.dim()) if every else dim, "static")


def _mark(function: str, tensor: torch.Tensor, dims: Any, mark: str) -> None:
    checks = ArgumentChecks(f"weft.{function}")
    checks.kind("tensor", tensor, torch.Tensor, "a tensor", "Pass one that is an argument of the step")
    allowed, remedy = "a dimension's number, or a list of them", "Write 0 for the first dimension"
    if isinstance(dims, bool) or not isinstance(dims, (int, list, tuple, range)):
        raise checks.wrong_type("dim", dims, allowed, remedy)
    listed = (dims,) if isinstance(dims, int) else tuple(dims)
    if not listed and not isinstance(dims, range):
        raise checks.invalid("dim", dims, allowed, remedy)
    for dim in listed:
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise checks.wrong_type("dim", dim, allowed, remedy)
        if not -tensor.dim() <= dim < tensor.dim():
            raise NoSuchDimension(checks.function, dim, tensor.dim())
    for dim in listed:
        tensor.__dict__.setdefault(MARKS, {})[dim % tensor.dim()] = mark
