"""The three places where sharding meets autograd.

    sharded parameter --ReduceGradient--> anchor --Attach--> gathered parameter --> the module's operations

The anchor has the shape of the gathered parameter and no memory. It exists so that all gathers of a parameter
in one forward, however many, hand their gradients to one ReduceGradient: autograd sums them there and the sum
is reduced once, as soon as the last of them has arrived. The sharded parameter is the one leaf, so the user's
hooks on it fire natively.

None of these save tensors: they may be run again by a second backward over the same graph. torch.compile, where a
user puts it around or into a sharded module, keeps out of what they do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from weft import torch_adapter

if TYPE_CHECKING:
    from weft.distributed.fsdp.param import ShardedParameter


class ReduceGradient(torch.autograd.Function):
    """Sharded DTensor parameter to anchor; backward reduces the whole gradient to this rank's shard of it."""

    @staticmethod
    def forward(ctx: Any, sharded: torch.Tensor, param: ShardedParameter, dtype: torch.dtype) -> torch.Tensor:
        """The anchor: the gathered parameter's shape and dtype, every stride 0, one element of memory."""
        ctx.param = param
        torch_adapter.cast_gradients(ctx, None)  # Attach has cast them.
        device = param.residence.device
        return torch.empty((), dtype=dtype, device=device).expand(param.layout.shape)

    @staticmethod
    @torch_adapter.untraced
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        """Reduce-scatter the whole gradient (the gathered parameter's shape); the result is this rank's shard of it."""
        ctx.param.on_gradient()
        with torch.no_grad():
            return ctx.param.reduce(grads[0]), None, None


class Attach(torch.autograd.Function):
    """Give a gathered tensor the anchor as its origin. The tensor comes in a list, so that it is no input of
    the function and becomes the output itself, without an operation.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        gathered: list[torch.Tensor],
        param: ShardedParameter,
        grad_dtype: torch.dtype | None,
    ) -> torch.Tensor:
        # The graph keeps the anchor alive: a later gather of the same forward finds it
        # (ShardedParameter.anchor).
        """The gathered tensor itself, now with ``anchor`` as its autograd input."""
        ctx.anchor, ctx.param, ctx.grad_dtype = anchor, param, grad_dtype
        torch_adapter.cast_gradients(ctx, grad_dtype)
        return gathered[0]

    @staticmethod
    @torch_adapter.untraced
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Pass the gradient of the gathered tensor on to the anchor."""
        return ctx.param.layout.unwrap_gradient(grads[0]), None, None, None


class AfterBackward(torch.autograd.Function):
    """Pass the inputs of a module through; call `done` when backward has got past the module.

    The inputs are the user's, so they may belong to transforms of torch.func and carry tangents, which pass too.
    """

    @staticmethod
    def forward(done: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``inputs`` as they are."""
        return inputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        """Keep ``done`` for backward."""
        ctx.done = inputs[0]
        ctx.set_materialize_grads(False)

    @staticmethod
    @torch_adapter.untraced
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Call ``done``; gradients pass unchanged."""
        ctx.done()
        return None, *grads

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Tangents pass unchanged."""
        return tuple(None if tangent is None else tangent.view_as(tangent) for tangent in tangents[1:])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        """Batched inputs pass unchanged."""
        return AfterBackward.apply(*args), in_dims[1:]
