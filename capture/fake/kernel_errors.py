"""The error with which the kernel of an operation refuses its operands, in the place of that of the fake rule.

Torch's rules for fake tensors say in other words what is wrong, and some raise exceptions of other classes: a step that
catches them would go another way than eager does. So the kernel of the CPU is run on zeros of the same sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft import torch_adapter
from weft.capture.user_code import user_line
from weft.errors import CannotCapture, UncapturableLayout
from weft.torch_adapter import OpOverload

# Other classes below these are of torch's tracer.
REFUSALS = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError)
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.layout, torch.memory_format)
_MOST_BYTES = 2**26  # of all operands, which are allocated and cleared


class _UnknownOperand(Exception):
    """An operand that cannot be made again."""


def kernel_error(error: Exception, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception:
    """What the kernel raises where the fake rule of ``op`` raised ``error``, or ``error`` where that is not known.

    Symbolic sizes and numbers among the operands become plain ones, with a guard on each: the kernel shows them.
    """
    if type(error) not in REFUSALS or op.namespace != "aten":
        return error
    with torch_adapter.only_mode(), torch.no_grad(), torch.random.fork_rng(devices=()):
        try:
            real = _Operands()
            operands = real.of(args), {name: real.of(value) for name, value in kwargs.items()}
        except _UnknownOperand:
            return error
        try:
            made = op(*operands[0], **operands[1])
        except REFUSALS as found:
            return found.with_traceback(error.__traceback__)  # an error of the operation's, not of this file's
    if isinstance(made, torch.Tensor) and made.layout is not torch.strided:
        return UncapturableLayout(str(op), made.layout, user_line())  # some versions of torch have a rule for it
    if isinstance(error, NotImplementedError):
        return CannotCapture(user_line(), f"torch has no rule for the result of {op}", "Move it out of the step")
    return error


class _Operands:
    """Real operands in the place of fake ones."""

    def __init__(self) -> None:
        self._bytes = 0

    def of(self, value: Any) -> Any:
        """The real operand for one, or those for the ones in a list."""
        if isinstance(value, FakeTensor):
            return self._zeros(value)
        if isinstance(value, (list, tuple)):
            return [self.of(each) for each in value]
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if isinstance(value, _NUMBERS):
            return self._number(value)
        if isinstance(value, _PLAIN):
            return value
        raise _UnknownOperand

    def _zeros(self, fake: FakeTensor) -> torch.Tensor:
        if fake.layout is not torch.strided:
            raise _UnknownOperand
        sizes, strides = ([self._number(each) for each in layout] for layout in (fake.shape, fake.stride()))
        elements = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        self._bytes += elements * fake.element_size()
        if self._bytes > _MOST_BYTES:
            raise _UnknownOperand
        return torch.empty_strided(sizes, strides, dtype=fake.dtype).zero_()

    def _number(self, value: Any) -> Any:
        if not isinstance(value, _NUMBERS):
            return value
        if not value.node.has_hint():
            raise _UnknownOperand
        return value.node.pytype(value)
