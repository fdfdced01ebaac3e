"""Functions of torch's that want sizes as integers of C, where an operation with symbolic sizes gives the same.

``F.one_hot(x, n)`` and ``F.interpolate(x, n)`` are several operations in C++, which torch fixes to one size before it
calls the first of them. They are called here one by one. ``torch.linspace(a, b, n)`` is an operation that has no
symbolic form; only its fake result needs one (:mod:`weft.capture.fake.fake_rules`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.record.recorder import OpRecorder

aten = torch.ops.aten
_UPSAMPLING = (
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d"),
    *("upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
    *(f"_upsample_nearest_exact{rank}d" for rank in (1, 2, 3)),
)


def one_hot(recorder: OpRecorder, tensor: torch.Tensor, num_classes: Any = -1) -> torch.Tensor | None:
    """As eager does it. For fake tensors, torch compares with all classes instead, and has no error for a wrong one."""
    if type(num_classes) is int and num_classes == -1 and type(count := tensor.numel()) is int and count:
        num_classes = int(tensor.max().item()) + 1  # a branch
    plain = type(num_classes) is int and num_classes >= 0
    if not (plain or type(num_classes) is torch.SymInt) or tensor.dtype != torch.int64:
        return None
    found = torch.zeros((*tensor.shape, num_classes), dtype=tensor.dtype, device=tensor.device)
    return found.scatter_(-1, tensor.unsqueeze(-1), 1)


def upsample(
    operation: Any, recorder: OpRecorder, x: torch.Tensor, size: Any, *options: Any, **named: Any
) -> torch.Tensor | None:
    """The upsampling of C++ to a size, without factors; ``options`` are those and whether corners are aligned."""
    *corners, factors = options or (None,)
    if named or factors is not None or size is None or not any(isinstance(each, torch.SymInt) for each in size):
        return None
    return operation(x, size, *corners)


def spaced(
    operation: Any, recorder: OpRecorder, start: Any, end: Any, steps: Any = None, *base: Any, **options: Any
) -> torch.Tensor | None:
    """``torch.linspace`` and ``torch.logspace`` of a symbolic number of steps."""
    made = {"dtype": options.pop("dtype", None), "device": options.pop("device", None) or torch.get_default_device()}
    numbers = (int, float, torch.SymInt, torch.SymFloat)
    if options or type(steps) is not torch.SymInt or not all(isinstance(each, numbers) for each in (start, end, *base)):
        return None
    with torch_adapter.only_mode(recorder.fake_mode):  # as below the recorder
        return recorder.__torch_dispatch__(operation, (), (start, end, steps, *base), made)


Handler = Callable[..., torch.Tensor | None]
SIZE_FUNCTIONS: dict[Any, Handler] = {
    torch.nn.functional.one_hot: one_hot,
    torch.linspace: functools.partial(spaced, aten.linspace.default),
    torch.logspace: functools.partial(spaced, aten.logspace.default),
    **{
        getattr(torch_adapter.nn_functions, name): functools.partial(upsample, getattr(aten, name).default)
        for name in _UPSAMPLING
    },
}


def is_resized(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether it is an interpolation to a symbolic size."""
    if function is not torch.nn.functional.interpolate:
        return False
    size = args[1] if len(args) > 1 else kwargs.get("size")
    return any(isinstance(each, torch.SymInt) for each in (size if isinstance(size, (list, tuple)) else (size,)))
