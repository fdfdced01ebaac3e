"""Tensors that are printed as eager prints them: ``tensor(3., grad_fn=<SumBackward0>)``.

A compiled step has no graph of autograd. Where it prints a tensor to which one belongs in eager, the tensor gets a node
of that name for the time of the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft import torch_adapter


class _AsItIs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients


@functools.cache
def _function_for(name: str) -> Any:
    return type(name, (_AsItIs,), {})


def gradient_shown(value: Any) -> str | None:
    """The name of the autograd node that the text of a tensor of the capture shows: "" for a leaf that requires grad,
    None where it shows none."""
    if not isinstance(value, FakeTensor) or not value.requires_grad:
        return None
    return "" if value.grad_fn is None else type(value.grad_fn).__name__


def with_gradient_shown(tensor: torch.Tensor, name: str | None) -> torch.Tensor:
    """The tensor with a node of autograd of that name."""
    if name is None:
        return tensor
    leaf = tensor.detach().requires_grad_()
    if not name:
        return leaf
    with torch.enable_grad():
        shown = _function_for(name).apply(leaf)
    type(shown.grad_fn).__name__ = name
    return shown


class Showing:
    """A function that prints or logs its arguments, with the nodes of autograd that they had in the capture.

    Args:
        function: to be called.
        arguments: of the call in the capture: positional and keyword arguments.
        own: the ids of the user's own tensors, which show what they are.
    """

    def __init__(self, function: Callable[..., Any], arguments: Any, own: Collection[int]) -> None:
        self._function = function
        self.__name__ = self.__qualname__ = getattr(function, "__name__", "print")
        leaves = torch_adapter.flatten(arguments)[0]
        self._names = [None if id(leaf) in own else gradient_shown(leaf) for leaf in leaves]

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if any(name is not None for name in self._names):
            leaves, spec = torch_adapter.flatten((args, kwargs))
            shown = map(with_gradient_shown, leaves, self._names)
            args, kwargs = torch_adapter.unflatten([*shown], spec)
        self._function(*args, **kwargs)
