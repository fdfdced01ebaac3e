"""A lowered step: loop nests and calls on named buffers, in an order that runs."""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.capture.graph import StepGraph
from weft.inductor.graph.gpu import HOPPER_MULTIPROCESSORS
from weft.inductor.loop_ir.axes import size_hint
from weft.inductor.loop_ir.ir import Buffer, Nest
from weft.inductor.loop_ir.numbering import numbers, renamed
from weft.inductor.lowering.memory_order import MemoryOrders
from weft.inductor.lowering.registry import Operand

Node = torch.fx.Node


@dataclass(frozen=True)
class NestItem:
    """A loop nest of a step, of one operation or of several that were fused.

    Attributes:
        form: the nest over numbered buffers, see :mod:`weft.inductor.loop_ir.numbering`. Equal layers share it.
        buffers: the names of these buffers.
    """

    form: Nest
    buffers: tuple[str, ...]

    @functools.cached_property
    def names(self) -> dict[str, str]:
        """The names of the buffers by their numbered names."""
        return dict(zip(numbers(len(self.buffers)), self.buffers, strict=True))

    @functools.cached_property
    def nest(self) -> Nest:
        """The nest over the buffers of the step."""
        return renamed(self.form, self.names)

    # By name, cached: fusion and live ranges ask for it at every pair of operations.
    @functools.cached_property
    def reads(self) -> frozenset[str]:
        """Names of the buffers that it loads from."""
        return frozenset([self.names[load.buffer] for load in self.form.reads])

    @functools.cached_property
    def writes(self) -> frozenset[str]:
        """Names of the buffers that it stores to."""
        return frozenset([self.names[name] for name in self.form.writes])


def computed_nodes(item: Any) -> tuple[Node, ...]:
    """Every node that a :class:`Loop` or a group of fused loops computes."""
    return item.nodes


# Frozen: passes replace a loop (`dataclasses.replace`) instead of changing it, so that earlier stages can be shown.
@dataclass(frozen=True)
class Loop(NestItem):
    """A loop nest and the node it comes from.

    Attributes:
        inlined: the nodes whose values it computes on the way, see :mod:`weft.inductor.fusion.inline`.
    """

    node: Node
    inlined: tuple[Node, ...] = ()

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Every node that it computes, the one it comes from last."""
        return (*self.inlined, self.node)


@dataclass(frozen=True)
class Extern:
    """A node that runs as it is: an ATen kernel, a collective, an effect, arithmetic on numbers.

    Attributes:
        reads: buffers of its tensor arguments.
        writes: buffers of its results.
    """

    node: Node
    # Names alone, without indices: a call may read or write any element of a buffer, so its order is kept as a whole.
    reads: frozenset[str]
    writes: frozenset[str]

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The node."""
        return (self.node,)


Operation = Loop | Extern


@dataclass
class Lowered:
    """A step as operations on buffers, in an order that runs.

    Attributes:
        device_kind: "cuda" where any tensor is on a GPU, else "cpu"; only operations there become loop nests.
        operations: loop nests and calls.
        buffers: every buffer by name; those of inputs are named like the placeholders.
        operands: what each tensor-valued node is to its readers.
        reasons: operations that were not lowered and how often, for the record of what a step runs.
        seeds: the operations that draw random numbers in kernels, each with a seed of its own.
        multiprocessors: of the GPU that kernels are made for; they decide how reductions are split.
        orders: how operands of reductions lie in memory; that decides it too.
    """

    step: StepGraph
    device_kind: str
    # Topological: every operation comes after those whose buffers it reads.
    operations: list[Operation] = field(default_factory=list)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    operands: dict[Node, Operand] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    seeds: list[Node] = field(default_factory=list)
    # Part of the lowering, as it decides how reductions are split.
    multiprocessors: int = HOPPER_MULTIPROCESSORS
    orders: MemoryOrders = field(default_factory=MemoryOrders)

    def bytes(self, name: str) -> float:
        """About how large a buffer is; 0 of a name that is none's."""
        # An estimate where sizes are symbolic. SEEDS and the names of nested lists have no buffer at times.
        buffer = self.buffers.get(name)
        return buffer.dtype.itemsize * math.prod(map(size_hint, buffer.sizes)) if buffer else 0.0
