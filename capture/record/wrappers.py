"""Wraps of modules inside a step, and training through torch's DistributedDataParallel, which are refused.

Wrapping is done once, before the first step: Python code of a step runs when it is captured, not at every call. torch's
wrappers and its `context_parallel` also resize the memory of parameters and buffers, which no graph can do.
DistributedDataParallel reduces gradients in C++, from buckets of its own.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from weft import thread_patches
from weft.argument_checks import ArgumentChecks
from weft.capture.user_code import user_line
from weft.errors import UncapturableWrapper, WrappedInStep

_TO_WEFT = "use weft.fully_shard, once and before the step"
# Where a wrapper is defined: module, function (or class and method), what it is called in a message, the remedy.
_FUNCTIONS = (
    ("torch.distributed.fsdp", "fully_shard", "torch.distributed.fsdp.fully_shard", _TO_WEFT),
    (
        "torch.distributed.tensor.experimental",
        "context_parallel",
        "torch.distributed.tensor.experimental.context_parallel",
        "shard the sequence before the step, and gather keys and values in the attention",
    ),
)
_CLASSES = (
    ("torch.distributed.fsdp", "FullyShardedDataParallel", _TO_WEFT),
    ("torch.nn.parallel", "DistributedDataParallel", "use weft.replicate, once and before the step"),
)
_OF_WEFT = ("weft.distributed.fsdp.api", "weft.distributed.ddp.replicate")


@contextlib.contextmanager
def wrapping_refused() -> Iterator[None]:
    """Inside, the thread that captures cannot wrap a module, enter `context_parallel`, or compute with a module in a
    DistributedDataParallel that reduces the gradients.

    Raises:
        WrappedInStep: it wraps a module, or enters `context_parallel`.
        UncapturableWrapper: it computes with such a module.
    """
    with contextlib.ExitStack() as stack:
        for module, name, called, remedy in _FUNCTIONS:
            function = getattr(sys.modules.get(module), name, None)
            if function is not None:
                # References that were imported before lead to the same inner function.
                inner = thread_patches.original(function.__wrapped__)
                for cell in function.__closure__:
                    if thread_patches.original(cell.cell_contents) is inner:
                        stack.enter_context(thread_patches.replaced(cell, "cell_contents", _refusal(called, remedy)))
        for module, name, remedy in _CLASSES:
            wrapper = getattr(sys.modules.get(module), name, None)
            if wrapper is not None:
                refusal = _refusal(f"{module}.{name}", remedy)
                stack.enter_context(thread_patches.replaced(wrapper, "__init__", refusal))
        ddp = nn.parallel.DistributedDataParallel
        refusing = _without_reduction(thread_patches.original(ddp._pre_forward))
        stack.enter_context(thread_patches.replaced(ddp, "_pre_forward", refusing))
        for module in _OF_WEFT:
            if module in sys.modules:
                stack.enter_context(thread_patches.replaced(sys.modules[module], "wrapped_modules", _refuse_of_weft))
        yield


def _refuse_of_weft(checks: ArgumentChecks, *_args: Any) -> NoReturn:
    raise WrappedInStep(f"weft.{checks.function}", user_line(), "call it once, before the step")


def _without_reduction(pre_forward: Callable[..., Any]) -> Callable[..., Any]:
    """What a DistributedDataParallel does before its forward, where no gradients are reduced after it."""

    def refusing(self: nn.parallel.DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            name = "torch.nn.parallel.DistributedDataParallel"
            raise UncapturableWrapper("the model", name, "use weft.replicate on the module inside it")
        return pre_forward(self, *args, **kwargs)

    return refusing


def _refusal(called: str, remedy: str) -> Callable[..., Any]:
    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise WrappedInStep(called, user_line(), remedy)

    return refuse
