"""GEMMs of odd sizes are padded to sizes that tensor cores support at full speed.

A row of half-precision numbers that does not start at a multiple of 16 bytes keeps cuBLAS from its fast kernels. The
output projection of GPT-2, with its 50257 classes, runs at a fifth of the speed of one with 50264. Operands get rows
and columns of zeros, and the result is sliced. Padding costs a copy of an operand, which the operand's producer mostly
makes itself.

Changes results: zeros change no sum, but another kernel may sum in another order.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from weft.capture.graph import StepGraph
from weft.capture.node_kinds import is_collective
from weft.inductor.graph.emitter import emitter
from weft.inductor.graph.pass_runner import changes_bits
from weft.inductor.graph.relayout import Relayout, behind
from weft.torch_adapter import OpOverload

aten = torch.ops.aten
Node = torch.fx.Node

_ALIGNED = 8  # elements of a half-precision type in 16 bytes
_LEAST_WORK = 1 << 30  # multiplications; below that a launch more costs more
_TRANSPOSES = frozenset({aten.t.default})


@changes_bits("cuBLAS may take another kernel, which sums in another order")
def pad_matmuls(step: StepGraph) -> StepGraph:
    """Pad large half-precision products of sizes that are no multiples of 8. Changes ``step``."""
    padder = _Padder(step)
    for node in list(step.graph.nodes):
        if node.target in (aten.mm.default, aten.addmm.default):
            padder.pad(node)
    for node in list(step.graph.nodes):
        padder.layouts.visit(node)
    return step


class _Padder:
    def __init__(self, step: StepGraph) -> None:
        self.graph = step.graph
        self.layouts = Relayout(step.graph, _reads_any_layout)
        self.padded: dict[tuple[Node, int, int], Node] = {}

    def pad(self, node: Node) -> None:
        *bias, left, right = node.args
        assert isinstance(left, Node)
        assert isinstance(right, Node)
        sizes = (*left.meta["val"].shape, right.meta["val"].shape[1])
        if left.meta["val"].dtype not in (torch.bfloat16, torch.float16) or any(type(n) is not int for n in sizes):
            return
        m, k, n = sizes
        more_m, more_k, more_n = (-size % _ALIGNED for size in sizes)
        if m * k * n < _LEAST_WORK or not (more_m or more_k or more_n):
            return
        if bias and (more_m or node.kwargs or bias[0].meta["val"].shape != (n,)):  # type: ignore[union-attr]
            return
        if bias and more_n:
            bias = [self._call(node, aten.constant_pad_nd.default, bias[0], [0, more_n])]
        wide = self._call(
            node, node.target, *bias, self._wider(left, more_m, more_k), self._wider(right, more_k, more_n)
        )
        if more_m:
            wide = self._call(node, aten.slice.Tensor, wide, 0, 0, m)
        if more_n:
            wide = self._call(node, aten.slice.Tensor, wide, 1, 0, n)
        self.layouts.replace(node, wide)
        self.graph.erase_node(node)

    def _wider(self, operand: Node, rows: int, columns: int) -> Node:
        """``operand`` with rows and columns of zeros added. Shared between users, also transposed ones."""
        if not rows and not columns:
            return operand
        if operand.target in _TRANSPOSES:
            source = operand.args[0]
            assert isinstance(source, Node)
            return self._after(
                operand, (operand, rows, columns), lambda: (aten.t.default, self._wider(source, columns, rows))
            )
        pads = [0, columns, 0, rows]
        return self._after(operand, (operand, rows, columns), lambda: (aten.constant_pad_nd.default, operand, pads))

    def _after(self, source: Node, key: tuple[Node, int, int], call: Any) -> Node:
        if key not in self.padded:
            target, *args = call()
            with self.graph.inserting_after(_last(args, source)):
                self.padded[key] = emitter(self.graph, source)(target, *args)
        return self.padded[key]

    def _call(self, before: Node, target: Any, *args: Any) -> Node:
        with self.graph.inserting_before(before):
            return emitter(self.graph, before)(target, *args)


def _reads_any_layout(node: Node) -> bool:
    """Operations do, if they can at all; collectives and the results of the step have eager's layout."""
    return isinstance(node.target, (OpOverload, type(operator.getitem))) and not is_collective(node)


def _last(args: Sequence[Any], source: Node) -> Node:
    """The node after which a call of ``args`` is inserted; the last placeholder where the first is a placeholder."""
    return behind(next((arg for arg in args if isinstance(arg, Node)), source))
