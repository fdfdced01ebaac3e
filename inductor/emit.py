"""Kernels back into a graph: each is one call of a StepGraph, so that everything that orders, places and runs graphs
runs kernels too."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch

from weft import torch_adapter
from weft.capture.graph import StepGraph
from weft.capture.symbols import Symbols
from weft.inductor.codegen.kernel import generate
from weft.inductor.fuse import Kernel
from weft.inductor.ir import Scalar
from weft.inductor.kernel_call import KernelCall, Origin
from weft.inductor.lower import Extern, Lowered
from weft.inductor.lowering.registry import SEEDS, Buffer
from weft.inductor.roofline import bytes_moved

aten = torch.ops.aten
Node = torch.fx.Node


def emit(lowered: Lowered, items: Sequence[Kernel | Extern]) -> StepGraph:
    """The step as a graph of kernels and of the calls that were not lowered, in the order of ``items``."""
    return _Emitter(lowered).run(items)


class _Emitter:
    def __init__(self, lowered: Lowered) -> None:
        self.lowered = lowered
        self.step = lowered.step
        self.mode = torch_adapter.fake_mode_of(lowered.step.graph)
        self.graph = torch.fx.Graph()
        self.nodes: dict[Node, Node] = {}
        self.homes: dict[str, Node] = {}  # buffer -> the node that holds it
        self.computed: set[Node] = set()  # by kernels; what several compute is counted once
        self.symbols: Symbols | None = None

    def run(self, items: Sequence[Kernel | Extern]) -> StepGraph:
        for node in self.step.placeholders:
            self._keep(node, self.graph.node_copy(node))
        for item in items:
            if isinstance(item, Extern):
                self._node(item.node)
            else:
                self._kernel(item)
        self.graph.output(torch.fx.map_arg(self.step.results, self._node))
        step = self.step
        return StepGraph(self.graph, list(step.inputs), list(step.outputs), dict(step.groups))

    # ---- nodes as they were

    def _node(self, node: Node) -> Node:
        """The new graph's node for a call that was not lowered, a view, or an element of a list."""
        if node in self.nodes:
            return self.nodes[node]
        operand = self.lowered.operands.get(node)
        if operand is not None and operand.buffer in self.homes and self._is_whole(node):
            return self._keep(node, self.homes[operand.buffer])
        made = self.graph.node_copy(node, self._node)
        base = made.args[0] if made.args else None
        if operand is not None and isinstance(base, Node) and operand.buffer != node.name:
            made.meta["val"] = _window(base.meta["val"], node.args[0].meta["val"], node.meta["val"])  # type: ignore
        return self._keep(node, made)

    def _is_whole(self, node: Node) -> bool:
        """Whether the node is its buffer, not a view of it."""
        operand = self.lowered.operands[node]
        if operand.buffer == node.name:
            return True
        source = node.args[0]
        return node.target is operator.getitem and operand.buffer == f"{source.name}.{node.args[1]}"  # type: ignore

    def _keep(self, node: Node, made: Node) -> Node:
        self.nodes[node] = made
        operand = self.lowered.operands.get(node)
        if operand is not None and self._is_whole(node):
            self.homes.setdefault(operand.buffer, made)
        return made

    def _home(self, name: str) -> Node:
        """The node that holds a buffer: a kernel's result, an input, a call's result or an element of it."""
        if name == SEEDS:
            return self._seeds()
        if name not in self.homes:
            source, _, at = name.rpartition(".")
            node = next(n for n in self.nodes if n.name == source)
            self.homes[name] = self._element(self.nodes[node], int(at))
        return self.homes[name]

    def _element(self, made: Node, at: int) -> Node:
        element = self.graph.call_function(operator.getitem, (made, at))
        element.meta = {**made.meta, "val": made.meta["val"][at]}
        return element

    def _seeds(self) -> Node:
        """One draw of the generator a step, for all random numbers that kernels make."""
        if SEEDS not in self.homes:
            buffer = self.lowered.buffers[SEEDS]
            last = next(reversed(self.step.placeholders), None)
            with self.graph.inserting_after(self.nodes[last]) if last else self.graph.inserting_before():
                drawn = self.graph.call_function(
                    aten.randint.low, (0, 2**31, list(buffer.sizes)), {"dtype": torch.int64, "device": buffer.device}
                )
            drawn.meta["val"] = self._fake(buffer)
            self.homes[SEEDS] = drawn
        return self.homes[SEEDS]

    # ---- kernels

    def _kernel(self, kernel: Kernel) -> None:
        buffers = {name: self.lowered.buffers[name] for name in (*kernel.reads, *kernel.writes)}
        generated = generate(kernel.nest, {name: buffer.dtype for name, buffer in buffers.items()})
        writes = kernel.nest.writes
        inputs = [name for name in generated.buffers if name not in writes]
        continued = [name for name in writes if name in self.homes]
        outputs = [buffers[name] for name in writes]
        symbols = _symbols(kernel, outputs)
        moved = bytes_moved(kernel.nest, buffers)
        given = [buffers[name] for name in inputs]
        call = KernelCall(generated, given, continued, outputs, symbols, _origins(kernel), moved)
        arguments = [self._home(name) for name in (*inputs, *continued)]
        arguments += [self._number(symbol) for symbol in symbols]
        made = self.graph.call_function(call, tuple(arguments))
        made.meta = {key: value for key, value in kernel.nodes[0].meta.items() if key in ("frames", "module", "stage")}
        made.meta["operations"] = len(set(kernel.nodes) - self.computed)
        self.computed.update(kernel.nodes)
        made.meta["val"] = [
            self.homes[buffer.name].meta["val"] if buffer.name in continued else self._fake(buffer)
            for buffer in outputs
        ]
        for at, name in enumerate(writes):
            self.homes[name] = self._element(made, at)

    def _fake(self, buffer: Buffer) -> torch.Tensor:
        with self.mode:
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
            self._learn(self.symbols)
        return self.symbols.expression(symbol)

    def _learn(self, symbols: Symbols) -> None:
        """Say which of the nodes so far symbols come from: numbers, and sizes that inputs have or the data decided."""
        for node, made in list(self.nodes.items()):
            val = node.meta.get("val")
            if isinstance(val, (torch.SymInt, torch.SymFloat)):
                symbols.define(val, lambda made=made: made)
            elif isinstance(val, torch.Tensor):
                symbols.define_sizes(val, made, self._emit)
            for at, item in enumerate(val if isinstance(val, (list, tuple)) else ()):
                if isinstance(item, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in item.shape):
                    symbols.define_sizes(item, self._home(f"{node.name}.{at}"), self._emit)

    def _emit(self, target: Any, *args: Any, val: Any) -> Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = val
        return node


def _window(base: torch.Tensor, old_base: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """The view of a new base that ``old`` was of the old one."""
    if base is old_base:
        return old
    offset = base.storage_offset() + old.storage_offset() - old_base.storage_offset()
    return torch.as_strided(base, old.shape, old.stride(), offset)


def _symbols(kernel: Kernel, outputs: Sequence[Buffer]) -> list[sympy.Symbol]:
    """Everything that must be known to launch the kernel and make its outputs."""
    found: set[sympy.Symbol] = set()
    numbers: list[Any] = [*kernel.nest.sizes]
    for buffer in outputs:
        numbers += [*buffer.sizes, *buffer.strides]
    for value in kernel.nest.values():
        if isinstance(value, Scalar):
            numbers.append(value.expression)
    for index in [store.index for store in kernel.nest.stores] + [load.index for load in kernel.nest.reads]:
        numbers += [index.offset, *(stride for _, stride in index.strides), *(stride for _, stride in index.picks)]
    for number in numbers:
        if not isinstance(number, int):
            found |= number.free_symbols
    return sorted(found, key=str)


def _origins(kernel: Kernel) -> list[Origin]:
    return [Origin(node.name, next(iter(node.meta.get("frames", ())), None)) for node in kernel.nodes]
