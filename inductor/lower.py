"""From a StepGraph to operations: loop nests where there is a lowering, ATen calls where there is none.

Views make no operation. A view's reader gets the base's buffer with the view's own sizes and strides, which the fake
tensors of the graph know; every other value has a buffer of its own.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.graph import WAIT, StepGraph
from weft.inductor.axes import magnitude
from weft.inductor.ir import Nest
from weft.inductor.lowering.registry import LOWERINGS, SEEDS, Buffer, Lower, Lowering, Operand, size_of
from weft.inductor.passes.fragments import base_of
from weft.inductor.passes.host import tensors_of
from weft.inductor.runtime.geometry import looks_into

Node = torch.fx.Node


@dataclass(frozen=True)
class Loop:
    """A loop nest and the node it comes from.

    Attributes:
        inlined: the nodes whose values it computes on the way, see :mod:`weft.inductor.inline`.
    """

    nest: Nest
    node: Node
    inlined: tuple[Node, ...] = ()

    @property
    def reads(self) -> frozenset[str]:
        return frozenset(load.buffer for load in self.nest.reads)

    @property
    def writes(self) -> frozenset[str]:
        return frozenset(self.nest.writes)


@dataclass(frozen=True)
class Extern:
    """A node that runs as it is: an ATen kernel, a collective, an effect, arithmetic on numbers.

    Attributes:
        reads: buffers of its tensor arguments.
        writes: buffers of its results.
    """

    node: Node
    reads: frozenset[str]
    writes: frozenset[str]


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
    """

    step: StepGraph
    device_kind: str
    operations: list[Operation] = field(default_factory=list)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    operands: dict[Node, Operand] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    seeds: list[Node] = field(default_factory=list)

    def bytes(self, name: str) -> float:
        """About how large a buffer is; 0 of a name that is none's."""
        buffer = self.buffers.get(name)
        return buffer.dtype.itemsize * math.prod(map(magnitude, buffer.sizes)) if buffer else 0.0


def lower(step: StepGraph, order: Sequence[Node]) -> Lowered:
    """Lower the nodes of ``step`` in ``order`` (topological, the output last)."""
    import weft.inductor.lowering.families  # noqa: F401 - registers the lowerings

    lowered = Lowered(step, device_kind(order))
    for node in order:
        if node.op == "placeholder":
            _own_buffer(lowered, node)
        elif node.op == "call_function":
            _lower_node(lowered, node)
    if lowered.seeds:
        device = lowered.seeds[0].meta["val"]
        while not isinstance(device, torch.Tensor):
            device = device[0]
        lowered.buffers[SEEDS] = Buffer(SEEDS, torch.int64, device.device, (len(lowered.seeds),), (1,))
    return lowered


def device_kind(nodes: Iterable[Node]) -> str:
    """ "cuda" where any tensor is on a GPU, else "cpu"."""
    vals = (node.meta.get("val") for node in nodes)
    return "cuda" if any(isinstance(val, torch.Tensor) and val.is_cuda for val in vals) else "cpu"


def _lower_node(lowered: Lowered, node: Node) -> None:
    if _is_view(lowered, node):
        return
    lowering = LOWERINGS.get(node.target)
    out = Lowering(node, lowered.operands, lowered.seeds)
    if lowering is not None and out.covers() and _known(lowered, node) and _lowered(lowering, out):
        lowered.buffers.update(out.buffers)
        lowered.operations += (Loop(nest.check(), node) for nest in out.nests)
        val = node.meta["val"]
        if isinstance(val, torch.Tensor):
            lowered.operands[node] = out.result()
        return
    lowered.reasons[str(node.target)] += 1
    _own_buffer(lowered, node)
    lowered.operations.append(Extern(node, frozenset(_read(lowered, node)), frozenset(_written(lowered, node))))


def _lowered(lowering: Lower, out: Lowering) -> bool:
    """Whether the lowering covers this case. What has no elements is left to ATen."""
    return lowering(out, out.node) is not False and not any(0 in nest.sizes for nest in out.nests)


def _is_view(lowered: Lowered, node: Node) -> bool:
    """Give ``node`` its operand where it is a view, or a result, of a value that has one."""
    val = node.meta.get("val")
    if node.target is operator.getitem:
        if val is None:  # a result that was not asked for
            return True
        source, at = node.args
        name = f"{source.name}.{at}"  # type: ignore[union-attr]
        if isinstance(val, torch.Tensor) and name in lowered.buffers:
            buffer = lowered.buffers[name]
            lowered.operands[node] = Operand(name, buffer.dtype, buffer.sizes, buffer.strides)
            return True
        return False
    if not isinstance(val, torch.Tensor) or node.target is WAIT or not looks_into(node):
        return False
    source = next((n for n in node.all_input_nodes if n in lowered.operands), None)
    if source is None or val.layout is not torch.strided or val.dtype != source.meta["val"].dtype:
        return False
    if torch_adapter.hint(val.storage_offset()) is None:  # only the view itself knows where the data put it
        return False
    if node.target is torch.ops.aten.as_strided.default and base_of(node).op == "placeholder":
        return False  # it counts from the start of a storage, in which the input of a call lies anywhere
    base = lowered.operands[source]
    given = source.meta["val"]
    if val.is_conj() != given.is_conj() or val.is_neg() != given.is_neg():
        return False
    offset = base.offset + size_of(val.storage_offset()) - size_of(given.storage_offset())
    sizes, strides = tuple(map(size_of, val.shape)), tuple(map(size_of, val.stride()))
    if offset != base.offset and isinstance(offset, int) and offset < 0:
        return False
    lowered.operands[node] = Operand(base.buffer, base.dtype, sizes, strides, offset)
    return True


def _own_buffer(lowered: Lowered, node: Node) -> None:
    """The buffers of an input, or of what an ATen call returns."""
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor):
        if val.layout is torch.strided:
            buffer = lowered.buffers[node.name] = _buffer(node.name, val)
            lowered.operands[node] = Operand(buffer.name, buffer.dtype, buffer.sizes, buffer.strides)
    elif isinstance(val, (list, tuple)):
        for at, item in enumerate(val):
            if isinstance(item, torch.Tensor) and item.layout is torch.strided:
                lowered.buffers[f"{node.name}.{at}"] = _buffer(f"{node.name}.{at}", item)


def _buffer(name: str, val: torch.Tensor) -> Buffer:
    return Buffer(name, val.dtype, val.device, tuple(map(size_of, val.shape)), tuple(map(size_of, val.stride())))


def _known(lowered: Lowered, node: Node) -> bool:
    """Whether the node makes tensors where the step computes, from tensors that are windows on buffers."""
    here = all(tensor.device.type == lowered.device_kind for tensor in tensors_of(node))
    return here and all(
        n in lowered.operands
        for n in node.all_input_nodes
        if isinstance(n.meta.get("val"), (torch.Tensor, list, tuple))
    )


def _read(lowered: Lowered, node: Node) -> Iterator[str]:
    for source in node.all_input_nodes:
        if source in lowered.operands:
            yield lowered.operands[source].buffer
        else:
            yield from _written(lowered, source)


def _written(lowered: Lowered, node: Node) -> Iterator[str]:
    """Buffers of the results; of a call that returns lists, its name, for the order of what picks from them."""
    val: Any = node.meta.get("val")
    if isinstance(val, (list, tuple)):
        if any(isinstance(item, (list, tuple)) for item in val):
            yield node.name
        yield from (name for at in range(len(val)) if (name := f"{node.name}.{at}") in lowered.buffers)
    elif node.name in lowered.buffers:
        yield node.name
