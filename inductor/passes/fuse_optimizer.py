"""The optimizer's many operations on lists of tensors become a few multi-tensor calls.

Fused Adam, AdamW and SGD take in gradient clipping (the clipped gradients are never written), casts of gradients that
only they read, and the step counters. Norms of many tensors become one call that returns one tensor of norms. The
remaining ``_foreach`` operations become one call for each chain on lists of equal sizes.

The calls are :class:`weft.inductor.multi_tensor.operation.MultiTensor`. Run as ATen operations they keep every bit;
their kernels are chosen later (:func:`weft.inductor.runtime.multi_tensor.use_kernels`).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from weft.capture.graph import StepGraph, calls, drop_dead
from weft.capture.node_kinds import is_wait
from weft.inductor.graph.collectives import ALL_REDUCE
from weft.inductor.graph.emitter import emitter
from weft.inductor.graph.escapes import escaping
from weft.inductor.graph.operations import arguments
from weft.inductor.graph.pass_runner import keeps_bits
from weft.inductor.multi_tensor.adam import Adam
from weft.inductor.multi_tensor.norm import ORDERS, Norm
from weft.inductor.multi_tensor.operation import MultiTensor
from weft.inductor.multi_tensor.sgd import Sgd
from weft.inductor.passes.fold_casts import represents_exactly
from weft.inductor.passes.foreach_chains import fuse_foreach_chains
from weft.inductor.passes.tensor_lists import (
    equal_scalars,
    iterable_by_kernels,
    list_of_elements,
    multi_tensor_call,
    readable_by_kernels,
    replace_elements,
    same_layouts,
)

Node = torch.fx.Node

aten = torch.ops.aten
_ADAMS = {
    aten._fused_adam.default: False,
    aten._fused_adam.tensor_lr: False,
    aten._fused_adamw.default: True,
    aten._fused_adamw.tensor_lr: True,
}
_SGDS = (aten._fused_sgd.default, aten._fused_sgd.tensor_lr)
_GRADS = 1  # position of the gradients among the results of all three


@keeps_bits
def fuse_optimizer(step: StepGraph) -> StepGraph:
    """Replace optimizer updates, norms of lists and ``_foreach`` chains by multi-tensor calls. Changes ``step``."""
    for node in list(step.graph.nodes):
        if node.target in _ADAMS:
            _fuse_adam(step.graph, node, _ADAMS[node.target])
        elif node.target in _SGDS:
            _fuse_sgd(step.graph, node)
        elif node.target in (aten.stack.default, aten.cat.default):
            _fuse_norms(step.graph, node)
    drop_dead(step.graph)
    kept = escaping(step)
    for node in calls(step.graph):
        if node.target is aten._foreach_norm.Scalar:
            _fuse_single_norms(step.graph, node, kept)
    drop_dead(step.graph)
    fuse_foreach_chains(step.graph)
    drop_dead(step.graph)
    return step


def _fuse_adam(graph: torch.fx.Graph, node: Node, decoupled: bool) -> None:
    bound = arguments(node)
    states = [bound[name] for name in ("self", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")]
    numbers = [bound[name] for name in ("beta1", "beta2", "weight_decay", "eps")]
    if not _fits(node, [*(s for s in states if s), bound["grads"]], numbers):
        return
    steps = bound["state_steps"]
    if not all(s.meta["val"].dtype == torch.float32 for s in steps):
        return
    grads, coefficient = _unclipped(node, bound["grads"])
    before = _before_counting(node, steps)
    beta1, beta2, weight_decay, eps = numbers
    amsgrad, maximize = bound["amsgrad"], bound["maximize"]
    call = Adam(decoupled, beta1, beta2, weight_decay, eps, amsgrad, maximize, before is not None)
    params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs = states
    lists = (params, _before_casts(node, grads), exp_avgs, exp_avg_sqs, max_exp_avg_sqs, before or steps)
    operands = (*lists, bound["lr"], coefficient, bound["grad_scale"], bound["found_inf"])
    _replace(graph, node, call, operands, bound["grads"], counted=steps if before else [])


def _fuse_sgd(graph: torch.fx.Graph, node: Node) -> None:
    bound = arguments(node)
    params, momenta = bound["self"], bound["momentum_buffer_list"]
    numbers = [bound[name] for name in ("momentum", "weight_decay", "dampening")]
    if not _fits(node, [params, bound["grads"], *([momenta] if momenta else [])], numbers):
        return
    grads, coefficient = _unclipped(node, bound["grads"])
    momentum, weight_decay, dampening = numbers
    first = bound["is_first_step"]
    call = Sgd(momentum, weight_decay, dampening, bound["nesterov"], bound["maximize"], first)
    grads = _before_casts(node, grads)
    operands = (params, grads, momenta, bound["lr"], coefficient, bound["grad_scale"], bound["found_inf"])
    _replace(graph, node, call, operands, bound["grads"])


def _fuse_norms(graph: torch.fx.Graph, node: Node) -> None:
    """``stack`` of whole tensors' norms, or what it decomposes to."""
    operands = _stacked(node)
    if not operands:
        return
    measured = [_norm_of(norm) for norm in operands]
    if any(m is None or len(norm.users) > 1 for m, norm in zip(measured, operands, strict=True)):  # type: ignore[union-attr]
        return
    tensors = [m[0] for m in measured if m is not None]
    orders = {m[1] for m in measured if m is not None}
    dtypes = {tensor.meta["val"].dtype for tensor in tensors} | {node.meta["val"].dtype}
    if len(orders) > 1 or not orders <= set(ORDERS) or len(dtypes) > 1 or not iterable_by_kernels([tensors]):
        return
    order = orders.pop()
    # Only the sum of squares counts then, which kernels can add up in any grouping, and over ranks.
    call = Norm(order, together=order == 2.0 and _read_together(node))
    ((norms,),) = multi_tensor_call(graph, node, call, (tensors,), [[node.meta["val"]]])
    node.replace_all_uses_with(norms)


def _fuse_single_norms(graph: torch.fx.Graph, node: Node, kept: set[Node]) -> None:
    """``_foreach_norm`` of which single norms are read: the norms are elements of one tensor. With tensor parallelism
    those of replicated parameters are divided before all are stacked and their squares added up over the ranks.

    Args:
        kept: what the user's code holds after the step, which must not be a view of the other norms.
    """
    picked = sorted(node.users)  # the first in the graph first
    measured = [_norm_of(norm) for norm in picked]
    if not picked or None in measured or not kept.isdisjoint(picked):
        return
    tensors, order = node.args[0], measured[0][1]  # type: ignore[index]
    dtypes = {each.meta["val"].dtype for each in (*tensors, *picked)}  # type: ignore[union-attr,misc]
    if order not in ORDERS or len(dtypes) > 1 or not iterable_by_kernels([tensors]):  # type: ignore[list-item]
        return
    result = picked[0].meta["val"].new_empty(len(tensors))  # type: ignore[arg-type]
    ((norms,),) = multi_tensor_call(graph, picked[0], Norm(order), (tensors,), [[result]])
    with graph.inserting_before(picked[0]):
        emit = emitter(graph, picked[0])
        replace_elements([(norm, emit(aten.select.int, norms, 0, norm.args[1])) for norm in picked])


def _read_together(norms: Node) -> bool:
    """Whether ``norms`` are only read for their own norm, on this rank or, if their squares are all-reduced, over
    several: then only the sum of their squares matters."""
    squared = False
    while len(norms.users) == 1:
        (norms,) = norms.users
        exponent = norms.args[1] if norms.target is aten.pow.Tensor_Scalar else None
        if exponent == (0.5 if squared else 2.0):
            squared = not squared
        elif norms.target is aten.linalg_vector_norm.default:
            return not squared and norms.args[1:] in ((), (2.0,), (2,)) and not norms.kwargs
        elif not (is_wait(norms) or (squared and _is_sum_over_ranks(norms))):
            return False
    return False


def _is_sum_over_ranks(node: Node) -> bool:
    return node.target is ALL_REDUCE.op and node.args[1] == "sum"


def _stacked(node: Node) -> list[Node]:
    """The 0-dim values that ``node`` stacks; empty where it does something else."""
    source: Any = node.args[0]
    if len(node.args) > 1 or node.kwargs or node.meta["val"].dim() != 1:
        return []
    if node.target is aten.stack.default:
        return list(source)
    single = all(part.target is aten.unsqueeze.default and len(part.users) == 1 for part in source)
    return [part.args[0] for part in source] if single else []


def _norm_of(norm: Any) -> tuple[Node, float] | None:
    """The tensor that ``norm`` is the norm of, and its order."""
    if norm.target is aten.linalg_vector_norm.default and not norm.kwargs and len(norm.args) <= 2:
        return norm.args[0], float(norm.args[1]) if len(norm.args) > 1 else 2.0
    if norm.target is operator.getitem and norm.args[0].target is aten._foreach_norm.Scalar:
        many, at = norm.args
        plain = not many.kwargs and len(many.args) <= 2
        return (many.args[0][at], float(many.args[1]) if len(many.args) > 1 else 2.0) if plain else None
    return None


def _fits(node: Node, lists: list[list[Node]], numbers: list[Any]) -> bool:
    """Whether one kernel can iterate over the lists, the numbers are constants, and users read elements of results."""
    results = [user for user in node.users if user.target is operator.getitem]
    singly = all(use.target is operator.getitem for user in results for use in user.users)
    bound = arguments(node)
    scalars = readable_by_kernels([bound[name] for name in ("lr", "grad_scale", "found_inf")], bound["self"][0])
    # With a scale, torch writes the unscaled gradients back. The kernels do not, so nobody may read them.
    unscaled = bound["grad_scale"] is None or all(user.args[1] != _GRADS for user in results)
    constant = all(type(value) in (int, float) for value in numbers)
    plain = constant and singly and unscaled and scalars and len(results) == len(node.users)
    return plain and same_layouts(lists) and iterable_by_kernels(lists)


def _unclipped(node: Node, grads: Sequence[Node]) -> tuple[Sequence[Node], Node | None]:
    """The gradients before clipping (a multiplication of all of them by one 0-dim tensor), and that tensor. The
    gradients as they are, and None, where they are not clipped, or where others than ``node`` read the clipped ones."""
    products = [_product(grad) for grad in grads]
    if any(product is None for product in products) or any(set(grad.users) != {node} for grad in grads):
        return grads, None
    # The caller sees the clipped gradients, so they have to exist.
    if any(user.target is operator.getitem and user.args[1] == _GRADS for user in node.users):
        return grads, None
    originals, factors = zip(*(product for product in products if product is not None), strict=True)
    same = all(o.meta["val"].dtype == g.meta["val"].dtype for o, g in zip(originals, grads, strict=True))
    same = same and same_layouts([originals, grads])
    same = same and equal_scalars(factors) and readable_by_kernels(factors, grads[0])
    return (list(originals), factors[0]) if same else (grads, None)


def _before_casts(node: Node, grads: Sequence[Node]) -> list[Node]:
    """The gradients before lossless casts that only ``node`` reads, as autocast inserts for half-precision weights."""
    return [grad.args[0] if _is_only_cast(node, grad) else grad for grad in grads]  # type: ignore[misc]


def _is_only_cast(node: Node, grad: Node) -> bool:
    if grad.target is not aten._to_copy.default or "inplace" in grad.meta or set(grad.users) != {node}:
        return False
    source = grad.args[0]
    assert isinstance(source, Node)
    source_dtype, grad_dtype = source.meta["val"].dtype, grad.meta["val"].dtype
    return (
        same_layouts([[source], [grad]])
        and iterable_by_kernels([[source]])
        and represents_exactly(grad_dtype, source_dtype)
    )


def _product(value: Node) -> tuple[Node, Node] | None:
    """The tensor and the 0-dim tensor that ``value`` is the product of."""
    if value.target is aten.mul.Tensor:
        tensor, factor = value.args
    elif value.target is operator.getitem and value.args[0].target is aten._foreach_mul.Tensor:  # type: ignore[union-attr]
        many, at = value.args
        tensor, factor = many.args[0][at], many.args[1]  # type: ignore[union-attr,index]
    else:
        return None
    fake = factor.meta["val"] if isinstance(factor, Node) else None
    return (tensor, factor) if isinstance(fake, torch.Tensor) and not fake.dim() else None  # type: ignore[return-value]


def _before_counting(node: Node, steps: Sequence[Node]) -> list[Node] | None:
    """The step counts before one was added to each, where nothing reads the new ones before ``node`` does."""
    many = list_of_elements(steps)
    # The kernel adds the one itself, which saves a launch.
    if many is None or many.target is not aten._foreach_add.Scalar or many.args[1] != 1:
        return None
    readers = {reader for user in many.users for reader in user.users}
    early = any(reader is not node and reader < node for reader in readers)
    return None if early or len(many.args[0]) != len(steps) else list(many.args[0])  # type: ignore[arg-type]


def _replace(
    graph: torch.fx.Graph,
    node: Node,
    call: MultiTensor,
    operands: tuple[Any, ...],
    grads: Sequence[Node],
    counted: Sequence[Node] = (),
) -> None:
    """Put ``call`` in the place of a fused update; ``counted`` are the step counts that it also computes."""
    vals = [list(vals) for at, vals in enumerate(node.meta["val"]) if at != _GRADS]
    vals += [[step.meta["val"] for step in counted]] if counted else []
    results = multi_tensor_call(graph, node, call, operands, vals)
    new = [results[0], list(grads), *results[1:]]
    elements = [(use, new[user.args[1]][use.args[1]]) for user in node.users for use in user.users]  # type: ignore[index]
    replace_elements([*elements, *zip(counted, new[-1], strict=False)])
