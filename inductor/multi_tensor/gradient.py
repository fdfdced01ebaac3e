"""What optimizers do to gradients before the update: cast, clip, unscale, negate."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from weft.inductor.multi_tensor.chunked_kernel import rounded

aten = torch.ops.aten


def clipped_gradients(
    params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], coefficient: torch.Tensor | None
) -> Sequence[torch.Tensor]:
    """The gradients in the dtypes of their parameters, times ``coefficient`` (0-dim, None for 1), by ATen's kernels."""
    # Cast before it is clipped, as a step that stores gradients in the parameters' dtype would.
    grads = [grad.to(param.dtype) for grad, param in zip(grads, params, strict=True)]
    return grads if coefficient is None else aten._foreach_mul.Tensor(grads, coefficient)


def gradient_lines(scalars: Collection[str], dtype: torch.dtype, maximize: bool) -> list[str]:
    """Lines that prepare the register ``grad``, in the order and with the roundings of ATen's fused optimizers.

    Args:
        scalars: names of the scalar registers that the kernel has; ``coefficient`` and ``grad_scale`` are used.
        dtype: of the parameters. The clipped gradient is rounded to it, as if it had been stored.
    """
    return [
        # Clipping is an operation before ATen's fused optimizer, which unscales and negates: this order, with a
        # rounding after each.
        *([f"grad = {rounded('(grad * coefficient)', dtype)}"] if "coefficient" in scalars else []),
        *(["grad = tl.div_rn(grad, grad_scale + tl.zeros_like(grad))"] if "grad_scale" in scalars else []),
        # Not ``-grad``, which Triton 3.6 computes as ``0 - grad``: zeros of a first momentum would lose their sign.
        *(["grad = grad * -1.0"] if maximize else []),
    ]
