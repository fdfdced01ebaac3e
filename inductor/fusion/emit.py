"""From fused loops back to a graph: each kernel becomes one call node of a StepGraph.

Everything that orders, places and runs graphs so handles kernels too.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft import knobs, torch_adapter
from weft.capture.graph import StepGraph, copy_node
from weft.capture.node_meta import meta_of
from weft.capture.record.operands import map_operands
from weft.capture.record.symbols import Symbols
from weft.inductor.codegen import canonical
from weft.inductor.codegen.kernel import GeneratedKernel, generate
from weft.inductor.codegen.kernel_call import KernelCall, Origin
from weft.inductor.cost.roofline import bytes_moved
from weft.inductor.fusion.fuse import FusedLoops
from weft.inductor.graph.aliasing import is_lazy
from weft.inductor.graph.faults import Guard, unguarded
from weft.inductor.graph.sizes import layout_text, spanned
from weft.inductor.loop_ir.ir import Buffer, Int, Nest, Scalar
from weft.inductor.loop_ir.verify import verify_nest
from weft.inductor.lowering.lowered_step import Extern, Lowered
from weft.inductor.lowering.registry import SEEDS
from weft.inductor.lowering.verify import origin

aten = torch.ops.aten
Node = torch.fx.Node


def generated_kernels(
    lowered: Lowered, items: Sequence[FusedLoops | Extern], guard: Guard = unguarded
) -> list[GeneratedKernel | None]:
    """The kernel of each of ``items``, None for calls.

    Args:
        guard: the context in which each kernel is generated. One whose exception it suppresses is None too.
    """
    kernels: list[GeneratedKernel | None] = [None] * len(items)
    for at, item in enumerate(items):
        if isinstance(item, FusedLoops):
            with guard(item.nodes):
                kernels[at] = _generated(lowered, item)
    return kernels


def _generated(lowered: Lowered, kernel: FusedLoops) -> GeneratedKernel:
    buffers = {name: lowered.buffers[buffer] for name, buffer in kernel.names.items()}
    dtypes = {name: buffer.dtype for name, buffer in buffers.items()}
    generated = generate(kernel.form, dtypes, lowered.multiprocessors)
    if knobs.verify_graphs:
        _verify_canonical(kernel, buffers)
    return replace(generated, buffers=tuple([kernel.names[name] for name in generated.buffers]))


def emit(
    lowered: Lowered,
    items: Sequence[FusedLoops | Extern],
    kernels: Sequence[GeneratedKernel | None],
    guard: Guard = unguarded,
) -> StepGraph:
    """The step as a graph of kernels and of the calls that were not lowered, in the order of ``items``.

    Args:
        kernels: see :func:`generated_kernels`.
        guard: the context in which each kernel becomes a call.
    """
    return _Emitter(lowered).run(items, kernels, guard)


class _Emitter:
    def __init__(self, lowered: Lowered) -> None:
        self.lowered = lowered
        self.step = lowered.step
        self.mode = torch_adapter.fake_mode_of(lowered.step.graph)
        # A new graph, not a changed one: the order of nodes changes as a whole, and the old one stays to be compared.
        self.graph = torch.fx.Graph()
        self.nodes: dict[Node, Node] = {}
        self.by_name: dict[str, Node] = {}  # the same new nodes, by the names of the old ones
        self.node_of_buffer: dict[str, Node] = {}  # the latest node whose result is the buffer
        self.computed: set[Node] = set()  # by kernels so far; a node that several compute is counted once
        self.symbols: Symbols | None = None

    def run(
        self, items: Sequence[FusedLoops | Extern], kernels: Sequence[GeneratedKernel | None], guard: Guard
    ) -> StepGraph:
        # Inputs keep their order, which is the step's interface, even if no kernel reads them.
        for node in self.step.placeholders:
            self._keep(node, copy_node(self.graph, node, lambda used: used))
        for item, generated in zip(items, kernels, strict=True):
            if isinstance(item, Extern):
                self._node(item.node)
            else:
                assert generated is not None, "a kernel that was not generated"
                with guard(item.nodes):
                    self._kernel(item, generated)
        # Views among the results are made here, when nothing else asked for them.
        self.graph.output(torch.fx.map_arg(self.step.results, self._node))
        step = self.step
        return StepGraph(self.graph, list(step.inputs), list(step.outputs), dict(step.groups))

    # ---- nodes as they were

    def _node(self, node: Node) -> Node:
        """The new graph's node for a call that was not lowered, a view, or an element of a list."""
        if node in self.nodes:
            return self.nodes[node]
        operand = self.lowered.operands.get(node)
        # The node's whole buffer exists already, as a kernel's result.
        if operand is not None and operand.buffer in self.node_of_buffer and self._is_whole(node):
            return self._keep(node, self.node_of_buffer[operand.buffer])
        # Operands are emitted on demand: views that only kernels read are never made.
        new = copy_node(self.graph, node, self._node)
        base = new.args[0] if new.args else None
        # A view of what a kernel made: its fake tensor must alias the new base, for the verifier and for live ranges.
        if node.target is operator.getitem and isinstance(base.meta.get("val"), (list, tuple)):  # type: ignore[union-attr]
            new.meta["val"] = base.meta["val"][node.args[1]]  # type: ignore[union-attr,index]
        elif operand is not None and isinstance(base, Node) and operand.buffer != node.name:
            new.meta["val"] = _window(base.meta["val"], node.args[0].meta["val"], node.meta["val"])  # type: ignore
        elif "inplace" in node.meta:
            new.meta["val"] = self._written_over(node)
        return self._keep(node, new)

    def _written_over(self, node: Node) -> Any:
        """The fake value of a call that writes in place: results lie in its operands, which kernels may have made."""
        # A result that is another part of an operand keeps its storage, and liveness counts both as one.
        place = lambda val: (torch_adapter.storage_key(val), val.storage_offset(), layout_text(val))
        moved = {}
        for used in node.all_input_nodes:
            old, now = used.meta.get("val"), self.nodes[used].meta.get("val")
            if isinstance(old, torch.Tensor) and old.layout is torch.strided and old is not now:
                moved[place(old)] = now
        if not moved:
            return node.meta["val"]
        return map_operands(
            node.meta["val"], lambda val: moved.get(place(val), val) if isinstance(val, torch.Tensor) else val
        )

    def _is_whole(self, node: Node) -> bool:
        """Whether the node is its buffer, not a view of it."""
        operand = self.lowered.operands[node]
        if operand.buffer == node.name:
            return True
        source = node.args[0]
        return node.target is operator.getitem and operand.buffer == f"{source.name}.{node.args[1]}"  # type: ignore

    def _keep(self, node: Node, new: Node) -> Node:
        self.nodes[node] = self.by_name[node.name] = new
        operand = self.lowered.operands.get(node)
        if operand is not None and self._is_whole(node):
            self.node_of_buffer.setdefault(operand.buffer, new)
        return new

    def _buffer_node(self, name: str) -> Node:
        """The node that holds a buffer: a kernel's result, an input, a call's result or an element of it."""
        if name == SEEDS:
            return self._seeds()
        if name not in self.node_of_buffer:
            # `node.1` is element 1 of an ATen call's results; names of kernels' results were entered when they were
            # emitted.
            source, _, at = name.rpartition(".")
            self.node_of_buffer[name] = self._element(self.by_name[source], int(at))
        return self.node_of_buffer[name]

    def _element(self, new: Node, at: int) -> Node:
        element = self.graph.call_function(operator.getitem, (new, at))
        element.meta = meta_of(new, val=new.meta["val"][at])
        return element

    def _seeds(self) -> Node:
        """One draw of the generator per step: the seeds of all random operations in kernels."""
        if SEEDS not in self.node_of_buffer:
            buffer = self.lowered.buffers[SEEDS]
            # Before everything else, so that the draw happens once and at one place of the generator's sequence.
            last = next(reversed(self.step.placeholders), None)
            with self.graph.inserting_after(self.nodes[last]) if last else self.graph.inserting_before():
                drawn = self.graph.call_function(
                    aten.randint.low, (0, 2**31, list(buffer.sizes)), {"dtype": torch.int64, "device": buffer.device}
                )
            drawn.meta = meta_of((), val=self._fake(buffer))
            self.node_of_buffer[SEEDS] = drawn
        return self.node_of_buffer[SEEDS]

    # ---- kernels

    def _kernel(self, kernel: FusedLoops, generated: GeneratedKernel) -> None:
        buffers = {name: self.lowered.buffers[name] for name in kernel.buffers}
        writes = [kernel.names[name] for name in kernel.form.writes]
        inputs = [name for name in generated.buffers if name not in writes]
        # Several kernels may store parts of one buffer (a concatenation): the later ones take it as an argument.
        # Functional: a continued buffer is an operand and a result, so the graph orders the kernels that write its
        # parts.
        continued = [name for name in writes if name in self.node_of_buffer]
        outputs = [buffers[name] for name in writes]
        symbols = _symbols(kernel, outputs)
        moved = bytes_moved(kernel.form, {name: buffers[buffer] for name, buffer in kernel.names.items()})
        input_buffers = [buffers[name] for name in inputs]
        call = KernelCall(generated, input_buffers, continued, outputs, symbols, _origins(kernel), moved)
        arguments = [self._buffer_node(name) for name in (*inputs, *continued)]
        arguments += [self._number(symbol) for symbol in symbols]
        new = self.graph.call_function(call, tuple(arguments))
        vals = [self.node_of_buffer[b.name].meta["val"] if b.name in continued else self._fake(b) for b in outputs]
        # The first node's frames and module path stand for all; `Origin` lists the others.
        new.meta = meta_of(kernel.nodes[0], val=vals, fused_ops=len(set(kernel.nodes) - self.computed))
        self.computed.update(kernel.nodes)
        for at, name in enumerate(writes):
            self.node_of_buffer[name] = self._element(new, at)

    def _fake(self, buffer: Buffer) -> torch.Tensor:
        if all(type(n) is int for n in (*buffer.sizes, *buffer.strides)):
            return torch_adapter.new_fake(self.mode, buffer.device, buffer.dtype, buffer.sizes, buffer.strides, 0, None)
        # Torch asks whether there are elements at all, which this form of the step need not know.
        with torch_adapter.assuming_nothing(self.mode.shape_env), self.mode:
            return torch.empty_strided(
                [self._size(n) for n in buffer.sizes],
                [self._size(n) for n in buffer.strides],
                dtype=buffer.dtype,
                device=buffer.device,
            )

    def _size(self, size: Any) -> Any:
        return size if isinstance(size, int) else torch_adapter.symbolic_size(self.mode, size)

    def _number(self, symbol: sympy.Symbol) -> Node:
        """The node that computes a symbol."""
        if self.symbols is None:
            self.symbols = Symbols(torch_adapter.shape_env_of(self.mode), self.graph)
        if not self.symbols.knows(symbol):
            for node in self.step.graph.nodes:  # a number that else only views inside kernels take
                if _among(symbol, [node.meta.get("val")]):
                    self._node(node)
            self._learn(self.symbols)
        if not self.symbols.knows(symbol):  # the size of a slice that only kernels read
            has_size = (
                node for node in self.step.graph.nodes if _among(symbol, getattr(node.meta.get("val"), "shape", ()))
            )
            self._node(next(has_size))
            self._learn(self.symbols)
        return self.symbols.expression(symbol)

    def _learn(self, symbols: Symbols) -> None:
        """Register the nodes that define symbols: numbers, and sizes of inputs and of results that data decides."""
        for node, new in list(self.nodes.items()):
            val = node.meta.get("val")
            if isinstance(val, (torch.SymInt, torch.SymFloat)):
                symbols.define(val, lambda new=new: new)
            elif isinstance(val, torch.Tensor):
                symbols.define_sizes(val, new, self._emit)
            for at, item in enumerate(val if isinstance(val, (list, tuple)) else ()):
                if isinstance(item, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in item.shape):
                    symbols.define_sizes(item, self._buffer_node(f"{node.name}.{at}"), self._emit)

    def _emit(self, target: Any, *args: Any, val: Any) -> Node:
        node = self.graph.call_function(target, args)
        node.meta = meta_of((), val=val)
        return node


def _verify_canonical(kernel: FusedLoops, buffers: Mapping[str, Buffer]) -> None:
    """Check the nest that the kernel is printed from: canonicalisation renames its buffers and symbols."""
    form = canonical.canonical(kernel.form)
    symbols = {scalar.expression: canonical.symbol(at) for at, scalar in enumerate(form.scalars)}

    def renamed(numbers: Sequence[Int]) -> tuple[Int, ...]:
        return tuple(n if isinstance(n, int) else n.xreplace(symbols) for n in numbers)

    known = {
        f"b{at}": replace(buffers[name], sizes=renamed(buffers[name].sizes), strides=renamed(buffers[name].strides))
        for at, name in enumerate(form.buffers)
    }
    verify_nest(form.nest, known, stage="canonicalisation", origin=origin(kernel.nodes))


def _window(base: torch.Tensor, old_base: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """The view of a new base that ``old`` was of the old one."""
    if base is old_base:
        return old
    offset = base.storage_offset() + old.storage_offset() - old_base.storage_offset()
    layout = old.shape, old.stride(), offset
    if not isinstance(base, FakeTensor) or is_lazy(base) or not _is_inside(base, *layout):
        return torch.as_strided(base, *layout)
    # What `as_strided` makes, in a quarter of its time.
    return torch_adapter.new_fake(base.fake_mode, base.device, base.dtype, *layout, base.untyped_storage())


def _is_inside(base: torch.Tensor, sizes: Sequence[Int], strides: Sequence[Int], offset: Int) -> bool:
    """Whether numbers, not symbols, say that a view lies in the storage of ``base``."""
    storage = base.untyped_storage().nbytes()
    if any(type(n) is not int for n in (*sizes, *strides, offset, storage)):
        return False
    return offset >= 0 and (offset + spanned(sizes, strides)) * base.dtype.itemsize <= storage


def _among(symbol: sympy.Symbol, numbers: Sequence[Any]) -> bool:
    """Whether one of ``numbers`` is the symbol."""
    return any(torch_adapter.expression(n) == symbol for n in numbers if isinstance(n, (torch.SymInt, torch.SymFloat)))


def _symbols(kernel: FusedLoops, outputs: Sequence[Buffer]) -> list[sympy.Symbol]:
    """The symbols whose values a launch of the kernel and the allocation of its outputs need."""
    sizes = [number for buffer in outputs for number in (*buffer.sizes, *buffer.strides)]
    found = _symbols_of(kernel.form).union(*(n.free_symbols for n in sizes if not isinstance(n, int)))
    # By name: sets have no order, and arguments must be in one order on every rank.
    return sorted(found, key=str)


@functools.lru_cache(maxsize=1024)
def _symbols_of(nest: Nest) -> frozenset[sympy.Symbol]:
    numbers: list[Any] = [*nest.sizes]
    numbers += [value.expression for value in nest.values() if isinstance(value, Scalar)]
    numbers += [number for access in (*nest.stores, *nest.reads) for number in access.index.numbers]
    return frozenset(symbol for number in numbers if not isinstance(number, int) for symbol in number.free_symbols)


def _origins(kernel: FusedLoops) -> list[Origin]:
    return [Origin(node.name, next(iter(node.meta.get("frames", ())), None)) for node in kernel.nodes]
