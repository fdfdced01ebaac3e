"""Recurrent networks in a step whose lengths are not known while it is captured.

Torch's kernels of ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` loop in C++ over the steps of time, so a capture must come
before them: always where the sequences are packed, and over a tensor where its length is a symbol. A call becomes an
autograd function whose forward and backward are nodes (:mod:`weft.capture.record.taped_ops`). An LSTM over a tensor of
any symbolic size is such a node too, because torch chooses its kernel in C++ from numbers. So is every network on a
GPU, because torch looks there, before it calls cuDNN, whether the weights are in one piece of memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.record.packed_sequences import check_operands, taped_results
from weft.capture.record.taped_ops import RECURRENT, STATES
from weft.capture.state.hook_registrations import user_hook
from weft.capture.user_code import user_line
from weft.errors import CannotCapture

ops = torch.ops.weft
_KINDS = {function: kind for kind, function in RECURRENT.items()}
RECURRENT_FUNCTIONS = tuple(_KINDS)


def recurrent_function(func: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[], Any] | None:
    """What computes ``func(*args)``, for one of :data:`RECURRENT_FUNCTIONS`, in a capture; None where torch can."""
    kind = _KINDS[func]
    if len(args) > 3 and isinstance(args[3], (list, tuple)):
        return lambda: _packed(kind, *args)
    return (lambda: _over_tensor(kind, *args)) if len(args) == 9 and _needs_node(kind, *args[:3]) else None


def _packed(kind: str, data: Any, batch_sizes: Any, hidden: Any, params: Any, *options: Any) -> Any:
    check_operands([data, *_states(kind, hidden), *params])
    return _recurrent(kind, data, batch_sizes, hidden, params, *options)


def _over_tensor(kind: str, data: Any, hidden: Any, params: Any, *options: Any) -> Any:
    """The network over a tensor [length, batch, width], or [batch, length, width] where the last option says so.

    Eager's kernels get a transposed view of the latter and return one, so the transposes can be nodes of their own.
    """
    *options, batch_first = options  # type: ignore[assignment]
    if not batch_first:
        return _recurrent(kind, data, None, hidden, params, *options)
    output, *last = _recurrent(kind, data.transpose(0, 1), None, hidden, params, *options)
    return output.transpose(0, 1), *last


def _needs_node(kind: str, data: Any, hidden: Any, params: Any) -> bool:
    """Whether torch's kernels of the network over a tensor cannot be captured, and a node can be.

    Raises:
        CannotCapture: neither can be.
    """
    tensors = [data, *_states(kind, hidden), *params]
    on_cpu = all(each.device.type == "cpu" for each in tensors)
    if on_cpu and not any(_has_symbols(each) for each in (tensors if kind == "lstm" else tensors[:1])):
        return False
    why = remedy = ""
    if torch.is_autocast_enabled(data.device.type):
        why, remedy = "under autocast", f'Call it in a region of torch.autocast("{data.device.type}", enabled=False)'
    elif not all(torch_adapter.is_plain_tensor_type(type(each)) for each in tensors):
        why, remedy = "whose weights are shards", "Gather them before the call: leave the module to weft.fully_shard"
    elif len([each for each in params if _has_hooks(each)]) > 1 and (kind == "lstm" or not on_cpu):
        # Such a kernel computes the gradients of all weights at once: their hooks run in another order.
        why, remedy = "with hooks on several weights", "Register them on one weight"
    if why and not on_cpu:
        raise CannotCapture(user_line(), f"a recurrent network on a GPU {why} cannot be one node of a graph", remedy)
    return not why


def _has_symbols(tensor: torch.Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in tensor.shape)


def _states(kind: str, hidden: Any) -> list[torch.Tensor]:
    return list(hidden) if kind == "lstm" else [hidden]


class _Weight(torch.autograd.Function):
    """The identity on a weight. Autograd computes the gradients of several weights in the reverse of the order in which
    this was applied to them."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0]


def _has_hooks(weight: torch.Tensor) -> bool:
    """Whether the user has registered hooks on a leaf. Those of weft's own wrappers run in any order."""
    if not weight.is_leaf or not weight.requires_grad:
        return False
    hooks = [user_hook(hook) for found in torch_adapter.registered_hooks(weight) for hook in found.values()]
    modules = [getattr(inspect.unwrap(hook), "__module__", None) or "" for hook in hooks]  # the capture counts calls
    return any(not name.startswith("weft.") for name in modules)


def _in_order_of_use(numbers: list[int], count: int, has_biases: bool) -> list[int]:
    """These numbers of weights, each once, in the order in which eager's first operations use them. Hooks run in the
    opposite order, and may draw random numbers.

    Args:
        numbers: in the order of the module: for each layer and direction those of the input and of the state, the two
            biases, and that of the projection.
        count: of weights of one layer and direction.
    """
    order = (0, 2, 1, 3, 4) if has_biases else (0, 1, 2)
    found = [numbers[start + at] for start in range(0, len(numbers), count) for at in order[:count]]
    return list(dict.fromkeys(found))


def _recurrent(kind: str, data: Any, batch_sizes: Any, hidden: Any, params: Any, *options: Any) -> Any:
    tensors = [data, *_states(kind, hidden), *params]
    has_biases, num_layers, dropout, train, bidirectional = options
    op = ops.recurrent_dropout if train and dropout > 0 and num_layers > 1 else ops.recurrent
    # Autograd sums what several uses of one tensor contribute, in the order of the uses.
    different = list({id(each): each for each in tensors}.values())
    at = {id(each): at for at, each in enumerate(different)}
    places = [at[id(each)] for each in tensors]
    ordered = len([each for each in different if _has_hooks(each)]) > 1
    if torch.is_grad_enabled():
        count = len(params) // (num_layers * (2 if bidirectional else 1))
        for each in _in_order_of_use([at[id(weight)] for weight in params], count, has_biases):
            different[each] = _Weight.apply(different[each])
    options = batch_sizes, *options, ordered, torch.is_grad_enabled()
    run = lambda tensors, differentiable: op(kind, list(tensors), places, *options, differentiable)
    return taped_results(run, 1 + STATES[kind], different)
