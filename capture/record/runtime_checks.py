"""The checks in a graph of what a capture assumed about numbers that only the data decides."""

from __future__ import annotations

import torch

from weft import torch_adapter
from weft.errors import RuntimeCheckFailed


def check(holds: bool, condition: str, names: str, *values: int) -> None:
    """Target of a node that checks what the graph assumes about numbers that only the data decides.

    Args:
        holds: whether the assumption is true in this call.
        condition: the assumption as text.
        names, values: the numbers in it; the names are separated by line feeds.

    Raises:
        RuntimeCheckFailed: it does not hold; names the condition and the numbers.
    """
    if not holds:
        found = ", ".join(f"{name} = {value}" for name, value in zip(names.split("\n"), values, strict=True))
        raise RuntimeCheckFailed(condition, found)


HOST_ASSERTS = (torch.ops.aten._assert_async.default, torch.ops.aten._assert_async.msg)
"""Assertions on tensors, which raise at once where the tensor is on the host."""


_FAILED = "Expected Tensor with single nonzero value, but got zero"


def assert_on_host(condition: torch.Tensor, message: str = _FAILED) -> None:
    """What a kernel of ``HOST_ASSERTS`` does, as Python: a branch of the step.

    Raises:
        RuntimeError: the tensor is zero.
    """
    try:
        torch_adapter.assert_tensor(condition, message)
    except AssertionError:
        raise RuntimeError(message) from None
