"""SGD over lists of tensors, with momentum or without, in one pass; gradients are clipped in registers.

ATen's fused CUDA kernel computes in float64 and rounds each result to float32; here it is float32 with fused
multiply-adds, so that float32 results differ from it in the last bit or two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.inductor.multi_tensor.operation import MultiTensor
from weft.inductor.multi_tensor.plan import Given, Number, Plan, add_walk, by_dtypes
from weft.inductor.multi_tensor.text import Column, number, rounded

aten = torch.ops.aten

# Positions of the arguments of a call.
PARAMS, GRADS, MOMENTA, LR, COEFFICIENT, GRAD_SCALE, FOUND_INF = range(7)

_NAMES = {PARAMS: "param", GRADS: "grad", MOMENTA: "momentum"}
_SCALARS = {LR: "lr", COEFFICIENT: "coefficient", GRAD_SCALE: "grad_scale", FOUND_INF: "found_inf"}


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
        return PARAMS, MOMENTA

    def __call__(self, *arguments: Any) -> list[list[torch.Tensor]]:
        params, grads, momenta, lr, coefficient, grad_scale, found_inf = arguments
        grads = [grad.to(param.dtype) for grad, param in zip(grads, params, strict=True)]
        if coefficient is not None:
            grads = aten._foreach_mul.Tensor(grads, coefficient)
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
        return [results[0], results[2]]

    def plan(self, arguments: Sequence[Any], number_type: str = "fp32") -> Plan:
        walked = [PARAMS, GRADS, *([MOMENTA] if arguments[MOMENTA] else [])]
        plan = Plan()
        given = [
            Number(name, at, arguments[at], number_type) for at, name in _SCALARS.items() if arguments[at] is not None
        ]
        for tensors in by_dtypes([arguments[which] for which in walked]):
            dtypes = {which: arguments[which][tensors[0]].dtype for which in walked}
            add_walk(
                plan,
                "sgd",
                [self._column(which, dtype) for which, dtype in dtypes.items()],
                [tuple(Given(which, at) for which in walked) for at in tensors],
                [arguments[PARAMS][at].numel() for at in tensors],
                tensors,
                given,
                body=self._body([n.name for n in given], dtypes[PARAMS], MOMENTA in walked),
                skip="found_inf == 1.0" if arguments[FOUND_INF] is not None else "",
            )
        return plan

    def _column(self, which: int, dtype: torch.dtype) -> Column:
        name = _NAMES[which]
        return Column(name, dtype, not (which == MOMENTA and self.first), "" if which == GRADS else name)

    def _body(self, scalars: list[str], dtype: torch.dtype, has_momentum: bool) -> list[str]:
        body = []
        if "coefficient" in scalars:
            body.append(f"grad = {rounded('(grad * coefficient)', dtype)}")
        if "grad_scale" in scalars:
            body.append("grad = tl.div_rn(grad, grad_scale + tl.zeros_like(grad))")
        if self.maximize:
            body.append("grad = -grad")
        if self.weight_decay != 0:
            body.append(f"grad = tl.fma(param, {number(self.weight_decay)}, grad)")
        step = "grad"
        if has_momentum:
            grown = f"tl.fma(momentum, {number(self.momentum)}, grad * {number(1 - self.dampening)})"
            body.append(f"momentum = {'grad' if self.first else grown}")
            step = f"tl.fma(momentum, {number(self.momentum)}, grad)" if self.nesterov else "momentum"
        return [*body, f"param = tl.fma({step}, -lr, param)"]
