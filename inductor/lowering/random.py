"""Random numbers inside kernels: Philox with a seed of each operation's own, drawn once a step, and the element's
position, so that a kernel may compute them anywhere and again. They differ from those that ATen's kernels draw.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.capture.functional import effects
from weft.inductor.ir import Call
from weft.inductor.lowering.elementwise import arguments, loaded, put, storable
from weft.inductor.lowering.expressions import Expression, where
from weft.inductor.lowering.reductions import linear
from weft.inductor.lowering.registry import Lowering, Node, lowers

aten = torch.ops.aten


def drawn(out: Lowering, kind: str, result: int = 0) -> Expression:
    """A float32 for each element of a result: ``rand`` is uniform in [0, 1), ``randn`` normal."""
    sizes = out.result(result).sizes
    at = linear(sizes, range(len(sizes))) if sizes else Expression(out.seed()).coerce(0)
    return Expression(Call(kind, (out.seed(), at.value), torch.float32))


def _functional(op: Any) -> Any:
    """What a capture writes for an in-place operation."""
    found = effects(op)
    assert found is not None
    return found.functional


@lowers(aten.native_dropout.default)
def _dropout(out: Lowering, node: Node) -> bool:
    given = arguments(node)
    p = given["p"]
    if not isinstance(p, (int, float)) or given["train"] is False or p >= 1:
        return False
    # The backward reads the mask, so it is stored in any case, and what uses it here reads it too.
    put(out, drawn(out, "rand", 1) >= p, result=1)
    mask = out.result(1)
    kept = Expression(mask.load(mask.index()))
    put(out, where(kept, loaded(out, given["input"], out.fake().dtype) * (1 / (1 - p)), 0))
    return True


@lowers(aten.bernoulli.p, _functional(aten.bernoulli_.float))
def _bernoulli(out: Lowering, node: Node) -> bool:
    p = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
    if not isinstance(p, (int, float)) or _own_generator(node) or not storable(out):
        return False
    put(out, drawn(out, "rand") < p)
    return True


@lowers(aten.rand.default, aten.rand_like.default, aten.randn.default, aten.randn_like.default)
def _standard(out: Lowering, node: Node) -> bool:
    # A half rounds numbers just below 1 up to 1, and a double has more digits than are drawn.
    kind = "randn" if "randn" in str(node.target) else "rand"
    if out.fake().dtype != torch.float32 or _own_generator(node) or not storable(out):
        return False
    put(out, drawn(out, kind))
    return True


@lowers(aten.uniform.default)
def _uniform(out: Lowering, node: Node) -> bool:
    given = arguments(node)
    low, high = given["from"], given["to"]
    if out.fake().dtype != torch.float32 or _own_generator(node) or not storable(out):
        return False
    if not isinstance(low, (int, float)) or not isinstance(high, (int, float)):
        return False
    put(out, drawn(out, "rand") * (high - low) + low)
    return True


@lowers(aten.normal_functional.default)
def _normal(out: Lowering, node: Node) -> bool:
    given = arguments(node)
    mean, std = given["mean"], given["std"]
    if out.fake().dtype == torch.float64 or _own_generator(node) or not storable(out):
        return False
    if not isinstance(mean, (int, float)) or not isinstance(std, (int, float)):
        return False
    put(out, drawn(out, "randn") * std + mean)
    return True


def _own_generator(node: Node) -> bool:
    return node.kwargs.get("generator") is not None
