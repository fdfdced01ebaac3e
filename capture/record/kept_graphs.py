"""Tensors in a step's state that keep their graph of autograd from one call to the next.

After ``self.hidden = self.hidden - self.weight`` the state holds a tensor with a grad_fn. In eager, the backward of the
next call goes through it to the operations of the calls before. A compiled step keeps no graph between calls, so that
its gradients would lack those parts.

Many steps leave such tensors and never go back through them, as with ``total = total + loss``. Whether a backward does,
the first attempt at a capture cannot see: no tensor of the state has a grad_fn yet. So the step is captured once more,
with these tensors as results of an operation whose backward raises.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.state.containers import StatePlace
from weft.capture.user_code import user_line
from weft.errors import GraphOutsideStep


class GraphsKept(Exception):
    """The step leaves tensors with a grad_fn where it read tensors without one.

    Attributes:
        tensors: those that it read, by the path of their place.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(sorted(tensors))
        self.tensors = tensors


class _Earlier(torch.autograd.Function):
    """Gives a tensor of the state a grad_fn, in place, that stands for the calls before."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, anchor: torch.Tensor, path: str) -> torch.Tensor:
        ctx.path = path
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        where = f"the backward at {user_line()} would go through it to an earlier call, of which nothing is kept"
        raise GraphOutsideStep(ctx.path, f"{where}. Store it detached, or compute it under torch.no_grad()")


class KeptGraphs:
    """The grad_fns of the tensors of a step's state, during one attempt at its capture.

    Args:
        places: of the tensors of the state.
        earlier: tensors of the state that get a grad_fn for the calls before, by path; those that the attempt before
            found.
    """

    def __init__(self, places: Mapping[int, StatePlace], earlier: Mapping[str, torch.Tensor]) -> None:
        self._earlier = earlier
        self._known: list[tuple[StatePlace, torch.Tensor, Any]] = []
        for place in places.values():
            tensor = place.get()
            # A leaf that requires grad gets no grad_fn. Of a view, torch cannot take one away.
            if isinstance(tensor, torch.Tensor) and not (tensor.requires_grad and tensor.is_leaf):
                self._known.append((place, tensor, tensor.grad_fn))
        self._left: list[tuple[StatePlace, torch.Tensor, Any]] = []

    @contextlib.contextmanager
    def followed(self, *modes: Any) -> Iterator[None]:
        """While the step runs on fakes. Afterwards the user's tensors have no grad_fn that is the capture's."""
        with torch_adapter.only_mode(*modes), torch.enable_grad():
            for path, tensor in self._earlier.items():
                _Earlier.apply(tensor, torch.zeros((), requires_grad=True), path)
        try:
            yield
        finally:
            self._left = [each for each in self._known if _is_left_with_graph(*each)]
            for _, tensor, before in self._known:
                if tensor.grad_fn is not before and before is None and not tensor._is_view():
                    with torch_adapter.only_mode(*modes):
                        tensor.detach_()

    def check(self, read: list[torch.Tensor]) -> None:
        """Raise where the step leaves graphs at places that it read, unless this attempt was to see them.

        Raises:
            GraphsKept: another attempt has to see whether a backward goes through them.
            GraphOutsideStep: the tensor had a grad_fn before the call.
        """
        inputs = set(map(id, read))
        found: dict[str, torch.Tensor] = {}
        for place, tensor, before in self._left:
            if id(tensor) not in inputs or place.path in self._earlier:
                continue
            if before is not None:
                raise GraphOutsideStep(place.path)
            if not tensor._is_view():
                found[place.path] = tensor
        if found:
            raise GraphsKept({**self._earlier, **found})


def _is_left_with_graph(place: StatePlace, tensor: torch.Tensor, before: Any) -> bool:
    """Whether the step wrote a result with a grad_fn into a tensor, or put one into its place."""
    now = place.get()
    if now is tensor:
        return tensor.grad_fn is not before
    return isinstance(now, torch.Tensor) and now.requires_grad and now.grad_fn is not None
