"""Gradients for which torch looks at the values of tensors, unless these are fake.

The gradient of a product divides it by its factors where none of them is zero. For a fake tensor torch cannot look,
and takes a formula that is right for all values, with other rounding. So the gradient that a node of autograd gives is
replaced by the one that torch gives for the values of each call. Where no further gradient is wanted, both are
computed and the values choose between them. Else the choice is a branch of the step, as in eager: a chosen gradient
would have gradients of both.

A hook on the node of autograd does this. The node does not exist yet when the operation is recorded, below autograd; it
does at the next operation. Under ``torch.compile`` nothing is recorded there: the last operation of Dynamo's graph
finds the nodes that lead to its results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from weft import torch_adapter

aten = torch.ops.aten

Gradients = tuple[torch.Tensor | None, ...]
# Makes the gradients of eager from those that the node gave, the gradient of the result or of each result, and the
# operation's arguments.
Formula = Callable[..., Gradients]


class ValueGradients:
    """The operations of a capture whose gradients depend on values, until they have hooks."""

    def __init__(self) -> None:
        self._new: list[tuple[str, torch.Tensor, Callable[..., Gradients]]] = []

    def note(self, name: str, formula: Formula, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note an operation of this name that gave ``result``, a tensor or a tuple of them.

        Where autograd records nothing (``no_grad``, the forward of a custom function), no node is its own. To ask a
        view for its node would run the view's operation again, in the middle of another one.
        """
        is_tensor = isinstance(result, torch.Tensor)
        out = result if is_tensor else result[0]
        if torch.is_grad_enabled() and not out._is_view():

            def replaced(given: Gradients, grads: Gradients) -> Gradients:
                # In a checkpoint that runs its own backward a node may be told no gradient of its result.
                told = any(each is not None for each in grads)
                return formula(given, grads[0] if is_tensor else grads, *args, **kwargs) if told else given

            self._new.append((name, out, replaced))

    def register(self) -> None:
        """Register the hooks of the operations noted since the last call."""
        while self._new:
            name, out, replaced = self._new.pop()
            node = out.grad_fn
            # That of another operation, where the tensor has become the result of a custom function meanwhile.
            if node is not None and node.name().lower().startswith(f"{name.replace('_', '')}backward"):
                node.register_hook(replaced)

    def clear(self) -> None:
        """Let go of the tensors."""
        self._new.clear()


def _product(
    given: Gradients, gradient: torch.Tensor, x: torch.Tensor, *, dtype: torch.dtype | None = None
) -> Gradients:
    if given[0] is None or x.dim() == 0:
        return given
    kind, x = x.dtype, x.to(gradient.dtype)
    if torch.is_grad_enabled():
        return given if bool((x == 0).any()) else ((gradient * (_result() / x).conj()).to(kind),)
    zeros = (x == 0).sum()
    exact = (gradient * (x.prod() / x).conj()).to(kind)
    return (torch.where(zeros == 0, exact, torch.where(zeros > 1, torch.zeros_like(given[0]), given[0])),)


def _product_along(
    given: Gradients,
    gradient: torch.Tensor,
    x: torch.Tensor,
    dim: int,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Gradients:
    if given[0] is None or x.dim() == 0:
        return given
    kind, x = x.dtype, x.to(gradient.dtype)
    further = torch.is_grad_enabled()
    if further and bool((x == 0).any()):
        return given
    result = _result() if further else x.prod(dim, keepdim)
    if not keepdim:
        gradient, result = gradient.unsqueeze(dim), result.unsqueeze(dim)
    exact = (gradient * (result / x).conj()).to(kind)
    return (exact if further else torch.where((x == 0).any(), given[0], exact),)


def _products_up_to(
    given: Gradients, gradient: torch.Tensor, x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None
) -> Gradients:
    if given[0] is None or x.numel() <= 1 or x.shape[dim] == 1:
        return given
    further = torch.is_grad_enabled()
    if further and bool((x == 0).any()):
        return (_of_each_product(gradient.to(x.dtype), x.conj(), dim),)
    result = (_result() if further else x.cumprod(dim, dtype=gradient.dtype)).conj()
    gradient, sum_from = gradient.to(x.dtype), lambda terms: terms.flip(dim).cumsum(dim).flip(dim)
    if further:
        return (sum_from(result * gradient).div(x.conj()).to(x.dtype),)
    zeros = (x == 0).cumsum(dim)
    before, after = zeros == 0, zeros == 1  # the first zero, which is in ``after``
    of_others = torch.where(before, sum_from((result * gradient).masked_fill(~before, 0)).div(x.conj()), 0)
    index = after.max(dim, keepdim=True).indices
    first = torch.zeros_like(after).scatter(dim, index, 1) & after
    product_after = x.conj().masked_fill(~(after & ~first), 1).cumprod(dim)
    product_before = result.gather(dim, (index - 1).relu()).masked_fill(index == 0, 1)
    of_first = (product_after * gradient.masked_fill(~after, 0)).sum(dim, keepdim=True) * product_before
    return (torch.where(first, of_first, of_others).to(x.dtype),)


def _of_each_product(gradient: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    """The gradient of cumulative products for any values, with further gradients: what each element is multiplied by.

    torch 2.14 and later have another formula, with other rounding, for fake tensors.
    """
    size, parts = x.shape[dim], []
    for at in range(size):
        others = x.narrow(dim, 0, at).prod(dim, keepdim=True) if at else x.new_ones(1).expand_as(x.narrow(dim, 0, 1))
        if at < size - 1:
            after = x.narrow(dim, at + 1, size - at - 1).cumprod(dim)
            others = torch.cat([others, others.expand_as(after) * after if at else after], dim)
        parts.append((gradient.narrow(dim, at, size - at) * others).sum(dim))
    return torch.stack(parts, dim)


def _chosen_element(reduce: Callable[[torch.Tensor], torch.Tensor]) -> Formula:
    """That of a maximum, minimum or median of all elements: only those that are it get a share of the gradient."""

    def formula(given: Gradients, gradient: torch.Tensor, x: torch.Tensor) -> Gradients:
        if given[0] is None or x.device.type != "cpu":
            return given
        with torch.no_grad():
            value = reduce(x)
            chosen = (x == value) | (x.isnan() & value.isnan())
        return (torch.zeros_like(given[0]).masked_fill(chosen, gradient / chosen.sum()),)

    return formula


def _filled(given: Gradients, gradient: torch.Tensor, x: torch.Tensor, mask: torch.Tensor, value: Any) -> Gradients:
    # A number as value has no gradient, and its node has one result.
    return given if len(given) < 2 or given[1] is None else (given[0], gradient.masked_select(mask).sum())


def _determinant(given: Gradients, gradients: Gradients, x: torch.Tensor) -> Gradients:
    # A further gradient needs another formula for singular matrices, of which torch computes both and takes one.
    if given[0] is None or gradients[0] is None or not torch.is_grad_enabled():
        return given
    determinant = _result()
    if bool((determinant.abs() < 100 * torch.finfo(x.dtype).eps).any()):
        return given
    scaled = (gradients[0] * determinant.conj()).unsqueeze(-1)
    return (torch.linalg.solve(x.mH, torch.diag_embed(scaled.expand(x.shape[:-1]))),)


def _eigenvectors(name: str) -> Formula:
    """That of eigenvectors: for complex ones it must not depend on their phases, which eager looks at."""

    def formula(given: Gradients, gradients: Gradients, x: torch.Tensor, *_: Any) -> Gradients:
        vectors = _result("eigenvectors")
        if given[0] is not None and gradients[1] is not None and vectors.is_complex():
            with torch.no_grad():
                phases = (vectors.mH @ gradients[1]).diagonal(0, -2, -1).imag
                aten._assert_async.msg((phases.abs() <= 1e-2).all(), f"{name}{_PHASES}")
        return given

    return formula


# As torch says it, after the name of its function.
_PHASES = (
    ": The eigenvectors in the complex case are specified up to multiplication by e^{i phi}. The specified loss "
    "function depends on this quantity, so it is ill-defined."
)


def _result(name: str = "result") -> Any:
    """What the node that runs now has saved of the operation: by default its result, with its autograd graph."""
    return getattr(torch_adapter.running_autograd_node(), f"_saved_{name}")


FORMULAS: dict[Any, Formula] = {
    aten.prod.default: _product,
    aten.prod.dim_int: _product_along,
    aten.cumprod.default: _products_up_to,
    aten.max.default: _chosen_element(torch.max),
    aten.min.default: _chosen_element(torch.min),
    aten.median.default: _chosen_element(torch.median),
    aten.nanmedian.default: _chosen_element(torch.nanmedian),
    aten.masked_fill.Tensor: _filled,
    aten.masked_fill_.Tensor: _filled,
    aten._linalg_det.default: _determinant,
    aten._linalg_eigh.default: _eigenvectors("linalg_eigh_backward"),
    aten.linalg_eig.default: _eigenvectors("linalg_eig_backward"),
}
"""By operation."""

_WRAPPED = 1 << 64  # autograd shows a negative number that it saved as an unsigned one
# By the name of autograd's node: the operation, and what the node saved of its arguments, in the order of the formula.
_BY_NODE: dict[str, tuple[Any, tuple[str, ...]]] = {
    "ProdBackward0": (aten.prod.default, ("self",)),
    "ProdBackward1": (aten.prod.dim_int, ("self", "dim", "keepdim")),
    "CumprodBackward0": (aten.cumprod.default, ("self", "dim")),
    "MaxBackward1": (aten.max.default, ("self",)),
    "MinBackward1": (aten.min.default, ("self",)),
    "MedianBackward0": (aten.median.default, ("self",)),
    "NanmedianBackward0": (aten.nanmedian.default, ("self",)),
    "MaskedFillBackward1": (aten.masked_fill.Tensor, ("mask", "mask", "mask")),
    "LinalgEighBackward0": (aten._linalg_eigh.default, ("eigenvectors",)),
    "LinalgEigBackward0": (aten.linalg_eig.default, ("eigenvectors",)),
}


def register_in_graph(graph: torch.fx.Graph) -> None:
    """Let a graph of Dynamo's register the hooks when it is traced: at its end, since its nodes are those of torch's
    functions, which may be many operations."""
    output = next(iter(reversed(graph.nodes)))
    with graph.inserting_before(output):
        graph.call_function(_register_behind, (output.args[0],))


def _register_behind(results: Any) -> None:
    pending = [each.grad_fn for each in results if isinstance(each, torch.Tensor)]
    met = set[Any]()
    while pending:
        node = pending.pop()
        if node is None or node in met:
            continue
        met.add(node)
        pending += [each for each, _ in node.next_functions]
        if node.name() in _BY_NODE:
            node.register_hook(_of_node(*_BY_NODE[node.name()]))


def _of_node(operation: Any, names: tuple[str, ...]) -> Callable[..., Gradients]:
    """The hook of a node that computes the gradients of eager."""
    many = operation in (aten._linalg_eigh.default, aten.linalg_eig.default)

    def replaced(given: Gradients, grads: Gradients) -> Gradients:
        saved = map(_result, names)
        args = [each - _WRAPPED if type(each) is int and each >= _WRAPPED // 2 else each for each in saved]
        return FORMULAS[operation](given, grads if many else grads[0], *args)

    return replaced
