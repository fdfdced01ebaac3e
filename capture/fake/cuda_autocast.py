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

from weft import torch_adapter
from weft.torch_adapter import OpOverload

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

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Cast = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Arguments | None]


@contextlib.contextmanager
def cuda_autocast_rules() -> Iterator[None]:
    """Inside, what is listed above follows CUDA's rules where autocast is enabled for "cuda". That of the CPU alone has
    its own rules, as before."""
    library = torch.library.Library("aten", "IMPL")  # its rules are removed when it is deleted
    try:
        for names, cast in ((_FLOAT32, _to_float32), (_FLOAT32_BY_DEFAULT, _by_default), (_WIDEST, _to_widest)):
            for name in names:
                packet, _, overload = name.partition(".")
                op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
                if op is not None and not torch_adapter.cpu_autocast_casts(name):
                    kernel = torch_adapter.autocast_kernel(op, _if_enabled(cast))
                    library.impl(name, kernel, "AutocastCPU", with_keyset=True)
        yield
    finally:
        del library


def _if_enabled(cast: Cast) -> Cast:
    return lambda op, args, kwargs: cast(op, args, kwargs) if torch.is_autocast_enabled("cuda") else None


def _is_cast(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype is not torch.float64


def _in(dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    cast = lambda tensor: tensor.to(dtype) if _is_cast(tensor) else tensor
    return torch_adapter.map_leaves(torch.Tensor, cast, (args, kwargs))


def _to_float32(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    return _in(torch.float32, args, kwargs)


def _by_default(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    at = next(at for at, argument in enumerate(op._schema.arguments) if argument.name == "dtype")
    given = args[at] if at < len(args) else kwargs.get("dtype")
    if given is not None or not _is_cast(args[0]):
        return None
    return args[:at], {**kwargs, "dtype": torch.float32}


def _to_widest(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    tensors = [each for each in torch_adapter.flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
    found = [tensor.dtype for tensor in tensors if _is_cast(tensor)]
    return _in(torch.float32 if torch.float32 in found else found[0], args, kwargs) if found else None
