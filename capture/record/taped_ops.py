"""Operations that run a composite kernel of torch with autograd, and their backward: recurrent networks whose lengths
are not known in advance, and products with sparse matrices.

The kernels of ``nn.LSTM`` and its like over a ``PackedSequence``, and of ``pad_packed_sequence``, loop in C++ over
batch sizes that only the data says; over a tensor they loop over its length, which may change from call to call. A
graph cannot hold the loop, so it holds the call. The forward runs under autograd on copies of its operands, and keeps
the autograd graph (the *tape*) with a small tensor that is its last result. The backward takes that tensor and asks the
autograd graph for gradients, which are the bits of eager: the same kernels run in the same order. The tape lives as
long as the tensor, and can be used more than once.

    weft::recurrent(kind, tensors, places, batch_sizes, ..., differentiable) -> [output, *hidden, tape]; without batch
        sizes the data are [length, batch, width]
    weft::recurrent_dropout: the same; it draws from the default generator.
    weft::pad_packed(data, batch_sizes, batch_first, padding_value, total_length, batch, differentiable)
        -> [padded, lengths, tape]
    weft::sparse_product(dense, function, indices, values, sizes, coalesced, ..., differentiable) -> [product, tape]
    weft::packed_backward(gradient, sizes, batch_sizes, batch_first): the gradient of what was packed, of these sizes
    weft::tape_backward(tape, gradients, sums, operands) -> the gradients of the differentiable operands

``places`` are the numbers in ``tensors`` of the data, the hidden states and the weights, of which several may be one
tensor. ``ordered`` says that the order matters in which weights get their gradients. ``grad_mode`` is that of the
step. ``differentiable`` are the numbers of the tensors that get gradients, and ``operands`` are these tensors, whose
sizes the gradients have. The program may write to their memory before the backward, or free it and gather a weight
again, as the tape has copies. ``sums`` are what the engine has summed up for an operand before: it adds one
contribution for each step of a sequence, and floats are summed in that order. All results are new memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft import torch_adapter

TAPED_OPERATIONS = (
    "recurrent",
    "recurrent_dropout",
    "pad_packed",
    "packed_backward",
    "sparse_product",
    "tape_backward",
)
"""Their names in the namespace ``weft``."""

_TAPE = "weft_tape"
_SEEDED = (torch.Tag.nondeterministic_seeded,)
_library = torch.library.Library("weft", "FRAGMENT")
_RECURRENT = (
    "(str kind, Tensor[] tensors, int[] places, Tensor? batch_sizes, bool has_biases, int num_layers, float dropout, "
    "bool train, bool bidirectional, bool ordered, bool grad_mode, int[] differentiable) -> Tensor[]"
)
_library.define(f"recurrent{_RECURRENT}")
_library.define(f"recurrent_dropout{_RECURRENT}", tags=_SEEDED)
_library.define(
    "pad_packed(Tensor data, Tensor batch_sizes, bool batch_first, float padding_value, SymInt total_length, "
    "SymInt batch, bool grad_mode, int[] differentiable) -> Tensor[]"
)
_library.define(
    "sparse_product(Tensor dense, str function, Tensor indices, Tensor values, SymInt[] sizes, bool coalesced, "
    "bool grad_mode, int[] differentiable) -> Tensor[]"
)
_library.define("packed_backward(Tensor gradient, SymInt[] sizes, Tensor batch_sizes, bool batch_first) -> Tensor")
_library.define("tape_backward(Tensor tape, Tensor?[] gradients, Tensor?[] sums, Tensor[] operands) -> Tensor[]")

RECURRENT: dict[str, Callable[..., Any]] = {
    "lstm": torch.lstm,
    "gru": torch.gru,
    "rnn_tanh": torch.rnn_tanh,
    "rnn_relu": torch.rnn_relu,
}
"""The functions of torch that run recurrent networks, by the names that graphs have for them."""

STATES = {kind: 2 if kind == "lstm" else 1 for kind in RECURRENT}
"""How many hidden states each has."""

PRODUCTS: dict[str, Callable[..., Any]] = {
    "sparse.mm": torch.sparse.mm,
    "mm": torch.mm,
    "matmul": torch.matmul,
    "mv": torch.mv,
}
"""The functions of torch that multiply a sparse matrix by a dense tensor, by the names that graphs have for them."""


class Tape:
    """The autograd graph of one call.

    Attributes:
        results: the differentiable results, with their autograd graph; no tensor of the program's.
        leaves: the copies of the differentiable operands, in the operands' order.
    """

    def __init__(self, results: list[torch.Tensor], leaves: list[torch.Tensor]) -> None:
        self.results = results
        self.leaves = leaves


def _taped(
    function: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
    tensors: Sequence[torch.Tensor],
    grad_mode: bool,
    differentiable: Sequence[int],
    copy: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
) -> list[torch.Tensor]:
    """The results of ``function(tensors)``, and the tensor that holds the tape."""
    copies = [copy(each).requires_grad_(at in differentiable) for at, each in enumerate(tensors) if differentiable]
    with torch.set_grad_enabled(grad_mode):  # some kernels round otherwise without it
        results = list(function(copies if differentiable else list(tensors)))
    token = torch.zeros(1)
    if differentiable:
        leaves = [copies[at] for at in differentiable]
        setattr(token, _TAPE, Tape([each for each in results if each.requires_grad], leaves))
    return [*(_new_memory(each, tensors) for each in results), token]


def _new_memory(result: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """The values of a result, not in the memory of any of ``others``."""
    memory = result.untyped_storage().data_ptr()
    shared = any(other.untyped_storage().data_ptr() == memory for other in others)
    return result.detach().clone() if shared else result.detach()


def _recurrent(
    kind: str,
    tensors: list[torch.Tensor],
    places: list[int],
    batch_sizes: torch.Tensor | None,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    ordered: bool,
    grad_mode: bool,
    differentiable: list[int],
) -> list[torch.Tensor]:
    if ordered and kind == "lstm" and batch_sizes is not None and bool((batch_sizes == batch_sizes[0]).all()):
        raise RuntimeError(
            "all sequences have one length, and several weights of an LSTM have hooks. Eager then runs the hooks in "
            "another order than for other lengths. Register them on one weight, or run this step uncompiled"
        )

    def run(copies: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        data, *others = (copies[at] for at in places)
        state: Any = others[:2] if kind == "lstm" else others[0]
        options = others[STATES[kind] :], has_biases, num_layers, dropout, train, bidirectional
        call = RECURRENT[kind]
        result: Sequence[torch.Tensor]
        with warnings.catch_warnings():
            # cuDNN wants all weights in one piece of memory, and copies are not.
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
            over_tensor = batch_sizes is None
            result = call(data, state, *options, False) if over_tensor else call(data, batch_sizes, state, *options)
        return [each.contiguous() for each in result]  # as the fake rule says

    return _taped(run, tensors, grad_mode, differentiable)


def _recurrent_like(
    kind: str,
    tensors: list[torch.Tensor],
    places: list[int],
    batch_sizes: torch.Tensor | None,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    ordered: bool,
    grad_mode: bool,
    differentiable: list[int],
) -> list[torch.Tensor]:
    data, *hidden = (tensors[at] for at in places[: 1 + STATES[kind]])
    width = hidden[0].shape[2] * (2 if bidirectional else 1)
    states = [state.new_empty(state.shape) for state in hidden]
    return [data.new_empty((*data.shape[:-1], width)), *states, _token(data)]


for _name in ("recurrent", "recurrent_dropout"):
    torch.library.impl(_library, _name, "CompositeExplicitAutograd")(_recurrent)
    torch.library.register_fake(f"weft::{_name}", _recurrent_like, lib=_library)


@torch.library.impl(_library, "pad_packed", "CompositeExplicitAutograd")
def _pad_packed(
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    batch_first: bool,
    padding_value: float,
    total_length: int,
    batch: int,
    grad_mode: bool,
    differentiable: list[int],
) -> list[torch.Tensor]:
    options = batch_first, padding_value, total_length
    run = lambda tensors: torch_adapter.pad_packed_sequence(tensors[0], batch_sizes, *options)
    return _taped(run, [data], grad_mode, differentiable)


@torch.library.register_fake("weft::pad_packed", lib=_library)
def _pad_packed_like(
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    batch_first: bool,
    padding_value: float,
    total_length: int,
    batch: int,
    grad_mode: bool,
    differentiable: list[int],
) -> list[torch.Tensor]:
    padded = data.new_empty((total_length, batch, *data.shape[1:]))
    padded = padded.as_strided(*_transposed(padded)) if batch_first else padded
    return [padded, torch.empty((batch,), dtype=torch.int64, device=batch_sizes.device), _token(data)]


@torch.library.impl(_library, "sparse_product", "CompositeExplicitAutograd")
def _sparse_product(
    dense: torch.Tensor,
    function: str,
    indices: torch.Tensor,
    values: torch.Tensor,
    sizes: list[int],
    coalesced: bool,
    grad_mode: bool,
    differentiable: list[int],
) -> list[torch.Tensor]:
    # Autograd keeps the matrix, to whose memory a later node may write.
    indices, values = (each.clone() if differentiable else each for each in (indices, values))
    matrix = torch.sparse_coo_tensor(indices, values, sizes, is_coalesced=coalesced, check_invariants=False)
    run = lambda tensors: [PRODUCTS[function](matrix, tensors[0])]
    return _taped(run, [dense], grad_mode, differentiable, torch.detach)  # the gradient depends on the matrix alone


@torch.library.register_fake("weft::sparse_product", lib=_library)
def _sparse_product_like(
    dense: torch.Tensor,
    function: str,
    indices: torch.Tensor,
    values: torch.Tensor,
    sizes: list[int],
    coalesced: bool,
    grad_mode: bool,
    differentiable: list[int],
) -> list[torch.Tensor]:
    torch._check(dense.shape[0] == sizes[1], lambda: f"sizes {sizes} and {list(dense.shape)} do not fit for a product")
    torch._check(dense.dtype == values.dtype, lambda: f"a product of {values.dtype} and {dense.dtype}")
    return [dense.new_empty((sizes[0], *dense.shape[1:])), _token(dense)]


@torch.library.impl(_library, "packed_backward", "CompositeExplicitAutograd")
def _packed_backward(
    gradient: torch.Tensor, sizes: list[int], batch_sizes: torch.Tensor, batch_first: bool
) -> torch.Tensor:
    padded: torch.Tensor = torch.ops.aten._pack_padded_sequence_backward(gradient, sizes, batch_sizes, batch_first)
    return padded


@torch.library.register_fake("weft::packed_backward", lib=_library)
def _packed_backward_like(
    gradient: torch.Tensor, sizes: list[Any], batch_sizes: torch.Tensor, batch_first: bool
) -> torch.Tensor:
    if not batch_first:
        return gradient.new_empty(sizes)
    padded = gradient.new_empty([*sizes[1::-1], *sizes[2:]])
    return padded.as_strided(*_transposed(padded))


def _transposed(padded: torch.Tensor) -> tuple[list[Any], list[Any]]:
    sizes, strides = list(padded.shape), list(padded.stride())
    return [*sizes[1::-1], *sizes[2:]], [*strides[1::-1], *strides[2:]]


def _token(data: torch.Tensor) -> torch.Tensor:
    return torch.empty((1,), dtype=torch.float32, device="cpu")


@torch.library.impl(_library, "tape_backward", "CompositeExplicitAutograd")
def _tape_backward(
    token: torch.Tensor,
    gradients: list[torch.Tensor | None],
    sums: list[torch.Tensor | None],
    operands: list[torch.Tensor],
) -> list[torch.Tensor]:
    tape: Tape = getattr(token, _TAPE)
    leaves = tape.leaves
    begun = [(leaf, each) for leaf, each in zip(leaves, sums, strict=True) if each is not None]
    # What the engine gets for a leaf itself comes before all contributions to it.
    roots = [*begun, *((out, each) for out, each in zip(tape.results, gradients, strict=True) if each is not None)]
    outs, given = zip(*roots, strict=True)
    found = torch.autograd.grad(outs, leaves, given, retain_graph=True, allow_unused=True)
    for leaf, gradient in zip(leaves, found, strict=True):
        if gradient is None:
            raise RuntimeError(
                f"in eager a weight or state of size {list(leaf.shape)} has no gradient in this call, and would have "
                "one in a call with longer sequences. Run this step uncompiled"
            )
    taken = [_new_memory(gradient, given) for gradient in found]
    # The sum has the layout that the engine gives it; see the fake rule.
    return [each.contiguous() if begun is None else each for each, begun in zip(taken, sums, strict=True)]


@torch.library.register_fake("weft::tape_backward", lib=_library)
def _tape_backward_like(
    token: torch.Tensor,
    gradients: list[torch.Tensor | None],
    sums: list[torch.Tensor | None],
    operands: list[torch.Tensor],
) -> list[torch.Tensor]:
    found = []
    for operand, begun in zip(operands, sums, strict=True):
        empty = operand.new_empty(operand.shape)
        found.append(empty if begun is None else torch.empty_like(begun + empty))
    return found
