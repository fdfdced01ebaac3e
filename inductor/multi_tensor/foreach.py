"""Chains of ``_foreach_*`` operations as one pass over their tensors.

Unfused optimizers, gradient clipping and weight averaging consist of ``_foreach`` operations, each of which reads and
writes every tensor. A chain of them on lists of equal sizes becomes one kernel. Intermediate results stay in registers
and are rounded to the dtype that they would have in memory, so results do not depend on the fusion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from weft.inductor.codegen.triton_text import float32_literal
from weft.inductor.graph.serializable import serializable
from weft.inductor.multi_tensor.chunked_kernel import Column, rounded
from weft.inductor.multi_tensor.launch_plan import (
    CallArgument,
    CallResult,
    CallScalar,
    LaunchPlan,
    Place,
    PointerParameter,
    add_chunked_launch,
    group_by_dtypes,
)
from weft.inductor.multi_tensor.operation import MultiTensor
from weft.torch_adapter import OpOverload

aten = torch.ops.aten


# Operands are described by positions, so equal chains over other tensors are equal calls, with one kernel.
@serializable
class Lists(NamedTuple):
    """An operand of a step: list number ``at`` of the call's arguments, or what step ``at`` computed."""

    at: int
    computed: bool


@serializable
class Scalars(NamedTuple):
    """An operand of a step: argument number ``at`` of the call, a number, a 0-dim tensor, or a list of numbers."""

    at: int


Operand = Lists | Scalars | float


@serializable
@dataclass(frozen=True)
class Step:
    """``op(*operands, **named)`` on lists; the results have the dtypes of the first operand."""

    op: OpOverload
    operands: tuple[Operand, ...]
    named: tuple[tuple[str, Operand], ...]


@serializable
@dataclass(frozen=True)
class Foreach(MultiTensor):
    """``foreach(*arguments)``, where the arguments are lists of tensors of equal length, and scalars.

    Returns the lists that the ``kept`` steps computed.

    Attributes:
        steps: the operations, in order.
        kept: for each list that is returned, the number of its step and the list argument that it overwrites, -1 for
            new memory. Lists in new memory come first.
    """

    steps: tuple[Step, ...]
    # Steps that nobody reads outside the chain are missing here: they never reach memory.
    kept: tuple[tuple[int, int], ...]

    @property
    def updated(self) -> tuple[int, ...]:
        """The list arguments that kept steps overwrite."""
        return tuple(old for _, old in self.kept if old >= 0)

    def __call__(self, *arguments: Any) -> list[list[torch.Tensor]]:
        computed: list[Any] = []

        def word(operand: Operand, type_: str) -> Any:
            if isinstance(operand, Lists):
                return computed[operand.at] if operand.computed else arguments[operand.at]
            value = arguments[operand.at] if isinstance(operand, Scalars) else operand
            # Overloads for numbers take no tensor, but a call may keep its numbers in one.
            # A read of it waits for the GPU, which only the reference does.
            in_memory = isinstance(value, torch.Tensor) and type_ != "Tensor"
            return value.tolist() if in_memory else value

        for step in self.steps:
            types = {argument.name: str(argument.type) for argument in step.op._schema.arguments}
            # By the schema: whether an operand is a number or a tensor decides which overload runs.
            words = [word(operand, type_) for operand, type_ in zip(step.operands, types.values(), strict=False)]
            computed.append(step.op(*words, **{name: word(operand, types[name]) for name, operand in step.named}))
        return [list(computed[step]) for step, _ in self.kept]

    def plan(self, arguments: Sequence[Any]) -> LaunchPlan:
        """One launch for each combination of dtypes across the lists."""
        # All lists that any step takes; their tensors are the columns of one pass.
        lists = sorted({o.at for step in self.steps for o in step.operands if isinstance(o, Lists) and not o.computed})
        plan = LaunchPlan.on_device_of(arguments)
        for tensors in group_by_dtypes([arguments[which] for which in lists]):
            self._add(plan, lists, tensors, arguments)
        return plan

    def _add(self, plan: LaunchPlan, lists: list[int], tensors: list[int], arguments: Sequence[Any]) -> None:
        # One body for each combination of dtypes, because roundings differ with them.
        writer = _Body(self, lists, {which: arguments[which][tensors[0]].dtype for which in lists}, arguments)
        stored = {old: step for step, old in self.kept if old >= 0}
        columns = [
            Column(
                f"list{which}",
                writer.dtypes[which],
                # A list that is only overwritten (`_foreach_zero`, the target of a copy) costs no reads.
                which in writer.read,
                f"step{stored[which]}" if which in stored else "",
            )
            for which in lists
        ]
        # Lists in new memory come first among the results, so their number among `kept` is their number as a result.
        fresh = [(result, step) for result, (step, old) in enumerate(self.kept) if old < 0]
        columns += [Column(f"result{result}", writer.computed[step], False, f"step{step}") for result, step in fresh]
        rows: list[tuple[Place, ...]] = [
            (*(CallArgument(which, at) for which in lists), *(CallResult(result, at) for result, _ in fresh))
            for at in tensors
        ]
        add_chunked_launch(
            plan,
            "foreach",
            columns,
            rows,
            [arguments[lists[0]][at].numel() for at in tensors],
            tensors,
            [CallScalar(f"scalar{at}", at, arguments[at]) for at in writer.numbers],
            [PointerParameter(f"scalars{at}", "*fp32", CallArgument(at)) for at in writer.number_lists],
            # A number for each tensor: the label of a chunk is the tensor's position in the call.
            setup=[f"scalar{at} = tl.load(scalars{at} + label)" for at in writer.number_lists],
            body=writer.lines,
        )


class _Body:
    """The lines of a kernel body, and the arguments that they read.

    Attributes:
        dtypes: of each list argument.
        computed: the dtype of each step's results.
        read: the list arguments that are loaded.
        numbers, number_lists: the scalar arguments in use, with one number for all tensors or one for each tensor.
    """

    def __init__(
        self, call: Foreach, lists: list[int], dtypes: dict[int, torch.dtype], arguments: Sequence[Any]
    ) -> None:
        self.dtypes = dtypes
        self.arguments = arguments
        self.computed: list[torch.dtype] = []
        self.read: set[int] = set()
        self.numbers: dict[int, None] = {}
        self.number_lists: dict[int, None] = {}
        self.lines: list[str] = []
        for at, step in enumerate(call.steps):
            # A chain has only operations whose results have the dtypes of their first list
            # (`passes/foreach_chains.py`).
            first = step.operands[0]
            assert isinstance(first, Lists)
            dtype = self.computed[first.at] if first.computed else dtypes[first.at]
            named = {name: self._word(operand) for name, operand in step.named}
            # A list that is only overwritten need not be loaded.
            used = step.operands[1:] if step.op in UNREAD else step.operands
            value = EXPRESSIONS[step.op](*(self._word(operand) for operand in used), **named)
            # As if it had gone through memory: fusing a chain must not change its results.
            self.lines.append(f"step{at} = {rounded(f'({value})', dtype)}")
            self.computed.append(dtype)

    def _word(self, operand: Operand) -> str:
        if isinstance(operand, Lists):
            if operand.computed:
                # A register of the same block: no traffic between the steps of a chain.
                return f"step{operand.at}"
            self.read.add(operand.at)
            return f"list{operand.at}"
        if isinstance(operand, Scalars):
            argument = self.arguments[operand.at]
            # A list of numbers may have been moved into a 1-d tensor (`passes/scalars_to_memory.py`).
            many = isinstance(argument, (list, tuple)) or (isinstance(argument, torch.Tensor) and argument.dim() == 1)
            # A dictionary as an ordered set: arguments of the kernel come in the order of use.
            (self.number_lists if many else self.numbers)[operand.at] = None
            return f"scalar{operand.at}"
        # A number of the graph is part of the text. ATen converts it to float32 (`opmath_t`) in the same way.
        return float32_literal(operand)


def _lerp(a: str, b: str, weight: str) -> str:
    """Linear interpolation from the nearer end, as ATen computes it: exact at both ends."""
    weight = f"({weight} + tl.zeros_like({a}))"
    near = f"tl.fma({b} - {a}, {weight}, {a})"
    far = f"tl.fma({b} - {a}, {weight} - 1.0, {b})"
    return f"tl.where(tl.abs({weight}) < 0.5, {near}, {far})"


# Correctly rounded, as ATen's division is.
def _divided(a: str, b: str) -> str:
    return f"tl.div_rn({a}, {b} + tl.zeros_like({a}))"


def _sum(a: str, b: str, alpha: str = "1.0") -> str:
    # ATen writes a + alpha * b, which its compiler contracts to this.
    return f"tl.fma({b}, {alpha}, {a})"


# Steps that overwrite their first operand without reading it.
UNREAD = frozenset({aten._foreach_copy.default, aten._foreach_zero.default})

# The keys are also the list of what a chain may consist of (`passes/foreach_chains.py`). Powers, exponentials and the
# like are missing: Triton's differ from ATen's in the last bits.
EXPRESSIONS: dict[OpOverload, Callable[..., str]] = {
    aten._foreach_add.List: _sum,
    aten._foreach_add.Scalar: lambda a, b: f"{a} + {b}",
    aten._foreach_add.ScalarList: lambda a, b: f"{a} + {b}",
    aten._foreach_add.Tensor: _sum,
    aten._foreach_sub.List: lambda a, b, alpha="1.0": f"tl.fma({b}, -{alpha}, {a})",
    aten._foreach_sub.Scalar: lambda a, b: f"{a} - {b}",
    aten._foreach_mul.List: lambda a, b: f"{a} * {b}",
    aten._foreach_mul.Scalar: lambda a, b: f"{a} * {b}",
    aten._foreach_mul.ScalarList: lambda a, b: f"{a} * {b}",
    aten._foreach_mul.Tensor: lambda a, b: f"{a} * {b}",
    aten._foreach_div.List: _divided,
    aten._foreach_div.Scalar: _divided,
    aten._foreach_div.ScalarList: _divided,
    aten._foreach_div.Tensor: _divided,
    aten._foreach_lerp.Scalar: _lerp,
    aten._foreach_addcmul.Scalar: lambda a, b, c, value="1.0": f"tl.fma({b} * {c}, {value}, {a})",
    aten._foreach_addcmul.ScalarList: lambda a, b, c, value: f"tl.fma({b} * {c}, {value}, {a})",
    aten._foreach_addcdiv.Scalar: lambda a, b, c, value="1.0": f"tl.fma(tl.div_rn({b}, {c}), {value}, {a})",
    aten._foreach_addcdiv.ScalarList: lambda a, b, c, value: f"tl.fma(tl.div_rn({b}, {c}), {value}, {a})",
    # NaN wins, as in torch.
    aten._foreach_maximum.List: lambda a, b: f"tl.maximum({a}, {b}, propagate_nan=tl.PropagateNan.ALL)",
    aten._foreach_sqrt.default: lambda a: f"tl.sqrt_rn({a})",
    # Not ``-a``, which Triton 3.6 computes as ``0 - a``: a zero would lose its sign.
    aten._foreach_neg.default: lambda a: f"{a} * -1.0",
    aten._foreach_abs.default: lambda a: f"tl.abs({a})",
    aten._foreach_reciprocal.default: lambda a: f"tl.div_rn(tl.full([BLOCK], 1.0, tl.float32), {a})",
    aten._foreach_copy.default: lambda a: a,
    aten._foreach_zero.default: lambda: "tl.zeros([BLOCK], tl.float32)",
}
