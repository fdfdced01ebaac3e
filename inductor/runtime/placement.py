"""Decide, for each value of a step, which tensor it lives in, and which operations may write in place again.

A StepGraph says what the step computes; the eager step also said where: it wrote parameters, optimizer states
and many temporaries in place. Here each node that came from an in-place operation gets that operation back
where nobody can tell the difference, and works on a clone of what it writes where somebody could. Written in
place is then what the eager step wrote, so the bits, the strides and the memory are the eager step's.

A write is safe when no later node reads what it destroys. One kind of read does not count: after a write
through a view the graph says "the base, with this view replaced" (a scatter), and in place that has happened
already.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from weft.capture.functional import Effects, Functionalized, effects
from weft.capture.graph import StepGraph, Update, is_collective, neighbourhood
from weft.errors import MalformedGraph
from weft.inductor.runtime.geometry import (
    SCATTERS,
    Geometry,
    geometry,
    is_inverse_view,
    looks_into,
    returns_its_input,
    share_storage,
    sources,
    storages,
)
from weft.torch_adapter import OpOverload

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
Node = torch.fx.Node

UNUSED = "_"
# They write their gradients only to unscale them.
_FUSED_OPTIMIZERS = frozenset(
    op
    for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_")
    for op in (getattr(aten, name).default, getattr(aten, name).tensor_lr)
)

_WITHOUT_COPY: dict[Any, OpOverload] = {
    _c10d.all_reduce.default: _c10d.all_reduce_.default,
    _c10d.all_reduce_coalesced.default: _c10d.all_reduce_coalesced_.default,
}


class Memory:
    """Memory that several values may lie in; memories that turn out to be possibly one are merged.

    Attributes of the root:
        values: the values in it that are read later than its last write.
        busy_until: position of the last read of any value that ever was in it.
        inputs: names of the placeholders that lie in it.
        read_only: whether it must keep what it holds.
        tensors: a variable for each geometry known to lie in it.
    """

    __slots__ = ("_into", "busy_until", "inputs", "read_only", "tensors", "values")

    def __init__(self, inputs: frozenset[str] = frozenset(), read_only: bool = False) -> None:
        self.values: list[Node] = []
        self.busy_until = -1
        self.inputs = inputs
        self.read_only = read_only
        self.tensors: dict[Geometry, Leaf] = {}
        self._into: Memory | None = None

    @property
    def root(self) -> Memory:
        memory = self
        while memory._into is not None:
            memory = memory._into
        return memory

    def merge(self, other: Memory) -> Memory:
        a, b = self.root, other.root
        if a is not b:
            b._into = a
            a.values += b.values
            a.busy_until = max(a.busy_until, b.busy_until)
            a.inputs |= b.inputs
            a.tensors = {**b.tensors, **a.tensors}
            a.read_only = a.read_only or b.read_only or len(a.inputs) > 1
        return a


class Leaf(NamedTuple):
    """A value's Python variable, and the memory it lies in (None for numbers)."""

    name: str
    memory: Memory | None


Tree = Leaf | list["Tree"] | None


class InPlace(Protocol):
    """An in-place operation of weft's own: a callable with the arguments of the functional one, returning the results
    that are new values."""

    effects: Effects

    def __call__(self, *arguments: Any) -> Any: ...


class Write(NamedTuple):
    """How an in-place node runs: ``op`` on ``arguments`` (the written ones, by name), after making ``clones``
    (a new variable, and what it is a clone of); ``fresh`` are its results that are new values."""

    op: OpOverload | InPlace
    arguments: dict[str, Tree]
    clones: list[tuple[Leaf, Leaf]]
    fresh: list[Tree]


class Copy(NamedTuple):
    """``target.copy_(source)``, after the node at position ``after``."""

    target: Leaf
    source: Leaf
    after: int


@dataclass
class Placement:
    """Where every value lives.

    Attributes:
        trees: for each node its variable, or a list of them for an operation with several results.
        writes: nodes that run as an operation that writes.
        free: nodes that need no code, their value being in its variable already.
        copies: new values of inputs that were not computed in place.
        kept: clones (variable, of what) to make at the end, before the copies there overwrite the originals.
        returned: for each ``Create`` and ``Return`` output its variable, or the constant that it is.
    """

    trees: dict[Node, Tree] = field(default_factory=dict)
    writes: dict[Node, Write] = field(default_factory=dict)
    free: set[Node] = field(default_factory=set)
    copies: list[Copy] = field(default_factory=list)
    kept: list[tuple[Leaf, Leaf]] = field(default_factory=list)
    returned: list[Any] = field(default_factory=list)


def place(step: StepGraph) -> Placement:
    """Place every value of ``step``, whose nodes run as they stand.

    Raises:
        MalformedGraph: an update of a number, or by a tensor of another shape or dtype.
    """
    return _Placer(step).run()


class _Placer:
    def __init__(self, step: StepGraph) -> None:
        self.step = step
        self.order = order = list(step.graph.nodes)
        self.at = {node: position for position, node in enumerate(order)}
        self.until = {node: self._done_reading(node) for node in order}
        self.last_read = {node: max((self.until[u] for u in node.users), default=self.at[node]) for node in order}
        self.names = {node.name for node in order}
        self.out = Placement()
        self.trees = self.out.trees
        self.written_back: dict[Node, Node] = {}

    def run(self) -> Placement:
        self._place_inputs()
        for node in self.order:
            if node.op == "call_function":
                self._set(node, self._place(node))
        self._place_outputs()
        return self.out

    def _done_reading(self, node: Node) -> int:
        """A collective reads its inputs until it has been waited for."""
        if not is_collective(node):
            return self.at[node]
        waits = [u for user in node.users for u in ([*user.users] if user.target is operator.getitem else [user])]
        return max((self.at[wait] for wait in waits), default=self.at[node])

    # ---- values

    def _place_inputs(self) -> None:
        updated = {what.input for what in self.step.outputs if isinstance(what, Update)}
        by_storage: dict[int, Memory] = {}
        for node in self.step.placeholders:
            memory = Memory(frozenset({node.name}), node.name not in updated)
            for storage in storages(node):
                memory = by_storage.setdefault(storage, memory).merge(memory)
            is_tensor = isinstance(node.meta["val"], torch.Tensor)
            self._set(node, Leaf(node.name, memory if is_tensor else None))

    def _set(self, node: Node, tree: Tree) -> None:
        """Note where ``node`` lives, and in each memory that the node lives there."""
        self.trees[node] = tree
        for leaf in leaves(tree):
            if leaf.memory is not None:
                memory = leaf.memory.root
                memory.values.append(node)
                memory.busy_until = max(memory.busy_until, self.last_read[node])
        where = geometry(node)
        if where is not None and isinstance(tree, Leaf) and tree.memory is not None:
            tree.memory.root.tensors.setdefault(where, tree)

    def _place(self, node: Node) -> Tree:
        if node in self.written_back:
            self.out.free.add(node)
            return self.trees[self.written_back[node]]
        if node.target is operator.getitem:
            return self._place_element(node)
        op = writing_form(node)
        if op is not None:
            return self._place_write(node, op)
        return self._place_result(node)

    def _place_element(self, node: Node) -> Tree:
        given = self._given(node.args[0])
        if isinstance(given, list):
            self.out.free.add(node)
            return given[node.args[1]]  # type: ignore[index]
        return Leaf(node.name, given.memory if given is not None else None)

    def _place_result(self, node: Node) -> Tree:
        if returns_its_input(node):
            return self._given(node.args[0])
        shared = [leaf.memory for source in sources(node) for leaf in leaves(self.trees[source]) if leaf.memory]
        if is_inverse_view(node) and shared:
            where = geometry(node)
            same = shared[0].root.tensors.get(where) if where is not None else None
            if same is not None:
                self.out.free.add(node)
                return same
        for other in shared[1:]:
            shared[0].merge(other)
        return _variables(node, shared[0] if shared else None)

    def _given(self, argument: Any) -> Tree:
        if isinstance(argument, Node):
            return self.trees[argument]
        return [self._given(item) for item in argument] if isinstance(argument, (list, tuple)) else None

    # ---- writes

    def _place_write(self, node: Node, op: OpOverload | InPlace) -> Tree:
        what = effects_of(op)
        assert what is not None
        given = {name: self._given(_argument(node, position, name)) for position, name in what.writes}
        written = {name: tree for name, tree in given.items() if not _left_alone(op, name, node)}
        times = Counter(leaf.memory.root for leaf in leaves(list(written.values())) if leaf.memory)
        clones: list[tuple[Leaf, Leaf]] = []
        backs: dict[Node, Node] = {}

        def put(tree: Tree) -> Tree:
            """The variables that hold the new values: the old ones where the write is safe, else clones."""
            if isinstance(tree, list):
                return [put(item) for item in tree]
            if tree is None:
                return None
            if tree.memory is None:
                raise MalformedGraph("a number is written", neighbourhood(self.step.graph.nodes, node))
            if times[tree.memory.root] == 1 and self._safe(node, tree, backs):
                return tree
            clones.append((Leaf(self._unused_name(f"{node.name}_{len(clones)}"), Memory()), tree))
            return clones[-1][0]

        placed = {name: put(tree) for name, tree in written.items()}
        if clones and getattr(op, "namespace", "") == "_c10d_functional":
            return _variables(node, None)
        self.written_back.update(backs)
        self.out.writes[node] = Write(op, placed, clones, _fresh_variables(node, what.fresh))
        for leaf in leaves(list(placed.values())):
            memory = leaf.memory.root  # type: ignore[union-attr]
            memory.values = [value for value in memory.values if self.last_read[value] > self.at[node]]
        results = [*self.out.writes[node].fresh, *({**given, **placed}[name] for name in given)]
        # Functional forms of ATen's return a single result bare.
        return results[0] if len(results) == 1 and isinstance(op, OpOverload) else results

    def _safe(self, node: Node, leaf: Leaf, backs: dict[Node, Node]) -> bool:
        """Whether ``node`` may write into ``leaf``: nobody reads later what it destroys.

        Notes in ``backs`` the nodes that are then free, with the base each hands on. What ``node`` reads may
        overlap what it writes only if the eager step's tensors overlapped too.
        """
        memory = leaf.memory.root  # type: ignore[union-attr]
        read = [value for value in memory.values if node in value.users]
        written = [value for value in read if any(at.name == leaf.name for at in leaves(self.trees[value]))]
        if memory.read_only or not all(share_storage(value, written[0]) for value in read):
            return False
        now = self.at[node]
        late = [v for v in memory.values if any(u is not node and self.until[u] > now for u in v.users)]
        free: dict[Node, Node] = {}
        if late:
            new = _holders(node)
            if not all(self._only_written_back(value, now, new, free) for value in late):
                return False
        backs.update(free)
        return True

    def _only_written_back(self, value: Node, now: int, new: set[Node], backs: dict[Node, Node]) -> bool:
        """Whether later reads of ``value`` only replace in it what was written; notes them in ``backs``."""
        for user in value.users:
            if self.until[user] <= now or self.at[user] == now:
                continue
            if user.target in SCATTERS and user.args[0] is value and user.args[1] in new:
                if geometry(user) != geometry(value) or not share_storage(user, user.args[1]):
                    return False
                backs[user] = value
            elif not looks_into(user) or not self._only_written_back(user, now, new, backs):
                return False
        return True

    # ---- outputs

    def _place_outputs(self) -> None:
        """Plan the copies into inputs not updated in place, each as early as the input's old value allows."""
        end = self.at[self.order[-1]]
        late: dict[Node, list[Leaf]] = {}
        updated: dict[Node, list[Node]] = {}
        for placeholder, value in self._updates():
            target, source = self.trees[placeholder], self.trees[value]
            assert isinstance(target, Leaf)
            assert isinstance(source, Leaf)
            assert target.memory is not None
            assert source.memory is not None
            updated.setdefault(value, []).append(placeholder)
            if target.name == source.name:
                continue
            after = max(self.at[value], target.memory.root.busy_until)
            if after < end:
                self.out.copies.append(Copy(target, source, after))
            else:
                late.setdefault(value, []).append(target)
        overwritten = {target.memory.root for targets in late.values() for target in targets if target.memory}
        for value, targets in late.items():
            source = self._kept(value, overwritten)
            self.out.copies += [Copy(target, source, end) for target in targets]
        for what, result in zip(self.step.outputs, self.step.results, strict=True):
            if not isinstance(what, Update):
                self.out.returned.append(self._returned(result, updated, overwritten))

    def _updates(self) -> Iterator[tuple[Node, Node]]:
        by_name = {node.name: node for node in self.step.placeholders}
        for entry, value in self.step.updates():
            old, new = (node.meta["val"] if isinstance(node, Node) else node for node in (by_name[entry.name], value))
            tensors = isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)
            if not tensors or old.dtype != new.dtype or list(map(str, old.shape)) != list(map(str, new.shape)):
                at = value if isinstance(value, Node) else None
                raise MalformedGraph(f"{entry.name} is updated by another kind of thing", neighbourhood(self.order, at))
            yield by_name[entry.name], value

    def _returned(self, result: Any, updated: dict[Node, list[Node]], overwritten: set[Memory]) -> Any:
        """The variable to return: the input itself where the eager step returned an input it updated."""
        if not isinstance(result, Node):
            return result
        where = geometry(result)
        inputs = (self.trees[p] for p in updated.get(result, ()) if where is not None and geometry(p) == where)
        return next(inputs, None) or self._kept(result, overwritten)

    def _kept(self, value: Node, overwritten: set[Memory]) -> Any:
        """Where ``value`` can be read while the inputs in ``overwritten`` get their new values."""
        leaf = self.trees[value]
        if not isinstance(leaf, Leaf) or leaf.memory is None or leaf.memory.root not in overwritten:
            return leaf
        known = next((clone for clone, old in self.out.kept if old.name == leaf.name), None)
        if known is None:
            known = Leaf(self._unused_name(f"{leaf.name}_before"), Memory())
            self.out.kept.append((known, leaf))
        return known

    def _unused_name(self, name: str) -> str:
        while name in self.names:
            name += "_"
        self.names.add(name)
        return name


def leaves(tree: Tree) -> Iterator[Leaf]:
    """The leaves of a tree, in order."""
    if isinstance(tree, Leaf):
        yield tree
    elif tree is not None:
        for item in tree:
            yield from leaves(item)


def writing_form(node: Node) -> OpOverload | InPlace | None:
    """The in-place operation that ``node`` came from, or that is as good: torch's functional all-reduces copy what they
    are given. None where there is none."""
    op = node.target.op if isinstance(node.target, Functionalized) else node.meta.get("inplace")
    op = op or _WITHOUT_COPY.get(node.target)
    return op if op is not None and effects_of(op) is not None else None


def effects_of(op: OpOverload | InPlace) -> Effects | None:
    """What ``op`` writes, None where it writes nothing."""
    return effects(op) if isinstance(op, OpOverload) else op.effects


def _argument(node: Node, position: int, name: str) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def _left_alone(op: OpOverload | InPlace, name: str, node: Node) -> bool:
    return op in _FUSED_OPTIMIZERS and name == "grads" and node.kwargs.get("grad_scale") is None


def _holders(node: Node) -> set[Node]:
    """What may hold the result of ``node``: itself, elements and views of it, bases it is written back to."""
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
    """Variables for the results of ``node``, in ``memory`` if given: one an element where users pick one."""
    val = node.meta.get("val")
    if isinstance(val, (list, tuple)) and all(_picks_one(user, len(val)) for user in node.users):
        if len(storages(node)) < sum(isinstance(item, torch.Tensor) for item in val):
            memory = memory or Memory()
        names = _element_names(node)
        return [_variable(names.get(at, UNUSED), item, memory) for at, item in enumerate(val)]
    return _variable(node.name, val, memory)


def _fresh_variables(node: Node, count: int) -> list[Tree]:
    """Variables for those results of a writing node that are new values; the written ones come after them."""
    val, names = node.meta.get("val"), _element_names(node)
    vals = val if isinstance(val, (list, tuple)) else [val]
    return [_variable(names.get(at, UNUSED), vals[at], None) for at in range(count)]


def _variable(name: str, val: Any, memory: Memory | None) -> Leaf:
    holds_memory = isinstance(val, (torch.Tensor, list, tuple))
    return Leaf(name, (memory or Memory()) if holds_memory else None)


def _element_names(node: Node) -> dict[Any, str]:
    return {user.args[1]: user.name for user in node.users if user.target is operator.getitem}


def _picks_one(user: Node, length: int) -> bool:
    index = user.args[1] if user.target is operator.getitem else None
    return type(index) is int and 0 <= index < length
