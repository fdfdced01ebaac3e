"""Functions of torch's that want sizes as integers of C, where an operation with symbolic sizes gives the same.

``F.one_hot(x, n)`` and ``F.interpolate(x, n)`` are several operations in C++, which torch fixes to one size before it
calls the first of them. They are called here one by one. ``torch.linspace(a, b, n)`` is an operation that has no
symbolic form; only its fake result needs one (:mod:`weft.capture.fake.fake_rules`).

In torch 2.11 products of matrices want the sizes of their operands so, and a cross entropy with probabilities.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.record.operands import tensors_in
from weft.capture.record.recorder import OpRecorder
from weft.capture.record.selected_parts import number_of

aten, nn_functions = torch.ops.aten, torch.nn.functional
_UPSAMPLING = (
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d"),
    *("upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
    *(f"_upsample_nearest_exact{rank}d" for rank in (1, 2, 3)),
)


def one_hot(recorder: OpRecorder, tensor: torch.Tensor, num_classes: Any = -1) -> torch.Tensor | None:
    """As eager does it. For fake tensors, torch compares with all classes instead, and has no error for a wrong one."""
    if type(num_classes) is int and num_classes == -1 and type(count := tensor.numel()) is int and count:
        num_classes = int(tensor.max().item()) + 1  # a branch
    num_classes = number_of(num_classes)
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
    if named or factors is not None or size is None:
        return None
    size = list(map(number_of, size))
    if not any(isinstance(each, torch.SymInt) for each in size):
        return None
    return operation(x, size, *corners)


def split_at(
    recorder: OpRecorder, x: torch.Tensor, at: Any = None, dim: int = 0, **named: Any
) -> tuple[torch.Tensor, ...] | None:
    """``tensor_split`` at the numbers of a 1-D tensor, which torch reads in C++."""
    at = named.pop("tensor_indices_or_sections", at)
    if named or not isinstance(at, torch.Tensor) or at.dim() != 1 or at.dtype != torch.int64 or at.device.type != "cpu":
        return None
    return x.tensor_split(at.tolist(), dim)


def spaced(
    operation: Any, recorder: OpRecorder, start: Any, end: Any, steps: Any = None, *base: Any, **options: Any
) -> torch.Tensor | None:
    """``torch.linspace`` and ``torch.logspace`` of a symbolic number of steps."""
    made = {"dtype": options.pop("dtype", None), "device": options.pop("device", None) or torch.get_default_device()}
    numbers, steps = (int, float, torch.SymInt, torch.SymFloat), number_of(steps)
    if options or type(steps) is not torch.SymInt or not all(isinstance(each, numbers) for each in (start, end, *base)):
        return None
    with torch_adapter.only_mode(recorder.fake_mode):  # as below the recorder
        return recorder.__torch_dispatch__(operation, (), (start, end, steps, *base), made)


def by_rule_in_python(function: Any, recorder: OpRecorder, *args: Any, **kwargs: Any) -> torch.Tensor | None:
    """A product of matrices, some of symbolic sizes, of the same operations as in C++."""
    if not _has_symbolic_sizes(args, kwargs):
        return None
    with torch_adapter.python_rules():
        product: torch.Tensor = function(*args, **kwargs)
    return product


def attention(recorder: OpRecorder, *args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Attention may be two products. The rule in Python for a dropout between them draws other random numbers."""
    if args[4] if len(args) > 4 else kwargs.get("dropout_p"):
        return None
    return by_rule_in_python(nn_functions.scaled_dot_product_attention, recorder, *args, **kwargs)


def cross_entropy(
    recorder: OpRecorder,
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """With probabilities as targets, as in ATen/native/LossNLL.cpp. Autocast casts for the whole of it."""
    plain = size_average is reduce is None and reduction in ("none", "mean", "sum") and 0 <= label_smoothing <= 1
    if not plain or torch.is_autocast_enabled(input.device.type) or not _has_symbolic_sizes((input, target), {}):
        return None
    if not target.is_floating_point() or not input.dim() or input.shape != target.shape:
        return None
    dim = min(input.dim() - 1, 1)
    classes = input.shape[dim]
    if type(classes) is not int or not classes or (weight is not None and weight.shape != (classes,)):
        return None
    if label_smoothing > 0:
        target = target * (1 - label_smoothing) + label_smoothing / classes
    terms = input.log_softmax(dim, input.dtype) * target
    if weight is not None:
        terms = terms * weight.view([classes if at == dim else 1 for at in range(input.dim())])
    if reduction == "none":
        return -terms.sum(dim)
    return -terms.sum() / (input.numel() // classes) if reduction == "mean" else -terms.sum()


def _has_symbolic_sizes(args: Any, kwargs: dict[str, Any]) -> bool:
    sizes = (size for each in tensors_in((args, kwargs)) for size in each.shape)
    return any(isinstance(size, torch.SymInt) for size in sizes)


_OF_INTEGERS: dict[Any, Callable[..., torch.Tensor | None]] = {
    nn_functions.cross_entropy: cross_entropy,
    nn_functions.scaled_dot_product_attention: attention,
    **{
        function: functools.partial(by_rule_in_python, function)
        for function in (
            *(torch.matmul, torch.linalg.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__),
            *(torch.Tensor.__rmatmul__, nn_functions.linear),
            *(torch.matrix_power, torch.linalg.matrix_power, torch.Tensor.matrix_power),
        )
    },
}

Handler = Callable[..., torch.Tensor | tuple[torch.Tensor, ...] | None]
SIZE_FUNCTIONS: dict[Any, Handler] = {
    nn_functions.one_hot: one_hot,
    torch.tensor_split: split_at,
    torch.Tensor.tensor_split: split_at,
    torch.linspace: functools.partial(spaced, aten.linspace.default),
    torch.logspace: functools.partial(spaced, aten.logspace.default),
    **{
        getattr(torch_adapter.nn_functions, name): functools.partial(upsample, getattr(aten, name).default)
        for name in _UPSAMPLING
    },
    **(_OF_INTEGERS if torch_adapter.COMPOSITES_WANT_INTEGERS else {}),
}


def calls_size_function(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether it is a function of torch's in Python that calls one of these, with symbolic sizes: an interpolation to a
    symbolic size, attention with several heads."""
    if function is nn_functions.multi_head_attention_forward:
        return torch_adapter.COMPOSITES_WANT_INTEGERS and _has_symbolic_sizes(args, kwargs)
    if function is not nn_functions.interpolate:
        return False
    size = args[1] if len(args) > 1 else kwargs.get("size")
    return any(
        isinstance(each, (torch.SymInt, torch.Tensor))
        for each in (size if isinstance(size, (list, tuple)) else (size,))
    )
