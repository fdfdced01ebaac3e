"""Tensor subclasses around other tensors: what is inside one, and the same one around other tensors.

Such a subclass (a DTensor, a quantized tensor) says by `__tensor_flatten__` which of its attributes are tensors, and
`__tensor_unflatten__` makes it of them. Operations on it end as operations on the plain tensors inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


def plain_parts(tensor: torch.Tensor) -> dict[tuple[str, ...], torch.Tensor]:
    """The plain tensors inside a wrapper subclass (DTensor), by the attributes that lead to them; a plain tensor is
    its own part, under ``()``."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return {(): tensor}
    inner = {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
    found = {name: plain_parts(part) for name, part in inner.items() if isinstance(part, torch.Tensor)}
    return {(name, *path): part for name, parts in found.items() for path, part in parts.items()}


@dataclass(frozen=True)
class Shell:
    """A wrapper subclass without its :func:`plain_parts`: what is needed to put it around others.

    Attributes:
        kind, context, size, stride: of the tensor.
        inside: for each of its attributes that is a tensor, the shell of that one, None for a plain tensor.
        values: its other attributes.
    """

    kind: Any
    context: Any
    size: Any
    stride: Any
    inside: dict[str, Shell | None]
    values: dict[str, Any]

    @classmethod
    def of(cls, tensor: Any) -> Shell:
        """The shell of a wrapper subclass."""
        names, context = tensor.__tensor_flatten__()
        found = {name: getattr(tensor, name) for name in names}
        tensors = {name: part for name, part in found.items() if isinstance(part, torch.Tensor)}
        inside = {n: cls.of(part) if hasattr(part, "__tensor_flatten__") else None for n, part in tensors.items()}
        values = {name: value for name, value in found.items() if name not in tensors}
        return cls(type(tensor), context, tensor.shape, tensor.stride(), inside, values)

    def around(self, parts: Mapping[tuple[str, ...], torch.Tensor]) -> torch.Tensor:
        """The tensor around these plain tensors."""
        inner = dict(self.values)
        for name, shell in self.inside.items():
            own = {path[1:]: part for path, part in parts.items() if path[0] == name}
            inner[name] = own[()] if shell is None else shell.around(own)
        return self.kind.__tensor_unflatten__(inner, self.context, self.size, self.stride)
