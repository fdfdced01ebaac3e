"""Tensors that a compiled step leaves with a grad_fn in eager have one that raises.

A compiled step keeps no graph of autograd after a call. A result without a grad_fn would be a constant in what the
caller computes from it: the backward of ``step(x) + penalty`` would give the gradients of the penalty alone.
"""

from __future__ import annotations

import enum
import functools
from typing import Any

import torch

from weft import torch_adapter
from weft.errors import BackwardOutsideStep


@functools.cache
def _anchor() -> torch.Tensor:
    """An input that requires grad, for the functions below: autograd gives a grad_fn only to what has such an input. No
    gradient reaches it."""
    with torch_adapter.real_tensors(), torch_adapter.no_torch_function_modes(), torch.inference_mode(False):
        return torch.zeros((), device="cpu", requires_grad=True)


class _AbsentGraph(torch.autograd.Function):
    """The end of every backward that reaches a tensor of an earlier call."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, result: list[torch.Tensor], where: str) -> torch.Tensor:
        ctx.weft_absent = where
        return result[0].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise BackwardOutsideStep(ctx.weft_absent)


def with_absent_graph(result: torch.Tensor, where: str) -> torch.Tensor:
    """The same values in the same memory, as a tensor that requires grad, and whose backward raises.

    Args:
        result: a tensor without a grad_fn. Any shape, a dtype that can require grad.
        where: what it is to the user, for the message: "the step's return value".
    """
    if not torch.is_grad_enabled():
        with torch.enable_grad():
            return with_absent_graph(result, where)
    # The result is no input of the function: an input and a result that share memory would be a view and its base,
    # and torch refuses writes in place to a view that a custom function made.
    made: torch.Tensor = _AbsentGraph.apply(_anchor(), [result], where)
    return made


class _AbsentInPlace(torch.autograd.Function):
    """The same for a tensor that the step wrote in place."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, anchor: torch.Tensor, where: str) -> torch.Tensor:
        ctx.weft_absent = where
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise BackwardOutsideStep(ctx.weft_absent)


def mark_absent_graph(updated: torch.Tensor, where: str) -> None:
    """Give a tensor, in place, a grad_fn whose backward raises. A tensor that requires grad already is left as it is.

    Args:
        updated: a tensor that a call wrote in place. Of a view, its base gets the grad_fn, as in eager.
        where: what it is to the user, for the message.
    """
    target = updated._base if updated._base is not None else updated
    if not target.requires_grad:
        with torch.enable_grad():
            _AbsentInPlace.apply(target, _anchor(), where)


def restore_absent_graph(tensor: torch.Tensor, before: Any, where: str) -> None:
    """Remove the grad_fn that a capture gave to a tensor. If the tensor had one that raises before, it gets that again.

    A tensor with a graph of its own stays as it is. Torch cannot detach a view in place: a view and its base are left
    with a grad_fn that raises.

    Args:
        before: the grad_fn that it had.
        where: what the tensor is to the user.
    """
    absent = _absent(before)
    if before is not None and absent is None:
        return
    if tensor._base is not None:
        tensor._base.detach_()
        mark_absent_graph(tensor, absent or where)
    else:
        tensor.detach_()
        if absent is not None:
            mark_absent_graph(tensor, absent)


def _absent(grad_fn: Any) -> str | None:
    """Where the tensor is that has this grad_fn, if no graph is behind it."""
    return getattr(grad_fn, "weft_absent", None)


class AutogradRole(enum.Enum):
    """What a tensor of the user's is to autograd."""

    CONSTANT = "no gradient flows to it"
    LEAF = "it gets a gradient, or is a parameter that is frozen"
    ABSENT = "an earlier call of a compiled step computed it, or what it is a view of"
    COMPUTED = "it has a graph"

    @classmethod
    def of(cls, tensor: torch.Tensor) -> AutogradRole:
        """The role of a tensor now."""
        if not tensor.requires_grad:
            return cls.LEAF if isinstance(tensor, torch.nn.Parameter) else cls.CONSTANT
        if tensor.is_leaf:
            return cls.LEAF
        source = tensor if tensor._base is None else tensor._base
        return cls.COMPUTED if _absent(source.grad_fn) is None else cls.ABSENT

    @property
    def replaceable(self) -> bool:
        """Whether another tensor of this role can take the place of one."""
        return self in (AutogradRole.CONSTANT, AutogradRole.ABSENT)
