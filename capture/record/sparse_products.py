"""Products of a sparse matrix of the user's with a dense one: ``torch.sparse.mm(adj, x)`` and ``adj @ x``.

Graphs hold strided tensors only. A sparse matrix that the step only multiplies by becomes two inputs, its indices and
its values, which each call reads anew. The node makes a sparse tensor of them and calls torch's function, under
autograd as :mod:`weft.capture.record.taped_ops` says, so that it gives eager's bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.record.packed_sequences import taped_results
from weft.capture.record.recorder import recording
from weft.capture.record.sparse_arguments import PARTS
from weft.capture.record.taped_ops import PRODUCTS
from weft.capture.state.tensor_memory import sparse_parts
from weft.capture.user_code import user_line
from weft.errors import CannotCapture, UncapturableLayout

_NAMES: dict[Any, str] = {
    **{function: name for name, function in PRODUCTS.items()},
    torch.Tensor.mm: "mm",
    torch.Tensor.matmul: "matmul",
    torch.Tensor.__matmul__: "matmul",
    torch.Tensor.mv: "mv",
}
_LOOKS = (torch.Tensor.is_coalesced, torch.Tensor.coalesce)
SPARSE_FUNCTIONS = (*_NAMES, *_LOOKS)


def sparse_function(func: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[], Any] | None:
    """What computes ``func(*args)`` of a sparse matrix in a capture; None for other operands.

    Raises:
        UncapturableLayout: it is a product that no node computes.
    """
    if func in _LOOKS:
        if len(args) != 1 or args[0].layout is not torch.sparse_coo:
            return None
        with torch_adapter.only_mode():
            coalesced = args[0].is_coalesced()  # which is a guard
        found = coalesced if func is torch.Tensor.is_coalesced else args[0] if coalesced else None
        return None if found is None else lambda: found
    return _product(func, args)


def _product(func: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[], Any] | None:
    if len(args) != 2 or not all(isinstance(each, torch.Tensor) for each in args):
        return None
    sparse, dense = args
    if sparse.layout is not torch.sparse_coo or dense.layout is not torch.strided:
        return None
    parts = vars(sparse).get(PARTS)
    with torch_adapter.only_mode():  # these are looks at a tensor of the user's, no operations of the step
        if parts is None and (found := sparse_parts(sparse)) is not None:
            parts = tuple(found.values())
        facts = [*sparse.shape], sparse.is_coalesced()
    kinds = all(torch_adapter.is_plain_tensor_type(type(each)) for each in args)
    if parts is None or not kinds or sparse.requires_grad or dense.dim() not in (1, 2):
        raise UncapturableLayout(_NAMES[func], sparse.layout, user_line())
    if sparse.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        raise UncapturableLayout(f"{_NAMES[func]} on a GPU or under autocast", sparse.layout, user_line())
    options = _NAMES[func], *parts, *facts, torch.is_grad_enabled()
    run = lambda tensors, differentiable: torch.ops.weft.sparse_product(tensors[0], *options, differentiable)
    recorder = recording()
    nodes = () if recorder is None else tuple(map(recorder.value, parts))

    def check_unchanged() -> None:
        """Eager's backward would read what another tensor in this memory has written."""
        if recorder is not None and tuple(map(recorder.value, parts)) != nodes:
            why = "the values of a sparse matrix change between its product and the backward of that"
            raise CannotCapture(user_line(), why, "Change them before the product or after the backward")

    return lambda: taped_results(run, 1, [dense], check_unchanged)[0]
