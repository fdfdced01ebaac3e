"""``copy.deepcopy`` of tensors in a step: of a state dictionary that is to be kept, or of a list of tensors."""

from __future__ import annotations

from typing import Any

import torch

from weft import torch_adapter
from weft.capture.record.recorder import OpRecorder
from weft.capture.state.tensor_memory import own_attributes
from weft.capture.strided_overlap import same_layout


def deep_copy(recorder: OpRecorder, tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor | None:
    """What ``tensor.__deepcopy__(memo)`` gives in eager, as operations of the graph; None where a graph has no place
    for it: the tensor is a part of a larger memory, all of which eager copies.

    Tensors in one memory are copied to one memory, as in eager.
    """
    if id(tensor) in memo:
        return memo[id(tensor)]
    tracked = recorder.storages.of(tensor)
    memory = ("memory of tensors", id(tracked.storage))
    plain = torch_adapter.is_plain_tensor_type(type(tracked.val)) and not own_attributes(tensor)
    if not plain or not _is_whole(tracked.val):
        return None
    gradient = None if tensor.grad is None else deep_copy(recorder, tensor.grad, memo)
    if tensor.grad is not None and gradient is None:
        return None
    with torch.no_grad():
        if memory not in memo:
            made = memo[memory] = tensor.detach().clone(memory_format=torch.preserve_format)
        elif (made := _in_memory_of(memo[memory], tensor)) is None:
            return None
    made.requires_grad_(tensor.requires_grad)
    made.grad = gradient
    memo[id(tensor)] = made
    return made


def _in_memory_of(whole: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor in the memory of a copy, with the sizes and strides of another one; None where sizes are symbols."""
    if whole.dtype != tensor.dtype:
        return None
    if same_layout(whole, tensor):
        return whole.detach()
    plain = all(type(each) is int for each in (*tensor.shape, *tensor.stride()))
    return whole.as_strided(tensor.shape, tensor.stride(), 0) if plain else None


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
