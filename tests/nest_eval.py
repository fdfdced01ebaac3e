"""The oracle of the inductor's tests: what a loop nest means, computed by torch on whole tensors at once."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch

from weft.inductor.loop_ir.ir import (
    Buffer,
    Call,
    Const,
    Index,
    Load,
    Nest,
    Position,
    Reduce,
    ReductionResult,
    Scalar,
    Value,
)
from weft.inductor.loop_ir.ops import OPS
from weft.inductor.lowering.lowered_step import Lowered
from weft.inductor.lowering.registry import SEEDS


def evaluate(nest: Nest, buffers: Mapping[str, torch.Tensor], numbers: Mapping[str, float] | None = None) -> None:
    """Run ``nest`` on flat tensors, in place: all loads, then all stores.

    Args:
        buffers: by name, one-dimensional, over the buffer's whole storage.
        numbers: values of the symbols that sizes and scalars are written in.
    """
    given = {str(name): value for name, value in (numbers or {}).items()}
    sizes = [_number(size, given) for size in nest.sizes]
    values: dict[Value, torch.Tensor] = {}
    for value in nest.values():
        values[value] = _value(value, values, buffers, sizes, given)
    for store in nest.stores:
        positions = _positions(store.index, values, sizes, given)
        axes = [n if axis in store.axes else 1 for axis, n in enumerate(sizes)]
        at = positions.expand(axes).reshape(-1)
        new = values[store.value].expand(axes).reshape(-1).to(buffers[store.buffer].dtype)
        if store.mask is not None:
            kept = values[store.mask].expand(axes).reshape(-1)
            at, new = at[kept], new[kept]
        buffers[store.buffer][at] = new


def _number(value: object, numbers: Mapping[str, float]) -> int:
    return value if isinstance(value, int) else int(_known(value, numbers))


def _known(expression: Any, numbers: Mapping[str, float]) -> Any:
    """The expression with its symbols, which are told apart by name, replaced."""
    return expression.xreplace({symbol: sympy.sympify(numbers[symbol.name]) for symbol in expression.free_symbols})


def _along(axis: int, sizes: Sequence[int]) -> torch.Tensor:
    shape = [1] * len(sizes)
    shape[axis] = sizes[axis]
    return torch.arange(sizes[axis]).reshape(shape)


def _positions(
    index: Index, values: Mapping[Value, torch.Tensor], sizes: Sequence[int], numbers: Mapping[str, float]
) -> torch.Tensor:
    total = torch.full([1] * len(sizes), _number(index.offset, numbers))
    for axis, stride in index.strides:
        total = total + _along(axis, sizes) * _number(stride, numbers)
    for value, stride in index.indirect:
        total = total + values[value] * _number(stride, numbers)
    return total


def _value(
    value: Value,
    values: Mapping[Value, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    sizes: Sequence[int],
    numbers: Mapping[str, float],
) -> torch.Tensor:
    scalar = [1] * len(sizes)
    if isinstance(value, Const):
        return torch.full(scalar, value.value, dtype=value.dtype)
    if isinstance(value, Scalar):
        return torch.full(scalar, float(_known(value.expression, numbers)), dtype=value.dtype)
    if isinstance(value, Position):
        return _along(value.axis, sizes)
    if isinstance(value, Load):
        at = _positions(value.index, values, sizes, numbers)
        if value.mask is None:
            return buffers[value.buffer][at].to(value.dtype)
        mask, at = torch.broadcast_tensors(values[value.mask], at)
        found = buffers[value.buffer][torch.where(mask, at, 0)].to(value.dtype)
        return torch.where(mask, found, torch.tensor(value.other, dtype=value.dtype))
    if isinstance(value, Call):
        return OPS[value.op].eager(*(values[arg] for arg in value.args)).to(value.dtype)
    if isinstance(value, ReductionResult):
        assert isinstance(value.reduce, Reduce)
        return _reduce(value.reduce, values, sizes)[value.at].to(value.dtype)
    assert isinstance(value, Reduce), value
    return _reduce(value, values, sizes)[0].to(value.dtype)


def _reduce(value: Reduce, values: Mapping[Value, torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
    """The results, with size 1 along the reduced axes."""
    over = set(value.over)
    args = [
        values[arg].expand([n if axis in over else values[arg].shape[axis] for axis, n in enumerate(sizes)])
        for arg in value.args
    ]
    kept = [1 if axis in over else n for axis, n in enumerate(args[0].shape)]
    last = [*(axis for axis in range(len(sizes)) if axis not in over), *value.over]
    rows = args[0].permute(last).reshape(*(n for axis, n in enumerate(args[0].shape) if axis not in over), -1)

    def shaped(result: torch.Tensor) -> torch.Tensor:
        return result.reshape(kept)

    if value.kind in ("sum", "prod"):
        return [shaped(getattr(rows, value.kind)(-1))]
    if value.kind in ("max", "min"):
        return [shaped(getattr(rows, f"a{value.kind}")(-1))]
    if value.kind in ("any", "all"):
        return [shaped(getattr(rows, value.kind)(-1))]
    if value.kind in ("argmax", "argmin"):
        found = getattr(rows, value.kind)(-1, keepdim=True)
        where = args[1].permute(last).expand(args[0].permute(last).shape).reshape(rows.shape)
        return [shaped(rows.gather(-1, found)), shaped(where.gather(-1, found))]
    if value.kind == "welford":
        mean = rows.mean(-1, keepdim=True)
        count = torch.full_like(mean, rows.shape[-1])
        return [shaped(mean), shaped(((rows - mean) ** 2).sum(-1)), shaped(count)]
    assert value.kind == "online_softmax", value.kind
    greatest = rows.amax(-1, keepdim=True)
    return [shaped(greatest), shaped((rows - greatest).exp().sum(-1))]


# ---- a whole step


def run_items(
    lowered: Lowered, items: Sequence[Any], inputs: Sequence[Any], numbers: Mapping[str, float] | None = None
) -> list[Any]:
    """The results of a step whose kernels are evaluated and whose other calls run as they are.

    Args:
        items: of the lowered step, in order: nests (``.nest``) and calls (``.node``).
        inputs: a value for each placeholder.
        numbers: values of the symbols that sizes are written in.
    """
    given = {str(name): value for name, value in (numbers or {}).items()}

    def whole(sizes: Sequence[Any]) -> list[int]:
        return [_number(size, given) for size in sizes]

    def zeros(buffer: Buffer) -> torch.Tensor:
        sizes = whole(buffer.sizes)
        reach = 1 + sum((n - 1) * s for n, s in zip(sizes, whole(buffer.strides), strict=True))
        return torch.zeros(0 if 0 in sizes else reach, dtype=buffer.dtype)

    step = lowered.step
    values: dict[torch.fx.Node, Any] = {}
    flat: dict[str, torch.Tensor] = {}

    def put(name: str, tensor: torch.Tensor) -> None:
        buffer = lowered.buffers[name]
        flat[name] = zeros(buffer)
        flat[name].as_strided(whole(buffer.sizes), whole(buffer.strides)).copy_(tensor)

    def get(node: torch.fx.Node) -> Any:
        operand = lowered.operands.get(node)
        if operand is not None and operand.buffer in flat:
            (offset,) = whole([operand.offset])
            return flat[operand.buffer].as_strided(whole(operand.sizes), whole(operand.strides), offset)
        if node not in values and node.target is operator.getitem:
            return get(node.args[0])[node.args[1]]  # type: ignore[index]
        return values[node]

    for node, value in zip(step.placeholders, inputs, strict=True):
        values[node] = value
        if node.name in lowered.buffers:
            put(node.name, value)
    if SEEDS in lowered.buffers:
        flat[SEEDS] = torch.arange(len(lowered.seeds))
    for item in items:
        if hasattr(item, "nest"):
            for name in item.nest.writes:
                flat.setdefault(name, zeros(lowered.buffers[name]))
            evaluate(item.nest, flat, given)
            continue
        args, kwargs = torch.fx.map_arg((item.node.args, item.node.kwargs), get)
        values[item.node] = result = item.node.target(*args, **kwargs)
        for at, tensor in enumerate(result if isinstance(result, (list, tuple)) else [result]):
            name = f"{item.node.name}.{at}" if isinstance(result, (list, tuple)) else item.node.name
            if name in lowered.buffers:
                put(name, tensor)
    return [get(node) if isinstance(node, torch.fx.Node) else node for node in step.results]
