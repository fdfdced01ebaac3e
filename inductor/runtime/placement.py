"""Placement: the Python variable and the memory of each value of a step, and which operations run in place.

A StepGraph is functional. The eager step was not: it wrote parameters, optimizer states and many temporaries in place.
Here a node that came from an in-place operation runs as that operation again if no other node can observe it. Otherwise
the operation runs on a clone of the tensor that it writes. The program then has the bits, the strides and the memory of
the eager step.

A write is safe if no later node reads the old value. One kind of read does not count: after a write through a view, the
functional graph has a scatter ("the base, with this view replaced"). The in-place write has already done that.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from weft.capture.graph import StepGraph, neighbourhood
from weft.capture.node_kinds import is_collective, is_wait
from weft.capture.record.functional_ops import Functionalized
from weft.capture.step_interface import Update
from weft.errors import MalformedGraph
from weft.inductor.graph.aliasing import (
    SCATTERS,
    Geometry,
    InPlace,
    copies,
    effects_of,
    geometry,
    is_inverse_view,
    looks_into,
    returns_its_input,
    share_storage,
    sources,
    storages,
)
from weft.inductor.graph.collectives import in_place_collective
from weft.inductor.graph.node_order import waits_of
from weft.inductor.graph.operations import argument_at
from weft.inductor.multi_tensor.operation import MultiTensor
from weft.torch_adapter import OpOverload

aten = torch.ops.aten
Node = torch.fx.Node

UNUSED = "_"
# Their schemas say that they write the gradients. They do so only to unscale them, with a ``grad_scale``.
_FUSED_OPTIMIZERS = frozenset(
    op
    for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_")
    for op in (getattr(aten, name).default, getattr(aten, name).tensor_lr)
)


class Memory:
    """One block of memory that several values may share, as a node of a union-find forest.

    Two memories that may be the same one are merged. Only the attributes of :attr:`root` are valid:

    Attributes:
        values: the values in it that some node reads after its last write.
        busy_until: position of the last read of any value that was ever in it.
        inputs: names of the placeholders that lie in it.
        read_only: whether no node may write to it (an input that the step does not update).
        tensors: a variable for each geometry (sizes, strides, offset) known to lie in it.
    """

    __slots__ = ("_into", "busy_until", "inputs", "read_only", "tensors", "values")

    def __init__(self, inputs: frozenset[str] = frozenset(), read_only: bool = False) -> None:
        self.values: list[Node] = []
        self.busy_until = -1
        self.inputs = inputs
        self.read_only = read_only
        self.tensors: dict[Geometry, Variable] = {}
        self._into: Memory | None = None

    @property
    def root(self) -> Memory:
        """The representative of all memories merged with this one."""
        memory = self
        while memory._into is not None:
            memory = memory._into
        return memory

    def merge(self, other: Memory) -> Memory:
        """Join two memories that may be the same one; returns their root."""
        a, b = self.root, other.root
        if a is not b:
            b._into = a
            a.values += b.values
            a.busy_until = max(a.busy_until, b.busy_until)
            a.inputs |= b.inputs
            a.tensors = {**b.tensors, **a.tensors}
            # Two inputs may overlap in part: a write to one would change the other, which the graph does not show.
            a.read_only = a.read_only or b.read_only or len(a.inputs) > 1
        return a


class Variable(NamedTuple):
    """The Python variable of a value, and its memory (None for numbers)."""

    name: str
    memory: Memory | None


Tree = Variable | list["Tree"] | None


class Write(NamedTuple):
    """How a node runs as an operation that writes in place.

    Attributes:
        op: the operation.
        arguments: the variables that it writes, by argument name.
        clones: pairs (new variable, original) to clone before the operation.
        fresh: its results that are new tensors, not written arguments.
    """

    op: OpOverload | InPlace
    arguments: dict[str, Tree]
    clones: list[tuple[Variable, Variable]]
    fresh: list[Tree]


class UpdateCopy(NamedTuple):
    """``target.copy_(source)``, after the node at position ``after``."""

    target: Variable
    source: Variable
    after: int


@dataclass
class Placement:
    """The variables and memory of all values of a step.

    Attributes:
        trees: for each node its variable, or a list of them for an operation with several results.
        writes: nodes that run as an operation that writes in place.
        elided: nodes without a statement, because a variable already holds their value.
        copies: copies of new values into inputs that were not updated in place.
        final_clones: pairs (new variable, original) to clone at the end, before the copies there overwrite the
            originals.
        final_views: the views of inputs to make before the return, each as (new variable, the node whose view it is,
            the variable that takes the place of the node's first argument).
        returned: for each ``Create`` and ``Return`` output its variable, or a constant.
    """

    trees: dict[Node, Tree] = field(default_factory=dict)
    writes: dict[Node, Write] = field(default_factory=dict)
    elided: set[Node] = field(default_factory=set)
    copies: list[UpdateCopy] = field(default_factory=list)
    final_clones: list[tuple[Variable, Variable]] = field(default_factory=list)
    final_views: list[tuple[Variable, Node, Variable]] = field(default_factory=list)
    returned: list[Any] = field(default_factory=list)


def place(step: StepGraph) -> Placement:
    """Place every value of ``step``; its nodes run in the order of the graph. Time is about linear in the nodes.

    Raises:
        MalformedGraph: an operation writes a number, an input that is no tensor is updated, or the new value of an
            input has another shape or dtype.
    """
    return _TensorPlacer(step).run()


class _TensorPlacer:
    def __init__(self, step: StepGraph) -> None:
        self.step = step
        self.order = order = list(step.graph.nodes)
        self.at = {node: position for position, node in enumerate(order)}
        self.reads_until = {node: self._reads_until(node) for node in order}
        # By value. A memory is busy until the last read of any value in it, see :class:`Memory`.
        self.last_read = {node: max((self.reads_until[u] for u in node.users), default=self.at[node]) for node in order}
        self.names = {node.name for node in order}
        self.by_name = {node.name: node for node in step.placeholders}
        self.out = Placement()
        self.trees = self.out.trees
        # Scatter -> the base whose memory already holds the scatter's result, because the view was written in place.
        self.written_back: dict[Node, Node] = {}

    def run(self) -> Placement:
        self._place_inputs()
        for node in self.order:
            if node.op == "call_function":
                self._set(node, self._place(node))
        self._place_outputs()
        return self.out

    def _reads_until(self, node: Node) -> int:
        """Position until which ``node`` reads its operands. A collective reads them until its last wait: a write before
        that would race with the transfer."""
        waits = waits_of(node) if is_collective(node) else []
        return max((self.at[wait] for wait in waits), default=self.at[node])

    # ---- values

    def _place_inputs(self) -> None:
        updated = {what.input for what in self.step.outputs if isinstance(what, Update)}
        by_storage: dict[int, Memory] = {}
        for node in self.step.placeholders:
            memory = Memory(frozenset({node.name}), node.name not in updated)
            # Inputs that share a storage when the step is captured (tied weights, a view beside its base) share a
            # memory.
            for storage in storages(node):
                memory = by_storage.setdefault(storage, memory).merge(memory)
            is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
            self._set(node, Variable(node.name, memory if is_tensor else None))

    def _set(self, node: Node, tree: Tree) -> None:
        """Record the variables of ``node``, and ``node`` as a value of their memories."""
        self.trees[node] = tree
        for leaf in leaves(tree):
            if leaf.memory is not None:
                memory = leaf.memory.root
                memory.values.append(node)
                memory.busy_until = max(memory.busy_until, self.last_read[node])
        where = geometry(node)
        if where is not None and isinstance(tree, Variable) and tree.memory is not None:
            # The first variable of a geometry: later views that come back to it need no statement.
            tree.memory.root.tensors.setdefault(where, tree)

    def _place(self, node: Node) -> Tree:
        # The view was written in place, so the base already holds what this scatter would make.
        if node in self.written_back:
            self.out.elided.add(node)
            return self.trees[self.written_back[node]]
        if node.target is operator.getitem:
            return self._place_element(node)
        op = writing_form(node)
        if op is not None:
            return self._place_write(node, op)
        return self._place_result(node)

    def _place_element(self, node: Node) -> Tree:
        operand = self._trees_of(node.args[0])
        if isinstance(operand, list):
            self.out.elided.add(node)
            return operand[node.args[1]]  # type: ignore[index]
        # The list is one variable, since somebody reads it as a whole. Its elements share its memory: more than needed,
        # never less.
        return Variable(node.name, operand.memory if operand is not None else None)

    def _place_result(self, node: Node) -> Tree:
        # A wait returns the tensor that it was given.
        if returns_its_input(node):
            return self._trees_of(node.args[0])
        if isinstance(node.target, MultiTensor):
            # Called as it is, it computes out of place. Its fakes lie where its kernels will write: in its operands.
            return _variables(node, None)
        # `sources` names too many rather than too few: a merge that was not needed costs a clone, one that is missing
        # costs bits.
        shared = [leaf.memory for source in sources(node) for leaf in leaves(self.trees[source]) if leaf.memory]
        if is_inverse_view(node) and shared:
            # view(view(x)) with the geometry of x is x: reuse its variable. An in-place write to the result then is a
            # write to x itself, as in the eager step.
            where = geometry(node)
            same = shared[0].root.tensors.get(where) if where is not None else None
            if same is not None:
                self.out.elided.add(node)
                return same
        # A result that may be a view of either of two operands makes their memories one.
        for other in shared[1:]:
            shared[0].merge(other)
        return _variables(node, shared[0] if shared else None)

    def _trees_of(self, argument: Any) -> Tree:
        if isinstance(argument, Node):
            return self.trees[argument]
        return [self._trees_of(item) for item in argument] if isinstance(argument, (list, tuple)) else None

    # ---- writes

    def _place_write(self, node: Node, op: OpOverload | InPlace) -> Tree:
        what = effects_of(op)
        assert what is not None
        operands = {name: self._trees_of(argument_at(node, position, name)) for position, name in what.writes}
        written = {name: tree for name, tree in operands.items() if not _keeps_gradients(op, name, node)}
        # A memory that the operation would write twice gets clones: the order of the writes is not defined.
        write_counts = Counter(leaf.memory.root for leaf in leaves(list(written.values())) if leaf.memory)
        clones: list[tuple[Variable, Variable]] = []
        backs: dict[Node, Node] = {}

        def target_of(tree: Tree) -> Tree:
            """The variables to write: the old ones where the write is safe, else clones."""
            if isinstance(tree, list):
                return [target_of(item) for item in tree]
            if tree is None:
                return None
            if tree.memory is None:
                raise MalformedGraph("a number is written", neighbourhood(self.step.graph.nodes, node))
            if write_counts[tree.memory.root] == 1 and self._safe(node, tree, backs):
                return tree
            clones.append((Variable(self._unused_name(f"{node.name}_{len(clones)}"), Memory()), tree))
            return clones[-1][0]

        targets = {name: target_of(tree) for name, tree in written.items()}
        # The functional collective allocates its result itself: cheaper than a clone and an in-place collective.
        if clones and is_collective(node):
            return _variables(node, None)
        self.written_back.update(backs)
        self.out.writes[node] = Write(op, targets, clones, _fresh_variables(node, what.fresh))
        for leaf in leaves(list(targets.values())):
            # Values without a later read cannot be destroyed by a later write.
            memory = leaf.memory.root  # type: ignore[union-attr]
            memory.values = [value for value in memory.values if self.last_read[value] > self.at[node]]
        # The functional form returns new tensors first, then the written arguments in the order of the schema.
        results = [*self.out.writes[node].fresh, *({**operands, **targets}[name] for name in operands)]
        # The functional form of an ATen operation returns a single result without a list around it.
        return results[0] if len(results) == 1 and isinstance(op, OpOverload) else results

    def _safe(self, node: Node, leaf: Variable, backs: dict[Node, Node]) -> bool:
        """Whether ``node`` may write to ``leaf``: no later node reads the old value.

        Adds to ``backs`` the scatters that then need no statement, each with its base.
        """
        memory = leaf.memory.root  # type: ignore[union-attr]
        read = [value for value in memory.values if node in value.users]
        written = [value for value in read if any(at.name == leaf.name for at in leaves(self.trees[value]))]
        # An operand may overlap the written tensor only if both shared a storage in the eager step too. A pass may have
        # put two tensors into one memory that were apart; the kernel would then read its own output.
        if memory.read_only or not all(share_storage(value, written[0]) for value in read):
            return False
        now = self.at[node]
        # Collectives count until their wait (`reads_until`): their operands are read by another stream.
        read_later = [v for v in memory.values if any(u is not node and self.reads_until[u] > now for u in v.users)]
        scatters: dict[Node, Node] = {}
        if read_later:
            new = _containers_of(node)
            if not all(self._only_written_back(value, now, new, scatters) for value in read_later):
                return False
        # Only now: a write that turns out to be unsafe must not elide any scatter.
        backs.update(scatters)
        return True

    def _only_written_back(self, value: Node, now: int, new: set[Node], backs: dict[Node, Node]) -> bool:
        """Whether all later reads of ``value`` are scatters of a value in ``new`` into it; adds these to ``backs``."""
        for user in value.users:
            # Read before the write, or by the writing node itself.
            if self.reads_until[user] <= now or self.at[user] == now:
                continue
            if user.target in SCATTERS and user.args[0] is value and user.args[1] in new:
                # The user's own scatter into another place makes a new tensor and needs the old base.
                if geometry(user) != geometry(value) or not share_storage(user, user.args[1]):
                    return False
                backs[user] = value
            # A view that is made later shows the new value. That is right only for scatters, which want the new value
            # there.
            elif not looks_into(user) or not self._only_written_back(user, now, new, backs):
                return False
        return True

    # ---- outputs

    def _place_outputs(self) -> None:
        """Plan the copies into inputs not updated in place, each as early as the input's old value allows."""
        end = self.at[self.order[-1]]
        late: dict[Node, list[Variable]] = {}
        updated: dict[Node, list[Node]] = {}
        for placeholder, value in self._updates():
            target, source = self.trees[placeholder], self.trees[value]
            assert isinstance(target, Variable)
            assert isinstance(source, Variable)
            assert target.memory is not None
            assert source.memory is not None
            # Computed in place: the input already holds its new value.
            updated.setdefault(value, []).append(placeholder)
            if target.name == source.name:
                continue
            # As early as possible, to free the new value's memory, but not before the last read of the old value.
            after = max(self.at[value], target.memory.root.busy_until)
            if after < end:
                self.out.copies.append(UpdateCopy(target, source, after))
            else:
                late.setdefault(value, []).append(target)
        # All copies at the end run one after the other, and each may destroy what a later one, or a result, still
        # needs.
        overwritten = {target.memory.root for targets in late.values() for target in targets if target.memory}
        # A source that is itself an input overwritten at the end (two inputs swapped) is cloned first.
        for value, targets in late.items():
            source = self._readable_at_end(value, overwritten)
            self.out.copies += [UpdateCopy(target, source, end) for target in targets]
        for what, result in zip(self.step.outputs, self.step.results, strict=True):
            if not isinstance(what, Update):
                view = self._view_of_input(what.memory, result, updated) if what.memory else None
                self.out.returned.append(view or self._returned(result, updated, overwritten))

    def _updates(self) -> Iterator[tuple[Node, Node]]:
        for entry, value in self.step.updates():
            placeholder = self.by_name[entry.name]
            old, new = (node.meta["val"] if isinstance(node, Node) else node for node in (placeholder, value))
            tensors = isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)
            if not tensors or old.dtype != new.dtype or list(map(str, old.shape)) != list(map(str, new.shape)):
                at = value if isinstance(value, Node) else None
                what = f"the new value of {entry.name} has another type, dtype or shape than the input"
                raise MalformedGraph(what, neighbourhood(self.order, at))
            yield placeholder, value

    def _returned(self, result: Any, updated: dict[Node, list[Node]], overwritten: set[Memory]) -> Any:
        """The variable to return: the input itself where the eager step returned an input it updated."""
        if not isinstance(result, Node):
            return result
        where = geometry(result)
        # With the geometry of the input: the caller gets the very tensor, as after `x.add_(1); return x`.
        inputs = (self.trees[p] for p in updated.get(result, ()) if where is not None and geometry(p) == where)
        return next(inputs, None) or self._readable_at_end(result, overwritten)

    def _view_of_input(self, name: str, result: Any, updated: dict[Node, list[Node]]) -> Variable | None:
        """The variable of ``result``, taken from the input ``name`` instead of from what that input is updated with.

        Eager wrote to the input and then took views of it; the graph takes them from the new value, which lies in
        memory of its own where no operation writes in place. None where ``result`` is no view of the new value.
        """
        placeholder = self.by_name[name]
        views: list[Node] = []
        value = result
        while not isinstance(value, Node) or placeholder not in updated.get(value, ()):
            if not isinstance(value, Node) or not looks_into(value) or is_wait(value) or copies(value):
                return None
            views.append(value)
            value = value.args[0]
        leaf = self.trees[placeholder]
        assert isinstance(leaf, Variable)
        if self.trees[value] == leaf:
            return None  # written in place, so that the result is a view of the input already
        for view in reversed(views):
            new = Variable(self._unused_name(f"{view.name}_of_{name}"), leaf.memory)
            self.out.final_views.append((new, view, leaf))
            leaf = new
        return leaf

    def _readable_at_end(self, value: Node, overwritten: set[Memory]) -> Any:
        """The variable of ``value``, or of a clone if the copies at the end overwrite its memory."""
        leaf = self.trees[value]
        if not isinstance(leaf, Variable) or leaf.memory is None or leaf.memory.root not in overwritten:
            return leaf
        # One clone serves every later reader.
        known = next((clone for clone, old in self.out.final_clones if old.name == leaf.name), None)
        if known is None:
            known = Variable(self._unused_name(f"{leaf.name}_before"), Memory())
            self.out.final_clones.append((known, leaf))
        return known

    def _unused_name(self, name: str) -> str:
        while name in self.names:
            name += "_"
        self.names.add(name)
        return name


def leaves(tree: Tree) -> Iterator[Variable]:
    """The leaves of ``tree``, from left to right."""
    if isinstance(tree, Variable):
        yield tree
    elif tree is not None:
        for item in tree:
            yield from leaves(item)


def writing_form(node: Node) -> OpOverload | InPlace | None:
    """The in-place operation that ``node`` came from, or an equivalent one; None where there is none.

    A functional all-reduce counts too: torch's implementation clones its operand, the in-place form saves that.
    """
    # What the user's step called comes first: it has the bits and the strides of eager.
    op = node.target.op if isinstance(node.target, Functionalized) else node.meta.get("inplace")
    op = op or in_place_collective(node.target)
    return op if op is not None and effects_of(op) is not None else None


def _keeps_gradients(op: OpOverload | InPlace, name: str, node: Node) -> bool:
    """Whether ``name`` is the gradients argument of a fused optimizer without a scale, which does not change them."""
    return op in _FUSED_OPTIMIZERS and name == "grads" and node.kwargs.get("grad_scale") is None


def _containers_of(node: Node) -> set[Node]:
    """Values that may contain the result of ``node``: itself, its elements and views, bases it is scattered into."""
    found, todo = {node}, [node]
    while todo:
        value = todo.pop()
        for user in value.users:
            written_back = user.target in SCATTERS and user.args[1] is value
            if user not in found and (written_back or looks_into(user)):
                found.add(user)
                todo.append(user)
    return found


def _variables(node: Node, memory: Memory | None) -> Tree:
    """Variables for the results of ``node``, in ``memory`` or in new memory. A list of variables if all users pick one
    element, so that each element is freed at its own last use."""
    val = node.meta.get("val")
    if isinstance(val, (list, tuple)) and all(_picks_one(user, len(val)) for user in node.users):
        if len(storages(node)) < sum(isinstance(item, torch.Tensor) for item in val):
            memory = memory or Memory()  # elements share a storage (``split``), so they share one memory
        names = _element_names(node)
        return [_variable(names.get(at, UNUSED), item, memory) for at, item in enumerate(val)]
    return _variable(node.name, val, memory)


def _fresh_variables(node: Node, count: int) -> list[Tree]:
    """Variables for the ``count`` new tensors of an in-place node. Its written arguments follow them in the results."""
    val, names = node.meta.get("val"), _element_names(node)
    vals = val if isinstance(val, (list, tuple)) else [val]
    return [_variable(names.get(at, UNUSED), vals[at], None) for at in range(count)]


def _variable(name: str, val: Any, memory: Memory | None) -> Variable:
    holds_memory = isinstance(val, (torch.Tensor, list, tuple))
    return Variable(name, (memory or Memory()) if holds_memory else None)


def _element_names(node: Node) -> dict[Any, str]:
    return {user.args[1]: user.name for user in node.users if user.target is operator.getitem}


def _picks_one(user: Node, length: int) -> bool:
    index = user.args[1] if user.target is operator.getitem else None
    return type(index) is int and 0 <= index < length
