"""Two-dimensional pooling and its gradients, unrolled over the window.

Each result reads the elements of its window. Each element of a gradient reads the windows that contain it, in a fixed
order: no atomic additions are needed, and sums are the same in every run.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from weft.inductor.graph.operations import arguments
from weft.inductor.loop_ir.axes import integer
from weft.inductor.loop_ir.ir import Index, Int, Position, Store, register_dtype
from weft.inductor.lowering.elementwise import store_result
from weft.inductor.lowering.expressions import Expression, call, logical_and, where, within
from weft.inductor.lowering.registry import Lowering, Node, Operand, register_lowering

aten = torch.ops.aten

# Loads of one point, which are all unrolled: windows of up to 5 x 5.
# Unrolled loads are all live until they are combined: larger windows run out of registers, and ATen reads them in a
# loop.
_MAX_READS = 25


class _Window(NamedTuple):
    """Windows along one dimension: kernel size, stride and padding, in elements."""

    size: int
    stride: int
    padding: int
    length: Int  # of what is pooled
    count: Int  # of windows

    @property
    def overlap(self) -> int:
        """In how many windows an element may lie."""
        # Rounded up: with stride 2 and size 3, every second element lies in two windows.
        return -(-self.size // self.stride)

    def start(self, axis: int) -> Expression:
        """Where the window at the nest's axis starts."""
        return Expression(Position(axis)) * self.stride - self.padding


def _windows(args: dict[str, Any], pooled: Operand, result: Operand) -> list[_Window] | None:
    """The windows along the last two dimensions; None where they are not covered (dilated, cut off, large)."""
    size, padding = _pair(args["kernel_size"]), _pair(args["padding"])
    # An empty list is torch's way to say that the stride is the window's size.
    stride = _pair(args["stride"] or size)
    # `ceil_mode` has windows that reach over the end; dilated windows have gaps. Both change what a window's elements
    # are.
    if args["ceil_mode"] or _pair(args.get("dilation", 1)) != (1, 1):
        return None
    lengths, counts = pooled.sizes[-2:], result.sizes[-2:]
    windows = [_Window(size[d], stride[d], padding[d], lengths[d], counts[d]) for d in range(2)]
    # Forward reads a window's elements, backward the windows of an element; one bound for both keeps them on one
    # side.
    reads = max(math.prod(w.size for w in windows), math.prod(w.overlap for w in windows))
    return windows if reads <= _MAX_READS else None


def _pair(numbers: Any) -> tuple[int, int]:
    """A number for each dimension, where one may stand for both."""
    listed = list(numbers) if isinstance(numbers, (list, tuple)) else [numbers]
    return listed[0], listed[-1]


def _taps(x: Operand, windows: list[_Window], outside: float) -> Iterator[tuple[Expression, Expression]]:
    """Each element of the window at every point of the result (``outside`` in the padding), and its position in the
    plane."""
    rank = len(x.sizes)
    h, w = windows
    # The nest's axes are those of the result; along the two pooled ones a step moves by the window's stride.
    index = x.index()
    steps = {rank - 2: h.stride, rank - 1: w.stride}
    strides = [(axis, stride * steps.get(axis, 1)) for axis, stride in index.strides]
    for i in range(h.size):
        for j in range(w.size):
            row, column = h.start(rank - 2) + i, w.start(rank - 1) + j
            shift = (i - h.padding) * x.strides[-2] + (j - w.padding) * x.strides[-1]
            # Without padding every tap is inside (`ceil_mode` is excluded), so no mask and no comparison is made.
            padded = h.padding or w.padding
            mask = logical_and(within(row, h.length), within(column, w.length)).value if padded else None
            load = x.load(Index(strides, index.offset + shift), mask, outside)
            # Flat in the plane, as torch's indices of max pooling are.
            yield Expression(load), row * Expression(integer(w.length)) + column


def _covering_windows(windows: list[_Window], rank: int) -> Iterator[tuple[Expression, Expression, Expression]]:
    """The windows that may hold the element at every point: their positions, and whether they exist and hold it."""
    for i in range(windows[0].overlap):
        for j in range(windows[1].overlap):
            positions, covered = [], []
            for back, axis, window in zip((i, j), (rank - 2, rank - 1), windows, strict=True):
                padded = Expression(Position(axis)) + window.padding
                # The last window that starts at or before the element, and those before it: the candidates that may
                # reach it.
                at = call("floordiv", padded, window.stride) - back
                offset = padded - at * window.stride
                positions.append(at)
                # With a stride above the size some elements are in no window; at the borders some windows do not
                # exist.
                covered.append(logical_and(within(at, window.count), offset < window.size))
            yield positions[0], positions[1], logical_and(*covered)


def _at_window(x: Operand, row: Expression, column: Expression, mask: Expression) -> Expression:
    """An element per window, read at the nest's outer axes."""
    outer = x.index([*range(len(x.sizes) - 2), None, None])
    # A quotient of a position is not affine, so the window's number is an indirect term.
    indirect = [(at.value, stride) for at, stride, n in zip((row, column), x.strides[-2:], x.sizes[-2:], strict=True)]
    return Expression(x.load(Index(outer.strides, outer.offset, indirect), mask.value, 0))


@register_lowering(aten.max_pool2d_with_indices.default)
def _max_pool(out: Lowering, node: Node) -> bool:
    args = arguments(node)
    x, result = out.operand(args["self"]), out.result()
    windows = _windows(args, x, result)
    # A dimension of size 1 has no stride in the operand's index, so its windows could not step.
    if windows is None or not x.dtype.is_floating_point or 1 in x.sizes[-2:]:
        return False
    h, w = (window.start(axis) for axis, window in enumerate(windows, len(x.sizes) - 2))
    width = Expression(integer(windows[1].length))
    # The first element inside the picture: ATen's answer where no element is above -inf.
    found = call("maximum", h, 0) * width + call("maximum", w, 0)
    (greatest, _), *others = _taps(x, windows, -math.inf)
    for value, position in others:
        # As in ATen: the first of equal elements counts, and NaN always replaces what was found.
        better = call("or", value > greatest, value != value)
        greatest, found = where(better, value, greatest), where(better, position, found)
    positions = out.result(1)
    targets = (result, greatest), (positions, found)
    out.nest(result.sizes, [Store(target.buffer, target.index(), value.value) for target, value in targets])
    return True


@register_lowering(aten.max_pool2d_with_indices_backward.default)
def _max_pool_backward(out: Lowering, node: Node) -> bool:
    args = arguments(node)
    grad, positions = out.operand(args["grad_output"]), out.operand(args["indices"])
    sizes = out.result().sizes
    windows = _windows(args, out.result(), grad)
    if windows is None:
        return False
    rank = len(sizes)
    # The gradient asks each window for the position that its forward stored; the input is not needed.
    here = Expression(Position(rank - 2)) * Expression(integer(sizes[-1])) + Expression(Position(rank - 1))
    parts = []
    for row, column, covered in _covering_windows(windows, rank):
        # Windows overlap, so each is asked whether its maximum was this element.
        mine = logical_and(covered, _at_window(positions, row, column, covered) == here)
        parts.append(where(mine, _at_window(grad, row, column, covered), 0))
    store_result(out, functools.reduce(operator.add, parts))
    return True


def _divisor(args: dict[str, Any], windows: list[_Window], at: list[Expression], dtype: torch.dtype) -> Expression:
    """By what the sum of a window is divided: its elements, those in the padding counted or not."""
    fixed = args["divisor_override"]
    whole = args["count_include_pad"] or not any(window.padding for window in windows)
    if fixed is not None or whole:
        number = math.prod(window.size for window in windows) if fixed is None else fixed
        return at[0].to(dtype).coerce(number)
    # Without the padding, windows at the border have fewer elements; ATen divides by their number.
    spans = []
    for window, position in zip(windows, at, strict=True):
        start = position * window.stride - window.padding
        end = call("minimum", start + window.size, Expression(integer(window.length)))
        spans.append(end - call("maximum", start, 0))
    return (spans[0] * spans[1]).to(dtype)


@register_lowering(aten.avg_pool2d.default)
def _avg_pool(out: Lowering, node: Node) -> bool:
    args = arguments(node)
    x, result = out.operand(args["self"]), out.result()
    windows = _windows(args, x, result)
    if windows is None or not x.dtype.is_floating_point or 1 in x.sizes[-2:]:
        return False
    rank, dtype = len(x.sizes), register_dtype(x.dtype)
    # In the order of the window, row by row: as ATen's loop adds.
    total = functools.reduce(operator.add, (value for value, _ in _taps(x, windows, 0)))
    at = [Expression(Position(axis)) for axis in (rank - 2, rank - 1)]
    store_result(out, total / _divisor(args, windows, at, dtype))
    return True


@register_lowering(aten.avg_pool2d_backward.default)
def _avg_pool_backward(out: Lowering, node: Node) -> bool:
    args = arguments(node)
    grad = out.operand(args["grad_output"])
    windows = _windows(args, out.result(), grad)
    if windows is None:
        return False
    dtype = register_dtype(grad.dtype)
    parts = []
    for row, column, covered in _covering_windows(windows, len(out.result().sizes)):
        share = _at_window(grad, row, column, covered) / _divisor(args, windows, [row, column], dtype)
        # The divisor may be 0 or negative for a window that does not exist: selected away, not multiplied by 0.
        parts.append(where(covered, share, 0))
    store_result(out, functools.reduce(operator.add, parts))
    return True
