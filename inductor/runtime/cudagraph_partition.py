"""Partition a step, so that as much of it as possible is recorded in CUDA graphs.

The first partition is what the host can compute before everything else: numbers, random draws on the CPU, copies of the
batch to the GPU. The rest is split at nodes that cannot be recorded: a number that the GPU sends to the host, a call of
Python code, a collective on the CPU. The order of nodes is kept, except for the first partition.

Partitions pass each other tensors and numbers that operations computed. Views and sizes are recomputed where they are
read. An input is updated in the last partition that reads its memory, or later.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from weft.capture.graph import StepGraph
from weft.capture.node_kinds import is_collective, is_effect, is_wait
from weft.capture.node_meta import same_meta
from weft.capture.step_interface import Input, Output, Return, Role, Update
from weft.inductor.graph.aliasing import looks_into, storages
from weft.inductor.graph.host_scalars import goes_to_gpu, host_nodes
from weft.inductor.graph.node_order import waits_of
from weft.inductor.graph.sizes import tensors_of
from weft.inductor.runtime.capturable import where, why_not

Node = torch.fx.Node

_HOST = 0
# A partition with fewer computing calls is not recorded, unless it is the only one: launching a graph and copying its
# results would cost about as much.
_FEWEST_CALLS = 8


@dataclass
class Partition:
    """A part of a step, as a StepGraph of its own.

    Attributes:
        step: its graph; values that later partitions read are among its outputs.
        input_names: names of the values that it is called with, aligned with the inputs of ``step``.
        output_names: names of the values that it returns, aligned with the outputs that are not updates.
        why_not: why it is not recorded as a CUDA graph; None where it can be.
        internal: positions in ``output_names`` of values that only later partitions read.
    """

    step: StepGraph
    input_names: list[str] = field(default_factory=list)
    output_names: list[str] = field(default_factory=list)
    why_not: str | None = None
    internal: frozenset[int] = frozenset()


def result_name(at: int) -> str:
    """The name of output number ``at`` of the whole step among the values that partitions pass on."""
    return f"result {at}"


def partition_step(step: StepGraph) -> list[Partition]:
    """The partitions of ``step``, in the order to run them. ``step`` is not changed."""
    return _Partitioner(step).run()


class _Partitioner:
    def __init__(self, step: StepGraph) -> None:
        self.step = step
        self.host = host_nodes(step)
        self.reasons: list[str | None] = ["the host computes it"]
        self.at: dict[Node, int] = {}  # the partition of each call; recomputed nodes (views, sizes) have none
        # A list may hold a thousand results, and each element of it asks about the list.
        self.recomputed: dict[Node, bool] = {}

    def run(self) -> list[Partition]:
        self._assign(self._unrecordable())
        self._join()
        updates = self._updates()
        results = self._results(updates)
        builders = [_PartitionBuilder(self, number) for number in range(len(self.reasons))]
        inputs = {node.name: node for node in self.step.placeholders}
        for node, number in self.at.items():
            builders[number].call(node)
        for (placeholder, value), number in updates.items():
            builders[number].update(placeholder, value)
        for at, number in results.items():
            memory = inputs.get(getattr(self.step.outputs[at], "memory", ""))
            builders[number].returns(self.step.results[at], result_name(at), memory)
        read_later = {name for builder in builders for name in builder.input_names}
        partitions = [builder.build(read_later, reason) for builder, reason in zip(builders, self.reasons, strict=True)]
        return [partition for partition in partitions if partition.step.outputs or self._matters(partition)]

    def _matters(self, partition: Partition) -> bool:
        """Whether a partition without outputs has effects: checks of numbers, random draws, calls of Python code."""
        return any(node.op == "call_function" and is_effect(node) for node in partition.step.graph.nodes)

    # ---- assignment to partitions

    def _unrecordable(self) -> dict[Node, str]:
        """The calls that cannot be recorded, each with the reason."""
        reasons = {}
        for node in self.step.graph.nodes:
            if node.op != "call_function" or node.target is operator.getitem or self._is_recomputed(node):
                continue  # an element of a list is in the partition of the list
            if (why := why_not(node, self.step)) is not None:
                reasons[node] = why + where(node)
        return reasons

    def _is_recomputed(self, node: Node) -> bool:
        """Whether every partition that reads ``node`` computes it itself: views, and arithmetic on sizes.

        A view passed between partitions would lose its storage: a write in place to it would not reach its base.
        """
        known = self.recomputed.get(node)
        if known is None:
            known = self.recomputed[node] = self._recomputes(node)
        return known

    def _recomputes(self, node: Node) -> bool:
        if node in self.host or is_wait(node):
            return False
        if node.target is operator.getitem:
            return self._is_recomputed(node.args[0]) if isinstance(node.args[0], Node) else False
        if node.op != "call_function" or is_collective(node) or node.meta.get("effect"):
            return False
        if torch.Tag.data_dependent_output in getattr(node.target, "tags", ()):
            return False
        return looks_into(node) or not _computes(node)

    def _assign(self, unrecordable: dict[Node, str]) -> None:
        """Assign every call to a partition, with each collective and its waits in one or outside of recordings.

        An event that a CUDA graph records cannot be waited for outside of the graph, nor the other way round. Taking
        such a collective out of the recording may separate others, so this repeats until none is left. Each round adds
        a node to ``unrecordable``, so it ends.
        """
        while True:
            self._number(unrecordable)
            separated = {
                node: "a collective is waited for in another partition"
                for node in self.at
                if is_collective(node) and self.reasons[self.at[node]] is None
                for wait in waits_of(node)
                if self.at[wait] != self.at[node]
            }
            if not separated:
                return
            unrecordable |= separated
            unrecordable |= {wait: why for node, why in separated.items() for wait in waits_of(node)}

    def _number(self, unrecordable: dict[Node, str]) -> None:
        """Number the partitions: a new one starts wherever recordable and unrecordable calls alternate."""
        del self.reasons[1:]
        self.at = {}
        for node in self.step.graph.nodes:
            if node.op != "call_function" or self._is_recomputed(node):
                continue
            if node in self.host or goes_to_gpu(node, self.host):
                self.at[node] = _HOST
            elif node.target is operator.getitem:
                self.at[node] = self.at[node.args[0]]
            else:
                why = unrecordable.get(node)
                # Runs of calls with the same answer share a partition: each boundary costs a launch and copies of what
                # crosses it.
                if len(self.reasons) == 1 or (self.reasons[-1] is None) != (why is None):
                    self.reasons.append(why)
                self.at[node] = len(self.reasons) - 1

    def _join(self) -> None:
        """Merge recordable partitions that are too small with the unrecorded ones around them."""
        counts = [0] * len(self.reasons)
        for node, number in self.at.items():
            counts[number] += _computes(node)
        recordable = [number for number, why in enumerate(self.reasons) if why is None]
        if len(recordable) < 2:
            return
        for number in recordable:
            if counts[number] < _FEWEST_CALLS:
                self.reasons[number] = f"it has fewer than {_FEWEST_CALLS} calls"
        reasons: list[str | None] = [self.reasons[_HOST]]
        new = [_HOST]
        for why in self.reasons[1:]:
            if len(reasons) == 1 or why is None or reasons[-1] is None:
                reasons.append(why)
            new.append(len(reasons) - 1)
        self.reasons = reasons
        self.at = {node: new[number] for node, number in self.at.items()}

    # ---- outputs

    def _updates(self) -> dict[tuple[Node, Node], int]:
        """For each updated input and its new value, the partition that writes it.

        Not before the last partition that reads the input's storage: it would read the new value.
        """
        by_name = {node.name: node for node in self.step.placeholders}
        end = len(self.reasons) - 1
        readers: dict[int, int] = {}

        def read(value: Node, number: int) -> None:
            for key in storages(self._base(value)):
                readers[key] = max(number, readers.get(key, 0))

        for node, number in self.at.items():
            for used in node.all_input_nodes if node.target is not operator.getitem else ():
                read(used, number)
        # A new value that is an input itself (two inputs swapped) is read when everything has run.
        for _, value in self.step.updates():
            if self._base(value).op == "placeholder":
                read(value, end)
        updates = {}
        for entry, value in self.step.updates():
            placeholder = by_name[entry.name]
            last = max((readers.get(key, 0) for key in storages(placeholder)), default=0)
            updates[placeholder, value] = max(last, self.at.get(self._base(value), end))
        return updates

    def _results(self, updates: dict[tuple[Node, Node], int]) -> dict[int, int]:
        """For each ``Create`` and ``Return`` output the partition that returns it: the one that computes it.

        The old value of an updated input comes from the partition that updates it, which can still clone it. So does
        what lies in the memory of the input in eager, because that partition can return a view of the input.
        """
        updated = {key: number for (node, _), number in updates.items() for key in storages(node)}
        by_name = {node.name: number for (node, _), number in updates.items()}
        results = {}
        for at, (what, value) in enumerate(zip(self.step.outputs, self.step.results, strict=True)):
            if isinstance(what, Update):
                continue
            base = self._base(value) if isinstance(value, Node) else None
            if what.memory:
                results[at] = by_name[what.memory]
            elif base is None or base.op == "placeholder":
                numbers = [updated[key] for key in (storages(base) if base is not None else ()) if key in updated]
                results[at] = max(numbers, default=len(self.reasons) - 1)
            else:
                results[at] = self.at.get(base, len(self.reasons) - 1)
        return results

    def _base(self, node: Node) -> Node:
        """The node below the recomputed views of ``node``: the value that partitions pass on."""
        while node.op == "call_function" and node not in self.at and looks_into(node) and node.all_input_nodes:
            node = node.all_input_nodes[0]
        return node


def _computes(node: Node) -> bool:
    """Whether a call launches work or has an effect: not a view, not arithmetic on numbers."""
    return not looks_into(node) and (bool(tensors_of(node)) or bool(node.meta.get("effect")))


class _PartitionBuilder:
    """Builds the graph of one partition."""

    def __init__(self, partitioner: _Partitioner, number: int) -> None:
        self.partitioner = partitioner
        self.number = number
        self.graph = torch.fx.Graph()
        self.nodes: dict[Node, Node] = {}
        self.input_names: dict[str, Node] = {}
        self.inputs: list[Input] = []
        self.outputs: list[tuple[Output, Any, str]] = []
        self.last: Node | None = None  # the last placeholder

    def call(self, node: Node) -> None:
        """Add a copy of ``node``."""
        self.nodes[node] = self.graph.node_copy(node, self.value)

    def update(self, placeholder: Node, value: Node) -> None:
        """Add the output that updates an input with ``value``."""
        target = self.value(placeholder)
        self.outputs.append((Update(target.name), self.value(value), ""))

    def returns(self, value: Any, name: str, memory: Node | None) -> None:
        """Return ``value`` under ``name``; ``memory`` is the updated input that it lies in, if any."""
        new = self.value(value) if isinstance(value, Node) else value
        self.outputs.append((Return(len(self.outputs), self.value(memory).name if memory else ""), new, name))

    def value(self, node: Node) -> Node:
        """The node of this partition for a value of the step: computed here, recomputed here, or an input."""
        if node not in self.nodes:
            is_input = node.op == "placeholder" or node in self.partitioner.at
            self.nodes[node] = self._input(node) if is_input else self.graph.node_copy(node, self.value)
        return self.nodes[node]

    def _input(self, node: Node) -> Node:
        self.input_names[node.name] = node
        # Placeholders come first in the graph, in the order of ``input_names``.
        with self.graph.inserting_after(self.last) if self.last else self.graph.inserting_before():
            new = self.graph.placeholder(node.name)
        new.meta = same_meta(node)
        self.last = new
        if node.op == "placeholder":
            entry = self.partitioner.step.input(node.name)
            self.inputs.append(replace(entry, name=new.name))
        else:
            # A result of a recorded partition keeps its address and is read in place (BUFFER). Others get a new address
            # at every call and are copied to a static buffer (BATCH).
            recorded = self.partitioner.reasons[self.partitioner.at[node]] is None
            self.inputs.append(Input(new.name, Role.BUFFER if recorded else Role.BATCH, node.name))
        return new

    def build(self, read_later: set[str], reason: str | None) -> Partition:
        """The partition; it also returns those of its values that are in ``read_later``."""
        internal = []
        for node, new in self.nodes.items():
            if node.name in read_later and self.partitioner.at.get(node) == self.number:
                internal.append(node.name)
                self.outputs.append((Return(len(self.outputs)), new, node.name))
        self.graph.output(tuple(value for _, value, _ in self.outputs))
        groups = dict(self.partitioner.step.groups)
        step = StepGraph(self.graph, self.inputs, [what for what, _, _ in self.outputs], groups)
        output_names = [name for what, _, name in self.outputs if not isinstance(what, Update)]
        inner = frozenset(at for at, name in enumerate(output_names) if name in internal)
        return Partition(step, list(self.input_names), output_names, reason, inner)
