"""Tensors of the user's that do not require grad: a step may make them require it, or give them a gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.capture.state.containers import Container
from weft.capture.step_interface import Role
from weft.errors import PythonStateChanged


class PlainLeaves:
    """The leaves that do not require grad and are no parameters, as a walk of the Python state finds them."""

    def __init__(self) -> None:
        self._found: list[tuple[torch.Tensor, str]] = []
        self._gradients: list[Container] = []

    def note(self, tensor: torch.Tensor, path: str, walk: Callable[[Container, Role], None]) -> None:
        """Note one that was found. A gradient that it has is walked; that it has none is no guard."""
        self._found.append((tensor, path))
        gradient = Container(tensor, path, label=lambda key: f"{path}.{key}")
        if tensor.grad is None:
            self._gradients.append(gradient)
        else:
            walk(gradient, Role.GRADIENT)

    def changed(self) -> list[Container]:
        """The containers of those that had no gradient, where the step gave them one or made them require it; each is
        returned once."""
        changed = [each for each in self._gradients if any(each.changes())]
        self._gradients = [each for each in self._gradients if each not in changed]
        return changed

    def refuse_changed(self) -> None:
        """Raise where the step made one require grad.

        Raises:
            PythonStateChanged: names the first.
        """
        for tensor, path in self._found:
            if tensor.requires_grad and tensor.is_leaf:
                remedy = "call requires_grad_() before the step"
                raise PythonStateChanged(f"{path}.requires_grad", "False -> True", remedy)

    def clear(self) -> None:
        """Let go of the tensors."""
        self._found.clear()
        self._gradients.clear()
