"""Operations that write to lists of tensors, and whether the order of their elements matters.

Eager works through the elements of ``torch._foreach_add_`` and its like one by one. The functional form reads all
operands before it writes any. Both agree unless an element reads or writes what was written for an earlier one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.capture.record.tracked_storages import TrackedStorages
from weft.capture.strided_overlap import any_overlap, overlap
from weft.capture.user_code import user_line
from weft.errors import UncapturableMutation
from weft.torch_adapter import OpOverload


def check_independent(
    op: OpOverload, targets: Any, operands: list[Any], storages: TrackedStorages, fake: Callable[[Any], Any]
) -> None:
    """Refuse an operation over lists whose result depends on the order of the elements.

    Args:
        targets: the list that is written.
        operands: all arguments of the operation.
        storages: says which tensors share memory.
        fake: the fake tensor of a tensor.

    Raises:
        UncapturableMutation: the operation reads or writes again what it wrote for an earlier element.
    """
    wrote: dict[int, list[tuple[int, torch.Tensor]]] = {}
    for at, tensor in enumerate(targets):
        wrote.setdefault(id(storages.of(tensor).storage), []).append((at, fake(tensor)))
    clash = any(any_overlap([tensor for _, tensor in each]) for each in wrote.values())
    for operand in operands:
        if operand is targets:
            continue
        listed = isinstance(operand, (list, tuple))
        for at, tensor in enumerate(operand if listed else [operand]):
            if isinstance(tensor, torch.Tensor):
                there = wrote.get(id(storages.of(tensor).storage), ())
                clash |= any(overlap(each, fake(tensor)) for earlier, each in there if earlier < at or not listed)
    if clash:
        what = f"{op} at {user_line()}: its lists hold tensors that share memory; call it once for each of them"
        raise UncapturableMutation(what)
