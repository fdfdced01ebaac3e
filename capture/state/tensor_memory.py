"""The memory of a tensor, as a key, and the plain tensor inside a subclass.

Python may hold several tensor objects for one tensor in memory (``p``, ``p.data``, ``p.detach()``). The capture finds
what it knows of a tensor by its memory: all such objects are one input of the graph.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.capture.state.containers import SPARSE_PARTS, part_of
from weft.tensor_subclasses import plain_parts

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def memory_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for plain tensors with the same elements in memory: storage, offset, sizes, strides and dtype."""
    storage = tensor.untyped_storage()
    return storage._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def inner_tensor(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[str, ...]]:
    """The plain tensor inside a wrapper subclass (DTensor), which kernels work on.

    Returns:
        The inner tensor, and the names of the attributes that lead to it. A plain tensor is returned itself, with ().
    """
    if type(tensor) in _PLAIN:
        return tensor, ()
    names: tuple[str, ...] = ()
    while hasattr(tensor, "__tensor_flatten__"):
        inner = [n for n in tensor.__tensor_flatten__()[0] if isinstance(getattr(tensor, n), torch.Tensor)]
        if len(inner) != 1:
            break
        names += (inner[0],)
        tensor = getattr(tensor, inner[0])
    return tensor, names


# What torch keeps in the attributes of a fake tensor, besides names that begin with an underscore.
_OF_FAKES = frozenset({"fake_mode", "fake_device", "constant", "pytype", "dispatch_keys", "real_tensor"})


def own_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """The attributes that a program put on a tensor object, or on the fake one that stands for it."""
    found = {name: value for name, value in vars(tensor).items() if name[0] != "_" and name not in _OF_FAKES}
    inside = tensor.__tensor_flatten__()[0] if found and hasattr(tensor, "__tensor_flatten__") else ()
    return {name: value for name, value in found.items() if name not in inside}


def parts_at(tensor: torch.Tensor, path: str) -> list[tuple[str, tuple[str, ...], torch.Tensor]]:
    """For each plain tensor inside the one at ``path``: its path, the attributes that lead to it, and it."""
    if tensor.layout is not torch.strided:
        found = sparse_parts(tensor) or {}
        return [(f"{path}.{name[1:]}()", (name,), part) for name, part in found.items()]
    parts = plain_parts(tensor)
    return [(path if len(parts) == 1 else ".".join((path, *at)), at, part) for at, part in parts.items()]


def with_inside(tensor: torch.Tensor, path: str) -> list[tuple[str, torch.Tensor]]:
    """A tensor and those inside it, such as the local tensor of a DTensor, with their paths."""
    found = [(path, tensor)]
    if type(tensor) not in _PLAIN and hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            found += with_inside(getattr(tensor, name), f"{path}.{name}")
    return found


def sparse_parts(tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """The indices and the values of a sparse matrix in coordinates, by the names that
    ``SPARSE_PARTS`` has; None of other tensors, also of matrices with dense parts."""
    if tensor.layout is not torch.sparse_coo or tensor.sparse_dim() != 2 or tensor.dense_dim() != 0:
        return None
    return {name: part_of(tensor, name) for name in SPARSE_PARTS}


def wrappers(tensor: Any) -> list[torch.Tensor]:
    """A tensor and those inside it that are subclasses of a program's own around others; a DTensor is none."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return []
    inside = [each for name in tensor.__tensor_flatten__()[0] for each in wrappers(getattr(tensor, name))]
    return inside if type(tensor).__module__.startswith("torch.distributed") else [tensor, *inside]
