"""Sums of matrix products become accumulating products: ``a @ b + c @ d`` is ``addmm(a @ b, c, d)``, in place.

The gradient of an activation that several projections read (query, key and value; gate and up) is such a sum. So are
gradients that accumulate over microbatches. cuBLAS reads the addend in the epilogue of the GEMM, so no kernel has to
add the two results, one tensor less is read, and one less is alive.

Only done where the addend is a product, or an input that the sum replaces, and is not read again: the sum then takes
its memory. Elsewhere cuBLAS would first copy the addend. An addend that a generated kernel computes is better added by
the kernel that reads the sum. Sibling products of one input are not merged into one wide product: their weights would
have to be copied side by side in each step. For query, key and value of Llama 8B at 4 TB/s the copy takes 25
microseconds, about what the merge would gain.

Changes results: the sum is rounded once, not twice.
"""

from __future__ import annotations

from typing import Any

import torch

from weft import torch_adapter
from weft.capture.graph import StepGraph, drop_dead
from weft.capture.node_meta import meta_of
from weft.inductor.graph.inline_function import base_of
from weft.inductor.graph.pass_runner import changes_bits

Node = torch.fx.Node

aten = torch.ops.aten
_ACCUMULATING = {
    aten.mm.default: (aten.addmm.default, aten.addmm_.default),
    aten.bmm.default: (aten.baddbmm.default, aten.baddbmm_.default),
}
_PRODUCTS = frozenset(_ACCUMULATING) | {functional for functional, _ in _ACCUMULATING.values()}
_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


@changes_bits("a sum of products is rounded once, not twice")
def accumulate_matmuls(step: StepGraph) -> StepGraph:
    """Turn additions of matrix products into products that accumulate. Changes ``step``."""
    at = {node: position for position, node in enumerate(step.graph.nodes)}
    updates = {value: entry.name for entry, value in step.updates()}
    for total in list(step.graph.nodes):
        if total.target is not aten.add.Tensor or total.kwargs or len(total.all_input_nodes) != 2:
            continue
        one, other = total.all_input_nodes
        for addend, summand in ((one, other), (other, one)):
            product = _product(summand)
            if product is None or not _can_hold_sum(addend, summand, total, updates.get(total, "")):
                continue
            source = _of_shape(addend, product)
            # The product is computed at its old place, so the addend must be there by then.
            if source is not None and at[source] < at[product]:
                accumulated, result = _accumulate(step.graph, total, source, product, summand)
                at |= {accumulated: at[product], result: at[total]}
                break
    drop_dead(step.graph)
    return step


def _product(summand: Node) -> Node | None:
    """The matrix product that ``summand`` is, perhaps in another shape, where nothing else reads it."""
    while summand.target in _RESHAPES and len(summand.users) == 1:
        summand = summand.args[0]  # type: ignore[assignment]
    return summand if summand.target in _ACCUMULATING and len(summand.users) == 1 else None


def _can_hold_sum(addend: Node, summand: Node, total: Node, updated: str) -> bool:
    """Whether the sum can be written over ``addend``: a product or input of the sum's shape that only the sum reads.

    Args:
        updated: the input that the sum is the new value of, if any.
    """
    vals: list[Any] = [node.meta.get("val") for node in (total, summand, addend)]
    if not all(isinstance(val, torch.Tensor) and _is_contiguous(val) for val in vals):
        return False
    if len({(val.dtype, val.device, _shape(val)) for val in vals}) > 1:
        return False
    base = base_of(addend)
    ours = base.name == updated if base.op == "placeholder" else base.target in _PRODUCTS
    return ours and _only_user(addend, base) and _elements(base.meta["val"]) == _elements(vals[0])


def _only_user(node: Node, base: Node) -> bool:
    """Whether each value on the way from ``base`` to ``node`` has one user."""
    while node is not base:
        if len(node.users) != 1:
            return False
        node = node.args[0]  # type: ignore[assignment]
    return len(base.users) == 1


def _of_shape(addend: Node, product: Node) -> Node | None:
    """The value that ``addend`` is a reshape of, where that has the product's shape; else ``addend`` itself, where it
    can be reshaped; else None."""
    shape = _shape(product.meta["val"])
    source: Any = addend
    while source.target in _RESHAPES and _shape(source.meta["val"]) != shape:
        source = source.args[0]
    if _shape(source.meta["val"]) == shape:
        return source
    return addend if _sizes(product.meta["val"]).count(-1) <= 1 else None


def _accumulate(graph: torch.fx.Graph, total: Node, source: Node, product: Node, summand: Node) -> tuple[Node, Node]:
    """Put ``source + product`` in the place of the product. Returns the accumulating call, and its value in the shape
    of ``total``."""
    functional, inplace = _ACCUMULATING[product.target]  # type: ignore[index]
    with graph.inserting_before(product):
        source = _reshaped(graph, source, product, _sizes(product.meta["val"]))
        accumulated = graph.call_function(functional, (source, *product.args))
    accumulated.meta = meta_of(product, val=source.meta["val"], inplace=inplace)
    with graph.inserting_before(total):
        result = _reshaped(graph, accumulated, total, summand.args[1])
    total.replace_all_uses_with(result)
    graph.erase_node(total)
    return accumulated, result


def _reshaped(graph: torch.fx.Graph, node: Node, like: Node, sizes: Any) -> Node:
    """``node`` viewed in the shape of ``like``; ``sizes`` are the arguments of the view."""
    val, shape = node.meta["val"], like.meta["val"].shape
    if _shape(val) == _shape(like.meta["val"]):
        return node
    with torch_adapter.only_mode(val.fake_mode):
        shaped = val.view(shape)
    view = graph.call_function(aten.view.default, (node, sizes))
    view.meta = meta_of(like, val=shaped)
    return view


# Symbolic sizes are compared as text: comparing themselves may add to what the graph assumes.


def _shape(val: torch.Tensor) -> tuple[str, ...]:
    return tuple(map(str, val.shape))


def _sizes(val: torch.Tensor) -> list[int]:
    """Sizes as arguments of a view; -1 for a symbolic size."""
    return [size if type(size) is int else -1 for size in val.shape]


def _elements(val: Any) -> str:
    return str(val.numel()) if isinstance(val, torch.Tensor) else ""


def _is_contiguous(val: torch.Tensor) -> bool:
    wanted: int | torch.SymInt = 1
    for size, stride in zip(reversed(val.shape), reversed(val.stride()), strict=True):
        if str(stride) != str(wanted) and str(size) != "1":
            return False
        wanted = wanted * size
    return True
