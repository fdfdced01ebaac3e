"""CUDA's autocast for tensors on the CPU: inside a fake world an operation gets the dtype that it gets on a GPU.

The tensors of a fake world are on the CPU, where ``torch.autocast("cuda")`` would do nothing, so the CPU's autocast
stands for it (:mod:`weft.capture.fake.fake_cuda`). Both cast the same matrix products and convolutions down. CUDA's
casts more operations up: layer norm, softmax, sums, exponentials and others run in float32, and their results are kept
so. The rules for these are registered here. The lists are those of ATen/autocast_mode.h and of the table in
docs.pytorch.org/docs/stable/amp.html.

Left as on a CPU: what only the CPU's autocast runs in float32 (``torch.fft``, ``torch.linalg``, paddings, pooling in
three dimensions, ``quantile``), and its casts of ``torch.cat`` and ``torch.stack`` to the widest dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only

from weft import torch_adapter

# In float32.
_FLOAT32 = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "reciprocal", "rsqrt"),
    *("sinh", "tan", "softplus", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar"),
    *("layer_norm", "native_layer_norm", "group_norm", "cosine_similarity", "dist", "pdist", "renorm", "logsumexp"),
    *("frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "norm.Scalar", "norm.ScalarOpt_dim"),
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d"),
    *("upsample_bicubic2d", "upsample_trilinear3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d"),
    *("_upsample_nearest_exact3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
)
# In float32 where the caller asks for no dtype.
_FLOAT32_BY_DEFAULT = (
    *("softmax.int", "log_softmax.int", "cumsum", "cumprod", "sum", "sum.dim_IntList"),
    *("linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord"),
)
# In the widest dtype of their operands.
_WIDEST = ("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "index_put", "tensordot", "scatter_add")

Cast = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


@contextlib.contextmanager
def cuda_autocast_rules() -> Iterator[None]:
    """Inside, what is listed above follows CUDA's rules where autocast is enabled for "cuda". That of the CPU alone has
    its own rules, as before."""
    rules = torch_adapter.AutocastRules()
    try:
        for names, cast in ((_FLOAT32, _to_float32), (_FLOAT32_BY_DEFAULT, _by_default), (_WIDEST, _to_widest)):
            for name in names:
                rules.add(name, _rule(cast))
        yield
    finally:
        rules.remove()


def _rule(cast: Cast) -> torch_adapter.AutocastRule:
    def rule(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return cast(op, args, kwargs) if torch.is_autocast_enabled("cuda") else (args, kwargs)

    return rule


def _is_cast(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype is not torch.float64


def _in(dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda each: each.to(dtype) if _is_cast(each) else each, (args, kwargs))


def _to_float32(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _in(torch.float32, args, kwargs)


def _by_default(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    at = next(at for at, argument in enumerate(op._schema.arguments) if argument.name == "dtype")
    given = args[at] if at < len(args) else kwargs.get("dtype")
    if given is not None or not _is_cast(args[0]):
        return args, kwargs
    return args[:at], {**kwargs, "dtype": torch.float32}


def _to_widest(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found: list[torch.dtype] = []
    tree_map_only(torch.Tensor, lambda each: found.append(each.dtype) if _is_cast(each) else None, (args, kwargs))
    return _in(torch.float32 if torch.float32 in found else found[0], args, kwargs) if found else (args, kwargs)
