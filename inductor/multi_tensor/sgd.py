"""SGD over lists of tensors, with momentum or without, in one pass; gradients are clipped in registers.

ATen's fused CUDA kernel computes in float64 and rounds each result to float32; here it is float32 with fused
multiply-adds, so that float32 results differ from it in the last bit or two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.inductor.codegen.triton_text import float32_literal
from weft.inductor.graph.serializable import serializable
from weft.inductor.multi_tensor.chunked_kernel import Column
from weft.inductor.multi_tensor.gradient import clipped_gradients, gradient_lines
from weft.inductor.multi_tensor.launch_plan import (
    CallArgument,
    CallScalar,
    LaunchPlan,
    add_chunked_launch,
    group_by_dtypes,
)
from weft.inductor.multi_tensor.operation import MultiTensor

aten = torch.ops.aten

# Positions of the arguments of a call.
PARAMS, GRADS, MOMENTA, LR, COEFFICIENT, GRAD_SCALE, FOUND_INF = range(7)

_NAMES = {PARAMS: "param", GRADS: "grad", MOMENTA: "momentum"}
# All may be tensors in memory: a schedule changes the rate under a replayed CUDA graph.
_SCALARS = {LR: "lr", COEFFICIENT: "coefficient", GRAD_SCALE: "grad_scale", FOUND_INF: "found_inf"}


@serializable
@dataclass(frozen=True)
class Sgd(MultiTensor):
    """``sgd(params, grads, momenta, lr, coefficient, grad_scale, found_inf)``.

    Updates the parameters and the momenta.

    ``momenta`` is empty without momentum. For gradients and scalars see :class:`weft.inductor.multi_tensor.adam.Adam`.

    Attributes:
        first: whether ``momenta`` hold nothing yet.
    """

    momentum: float
    weight_decay: float
    dampening: float
    nesterov: bool
    maximize: bool
    first: bool

    @property
    def updated(self) -> tuple[int, ...]:
        """The parameters and the momenta."""
        return PARAMS, MOMENTA

    def __call__(self, *arguments: Any) -> list[list[torch.Tensor]]:
        params, grads, momenta, lr, coefficient, grad_scale, found_inf = arguments
        grads = clipped_gradients(params, grads, coefficient)
        update = aten._fused_sgd.tensor_lr if isinstance(lr, torch.Tensor) else aten._fused_sgd.default
        results = update(
            params,
            grads,
            momenta,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=lr,
            dampening=self.dampening,
            nesterov=self.nesterov,
            maximize=self.maximize,
            is_first_step=self.first,
            grad_scale=grad_scale,
            found_inf=found_inf,
        )
        # ATen's second result are the gradients, unchanged.
        return [results[0], results[2]]

    def plan(self, arguments: Sequence[Any]) -> LaunchPlan:
        """One launch for each combination of dtypes."""
        walked = [PARAMS, GRADS, *([MOMENTA] if arguments[MOMENTA] else [])]
        plan = LaunchPlan.on_device_of(arguments)
        numbers = [CallScalar(name, at, arguments[at]) for at, name in _SCALARS.items() if arguments[at] is not None]
        for tensors in group_by_dtypes([arguments[which] for which in walked]):
            dtypes = {which: arguments[which][tensors[0]].dtype for which in walked}
            add_chunked_launch(
                plan,
                "sgd",
                [self._column(which, dtype) for which, dtype in dtypes.items()],
                [tuple(CallArgument(which, at) for which in walked) for at in tensors],
                [arguments[PARAMS][at].numel() for at in tensors],
                tensors,
                numbers,
                body=self._body([n.name for n in numbers], dtypes[PARAMS], MOMENTA in walked),
                skip="found_inf == 1.0" if arguments[FOUND_INF] is not None else "",
            )
        return plan

    def _column(self, which: int, dtype: torch.dtype) -> Column:
        name = _NAMES[which]
        # On the first step the memory of the momenta holds nothing that may be read.
        return Column(name, dtype, not (which == MOMENTA and self.first), "" if which == GRADS else name)

    def _body(self, scalars: list[str], dtype: torch.dtype, has_momentum: bool) -> list[str]:
        body = gradient_lines(scalars, dtype, self.maximize)
        if self.weight_decay != 0:
            # Torch's order: decay is added to the gradient before the momentum sees it.
            body.append(f"grad = tl.fma(param, {float32_literal(self.weight_decay)}, grad)")
        step = "grad"
        if has_momentum:
            grown = f"tl.fma(momentum, {float32_literal(self.momentum)}, grad * {float32_literal(1 - self.dampening)})"
            # Torch starts the momentum at the gradient itself, without dampening.
            body.append(f"momentum = {'grad' if self.first else grown}")
            # Nesterov looks one step of the momentum ahead.
            step = f"tl.fma(momentum, {float32_literal(self.momentum)}, grad)" if self.nesterov else "momentum"
        return [*body, f"param = tl.fma({step}, -lr, param)"]
