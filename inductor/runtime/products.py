"""Matrix products of a program by the algorithms that were chosen for them, in place of the library's own choice."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import torch

from weft.inductor.runtime.bindings import callable_of
from weft.inductor.runtime.cublas_lt import ALIGNMENT, Shape, product_of
from weft.torch_adapter import OpOverload

Node = torch.fx.Node
Tensor = torch.Tensor

aten = torch.ops.aten

Run = Callable[[Tensor, Tensor, Tensor], bool]


def shape_of(node: Node) -> Shape | None:
    """The shape of the product that a node computes on the current GPU, ``mm`` or ``addmm`` over its addend, where an
    algorithm can be chosen for it."""
    adds = node.target is aten.addmm.default and node.meta.get("inplace") is aten.addmm_.default
    if node.target is not aten.mm.default and not (adds and not node.kwargs):
        return None
    a, b = (operand.meta["val"] for operand in node.args[-2:])  # type: ignore[union-attr]
    if not a.is_cuda or a.device.index not in (None, torch.cuda.current_device()):
        return None
    if any(type(size) is not int for val in (a, b) for size in (*val.shape, *val.stride())):
        return None
    shape = Shape.of(a, b, adds)
    return shape if shape.fits and b.dtype == a.dtype == node.meta["val"].dtype else None


def chosen(step: torch.fx.Graph) -> dict[Shape, str]:
    """The algorithms that nodes of a graph are to be computed by (hexadecimal), in ``meta["algorithm"]``."""
    return {shape: found for node in step.nodes if (found := node.meta.get("algorithm")) and (shape := shape_of(node))}


def product_callables(algorithms: Mapping[Shape, str]) -> dict[OpOverload, Callable[..., Any]]:
    """What a program calls for products: for ``algorithms``' shapes those, for others what it called anyway."""
    if not algorithms:
        return {}
    device = torch.device("cuda", torch.cuda.current_device())
    runs: dict[Any, Run] = {
        (shape.a[:2], shape.a[2:], shape.b[:2], shape.b[2:], shape.dtype, shape.adds): _run(shape, algorithm, device)
        for shape, algorithm in algorithms.items()
    }
    plain, plain_out = callable_of(aten.mm.default), callable_of(aten.mm.out)
    plain_add = callable_of(aten.addmm_.default)

    def mm(a: Tensor, b: Tensor) -> Tensor:
        run = runs.get((a.shape, a.stride(), b.shape, b.stride(), a.dtype, False))
        if run is not None and run(a, b, result := a.new_empty((a.shape[0], b.shape[1]))):
            return result
        return plain(a, b)

    def mm_out(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        run = runs.get((a.shape, a.stride(), b.shape, b.stride(), a.dtype, False))
        return out if run is not None and run(a, b, out) else plain_out(a, b, out=out)

    def addmm_(c: Tensor, a: Tensor, b: Tensor, **scaled: Any) -> Tensor:
        run = None if scaled else runs.get((a.shape, a.stride(), b.shape, b.stride(), a.dtype, True))
        return c if run is not None and run(a, b, c) else plain_add(c, a, b, **scaled)

    return {aten.mm.default: mm, aten.mm.out: mm_out, aten.addmm_.default: addmm_}


def _run(shape: Shape, algorithm: str, device: torch.device) -> Run:
    """Computes a product, if all three matrices lie as the algorithm wants; says whether it did."""
    product, words = product_of(shape, device), ctypes.create_string_buffer(bytes.fromhex(algorithm), 64)
    strides = (shape.b[1], 1)

    def run(a: Tensor, b: Tensor, result: Tensor) -> bool:
        if (a.data_ptr() | b.data_ptr() | result.data_ptr()) % ALIGNMENT or result.stride() != strides:
            return False
        product.run(words, a, b, result)
        return True

    return run
