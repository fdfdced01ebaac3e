"""Fake rules of operations whose rule in torch differs from their kernels.

A fake rule computes the sizes, strides and dtype of an operation's result. Where torch's is too strict, the capture
would refuse a step that runs. Where it gives other strides than the kernel, the step would record a view of a result
that cannot be viewed so, because ``reshape`` asks the strides whether it must copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft import torch_adapter
from weft.capture.fake.gpu_rules import GPU_RULES
from weft.capture.user_code import user_line
from weft.errors import CannotCapture
from weft.torch_adapter import OpOverload

aten = torch.ops.aten

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of dimensions


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Kernels of grouped GEMMs accept float32 and float16 too; torch's rule accepts only bfloat16."""
    half = torch.bfloat16
    out = aten._grouped_mm.default(a.to(half), b.to(half), *args, **kwargs)
    return out if a.dtype == half else out.to(a.dtype, memory_format=torch.preserve_format)


def _bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where there is nothing to multiply, the kernel accepts two dtypes and returns the second; torch's rule does
    not."""
    sizes = (*a.shape, *b.shape)
    empty = all(isinstance(size, int) for size in sizes) and 0 in sizes
    return aten.bmm.default(a.to(b.dtype) if empty else a, b)


def _loss_backward(op: OpOverload) -> Callable[..., torch.Tensor]:
    """The backward of a loss: torch's rule divides by the number of elements, which may be 0. The kernel's result is
    contiguous."""

    def rule(grad: torch.Tensor, values: torch.Tensor, *args: Any) -> torch.Tensor:
        empty = all(isinstance(size, int) for size in values.shape) and 0 in values.shape
        out = values if empty else op(grad, values, *args)
        return torch.empty_like(out, memory_format=torch.contiguous_format)

    return rule


def _strides_of(op: OpOverload, *operands: int) -> Callable[..., torch.Tensor]:
    """Strides as TensorIterator takes them from these operands in this order; torch's rule takes another order."""

    def rule(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = op(*args, **kwargs)
        first, *rest = (args[at] for at in operands)
        # The rule of a product is TensorIterator's.
        model = aten.mul.Tensor(first, rest[0]) if rest and isinstance(rest[0], torch.Tensor) else first
        if model.shape != out.shape or model.stride() == out.stride():
            return out
        return torch.empty_like(model, dtype=out.dtype)

    return rule


def _broadcasting(op: OpOverload) -> Callable[..., torch.Tensor]:
    """Torch's rule cannot broadcast operands whose sizes are symbolic."""

    def rule(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        if not all(isinstance(size, int) for tensor in tensors for size in tensor.shape):
            first, *others = torch.broadcast_tensors(*tensors)
            args = (args[0] if op._schema.is_mutable else first, *others, *args[len(tensors) :])
        return op(*args, **kwargs)

    return rule


def _contiguous(op: OpOverload) -> Callable[..., torch.Tensor]:
    """A contiguous result; torch's rule keeps the strides of the operands."""

    def rule(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = op(*args, **kwargs)
        return torch.empty_like(out, memory_format=torch.contiguous_format)

    return rule


def _log_sigmoid(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The CPU's kernel makes a contiguous result, the GPU's keeps the strides."""
    out, buffer = aten.log_sigmoid_forward.default(x)
    keep = torch.contiguous_format if x.device.type == "cpu" else torch.preserve_format
    return torch.empty_like(out, memory_format=keep), buffer


def _ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, sizes: Any, target_sizes: Any, *args: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses, and the log probabilities of all prefixes of the longest target, with blanks between."""
    steps, batch, _ = log_probs.shape
    if isinstance(target_sizes, torch.Tensor):
        width = cast(
            Any, torch_adapter.fresh_number(torch_adapter.shape_env_of(cast(Any, log_probs).fake_mode), torch.int64)
        )
        torch._check(width >= 1)
    else:
        width = 2 * max(target_sizes) + 1
    return log_probs.new_empty((batch,)), log_probs.new_empty((batch, steps, width))


def _ctc_loss_backward(grad: torch.Tensor, log_probs: torch.Tensor, *args: Any) -> torch.Tensor:
    """The gradient of the log probabilities."""
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _pack_padded_sequence(x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, ...]:
    """As many rows as the lengths have together, and a batch size, on the CPU, for each step of the longest sequence.
    Torch's rule gives other sizes, and the dtype of the rows for the batch sizes."""
    shape_env = torch_adapter.shape_env_of(cast(Any, x).fake_mode)
    rows, steps = (cast(Any, torch_adapter.fresh_number(shape_env, torch.int64)) for _ in range(2))
    for size in (rows, steps):
        torch._check(size >= 1)
    return x.new_empty((rows, *x.shape[2:])), torch.empty((steps,), dtype=torch.int64, device="cpu")


def _dropout(*args: Any) -> torch.Tensor:
    """The operand itself where nothing is dropped, as of the kernel; torch's rule copies it."""
    return torch_adapter.run_composite(aten.dropout.default, args, {})


def _native_attention(*args: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The kernel makes no weights where none are wanted; torch's rule does."""
    out, weights = aten._native_multi_head_attention.default(*args)
    wants_weights = len(args) < 11 or args[10]
    return out, weights if wants_weights else None


def _lstsq(a: torch.Tensor, b: torch.Tensor, *args: Any, driver: str | None = None) -> tuple[torch.Tensor, ...]:
    """Torch has no rule. Two drivers tell how large the residuals are by the rank, which only the data decides."""
    driver = driver or ("gelsy" if a.device.type == "cpu" else "gels")
    if driver not in ("gelsy", "gels"):
        return aten.linalg_lstsq.default(a, b, *args, driver=driver)
    vector = b.dim() == 1 or (a.dim() - 1 == b.dim() and a.shape[:-1] == b.shape)
    columns = 1 if vector else b.shape[-1]
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-1] if vector else b.shape[:-2])
    rows, unknowns = a.shape[-2:]
    # LAPACK computes in columns as long as the longer side; the solution is the beginning of each.
    longer: Any = torch.sym_max(rows, unknowns)
    solution = a.new_empty((*batch, columns, longer)).mT.narrow(-2, 0, unknowns)
    has_residuals = driver == "gels" and rows > unknowns
    residuals = a.new_empty((*batch, columns) if has_residuals else (0,))
    rank = a.new_empty((0,) if driver == "gels" else a.shape[:-2], dtype=torch.int64)
    return solution.squeeze(-1) if vector else solution, residuals, rank, a.new_empty((0,))


def _nested_tensor(*args: Any) -> torch.Tensor:
    """An encoder of torch's leaves out the padding in eager, which only the data places."""
    why = "nn.TransformerEncoder makes a nested tensor of the part that the padding mask leaves"
    raise CannotCapture(user_line(), why, "Give it enable_nested_tensor=False")


def _slice(x: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> torch.Tensor:
    """Torch's rule asks whether the end lies behind that of the tensor, also where it cannot lie before it: the
    last rows of a loop over ``x[at : at + 4]`` would be two forms."""
    if isinstance(end, int) and isinstance(x.shape[dim], torch.SymInt) and torch_adapter.is_sure(x.shape[dim] <= end):
        end = None
    return aten.slice.Tensor(x, dim, start, end, step)


def _select(x: torch.Tensor, dim: int, index: Any) -> torch.Tensor:
    """torch 2.11 does not ask whether a number that changes from call to call is in range."""
    known = isinstance(index, torch.SymInt) and index.node.has_hint() and x.dim()
    if known and (index >= x.shape[dim] or index < -x.shape[dim]):
        raise IndexError(f"select(): index {index} is out of range for dimension {dim}")
    return aten.select.int(x, dim, index)


def _unbind(x: torch.Tensor, dim: int = 0) -> list[torch.Tensor]:
    """torch 2.11 keeps ``dim`` in the elements, with size 1, where only the data decides how many there are."""
    return [aten.select.int(x, dim, at) for at in range(x.shape[dim])]


def _spaced(start: Any, end: Any, steps: Any, *base: Any, **options: Any) -> torch.Tensor:
    """As many elements as steps; torch's rule wants their number plain."""
    return torch.empty((steps,), dtype=options.get("dtype"), device=options.get("device"))


def _upsample_backward(op: OpOverload) -> Callable[..., torch.Tensor]:
    """The gradient of the input, in the memory format of that of the output. Torch's rule wants plain sizes."""

    def rule(grad: torch.Tensor, output_size: Any, input_size: Any, *args: Any) -> torch.Tensor:
        if not _is_symbolic((grad, output_size, input_size)):
            return op(grad, output_size, input_size, *args)
        last = _CHANNELS_LAST.get(grad.dim())
        memory_format = last if last is not None and _has_channels_last(grad, last) else torch.contiguous_format
        return torch.empty(input_size, dtype=grad.dtype, device=grad.device, memory_format=memory_format)

    return rule


def _convolution(op: OpOverload, image: int) -> Callable[..., Any]:
    """On a GPU results have channels innermost where image or weight have, as cuDNN makes them. A torch without CUDA
    has other kernels to choose from, and its rule says contiguous.

    Args:
        image: position of the image; the weight follows.
    """

    def rule(*args: Any, **kwargs: Any) -> Any:
        out = op(*args, **kwargs)
        operands = args[image : image + 2]
        last = _CHANNELS_LAST.get(operands[0].dim())
        if last is None or not _lacks_rule(operands[0]) or not any(_has_channels_last(each, last) for each in operands):
            return out
        # Of the results of a backward, the gradient of the bias has one dimension.
        alike = lambda each: torch.empty_like(each, memory_format=last) if each.dim() == operands[0].dim() else each
        return torch_adapter.map_leaves(torch.Tensor, alike, out)

    return rule


def _native_batch_norm(
    input: torch.Tensor,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    *rest: Any,
    **more: Any,
) -> tuple[torch.Tensor, ...]:
    """On a GPU the statistics of half precision are float32. A torch without CUDA has no rule for a GPU."""
    if not _lacks_rule(input):
        others = weight, bias, running_mean, running_var, training, *rest
        return aten.native_batch_norm.default(input, *others, **more)
    dtype = torch.float32 if input.dtype in (torch.float16, torch.bfloat16) else input.dtype
    mean, deviation = (input.new_empty((input.shape[1] if training else 0,), dtype=dtype) for _ in range(2))
    return torch.empty_like(input), mean, deviation


def _lacks_rule(tensor: torch.Tensor) -> bool:
    """Whether this torch, built without CUDA, has no rule for the GPU of a tensor."""
    return tensor.device.type == "cuda" and not torch.backends.cuda.is_built()


def _has_channels_last(tensor: torch.Tensor, memory_format: torch.memory_format) -> bool:
    """Whether torch suggests that memory format for what is computed from the tensor."""
    return not tensor.is_contiguous() and tensor.is_contiguous(memory_format=memory_format)


_BROADCASTING = (
    *(aten.addcmul.default, aten.addcdiv.default, aten.lerp.Scalar, aten.lerp.Tensor),
    *(aten.addcmul_.default, aten.addcdiv_.default, aten.lerp_.Scalar, aten.lerp_.Tensor),
)
_LOSSES = (aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default)
_BINARY = (
    *(aten.xlogy.Tensor, aten.special_xlog1py.default, aten.floor_divide.default, aten.copysign.Tensor),
    *(aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default, aten.heaviside.default),
    *(aten.logaddexp.default, aten.logaddexp2.default, aten.hardsigmoid_backward.default),
    *(aten.hardswish_backward.default, aten.hardtanh_backward.default, aten.logit_backward.default),
    *(aten.softplus_backward.default, aten.native_dropout_backward.default),
)
_ALWAYS_CONTIGUOUS = (
    *(aten.pow.Scalar, aten.poisson.default, aten._standard_gamma.default, aten.isin.Tensor_Tensor),
    *(aten.isin.Tensor_Scalar, aten.normal.float_Tensor, aten.normal.Tensor_Tensor, aten.normal.Tensor_float),
)
_UPSAMPLE_BACKWARDS = [
    getattr(aten, f"{name}_backward").default
    for name in (
        *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
        *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
        *(f"{name}{rank}d" for name in ("upsample_nearest", "_upsample_nearest_exact") for rank in (1, 2, 3)),
    )
]
_RULES: dict[Any, Callable[..., Any]] = {
    **{op: _upsample_backward(op) for op in _UPSAMPLE_BACKWARDS},
    aten.convolution.default: _convolution(aten.convolution.default, 0),
    aten.convolution_backward.default: _convolution(aten.convolution_backward.default, 1),
    aten.native_batch_norm.default: _native_batch_norm,
    aten.log_sigmoid_forward.default: _log_sigmoid,
    aten.elu_backward.default: _strides_of(aten.elu_backward.default, 0, 5),
    aten.binary_cross_entropy_backward.default: _strides_of(aten.binary_cross_entropy_backward.default, 1),
    **{op: _strides_of(op, 0, 1) for op in _BINARY},
    **{op: _contiguous(op) for op in _ALWAYS_CONTIGUOUS},
    aten._grouped_mm.default: _grouped_mm,
    aten.bmm.default: _bmm,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.unbind.int: _unbind,
    aten.dropout.default: _dropout,
    aten.linalg_lstsq.default: _lstsq,
    aten._nested_tensor_from_mask.default: _nested_tensor,
    aten._native_multi_head_attention.default: _native_attention,
    aten.linspace.default: _spaced,
    aten.logspace.default: _spaced,
    **{getattr(aten._ctc_loss, name): _ctc_loss for name in ("default", "Tensor")},
    aten._ctc_loss_backward.default: _ctc_loss_backward,
    aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
    aten._pack_padded_sequence.default: _pack_padded_sequence,
    **{op: _loss_backward(op) for op in _LOSSES},
    **{op: _broadcasting(op) for op in _BROADCASTING},
    **GPU_RULES,
}


def fake_result(op: OpOverload, args: Any, kwargs: Any) -> Any:
    """What ``op`` gives for fake operands: the operation itself says it, with few exceptions."""
    rule = _RULES.get(op, op)
    if not _is_symbolic((args, *kwargs.values())):
        return _distinct(rule(*args, **kwargs))
    # A rule in C++ (of a pad, a determinant, an unfold) asks for sizes as numbers, which fixes them or fails.
    with torch_adapter.python_rules():
        return _distinct(rule(*args, **kwargs))


def _distinct(out: Any) -> Any:
    """The results of an operation, none of which is another one of them.

    The rule for the backward of an LSTM on a CPU gives one fake for the gradients of both biases. The kernel gives two
    tensors, as does torch's cache of fake results: a step would be recorded in one way the first time, and in another
    one later.
    """
    if type(out) is not tuple or len(out) == len(set(map(id, out))):
        return out
    found: dict[int, Any] = {}
    return tuple(
        torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=each.device)
        if isinstance(each, FakeTensor) and found.setdefault(id(each), at) != at
        else each
        for at, each in enumerate(out)
    )


def _is_symbolic(operands: Any) -> bool:
    """Whether the size of an operand, or an operand itself, is a symbol."""
    for each in operands:
        if isinstance(each, FakeTensor):
            if each._has_symbolic_sizes_strides:
                return True
        elif isinstance(each, (list, tuple)):
            if _is_symbolic(each):
                return True
        elif isinstance(each, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return True
    return False
