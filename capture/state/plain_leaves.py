"""Tensors of the user's that do not require grad: a step, or the code between its calls, may make them require it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from weft.capture.state.containers import Container, StatePlace
from weft.capture.state.tensor_memory import inner_tensor
from weft.capture.step_interface import Role
from weft.errors import PythonStateChanged


class PlainLeaves:
    """The leaves that do not require grad and are no parameters, as a walk of the Python state finds them."""

    def __init__(self) -> None:
        self._found: list[tuple[torch.Tensor, str, StatePlace | None]] = []
        self._gradients: list[Container] = []

    def note(
        self, tensor: torch.Tensor, path: str, place: StatePlace | None, walk: Callable[[Container, Role], None]
    ) -> None:
        """Note one that was found. A gradient that it has is walked; that it has none is no guard."""
        self._found.append((tensor, path, place))
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
        for tensor, path, _ in self._found:
            if tensor.requires_grad and tensor.is_leaf:
                remedy = "call requires_grad_() before the step"
                raise PythonStateChanged(f"{path}.requires_grad", "False -> True", remedy)

    def guarded(self, inputs: Sequence[StatePlace]) -> Iterator[tuple[torch.Tensor, str]]:
        """Those that a later call must find as they are, but for gradients.

        Not those that each call replaces. Of those without a place of their own, which may be held weakly, only inputs
        of the graph, which holds them.

        Args:
            inputs: the places of the inputs of the graph.
        """
        held = {id(place.get()) for place in inputs}
        for tensor, path, place in self._found:
            if place is None:
                is_kept = id(inner_tensor(tensor)[0]) in held
            else:
                is_kept = not place.container.frozen and place.key not in place.container.by_value
            if is_kept and (place is None or place.role is not Role.GRADIENT):
                yield tensor, path

    def clear(self) -> None:
        """Let go of the tensors."""
        self._found.clear()
        self._gradients.clear()
