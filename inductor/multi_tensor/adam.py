"""Adam and AdamW over lists of tensors: one small kernel for step counts and rates, one pass over the tensors.

Operations have the order and the roundings of ATen's fused CUDA kernel (``fused_adam_utils.cuh``): float32 results
equal its results, but for the last bit of a power. Unlike it, gradients are clipped in the registers of the same pass,
and step counts advance here.
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
    PointerParameter,
    PointerTable,
    Scratch,
    add_chunked_launch,
    add_launch,
    group_by_dtypes,
)
from weft.inductor.multi_tensor.operation import MultiTensor
from weft.inductor.multi_tensor.rounded_division import quotient_lines, reciprocal_lines, square_root_lines

aten = torch.ops.aten

# Positions of the arguments of a call.
PARAMS, GRADS, EXP_AVGS, EXP_AVG_SQS, MAX_EXP_AVG_SQS, STEPS, LR, COEFFICIENT, GRAD_SCALE, FOUND_INF = range(10)

# Floats a tensor in the scratch memory: step size, sqrt of the second bias correction, 1 / that, decay.
_RATES = 4
# Scales changes so that their remainders are exact, but below 2**-126; a power of two is taken back without an error.
# A numerator above 2**104 would overflow, but its square in exp_avg_sq has overflowed long before.
_SCALE = 2.0**24
# Tensors whose rates a program of the first kernel computes.
_BLOCK = 128


@serializable
@dataclass(frozen=True)
class Adam(MultiTensor):
    """``adam(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, lr, coefficient, grad_scale, found_inf)``.

    Updates all lists but the gradients, and the steps if it counts them. Gradients may be of a narrower dtype than
    their parameters, which they are cast to first. ``lr`` is a number or a 0-dim tensor;
    ``coefficient`` (which gradients are multiplied by first), ``grad_scale`` (which they are divided by) and
    ``found_inf`` (1.0: change nothing) are 0-dim tensors or None.

    Attributes:
        decoupled: AdamW's weight decay, not Adam's.
        advance: whether steps are counted here; else they have been.
    """

    decoupled: bool
    beta1: float
    beta2: float
    weight_decay: float
    eps: float
    amsgrad: bool = False
    maximize: bool = False
    advance: bool = True

    @property
    def updated(self) -> tuple[int, ...]:
        """Parameters and optimizer states; the steps too, if they advance here."""
        # MAX_EXP_AVG_SQS is an empty list without AMSGrad.
        return PARAMS, EXP_AVGS, EXP_AVG_SQS, MAX_EXP_AVG_SQS, *((STEPS,) if self.advance else ())

    def __call__(self, *arguments: Any) -> list[list[torch.Tensor]]:
        params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, lr, coefficient, grad_scale, found_inf = arguments
        # The reference: ATen's own fused optimizer, out of place.
        grads = clipped_gradients(params, grads, coefficient)
        if self.advance:
            steps = aten._foreach_add.Scalar(steps, 1)
        op = aten._fused_adamw if self.decoupled else aten._fused_adam
        update = op.tensor_lr if isinstance(lr, torch.Tensor) else op.default
        results = update(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            max_exp_avg_sqs,
            steps,
            lr=lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=self.amsgrad,
            maximize=self.maximize,
            grad_scale=grad_scale,
            found_inf=found_inf,
        )
        # ATen returns the gradients too, at position 1; they are not updated here.
        new = [results[0], *results[2:]]
        return [*new, steps] if self.advance else new

    def plan(self, arguments: Sequence[Any]) -> LaunchPlan:
        """One launch for the rates of all tensors, then one for each combination of dtypes."""
        states = [PARAMS, EXP_AVGS, EXP_AVG_SQS, *([MAX_EXP_AVG_SQS] if self.amsgrad else [])]
        count = len(arguments[PARAMS])
        plan = LaunchPlan.on_device_of(arguments)
        plan.scratch["rates"] = (count * _RATES, torch.float32)
        # Powers and roots depend on a tensor's step only: computed here, once a tensor, not once an element.
        self._add_rates(plan, count, CallScalar("lr", LR, arguments[LR]))
        # The columns of a pass over the elements.
        walked = [PARAMS, GRADS, *states[1:]]
        # Dtypes are part of a kernel's text, so each combination is a launch.
        for tensors in group_by_dtypes([arguments[which] for which in walked]):
            self._add_update(plan, walked, tensors, arguments)
        return plan

    def _add_rates(self, plan: LaunchPlan, count: int, lr: CallScalar) -> None:
        """The kernel that counts the step and computes each tensor's rates."""
        lines = [
            *(lr.parameter.lines() if lr.parameter is not None else ()),
            *lr.setup,
            "tensor = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
            "inside = tensor < COUNT",
            # Rows of a pointer table are an address and a flag, hence the factor 2.
            "step_at = tl.load(steps + tensor * 2, mask=inside, other=0).to(tl.pointer_type(tl.float32))",
            "step = tl.load(step_at, mask=inside, other=0.0)",
            *(["step += 1.0", "tl.store(step_at, step, mask=inside)"] if self.advance else ()),
            *_power("power1", self.beta1),
            *_power("power2", self.beta2),
            f"rate = rates + tensor * {_RATES}",
            # Correctly rounded, as in ATen's kernel: one such number decides all elements of a tensor.
            "correction = tl.sqrt_rn(1.0 - power2)",
            "tl.store(rate, tl.div_rn(lr + tl.zeros_like(power1), 1.0 - power1), mask=inside)",
            "tl.store(rate + 1, correction, mask=inside)",
            "tl.store(rate + 2, tl.div_rn(tl.full([BLOCK], 1.0, tl.float32), correction), mask=inside)",
            f"tl.store(rate + 3, lr * {float32_literal(self.weight_decay)} + tl.zeros_like(power1), mask=inside)",
        ]
        # Steps are 0-dim tensors anywhere in memory, so the kernel gets their addresses.
        plan.pointers["steps"] = [(CallArgument(STEPS, at),) for at in range(count)]
        # A rate that is a number of the text needs no argument; one in memory may change under a replayed CUDA graph.
        passed = [] if lr.parameter is None else [(lr.parameter.argument, lr.parameter.type, CallArgument(lr.argument))]
        signature = {"steps": "*i64", "rates": "*fp32", **{name: type_ for name, type_, _ in passed}}
        places = (PointerTable("steps"), Scratch("rates"), *(place for _, _, place in passed))
        grid = -(-count // _BLOCK)
        add_launch(plan, "adam_rates", lines, signature, places, grid, {"COUNT": count, "BLOCK": _BLOCK})

    def _add_update(self, plan: LaunchPlan, walked: list[int], tensors: list[int], arguments: Sequence[Any]) -> None:
        fakes = {which: arguments[which][tensors[0]] for which in walked}
        columns = [
            # Gradients are read only: the user may look at them after the step.
            Column(_NAMES[which], fake.dtype, store="" if which == GRADS else _NAMES[which])
            for which, fake in fakes.items()
        ]
        scalars = [(COEFFICIENT, "coefficient"), (GRAD_SCALE, "grad_scale"), (FOUND_INF, "found_inf")]
        numbers = [CallScalar(name, at, arguments[at]) for at, name in scalars if arguments[at] is not None]
        add_chunked_launch(
            plan,
            self.__name__ + ("w" if self.decoupled else ""),
            columns,
            [tuple(CallArgument(which, at) for which in walked) for at in tensors],
            [arguments[PARAMS][at].numel() for at in tensors],
            tensors,
            numbers,
            [PointerParameter("rates", "*fp32", Scratch("rates"))],
            setup=_LOAD_RATES,
            body=self._body([n.name for n in numbers], fakes[PARAMS].dtype),
            # GradScaler's contract: an overflow leaves parameters and states as they are.
            skip="found_inf == 1.0" if arguments[FOUND_INF] is not None else "",
        )

    def _body(self, scalars: list[str], dtype: torch.dtype) -> list[str]:
        body = gradient_lines(scalars, dtype, self.maximize)
        if self.weight_decay != 0:
            # AdamW scales the parameter by 1 - lr * weight_decay; Adam adds the decay to the gradient.
            decay = "tl.fma(param, -decay, param)"
            body.append(f"param = {decay}" if self.decoupled else f"grad = {_fma('param', self.weight_decay, 'grad')}")
        body += [
            # beta * avg + (1 - beta) * grad, with grad - beta * grad for the last term: the roundings of ATen's
            # compiled kernel.
            f"exp_avg = {_fma('exp_avg', self.beta1, _fma('grad', -self.beta1, 'grad'))}",
            "square = grad * grad",
            f"exp_avg_sq = {_fma('exp_avg_sq', self.beta2, _fma('square', -self.beta2, 'square'))}",
        ]
        second = "exp_avg_sq"
        if self.amsgrad:
            second = "max_exp_avg_sq"
            # Not a maximum: a NaN in either must come out as ATen's comparison leaves it.
            body.append(f"{second} = tl.where({second} < exp_avg_sq, exp_avg_sq, {second})")
        return [
            *body,
            # Correctly rounded, as ATen's `sqrt` and `/` of float32 are; approximate ones would drift from eager over
            # a training.
            *square_root_lines("root", second),
            *quotient_lines("ratio", "root", "correction", "inverse_correction"),
            f"denominator = ratio + {float32_literal(self.eps)}",
            f"change = step_size * exp_avg * {_SCALE!r}",
            *reciprocal_lines("inverse_denominator", "denominator"),
            *quotient_lines("change", "change", "denominator", "inverse_denominator"),
            # The scale is a power of two, so taking it back inside the fused multiply-add rounds nothing.
            f"param = tl.fma(change, {-1 / _SCALE!r}, param)",
        ]


_NAMES = {
    PARAMS: "param",
    GRADS: "grad",
    EXP_AVGS: "exp_avg",
    EXP_AVG_SQS: "exp_avg_sq",
    MAX_EXP_AVG_SQS: "max_exp_avg_sq",
}

_LOAD_RATES = (
    f"rate = rates + label * {_RATES}",
    "step_size = tl.load(rate)",
    "correction = tl.load(rate + 1)",
    "inverse_correction = tl.load(rate + 2)",
    "decay = tl.load(rate + 3)",
)


def _fma(a: str, b: float, c: str) -> str:
    return f"tl.fma({a}, {float32_literal(b)}, {c})"


def _power(result: str, base: float) -> list[str]:
    """Lines for ``base ** step``, rounded once: squares in float64, since Triton's own ``exp2`` is approximate."""
    return [
        # Exact: steps are whole numbers, up to 2**24 in float32.
        "exponent = step.to(tl.int32)",
        f"square = tl.full([BLOCK], {float32_literal(base)}, tl.float64)",
        "power = tl.full([BLOCK], 1.0, tl.float64)",
        "for _ in range(31):",
        "    power = tl.where(exponent & 1 != 0, power * square, power)",
        "    square = square * square",
        "    exponent = exponent >> 1",
        f"{result} = power.to(tl.float32)",
    ]
