"""When scattered sums become :class:`weft.inductor.multi_tensor.shared_scatter.SharedScatter`: where many lines share
an index, as in the gradient of a gather with an index that is expanded over heads and samples."""

from __future__ import annotations

import math
from typing import Any

import torch

from weft.inductor.graph.emitter import emitter
from weft.inductor.graph.fake_values import replace_uses
from weft.inductor.multi_tensor.chunked_kernel import COLUMN_DTYPES
from weft.inductor.multi_tensor.shared_scatter import MAX_COUNT, SharedScatter
from weft.inductor.passes.tensor_lists import is_static, multi_tensor_call

Node = torch.fx.Node

aten = torch.ops.aten

# Fewer lines would leave most of a tensor core idle.
_FEWEST_LINES = 16
# With so many places an index in random order takes 1.6 times as long as ATen's atomics, and one that grows along its
# rows 0.6 times (measured, see the module of the kernel). An index in random order takes longer with more places.
_MOST_PLACES = 512


class SharedScatterSum:
    """``scatter_add`` of ``source`` to zeros, along the last dimension.

    Args:
        source: the summands.
        index: the place that each is added to; dimensions of stride 0 before its last two are those that share it.
    """

    def __init__(self, source: Node, index: Node) -> None:
        self.source, self.index = source, index

    @staticmethod
    def matches(arguments: dict[str, Any]) -> bool:
        """Whether a call of ``scatter_add`` is along the last dimension, with an index that lines share."""
        index, source = arguments["index"].meta["val"], arguments["src"].meta["val"]
        last = index.dim() - 1
        if last < 2 or arguments["dim"] not in (-1, last) or index.shape != source.shape:
            return False
        return not any(stride for size, stride in zip(index.shape[:-2], index.stride()[:-2], strict=True) if size != 1)

    def is_faster(self, node: Node) -> bool:
        """Whether the kernel supports these tensors and is faster than ATen's."""
        source, index, sums = (used.meta["val"] for used in (self.source, self.index, node))
        if not is_static((source, index, sums)) or source.dtype not in COLUMN_DTYPES or source.numel() == 0:
            return False
        if sums.dtype != source.dtype or index.dtype not in (torch.int32, torch.int64) or not sums.is_contiguous():
            return False
        if sums.shape[:-1] != source.shape[:-1] or source.shape[-1] > MAX_COUNT:
            return False
        return math.prod(source.shape[:-2]) >= _FEWEST_LINES and sums.shape[-1] <= _MOST_PLACES

    def replace(self, graph: torch.fx.Graph, node: Node) -> None:
        """Replace ``node`` by a multi-tensor call."""
        source, sums = self.source.meta["val"], node.meta["val"]
        rows, count = source.shape[-2:]
        with graph.inserting_before(node):
            emit = emitter(graph, node)
            index = self.index
            while index.meta["val"].dim() > 2:
                index = emit(aten.select.int, index, 0, 0)
            if not index.meta["val"].is_contiguous():
                index = emit(aten.clone.default, index, memory_format=torch.contiguous_format)
            values = self.source
            # A program reads parts of rows, so rows have to lie in one piece each.
            if source.stride(-1) != 1 or (source.dim() > 3 and not source.is_contiguous()):
                values = emit(aten.clone.default, values, memory_format=torch.contiguous_format)
            values = emit(aten.view.default, values, [-1, rows, count])
            flat = sums.new_empty(values.meta["val"].shape[0], rows, sums.shape[-1])
            ((new,),) = multi_tensor_call(graph, node, SharedScatter(sums.shape[-1]), ([values], index), [[flat]])
            replace_uses(graph, node, emit(aten.view.default, new, list(sums.shape)))
        graph.erase_node(node)
