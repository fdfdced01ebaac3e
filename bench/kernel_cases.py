"""The memory-bound operations that ``kernels.py`` measures: plain PyTorch, with inputs of the sizes of real models.

A case is a function of tensors, run forward, backward or both. Its backward is measured alone: eager and torch.compile
run what autograd made of a forward that is not timed, weft runs one step of the tensors that such a backward needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

Tensors = tuple[torch.Tensor, ...]
Function = Callable[..., Tensors]

WIDTHS = (768, 1024, 2048, 4096, 8192, 16384)
_ELEMENTS = 1 << 26  # of the largest tensors: 128 MiB of bfloat16, several times the L2


@dataclass(frozen=True)
class Case:
    """One operation.

    Attributes:
        run: what is timed.
        forward: the operation, over ``inputs``.
        inputs: makes its tensors, given a factory.
        step: what weft compiles, over ``held``: the same work as one function, without gradients of its own.
        held: the tensors of ``step``, of the inputs, the results of ``forward`` and their gradients.
        wanted: which inputs have gradients.
        unread: which of ``held`` say no more than sizes.
        expected: exact results, given the inputs and the results in question, where these are drawn at random.
    """

    name: str
    run: Literal["forward", "backward", "both"]
    forward: Function
    inputs: Callable[[Make], Tensors]
    step: Function
    held: Callable[[Tensors, Tensors, Tensors], Tensors] = lambda inputs, results, gradients: inputs
    wanted: tuple[int, ...] = ()
    unread: tuple[int, ...] = ()
    expected: Callable[[Tensors, Tensors], Tensors] | None = None


class Make:
    """Makes the tensors of a case, always the same ones; ``tiny`` ones for a CPU."""

    def __init__(self, device: torch.device | str, tiny: bool, dtype: torch.dtype = torch.bfloat16) -> None:
        self.device, self.tiny, self.dtype = torch.device(device), tiny, dtype
        self.generator = None if self.device.type == "meta" else torch.Generator(self.device).manual_seed(0)

    def size(self, full: int, tiny: int) -> int:
        return tiny if self.tiny else full

    def normal(self, *sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device=self.device, dtype=self.dtype, generator=self.generator)

    def integers(self, bound: int, *sizes: int) -> torch.Tensor:
        return torch.randint(bound, sizes, device=self.device, generator=self.generator)

    def rows(self, width: int) -> int:
        """How many rows of a width make a tensor of the full size."""
        return self.size(1 << (_ELEMENTS // width).bit_length() - 1, 24)


def autograd(forward: Function, wanted: tuple[int, ...], count: int = 1) -> Function:
    """The gradients of ``forward``, as a function of its inputs and of the gradients of its ``count`` results."""

    def step(*held: torch.Tensor) -> Tensors:
        inputs, gradients = list(held[: len(held) - count]), held[len(held) - count :]
        for at in wanted:
            inputs[at] = inputs[at].detach().requires_grad_()
        return torch.autograd.grad(forward(*inputs), [inputs[at] for at in wanted], gradients)

    return step


def _with_gradients(inputs: Tensors, results: Tensors, gradients: Tensors) -> Tensors:
    return *inputs, *gradients


def _pair(
    name: str,
    forward: Function,
    inputs: Callable[[Make], Tensors],
    wanted: tuple[int, ...],
    results: int = 1,
    unread: tuple[int, ...] = (),
) -> Iterator[Case]:
    """An operation forward and backward; ``unread`` are inputs that the backward does not need."""
    yield Case(f"{name} forward", "forward", forward, inputs, forward)
    step = autograd(forward, wanted, results)
    yield Case(f"{name} backward", "backward", forward, inputs, step, _with_gradients, wanted, unread)


# ---- norms with a residual


def _rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Tensors:
    total = x + residual
    return total, F.rms_norm(total, weight.shape, weight, 1e-5)


def _layer_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Tensors:
    total = x + residual
    return total, F.layer_norm(total, weight.shape, weight, bias, 1e-5)


def _rms_norm_backward(
    total: torch.Tensor, weight: torch.Tensor, later: torch.Tensor, gradient: torch.Tensor
) -> Tensors:
    """``later`` is the gradient that reaches the sum past the norm."""
    total, weight = total.detach().requires_grad_(), weight.detach().requires_grad_()
    result = F.rms_norm(total, weight.shape, weight, 1e-5)
    of_total, of_weight = torch.autograd.grad(result, [total, weight], gradient)
    return of_total + later, of_weight


def _rms_norm_held(inputs: Tensors, results: Tensors, gradients: Tensors) -> Tensors:
    return results[0], *inputs[2:], *gradients


def _layer_norm_backward(
    total: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    later: torch.Tensor,
    gradient: torch.Tensor,
) -> Tensors:
    """Of what a forward keeps: autograd of ``F.layer_norm`` calls the same, in a captured step too."""
    results = torch.ops.aten.native_layer_norm_backward(
        gradient, total, weight.shape, mean, rstd, weight, bias, [True, True, True]
    )
    return results[0] + later, *results[1:]


def _layer_norm_held(inputs: Tensors, results: Tensors, gradients: Tensors) -> Tensors:
    total, (weight, bias) = results[0], inputs[2:]
    _, mean, rstd = torch.native_layer_norm(total, weight.shape, weight, bias, 1e-5)
    # ATen's kernel for CPUs keeps them in the type of the input.
    return total, weight, bias, mean.float(), rstd.float(), *gradients


def _norms(width: int) -> Iterator[Case]:
    kinds = (
        ("RMSNorm", _rms_norm, _rms_norm_backward, _rms_norm_held, 1),
        ("LayerNorm", _layer_norm, _layer_norm_backward, _layer_norm_held, 2),
    )
    for name, forward, backward, held, parameters in kinds:

        def inputs(make: Make, parameters: int = parameters) -> Tensors:
            columns = make.size(width, 96)
            x, residual = (make.normal(make.rows(width), columns) for _ in range(2))
            return x, residual, *(make.normal(columns) for _ in range(parameters))

        wanted = (0, *range(2, 2 + parameters))
        yield Case(f"{name} {width} forward", "forward", forward, inputs, forward)
        yield Case(f"{name} {width} backward", "backward", forward, inputs, backward, held, wanted)


# ---- rows and points


def _softmax(scores: torch.Tensor) -> Tensors:
    return (scores.softmax(-1),)


def _scores(make: Make) -> Tensors:
    length = make.size(2048, 96)
    return (make.normal(make.size(16, 1), make.size(2048, 24), length),)


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> Tensors:
    return (F.silu(gate) * up,)


def _gate_and_up(make: Make) -> Tensors:
    shape = make.rows(8192), make.size(8192, 96)
    return make.normal(*shape), make.normal(*shape)


def _gelu_bias(x: torch.Tensor, bias: torch.Tensor) -> Tensors:
    return (F.gelu(x + bias, approximate="tanh"),)


def _x_and_bias(make: Make) -> Tensors:
    width = make.size(8192, 96)
    return make.normal(make.rows(8192), width), make.normal(width)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _rope(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Tensors:
    """As Hugging Face's Llama: heads in front of positions as a view of what the projections gave."""
    cos, sin = cos[None, None], sin[None, None]
    return tuple(_rotated(x.transpose(1, 2), cos, sin) for x in (query, key))


def _heads(make: Make) -> Tensors:
    batch, length, size = make.size(4, 1), make.size(4096, 12), make.size(128, 16)
    angles = torch.arange(length, device=make.device)[:, None] * torch.logspace(0, -4, size // 2, device=make.device)
    angles = torch.cat((angles, angles), -1)
    query, key = (make.normal(batch, length, make.size(heads, 2), size) for heads in (32, 8))
    return query, key, angles.cos().to(make.dtype), angles.sin().to(make.dtype)


# ---- losses, tables, random numbers


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> Tensors:
    return (F.cross_entropy(logits, labels),)


def _cross_entropy_step(logits: torch.Tensor, labels: torch.Tensor) -> Tensors:
    logits = logits.detach().requires_grad_()
    (loss,) = _cross_entropy(logits, labels)
    return loss.detach(), *torch.autograd.grad(loss, [logits])


def _logits(make: Make) -> Tensors:
    rows, classes = make.size(8192, 12), make.size(128256, 1000)
    return make.normal(rows, classes), make.integers(classes, rows)


def _embedding(table: torch.Tensor, tokens: torch.Tensor) -> Tensors:
    return (F.embedding(tokens, table),)


def _table_and_tokens(make: Make) -> Tensors:
    tokens = make.size(32768, 40)
    classes = make.size(128256, 50)
    return make.normal(classes, make.size(2048, 32)), make.integers(classes, tokens)


DROPPED = 0.1


def _dropout(x: torch.Tensor, residual: torch.Tensor) -> Tensors:
    return (residual + F.dropout(x, DROPPED),)


def _x_and_residual(make: Make) -> Tensors:
    shape = make.rows(4096), make.size(4096, 96)
    x = make.normal(*shape)
    # Nothing of x is so small that a sum would not show whether it was dropped.
    return torch.where(x < 0, x - 1, x + 1), make.normal(*shape).clamp(-8, 8)


def _with_the_same_dropped(inputs: Tensors, results: Tensors) -> Tensors:
    x, residual = inputs
    kept = (results[0] - residual).abs() > 0.5
    share = float(kept.double().mean())
    allowed = 6 * (DROPPED * (1 - DROPPED) / x.numel()) ** 0.5
    assert abs(share - (1 - DROPPED)) < allowed, f"{share} of the elements were kept, not {1 - DROPPED}"
    return (torch.where(kept, x / (1 - DROPPED), 0) + residual,)


def cases() -> list[Case]:
    """All of them, in the order they are run in."""
    return [
        Case(
            "cross-entropy forward+backward",
            "both",
            _cross_entropy,
            _logits,
            _cross_entropy_step,
            wanted=(0,),
        ),
        *_pair("softmax", _softmax, _scores, (0,)),
        *_pair("SwiGLU", _swiglu, _gate_and_up, (0, 1)),
        *_pair("GELU+bias", _gelu_bias, _x_and_bias, (0, 1)),
        *_pair("rope", _rope, _heads, (0, 1), results=2, unread=(0, 1)),
        Case(
            "embedding backward",
            "backward",
            _embedding,
            _table_and_tokens,
            autograd(_embedding, (0,)),
            _with_gradients,
            wanted=(0,),
            unread=(0,),
        ),
        Case(
            "dropout+residual forward",
            "forward",
            _dropout,
            _x_and_residual,
            _dropout,
            expected=_with_the_same_dropped,
        ),
        *(case for width in WIDTHS for case in _norms(width)),
    ]
