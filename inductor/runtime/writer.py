"""The text of a program: one statement of Python a node, each variable dropped at its last use."""

from __future__ import annotations

import math
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.capture.functional import Functionalized
from weft.capture.graph import StepGraph, neighbourhood
from weft.errors import MalformedGraph
from weft.inductor.runtime.geometry import looks_into, returns_its_input
from weft.inductor.runtime.memory_plan import MemoryPlan, Span, new_arena, part
from weft.inductor.runtime.placement import UNUSED, Leaf, Placement, Tree, Write, leaves, writing_form
from weft.torch_adapter import OpOverload

aten = torch.ops.aten
Node = torch.fx.Node

_WIDTH = 110
_WRITTEN_AS_THEY_PRINT = (torch.dtype, torch.layout, torch.memory_format)


@dataclass
class _Statement:
    """``makes = function(arguments)``.

    Attributes:
        many: whether the results are unpacked.
        reads: the variables among the arguments.
        pure: whether the statement can be left out when nothing it makes is read.
        node: the node it belongs to.
    """

    function: str
    arguments: str
    reads: set[str]
    makes: list[str]
    many: bool
    pure: bool
    node: Node


def write_program(
    step: StepGraph, placement: Placement, device: torch.device | None, plan: MemoryPlan | None = None
) -> tuple[str, dict[str, Any], list[Node | None]]:
    """The source of a function ``run`` over the inputs, the names it needs, and the node of each line.

    With a ``plan`` of its memory each call makes one block, in which values lie as planned.

    Raises:
        MalformedGraph: a node that is no call of a function, or a symbol that no node defines.
    """
    writer = _Writer(step, placement, device, plan)
    writer.write()
    return writer.text()


class _Writer:
    def __init__(
        self, step: StepGraph, placement: Placement, device: torch.device | None, plan: MemoryPlan | None
    ) -> None:
        self.step = step
        self.order = list(step.graph.nodes)
        self.placement = placement
        self.device = device
        self.spans = {} if plan is None else plan.spans
        self.node = self.order[-1]
        self.statements: list[_Statement] = []
        self.reads: set[str] = set()
        self.names: dict[str, Any] = {"torch": torch}
        self.bound: dict[Any, str] = {}
        variables = {leaf.name for tree in placement.trees.values() for leaf in leaves(tree)}
        self.taken = (
            variables | {node.name for node in self.order} | {"run", "inputs", "torch", "float", "slice", UNUSED}
        )
        self.arena = self._arena(plan)

    def _arena(self, plan: MemoryPlan | None) -> str:
        """Make the block of memory that the plan is for; returns its variable."""
        name = "arena"
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        if plan is not None and plan.device is not None:
            self._add(new_arena, [plan.size, plan.device], [name])
        return name

    # ---- statements

    def write(self) -> None:
        copies: dict[int, list[Any]] = {}
        for copy in self.placement.copies:
            copies.setdefault(copy.after, []).append(copy)
        for position, node in enumerate(self.order):
            self.node = node
            if node.op == "output":
                self._clone(self.placement.kept)
            elif node.op == "call_function":
                self._call(node)
            elif node.op != "placeholder":
                raise MalformedGraph(f"a {node.op} node", neighbourhood(self.order, node))
            for copy in copies.get(position, ()):
                self._add(aten.copy_.default, [copy.target, copy.source], [])
        self._add("return ", self.placement.returned, [])

    def _call(self, node: Node) -> None:
        write = self.placement.writes.get(node)
        if node in self.placement.free:
            return
        if write is not None:
            self._call_write(node, write)
            return
        tree = self.placement.trees[node]
        makes = [] if returns_its_input(node) else [leaf.name for leaf in leaves(tree)]
        args, kwargs = self._arguments(node, {})
        pure = bool(makes) and looks_into(node)
        target = node.target
        out = self._out(node)
        if out is not None:
            target = target.overloadpacket.out if isinstance(target, OpOverload) else target
            kwargs = {**kwargs, "out": out}
        self._add(target, args, makes, kwargs, many=isinstance(tree, list), pure=pure)

    def _out(self, node: Node) -> Any:
        """Where a node is told to put its results: in memory that ranks share, in the arena, None where it pleases."""
        shared, own = node.meta.get("place"), self.spans.get(node)
        if isinstance(node.target, OpOverload):
            return shared[0] if shared else own
        if not shared or not own:
            return [*shared] if shared else own
        return [here if there is None else there for there, here in zip(shared, own, strict=True)]

    def _call_write(self, node: Node, write: Write) -> None:
        self._clone(write.clones)
        args, kwargs = self._arguments(node, write.arguments)
        if not isinstance(write.op, OpOverload):
            self._add(write.op, args, [_name(tree) for tree in write.fresh], kwargs, many=True)
            return
        returns = write.op._schema.returns
        fresh = iter(write.fresh)
        makes = [UNUSED if result.alias_info else _name(next(fresh)) for result in returns]
        self._add(write.op, args, makes if write.fresh else [], kwargs, many=len(returns) > 1)

    def _clone(self, clones: Sequence[tuple[Leaf, Leaf]]) -> None:
        for new, old in clones:
            self._add(aten.clone.default, [old], [new.name])

    def _add(
        self,
        target: Any,
        args: Sequence[Any],
        makes: list[str],
        kwargs: dict[str, Any] | None = None,
        *,
        many: bool = False,
        pure: bool = False,
    ) -> None:
        self.reads = set()
        words = [self._word(arg) for arg in args]
        words += [f"{name}={self._word(value)}" for name, value in (kwargs or {}).items()]
        function = target if isinstance(target, str) else self._function(target)
        self.statements.append(_Statement(function, ", ".join(words), self.reads, makes, many, pure, self.node))

    def _arguments(self, node: Node, written: dict[str, Tree]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of ``node``: the written ones replaced, process groups named as torch knows them."""

        def argument(name: str, value: Any) -> Any:
            if name == "group_name":
                return self.step.groups.get(value, value)
            return written.get(name, value)

        op = writing_form(node) or node.target
        schema = getattr(op, "_schema", None)
        if schema is None:
            names = dict(op.effects.writes) if written else {}  # type: ignore[union-attr]
            return [written.get(names.get(at, ""), value) for at, value in enumerate(node.args)], node.kwargs
        args = [argument(spec.name, value) for spec, value in zip(schema.arguments, node.args, strict=False)]
        return args, {name: argument(name, value) for name, value in node.kwargs.items()}

    # ---- words

    def _word(self, value: Any) -> str:
        """``value`` as an expression."""
        if isinstance(value, Node):
            return self._word(self.placement.trees[value])
        if isinstance(value, Leaf):
            self.reads.add(value.name)
            return value.name
        if isinstance(value, Span):
            self.reads.add(self.arena)
            words = ", ".join(self._word(word) for word in value)
            return f"{self._function(part)}({self.arena}, {words})"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._word(item) for item in value)}]"
        if isinstance(value, slice):
            return f"slice({', '.join(self._word(part) for part in (value.start, value.stop, value.step))})"
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise MalformedGraph(f"no node defines {value}", neighbourhood(self.order, self.node))
        if type(value) is float:
            return repr(value) if math.isfinite(value) else f"float('{value}')"
        if value is None or type(value) in (bool, int) or (type(value) is str and not re.search(r"\s", value)):
            return repr(value)
        if isinstance(value, _WRITTEN_AS_THEY_PRINT):
            return str(value)
        if isinstance(value, torch.device):
            device = self.device or value
            return self._bind(device, f"device_{device}", device)
        return self._bind(id(value), "constant", value)

    def _function(self, target: Callable[..., Any]) -> str:
        op = target.op if isinstance(target, Functionalized) else target
        if isinstance(op, OpOverload):
            name = str(op).removesuffix(".default")
            return self._bind(op, name, op)
        return self._bind(op, getattr(op, "__name__", type(op).__name__), op)

    def _bind(self, key: Any, name: str, value: Any) -> str:
        """The global name of ``value``: ``name``, or the like where that is taken."""
        if key not in self.bound:
            base = name = re.sub(r"\W", "_", name)
            count = 0
            while name in self.taken:
                count += 1
                name = f"{base}_{count}"
            self.taken.add(name)
            self.bound[key] = name
            self.names[name] = value
        return self.bound[key]

    # ---- text

    def text(self) -> tuple[str, dict[str, Any], list[Node | None]]:
        kept, dropped, unread = self._last_uses()
        lines = ["def run(inputs):", *self._unpacked(unread)]
        nodes: list[Node | None] = [None] * len(lines)
        place = ""
        for at, statement in kept:
            new = list(_statement_lines(statement, sorted(dropped[at])))
            here = _user_line(statement.node)
            if here and here != place:
                new[0] += f"  # {here}"
                place = here
            lines += new
            nodes += [statement.node] * len(new)
        return "\n".join(lines) + "\n", self.names, nodes

    def _unpacked(self, unread: set[str]) -> Iterator[str]:
        """The lines that take the inputs out of the list they come in."""
        names = [UNUSED if node.name in unread else node.name for node in self.step.placeholders]
        yield from _wrapped("[", ", ".join(names), "] = inputs")
        yield "    inputs.clear()"
        if UNUSED in names:
            yield f"    del {UNUSED}"

    def _last_uses(self) -> tuple[list[tuple[int, _Statement]], dict[int, set[str]], set[str]]:
        """The statements that are needed, the variables to drop after each, and the inputs that none reads."""
        kept: list[tuple[int, _Statement]] = []
        dropped: dict[int, set[str]] = {}
        inputs = {node.name for node in self.step.placeholders}
        read: set[str] = set()
        for at in range(len(self.statements) - 1, -1, -1):
            statement = self.statements[at]
            made = set(statement.makes)
            if made.isdisjoint(read):
                if statement.pure:
                    continue
                statement.makes = []
            dropped[at] = {name for name in statement.reads if name not in read}
            dropped[at] |= {name for name in statement.makes if name not in read}
            read |= statement.reads
            kept.append((at, statement))
        dropped[len(self.statements) - 1] = set()
        return kept[::-1], dropped, inputs - read


def _statement_lines(statement: _Statement, dropped: list[str]) -> Iterator[str]:
    makes = ""
    if statement.makes:
        comma = "," if statement.many and len(statement.makes) == 1 else ""
        makes = f"{', '.join(statement.makes)}{comma} = "
    if statement.function == "return ":
        yield from _wrapped("return [", statement.arguments, "]")
        return
    yield from _wrapped(f"{makes}{statement.function}(", statement.arguments, ")")
    if dropped:
        yield from _deletion(", ".join(dropped))


def _deletion(names: str) -> Iterator[str]:
    short = len(names) + 8 <= _WIDTH
    return _wrapped("del ", names, "", "    ") if short else _wrapped("del (", names, ")")


def _wrapped(head: str, body: str, tail: str, indent: str = "    ") -> Iterator[str]:
    """``head + body + tail`` on one line, or with the body broken at spaces where that is too long."""
    if len(indent) + len(head) + len(body) + len(tail) <= _WIDTH:
        yield f"{indent}{head}{body}{tail}"
        return
    yield indent + head
    inner = indent + "    "
    yield from textwrap.wrap(
        body,
        _WIDTH,
        initial_indent=inner,
        subsequent_indent=inner,
        break_long_words=False,
        break_on_hyphens=False,
    )
    yield indent + tail


def _name(tree: Tree) -> str:
    return tree.name if isinstance(tree, Leaf) else UNUSED


def _user_line(node: Node) -> str:
    frames = node.meta.get("frames")
    return f"{os.path.basename(frames[0].filename)}:{frames[0].lineno} in {frames[0].name}" if frames else ""
