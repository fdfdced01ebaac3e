"""Tensors that a step makes from Python numbers: ``torch.tensor([1.0, 2.0])``.

Such a literal is a real tensor, because torch makes it below all modes. One number becomes an operation of the graph
that makes it, so that the compiler knows its value. Other literals become inputs of the graph, read anew by each call.
What the step writes to it belongs to one call: ``total = torch.tensor(0.0); total += loss`` must start from zero each
time. So the tensor that the step works with is tracked in a storage of its own, whose first value is the input or the
operation, and a write to it is not an update of the input. A literal that leaves the step is copied, as every value is
that is in the memory of another storage (``TrackedStorages.end``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft import torch_adapter

if TYPE_CHECKING:
    from weft.capture.record.recorder import OpRecorder

aten = torch.ops.aten
LIFTS = (aten.lift_fresh.default, aten.lift.default)


def is_literal(tensor: torch.Tensor) -> bool:
    """Whether a tensor to be lifted was made from Python numbers, and does not share the memory of a numpy array."""
    return not isinstance(tensor, FakeTensor) and tensor.untyped_storage().resizable()


def record_literal(recorder: OpRecorder, literal: torch.Tensor) -> torch.Tensor:
    """The fake tensor that the step works with in place of a literal."""
    fake = torch_adapter.fake_like(recorder.fake_mode, literal)
    if literal.dim() or literal.dtype.is_complex or literal.layout is not torch.strided:
        node = recorder.value(literal)
        recorder.literals[node] = literal
        return recorder.storages.bind_fresh(fake, node).val
    with torch.no_grad(), torch_adapter.real_tensors(), torch_adapter.no_torch_function_modes():
        number = literal.item()
    node = recorder.emit(aten.full.default, [], number, dtype=literal.dtype, device=literal.device, val=fake)
    return recorder.storages.bind_fresh(fake, node).val
