"""From a StepGraph to a lowered step: loop nests where there is a lowering, ATen calls where there is none.

Views produce no operation. The reader of a view reads the base's buffer with the view's own sizes and strides, which
the fake tensors of the graph record; every other value has a buffer of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from weft import knobs, torch_adapter
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import WAIT
from weft.inductor.graph.aliasing import looks_into, share_storage
from weft.inductor.graph.faults import Guard, unguarded
from weft.inductor.graph.gpu import multiprocessors
from weft.inductor.graph.inline_function import base_of
from weft.inductor.graph.sizes import may_overlap, spanned, tensors_of
from weft.inductor.loop_ir.ir import Buffer
from weft.inductor.lowering.lowered_step import Extern, Lowered
from weft.inductor.lowering.registry import LOWERINGS, SEEDS, Lower, Lowering, Operand, size_of
from weft.inductor.lowering.repeated_operations import RepeatedOperations
from weft.inductor.lowering.verify import verify_lowered

Node = torch.fx.Node


def lower(step: StepGraph, order: Sequence[Node], on_aten: Collection[str] = (), guard: Guard = unguarded) -> Lowered:
    """Lower the nodes of ``step`` in ``order`` (topological, the output last).

    Args:
        on_aten: names of nodes that stay ATen calls.
        guard: the context in which each node is lowered. A node whose exception it suppresses stays an ATen call.
    """
    # Here, not at the top: importing them takes time that only a step with kernels should pay.
    import weft.inductor.lowering.all_lowerings  # noqa: F401 - registers the lowerings

    kind = device_kind(order)
    lowered = Lowered(step, kind, multiprocessors=multiprocessors(kind))
    repeated = RepeatedOperations(lowered)
    # In the order of the step, which the operations keep: a nest may read only what an earlier operation stored.
    for node in order:
        if node.op == "placeholder":
            _own_buffer(lowered, node)
        elif node.op == "call_function":
            _lower_node(lowered, node, node.name in on_aten, repeated, guard)
    if lowered.seeds:
        device = lowered.seeds[0].meta["val"]
        while not isinstance(device, torch.Tensor):
            device = device[0]
        # One tensor for all seeds, so that a step draws from torch's generator once.
        lowered.buffers[SEEDS] = Buffer(SEEDS, torch.int64, device.device, (len(lowered.seeds),), (1,))
    if knobs.verify_graphs:
        verify_lowered(lowered, lowered.operations, "lowering", guard)
    return lowered


def device_kind(nodes: Iterable[Node]) -> str:
    """ "cuda" where any tensor is on a GPU, else "cpu"."""
    vals = (node.meta.get("val") for node in nodes)
    return "cuda" if any(isinstance(val, torch.Tensor) and val.device.type == "cuda" for val in vals) else "cpu"


def _lower_node(lowered: Lowered, node: Node, on_aten: bool, repeated: RepeatedOperations, guard: Guard) -> None:
    # Views first: a view has no lowering and must not become an ATen call, which would need its base in memory.
    if _is_view(lowered, node):
        return
    lowering = None if on_aten else LOWERINGS.get(node.target)
    with guard((node,)):
        if lowering is not None and repeated.add(node, lambda: _to_loops(lowered, node, lowering)):
            return
    # Reached for a lowering that returned False, for one that failed under the guard, and where there is none.
    lowered.reasons[str(node.target)] += 1
    _own_buffer(lowered, node)
    # A call keeps its operands as tensors in memory: what it reads is a buffer that no fusion may remove.
    lowered.operations.append(Extern(node, frozenset(_read(lowered, node)), frozenset(_written(lowered, node))))


def _to_loops(lowered: Lowered, node: Node, lowering: Lower) -> Lowering | None:
    """The loop nests of a node. None where its lowering does not cover it."""
    # Buffers and nests collect in `out` until the lowering is known to cover the case, so a refusal leaves no trace.
    orders = lambda operand: lowered.orders.strides(operand, lowered.buffers)
    out = Lowering(node, lowered.operands, lowered.seeds, lowered.multiprocessors, orders)
    # The cheap and general conditions first, so that lowerings need not repeat them.
    return out if out.takes_operands() and _known(lowered, node) and _lowered(lowering, out) else None


def _lowered(lowering: Lower, out: Lowering) -> bool:
    """Whether the lowering covers this case. What has no elements is left to ATen."""
    # None counts as covered: a lowering without a case to refuse returns nothing.
    return lowering(out, out.node) is not False and not any(0 in nest.sizes for nest in out.nests)


def _is_view(lowered: Lowered, node: Node) -> bool:
    """Give ``node`` its operand where it is a view, or a result, of a value that has one."""
    val = node.meta.get("val")
    # `getitem` on results of a lowered node reads their buffers; on those of an ATen call too, if they are strided.
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
    # A wait returns its operand's memory, but only after the collective: as a view of it, it could be read before.
    if not isinstance(val, torch.Tensor) or node.target is WAIT or not looks_into(node):
        return False
    # The first operand that has a buffer. A view with another dtype (`view(dtype)`) reads the same memory as other
    # elements, which an index in elements cannot say.
    source = next((n for n in node.all_input_nodes if n in lowered.operands), None)
    if source is None or val.layout is not torch.strided or val.dtype != source.meta["val"].dtype:
        return False
    # `reshape` returns a view where strides allow, else a copy, and its schema says "view" of both.
    if not share_storage(node, source):
        return False
    if torch_adapter.hint(val.storage_offset()) is None:  # only the view itself knows where the data put it
        return False
    if node.target is torch.ops.aten.as_strided.default and base_of(node).op == "placeholder":
        return False  # it counts from the start of a storage, in which the input of a call lies anywhere
    base = lowered.operands[source]
    source_val = source.meta["val"]
    # A lazy conjugate or negative has the base's memory but not its values.
    if val.is_conj() != source_val.is_conj() or val.is_neg() != source_val.is_neg():
        return False
    # Fake tensors count from the start of a storage, operands from the start of a buffer: the difference of both is
    # what the view moves by.
    offset = base.offset + size_of(val.storage_offset()) - size_of(source_val.storage_offset())
    sizes, strides = tuple(map(size_of, val.shape)), tuple(map(size_of, val.stride()))
    # `as_strided` may reach beyond its source. Elements outside of the buffer belong to no buffer here.
    if offset != base.offset and not _is_inside(lowered.buffers[base.buffer], sizes, strides, offset):
        return False
    lowered.operands[node] = Operand(base.buffer, base.dtype, sizes, strides, offset)
    return True


def _is_inside(buffer: Buffer, sizes: Sequence[Any], strides: Sequence[Any], offset: Any) -> bool:
    """Whether a view lies in a buffer, as far as numbers, not symbols, say."""
    if isinstance(offset, int) and offset < 0:
        return False
    if any(type(n) is not int for n in (offset, *sizes, *strides, *buffer.sizes, *buffer.strides)):
        return True
    return offset + spanned(sizes, strides) <= spanned(buffer.sizes, buffer.strides)


def _own_buffer(lowered: Lowered, node: Node) -> None:
    """The buffers of an input, or of what an ATen call returns."""
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor):
        # Sparse tensors have no strides; only ATen calls can take them.
        if val.layout is torch.strided:
            buffer = lowered.buffers[node.name] = _buffer(node.name, val)
            lowered.operands[node] = Operand(buffer.name, buffer.dtype, buffer.sizes, buffer.strides)
    elif isinstance(val, (list, tuple)):
        # Names of results end in their number (`node.1`), as `Lowering.result` names those of lowered nodes.
        for at, item in enumerate(val):
            if isinstance(item, torch.Tensor) and item.layout is torch.strided:
                lowered.buffers[f"{node.name}.{at}"] = _buffer(f"{node.name}.{at}", item)


def _buffer(name: str, val: torch.Tensor) -> Buffer:
    return Buffer(name, val.dtype, val.device, tuple(map(size_of, val.shape)), tuple(map(size_of, val.stride())))


def _known(lowered: Lowered, node: Node) -> bool:
    """Whether the node makes tensors where the step computes, from tensors that are windows on buffers."""
    # Work on the host beside a GPU step (a counter, a scalar) stays with ATen: kernels are for one device.
    here = all(tensor.device.type == lowered.device_kind for tensor in tensors_of(node))
    # Programs of a kernel run in no order: two elements at one place could hold either value.
    here = here and not any(may_overlap(tensor.shape, tensor.stride()) for tensor in tensors_of(node))
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
            # A call that picks from a list of tensors reads what the list's node wrote.
            yield from _written(lowered, source)


def _written(lowered: Lowered, node: Node) -> Iterator[str]:
    """Buffers of the results; of a call that returns lists, its name, for the order of what picks from them."""
    val: Any = node.meta.get("val")
    if isinstance(val, (list, tuple)):
        # Nested lists have no buffers by name, but their order still counts.
        if any(isinstance(item, (list, tuple)) for item in val):
            yield node.name
        yield from (name for at in range(len(val)) if (name := f"{node.name}.{at}") in lowered.buffers)
    elif node.name in lowered.buffers:
        yield node.name
