"""The checks in a graph of what a capture assumed about numbers that only the data decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.record.caught_errors import is_caught
from weft.capture.record.real_operations import operations_for_real
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


_HOST_ASSERTS = (torch.ops.aten._assert_async.default, torch.ops.aten._assert_async.msg)
_LINALG = torch.ops.aten._linalg_check_errors.default
CHECKS = (*_HOST_ASSERTS, _LINALG)
"""Operations that raise an exception for some values of their first argument."""


def check_in_python(op: Any, operand: torch.Tensor) -> Callable[..., None] | None:
    """What one of ``CHECKS`` does, as Python with branches; None where the operation itself is recorded.

    Assertions raise at once where the tensor is on the host. Functions of ``torch.linalg`` raise where a matrix is
    singular, and a step that catches this goes on in another way.
    """
    if op is _LINALG:
        return _raise_linalg_error if is_caught([torch.linalg.LinAlgError]) else None
    return _assert_on_host if operand.device.type == "cpu" else None


_FAILED = "Expected Tensor with single nonzero value, but got zero"


def _assert_on_host(condition: torch.Tensor, message: str = _FAILED) -> None:
    try:
        torch_adapter.assert_tensor(condition, message)
    except AssertionError:
        raise RuntimeError(message) from None


def _raise_linalg_error(info: torch.Tensor, function: str, *, is_matrix: bool) -> None:
    """Where torch says by ``info`` that matrices are singular, the first of them and its number are in the message."""
    if not bool((info != 0).any()):
        return
    numbers = info.reshape(-1)
    at = int((numbers != 0).int().argmax())
    number = int(numbers[at])
    with operations_for_real(lambda: None, ()):
        found = torch.zeros((at + 1,), dtype=torch.int32)
        found[at] = number
        _LINALG(found[at] if is_matrix else found, function, is_matrix=is_matrix)
