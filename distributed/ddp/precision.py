"""Compute in lower precision while the parameters stay as they are.

For the time of a forward, each managed parameter is replaced in its module by a cast of it. The cast is an
ordinary operation of autograd, so the parameter remains the leaf: its gradient and its hooks are in its own
dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from weft import torch_adapter
from weft.distributed.ddp.slots import ModuleSlot


class ParameterCast:
    """Casts the floating-point parameters in `slots` to `dtype` while a managed module runs its forward.

    Every module has the hooks and the outermost one that runs does the work: usually the wrapped module, but
    a part of it when activation checkpointing runs that part again during backward. A parameter used in
    several places is cast once.
    """

    def __init__(self, slots: Sequence[ModuleSlot], modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._running: list[nn.Module] = []
        self._replaced: list[tuple[ModuleSlot, torch.Tensor]] = []
        by_owner: dict[nn.Module, list[ModuleSlot]] = {}
        for slot in slots:
            by_owner.setdefault(slot.owner, []).append(slot)
        self._under = {m: [s for part in m.modules() for s in by_owner.get(part, ())] for m in modules}

    def install(self) -> None:
        """Register the forward hooks that put cast tensors in the place of parameters during forward."""
        for module in self._under:
            module.register_forward_pre_hook(self._enter, prepend=True)
            # Also when forward raises: checkpointing stops a second forward early with an exception.
            module.register_forward_hook(self._leave, always_call=True)

    def reset(self) -> None:
        """Put the parameters back after an exception left the forward of a part that is no hook's business."""
        self._running.clear()
        self._restore()

    def _enter(self, module: nn.Module, _args: Any) -> None:
        if not self._running:
            self._replace(self._under[module])
        self._running.append(module)

    def _leave(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if self._running and self._running[-1] is module:
            self._running.pop()
        if not self._running:
            self._restore()

    def _replace(self, slots: Iterable[ModuleSlot]) -> None:
        casts: dict[torch.Tensor, torch.Tensor] = {}
        for slot in slots:
            param = slot.get()
            if param is None or not param.is_floating_point() or param.dtype == self._dtype:
                continue
            if param not in casts:
                casts[param] = param.to(self._dtype)
            self._replaced.append((slot, param))
            _put(slot, casts[param])

    def _restore(self) -> None:
        for slot, param in self._replaced:
            _put(slot, param)
        self._replaced.clear()


def _put(slot: ModuleSlot, tensor: torch.Tensor) -> None:
    # Not setattr: it refuses a tensor that is not a Parameter in the place of one.
    slot.owner._parameters[slot.name] = tensor  # type: ignore[assignment]
    if isinstance(slot.owner, nn.RNNBase):
        torch_adapter.refresh_rnn_weights(slot.owner)
