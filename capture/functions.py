"""Torch functions whose meaning would be lost between Python and the dispatcher.

Most of what a step does arrives at the dispatcher and is recorded there. A few things do not: they read or replace the
memory of a tensor in C++. A function mode sees them first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from weft import torch_adapter
from weft.capture.recorder import Alias, Recorder
from weft.capture.user_code import user_line
from weft.errors import NumpyOnTensor, UncapturableMutation

_TO_NUMPY = (torch.Tensor.numpy, torch.Tensor.__array__)
_FUSED = tuple(
    getattr(torch, name)
    for name in ("_fused_adamw_", "_fused_adam_", "_fused_sgd_", "_fused_adagrad_")
    if hasattr(torch, name)
)


def to_list(tensor: torch.Tensor) -> list[Any]:
    """The numbers of a 1-D tensor as Python numbers: one copy to the host however long it is."""
    return tensor.tolist()


class CaptureFunctions(TorchFunctionMode):
    """Active around a capture, above the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._tags = 0

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.tolist and args[0].dim() == 1:
            return self._to_list(args[0])
        if func in _TO_NUMPY:
            raise NumpyOnTensor(user_line())
        if func == _SET_DATA:
            return self._set_data(*args)
        if func in _FUSED and isinstance(kwargs.get("lr"), torch.SymFloat):
            kwargs = {**kwargs, "lr": self._tag(kwargs["lr"])}
        return func(*args, **kwargs)

    def _to_list(self, tensor: torch.Tensor) -> list[Any]:
        """One node for the whole list; each number becomes a symbol of its own."""
        recorder = self._recorder
        length = tensor.shape[0]
        if not isinstance(length, int):
            return tensor.tolist()
        values = [torch_adapter.fresh_number(recorder.symbols.shape_env, tensor.dtype) for _ in range(length)]
        node = recorder.effect(to_list, tensor, val=values)
        for at, value in enumerate(values):
            recorder.symbols.define(value, lambda at=at, value=value: recorder.pick(node, at, value))
        recorder.take_pending_symbols()
        return values

    def _set_data(self, target: torch.Tensor, value: torch.Tensor) -> None:
        """``target.data = value``: target keeps its identity and hooks, and shares the memory of value from here on."""
        recorder = self._recorder
        source = recorder.alias(value)
        if source.val.shape != target.shape or source.val.dtype != target.dtype:
            raise UncapturableMutation(
                f"`tensor.data = ...` with another shape or dtype at {user_line()}; assign a new tensor instead"
            )
        alias = Alias(source.buffer, recorder.read(source), source.val, source.parent, source.replay)
        alias.version = source.buffer.version
        if isinstance(target, FakeTensor):
            target._weft_alias = alias  # type: ignore[attr-defined]
        else:
            recorder.redirect(target, alias)

    def _tag(self, rate: torch.SymFloat) -> float:
        """A float that no program uses, to carry a symbolic number through an argument that must be a C double.

        The fused optimizers take lr as a double, which would fix the symbol to its present value. Denormals near the
        smallest one are safe as marks; the recorder turns them back.
        """
        self._tags += 1
        tag = self._tags * 5e-324
        self._recorder.float_tags[tag] = rate
        return tag


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
