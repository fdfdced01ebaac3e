"""``copy.deepcopy`` of tensors in a step: of a state dictionary that is to be kept, or of a list of tensors."""

from __future__ import annotations

import copy
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.record.recorder import OpRecorder
from weft.capture.state.tensor_memory import own_attributes


def deep_copy(recorder: OpRecorder, tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor | None:
    """What ``tensor.__deepcopy__(memo)`` gives in eager, as operations of the graph; None where a graph has no place
    for it: the tensor is a part of a larger memory, all of which eager copies.

    Tensors in one memory are copied to one memory, as in eager.
    """
    if id(tensor) in memo:
        return memo[id(tensor)]
    tracked = recorder.storages.of(tensor)
    memory = ("memory of tensors", id(tracked.storage))
    if not torch_adapter.is_plain_tensor_type(type(tracked.val)) or not _is_whole(tracked.val):
        return None
    with torch.no_grad():
        if memory not in memo:
            memo[memory] = tensor.detach().clone(memory_format=torch.preserve_format)
        whole = memo[memory]
        made = whole.as_strided(tensor.shape, tensor.stride(), 0) if whole.dtype == tensor.dtype else None
    if made is None:
        return None
    made.requires_grad_(tensor.requires_grad)
    if tensor.grad is not None:
        made.grad = copy.deepcopy(tensor.grad, memo)
    for name, value in own_attributes(tensor).items():
        setattr(made, name, copy.deepcopy(value, memo))
    memo[id(tensor)] = made
    return made


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor fill its memory, each once."""
    size = tensor.numel() * tensor.element_size()
    dense = torch_adapter.surely(size == tensor.untyped_storage().nbytes())
    places = sorted(zip(tensor.stride(), tensor.shape, strict=True), key=lambda each: int(each[0]))
    reached: Any = 1
    for stride, count in places:
        if not torch_adapter.surely(count == 1):
            dense = dense and torch_adapter.surely(stride == reached)
            reached = reached * count
    return dense and torch_adapter.surely(tensor.storage_offset() == 0)
