"""Attributes that Python code puts on tensors, ``p.main_grad = ...``."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Any

import torch

from weft.capture.state import containers
from weft.capture.state.tensor_memory import own_attributes, with_inside


class AttributesOfTensors:
    """The tensors that a walk met, with the attributes that they had then."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.Tensor, str, dict[str, Any]]] = {}

    def note(
        self, tensor: torch.Tensor, path: str, asked: Callable[[str], bool]
    ) -> Iterator[tuple[torch.Tensor, str, bool]]:
        """The walk meets a tensor under a path, and with it those inside, such as the local tensor of a DTensor.

        Args:
            asked: whether the step asks for all attributes of the tensor at a path.

        Yields:
            Those of which attributes count, their paths, and whether all count. Of one inside another they do: wrappers
            read them, whose code is not searched for names.
        """
        for where, each in with_inside(tensor, path):
            self._known[id(each)] = each, where, dict(vars(each))
            if vars(each) or asked(where):
                yield each, where, each is not tensor and bool(own_attributes(each))

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


class MissingAttributes:
    """What a step looked for on tensors and did not find: ``hasattr(p, "main_grad")``.

    Attributes:
        found: the dictionary of the attributes of each tensor, its path, and the names that the step looked for.
    """

    def __init__(self) -> None:
        self.found: dict[int, tuple[dict[str, Any], str, set[str]]] = {}

    def note(self, tensor: torch.Tensor, path: str, name: str) -> None:
        """The step did not find an attribute of a tensor."""
        attributes = vars(tensor)
        self.found.setdefault(id(attributes), (attributes, path, set()))[2].add(name)
