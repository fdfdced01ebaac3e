"""The program writer: a placed step as the text of one Python function.

Each node becomes one statement. A ``del`` follows the last use of each variable, so that memory is freed as early as in
the eager step. The text is straight-line code without branches or loops. So each line belongs to one node, and
:mod:`weft.inductor.runtime.verify` can follow every variable in one walk.
"""

from __future__ import annotations

import math
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.capture.graph import StepGraph, neighbourhood
from weft.capture.record.functional_ops import operation_of
from weft.capture.user_code import printable
from weft.errors import MalformedGraph
from weft.inductor.graph.aliasing import looks_into, returns_its_input
from weft.inductor.runtime.memory_plan import ArenaSpan, MemoryPlan, new_arena, part
from weft.inductor.runtime.placement import UNUSED, Placement, Tree, Variable, Write, leaves, writing_form
from weft.torch_adapter import OpOverload

aten = torch.ops.aten
Node = torch.fx.Node

_WIDTH = 110  # characters per line of the text
# Types whose ``str`` is an expression over ``torch``.
_STR_IS_EXPRESSION = (torch.dtype, torch.layout, torch.memory_format)


@dataclass
class _Statement:
    """``outputs = function(arguments)``.

    Attributes:
        reads: the variables among the arguments.
        outputs: the variables that it assigns.
        unpacks: whether the function returns a sequence that is unpacked into ``outputs``.
        removable: whether the statement can be left out if nothing reads its outputs.
        node: the node that it belongs to.
    """

    function: str
    arguments: str
    reads: set[str]
    outputs: list[str]
    unpacks: bool
    removable: bool
    node: Node


def write_program(
    step: StepGraph, placement: Placement, device: torch.device | None, plan: MemoryPlan | None = None
) -> tuple[str, dict[str, Any], list[Node | None]]:
    """The source of a function ``run(inputs)``, its global names with their values, and the node of each line.

    Args:
        step: the graph; its nodes run in order.
        placement: the variable of each value.
        device: replaces the devices in arguments of operations; None keeps them.
        plan: with a plan, each call allocates one arena, and values lie at their planned offsets.

    Raises:
        MalformedGraph: a node is no function call, or an argument is a symbol that no node defines.
    """
    writer = _ProgramWriter(step, placement, device, plan)
    writer.write()
    return writer.text()


class _ProgramWriter:
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
        # Global names must not be hidden by variables: a call would then call a tensor.
        variables = {leaf.name for tree in placement.trees.values() for leaf in leaves(tree)}
        self.taken = (
            variables | {node.name for node in self.order} | {"run", "inputs", "torch", "float", "slice", UNUSED}
        )
        self.arena = self._arena(plan)

    def _arena(self, plan: MemoryPlan | None) -> str:
        """Add the statement that allocates the arena, if there is one; returns the arena's variable."""
        name = "arena"
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        if plan is not None and plan.device is not None:
            self._add(new_arena, [plan.size, plan.device], [name])
        return name

    # ---- statements

    def write(self) -> None:
        """Add the statements of all nodes, of the copies between them, and the return."""
        copies: dict[int, list[Any]] = {}
        for copy in self.placement.copies:
            copies.setdefault(copy.after, []).append(copy)
        for position, node in enumerate(self.order):
            self.node = node
            # The clones at the end must come before the copies at the end, which overwrite the originals.
            if node.op == "output":
                self._clone(self.placement.final_clones)
            elif node.op == "call_function":
                self._call(node)
            elif node.op != "placeholder":
                raise MalformedGraph(f"a {node.op} node", neighbourhood(self.order, node))
            for copy in copies.get(position, ()):
                self._add(aten.copy_.default, [copy.target, copy.source], [])
        for new, node, base in self.placement.final_views:
            self._add(node.target, [base, *node.args[1:]], [new.name], {**node.kwargs})
        self._add("return ", self.placement.returned, [])

    def _call(self, node: Node) -> None:
        write = self.placement.writes.get(node)
        if node in self.placement.elided:
            return
        if write is not None:
            self._call_write(node, write)
            return
        tree = self.placement.trees[node]
        outputs = [] if returns_its_input(node) else [leaf.name for leaf in leaves(tree)]
        args, kwargs = self._arguments(node, {})
        # Only views are removed: an unused call may draw random numbers, communicate or raise.
        removable = bool(outputs) and looks_into(node)
        target = node.target
        out = self._out(node)
        if out is not None:
            target = target.overloadpacket.out if isinstance(target, OpOverload) else target
            kwargs = {**kwargs, "out": out}
        self._add(target, args, outputs, kwargs, unpacks=isinstance(tree, list), removable=removable)

    def _out(self, node: Node) -> Any:
        """The ``out`` argument of a node: slots of the symmetric arena, spans of the program's arena, or both.

        None, or None in the list, for a result that the operation allocates itself.
        """
        slots, spans = node.meta.get("arena_slots"), self.spans.get(node)
        if isinstance(node.target, OpOverload):
            return slots[0] if slots else spans
        if not slots or not spans:
            return [*slots] if slots else spans
        # A result with a slot must lie there, because peers read it: the slot wins.
        return [span if slot is None else slot for slot, span in zip(slots, spans, strict=True)]

    def _call_write(self, node: Node, write: Write) -> None:
        self._clone(write.clones)
        args, kwargs = self._arguments(node, write.arguments)
        if not isinstance(write.op, OpOverload):
            self._add(write.op, args, [_name(tree) for tree in write.fresh], kwargs, unpacks=True)
            return
        returns = write.op._schema.returns
        fresh = iter(write.fresh)
        # A result with alias information is a written argument again. Its variable already exists.
        outputs = [UNUSED if result.alias_info else _name(next(fresh)) for result in returns]
        self._add(write.op, args, outputs if write.fresh else [], kwargs, unpacks=len(returns) > 1)

    def _clone(self, clones: Sequence[tuple[Variable, Variable]]) -> None:
        for new, old in clones:
            self._add(aten.clone.default, [old], [new.name])

    def _add(
        self,
        target: Any,
        args: Sequence[Any],
        outputs: list[str],
        kwargs: dict[str, Any] | None = None,
        *,
        unpacks: bool = False,
        removable: bool = False,
    ) -> None:
        self.reads = set()  # filled by :meth:`_expression`
        arguments = [self._expression(arg) for arg in args]
        arguments += [f"{name}={self._expression(value)}" for name, value in (kwargs or {}).items()]
        function = target if isinstance(target, str) else self._function(target)
        statement = _Statement(function, ", ".join(arguments), self.reads, outputs, unpacks, removable, self.node)
        self.statements.append(statement)

    def _arguments(self, node: Node, written: dict[str, Tree]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of ``node`` with the ``written`` ones replaced by their variables.

        The graph names process groups by mesh and dimension, the same on all ranks. Here torch's own name is put in.
        """

        def argument(name: str, value: Any) -> Any:
            if name == "group_name":
                return self.step.groups.get(value, value)
            return written.get(name, value)

        # The in-place form names its arguments, and `written` goes by these names.
        op = writing_form(node) or node.target
        schema = getattr(op, "_schema", None)
        if schema is None:
            names = dict(op.effects.writes) if written else {}  # type: ignore[union-attr]
            return [written.get(names.get(at, ""), value) for at, value in enumerate(node.args)], node.kwargs
        args = [argument(spec.name, value) for spec, value in zip(schema.arguments, node.args, strict=False)]
        return args, {name: argument(name, value) for name, value in node.kwargs.items()}

    # ---- expressions

    def _expression(self, value: Any) -> str:
        """``value`` as a Python expression; adds the variables in it to ``self.reads``."""
        if isinstance(value, Node):
            return self._expression(self.placement.trees[value])
        if isinstance(value, Variable):
            self.reads.add(value.name)
            return value.name
        if isinstance(value, ArenaSpan):
            self.reads.add(self.arena)
            fields = ", ".join(self._expression(each) for each in value)
            return f"{self._function(part)}({self.arena}, {fields})"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._expression(item) for item in value)}]"
        if isinstance(value, slice):
            return f"slice({', '.join(self._expression(part) for part in (value.start, value.stop, value.step))})"
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise MalformedGraph(f"no node defines {value}", neighbourhood(self.order, self.node))
        # The repr of infinities and NaN is no expression.
        if type(value) is float:
            return repr(value) if math.isfinite(value) else f"float('{value}')"
        if value is None or type(value) in (bool, int) or (type(value) is str and not re.search(r"\s", value)):
            return repr(value)
        # Everything else becomes a global name, bound to the object itself.
        if isinstance(value, _STR_IS_EXPRESSION):
            return str(value)
        if isinstance(value, torch.device):
            device = self.device or value
            return self._bind(device, f"device_{device}", device)
        return self._bind(id(value), "constant", value)

    def _function(self, target: Callable[..., Any]) -> str:
        op = operation_of(target)
        if isinstance(op, OpOverload):
            name = str(op).removesuffix(".default")
            return self._bind(op, name, op)
        return self._bind(op, getattr(op, "__name__", type(op).__name__), op)

    def _bind(self, key: Any, name: str, value: Any) -> str:
        """The global name of ``value``: ``name``, with a number appended if another value or a variable has it."""
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
        """The text of all statements, the values of its global names, and the node of each line of the text."""
        statements, dropped, unread = self._last_uses()
        lines = ["def run(inputs):", *self._unpacked(unread)]
        nodes: list[Node | None] = [None] * len(lines)
        last_user_line = ""
        for at, statement in statements:
            new = list(_statement_lines(statement, sorted(dropped[at])))
            user_line = _user_line(statement.node)
            if user_line and user_line != last_user_line:
                new[0] += f"  # {user_line}"
                last_user_line = user_line
            lines += new
            # The verifier and error messages look up nodes by line number.
            nodes += [statement.node] * len(new)
        return "\n".join(lines) + "\n", self.names, nodes

    def _unpacked(self, unread: set[str]) -> Iterator[str]:
        """The lines that unpack the inputs. The list is cleared, so that the variables hold the only references and an
        input can be freed at its last use."""
        names = [UNUSED if node.name in unread else node.name for node in self.step.placeholders]
        yield from _wrapped("[", ", ".join(names), "] = inputs")
        yield "    inputs.clear()"
        if UNUSED in names:
            yield f"    del {UNUSED}"

    def _last_uses(self) -> tuple[list[tuple[int, _Statement]], dict[int, set[str]], set[str]]:
        """The statements without unused views, the variables to delete after each of them, and the unread inputs.

        One backward walk, as in classic liveness analysis: a variable that no later statement reads is at its last use.
        """
        needed: list[tuple[int, _Statement]] = []
        dropped: dict[int, set[str]] = {}
        inputs = {node.name for node in self.step.placeholders}
        read: set[str] = set()
        for at in range(len(self.statements) - 1, -1, -1):
            statement = self.statements[at]
            if read.isdisjoint(statement.outputs):
                if statement.removable:
                    continue
                statement.outputs = []
            dropped[at] = {name for name in statement.reads if name not in read}
            # An output that nothing reads is dropped at once; its memory would otherwise live to the end of the call.
            dropped[at] |= {name for name in statement.outputs if name not in read}
            read |= statement.reads
            needed.append((at, statement))
        dropped[len(self.statements) - 1] = set()  # nothing can follow the return
        return needed[::-1], dropped, inputs - read


def _statement_lines(statement: _Statement, dropped: list[str]) -> Iterator[str]:
    outputs = ""
    if statement.outputs:
        comma = "," if statement.unpacks and len(statement.outputs) == 1 else ""
        outputs = f"{', '.join(statement.outputs)}{comma} = "
    if statement.function == "return ":
        yield from _wrapped("return [", statement.arguments, "]")
        return
    yield from _wrapped(f"{outputs}{statement.function}(", statement.arguments, ")")
    if dropped:
        yield from _deletion(", ".join(dropped))


def _deletion(names: str) -> Iterator[str]:
    short = len(names) + 8 <= _WIDTH
    return _wrapped("del ", names, "", "    ") if short else _wrapped("del (", names, ")")


def _wrapped(head: str, body: str, tail: str, indent: str = "    ") -> Iterator[str]:
    """``head + body + tail`` on one line, or with the body broken at spaces if that exceeds 110 characters."""
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
    return tree.name if isinstance(tree, Variable) else UNUSED


def _user_line(node: Node) -> str:
    """The innermost user frame of ``node`` as text of a comment; "" where no frame is known."""
    frames = node.meta.get("frames")
    if not frames:
        return ""
    return printable(f"{os.path.basename(frames[0].filename)}:{frames[0].lineno} in {frames[0].name}")
