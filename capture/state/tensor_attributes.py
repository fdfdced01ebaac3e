"""Attributes that Python code puts on tensors, ``p.main_grad = ...``."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Any

import torch

from weft.capture.state import containers
from weft.capture.state.tensor_memory import own_attributes


class AttributesOfTensors:
    """The tensors that a walk met, with the attributes that they had then."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.Tensor, str, dict[str, Any]]] = {}

    def note(self, tensor: torch.Tensor, path: str) -> None:
        """The walk meets a tensor under a path."""
        self._known[id(tensor)] = tensor, path, dict(vars(tensor))

    def path_of(self, tensor: torch.Tensor) -> str | None:
        """The path of a tensor; None of one that the walk has not met."""
        known, path, _ = self._known.get(id(tensor), (None, "", None))
        return path if known is tensor else None

    def found_with(self, tensor: Any) -> dict[str, Any] | None:
        """The attributes that a tensor had when the walk met it, None of another object."""
        return dict(self._known[id(tensor)][2]) if id(tensor) in self._known else None

    def new(self, followed: Callable[[torch.Tensor], Container[str]]) -> Iterator[containers.Container]:
        """The attributes that tensors got since they were asked for last.

        Args:
            followed: the names of those of a tensor's attributes that are followed anyway.
        """
        for tensor, path, before in list(self._known.values()):
            known, now = followed(tensor), own_attributes(tensor)
            missing = containers.MISSING
            new = {name for name, value in now.items() if name not in known and value is not before.get(name, missing)}
            if new:
                found = containers.Container(vars(tensor), path, frozenset(new), containers.label_of(path))
                found.before = {name: before[name] for name in new & before.keys()}
                yield found
                self._known[id(tensor)] = tensor, path, before | now

    def clear(self) -> None:
        """Let go of the tensors."""
        self._known.clear()
