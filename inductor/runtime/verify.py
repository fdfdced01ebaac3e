"""The verifier of programs: it reads the text that will run and follows every variable through it.

The text of a program is straight-line Python, so one walk over its statements decides all of this:

- Every name is bound before it is used; every variable is dropped once, after its last use, unless it is returned.
- A collective's result is used only after a wait, no result is still pending at the end, and nothing writes to what a
  collective in flight reads.
- Two values that lie in the planned arena have no byte in common while both are alive. Live ranges come from the
  statements: from the call that writes a value to the last statement that reads it, or a view of it. The planner works
  on the graph, so a mistake of one is seen by the other.
- Nothing that the step returns lies in the arena, which the next call overwrites.
- No statement reads a value after it was overwritten.
- Every updated input is written with its new value.

Variables that may lie in the same memory are joined by union-find (Tarjan, Efficiency of a Good But Not Linear Set
Union Algorithm, 1975): "storage" below is a set of such variables.
"""

from __future__ import annotations

import ast
import builtins
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.capture.graph import StepGraph
from weft.capture.node_kinds import calls_collective, calls_wait, is_wait
from weft.capture.record.functional_ops import operation_of, written_arguments
from weft.capture.step_interface import Update
from weft.errors import MalformedProgram
from weft.inductor.graph.aliasing import SCATTERS, looks_into, storage_keys, storages
from weft.inductor.multi_tensor.operation import MultiTensor
from weft.inductor.runtime.cudagraph_partition import Partition, result_name
from weft.inductor.runtime.memory_plan import new_arena, part
from weft.inductor.runtime.placement import UNUSED, writing_form
from weft.torch_adapter import OpOverload

Node = torch.fx.Node

aten = torch.ops.aten
# Views, although their schemas do not say so.
_UNMARKED_VIEWS = (aten._unsafe_view.default,)
_BUILTINS = frozenset(dir(builtins))


def verify_program(step: StepGraph, source: str, names: Mapping[str, Any], lines: Sequence[Node | None]) -> None:
    """Check the program that :func:`weft.inductor.runtime.writer.write_program` wrote for ``step``. Time is linear in
    the statements, but for the values of the arena that are alive at once.

    Args:
        names: what the text's global names are.
        lines: the node that each line of the text belongs to.

    Raises:
        MalformedProgram: a rule of programs is broken; shows the lines around the fault.
    """
    _ProgramVerifier(step, source, names, lines).run()


def verify_partitions(step: StepGraph, partitions: Sequence[Partition]) -> None:
    """Check that every input of a partition comes from an earlier one, and that each input of ``step`` is updated once.

    Raises:
        MalformedProgram: a partition reads a value that no earlier one computes, or an update or a result is missing or
            computed twice.
    """
    known = {entry.name for entry in step.inputs}
    updated: list[str] = []
    for number, partition in enumerate(partitions):
        if missing := sorted(set(partition.input_names) - known):
            what = f"partition {number} reads {missing}, which no earlier partition computes"
            raise MalformedProgram(what, str(partition.step))
        if repeated := sorted(set(partition.output_names) & known):
            raise MalformedProgram(f"partition {number} computes {repeated}, which exist already", str(partition.step))
        known |= set(partition.output_names)
        taken = {entry.name: name for entry, name in zip(partition.step.inputs, partition.input_names, strict=True)}
        updated += [taken[entry.name] for entry, _ in partition.step.updates()]
    if sorted(updated) != (expected := sorted(entry.name for entry, _ in step.updates())):
        raise MalformedProgram(f"the partitions update {sorted(updated)}, the step updates {expected}", str(step))
    results = (result_name(at) for at, what in enumerate(step.outputs) if not isinstance(what, Update))
    if missing := sorted(set(results) - known):
        raise MalformedProgram(f"no partition computes {missing}", str(step))


@dataclass(frozen=True)
class _ArenaBlock:
    """Bytes of the arena that the call of statement number ``start`` writes, for one result of it."""

    offset: int
    end: int
    start: int
    storage: int
    line: int


@dataclass
class _Storage:
    """What is known of a set of variables that may lie in the same memory.

    Attributes:
        last_use: number of the last statement that reads or writes it, collectives until their wait.
        last_write: number of the last statement that overwrote it, -1 before that.
        contents: the nodes whose calls wrote what is in it.
        pending: the collective that still writes it, by the number of its statement; None where none does.
        in_flight: numbers of the collectives that still read it.
        in_arena: whether some of it lies in the arena.
    """

    last_use: int = -1
    last_write: int = -1
    contents: set[Node] = field(default_factory=set)
    pending: int | None = None
    in_flight: set[int] = field(default_factory=set)
    in_arena: bool = False


class _ProgramVerifier:
    def __init__(self, step: StepGraph, source: str, names: Mapping[str, Any], lines: Sequence[Node | None]) -> None:
        self.step = step
        self.text = source.splitlines()
        self.names = names
        self.lines = lines
        (self.function,) = ast.parse(source).body
        self.variables: dict[str, int] = {}  # variable -> its storage, as long as it is bound
        self.parents: list[int] = []
        self.storages: list[_Storage] = []
        self.blocks: list[_ArenaBlock] = []
        self.arena = ""  # the variable of the whole arena: naming a part of it neither reads nor writes the rest
        self.arena_bytes = 0
        self.inputs: dict[str, int] = {}  # input -> its storage
        self.reads_of: dict[int, list[int]] = {}  # collective in flight, by its statement -> storages that it reads
        self.waits_for: dict[int, int] = {}  # the same -> how many of its results are not waited for
        self.computed: dict[Node, int] = {}  # node -> number of the statement that computes it
        self.stood_for: dict[Node, int] = {}  # the same for nodes without a statement
        self.now = 0
        self.line = 0
        self.statement_lines: list[int] = []

    def run(self) -> None:
        assert isinstance(self.function, ast.FunctionDef)
        *statements, last = self.function.body
        for self.now, statement in enumerate(statements):
            self.line = statement.lineno
            self.statement_lines.append(self.line)
            self._statement(statement)
        self.now, self.line = len(statements), last.lineno
        if isinstance(last, ast.Return):
            self._return(last)
        else:
            self._fault("the program does not end with a return")

    def _fault(self, what: str, line: int | None = None) -> Any:
        at = self.line if line is None else line
        window = range(max(1, at - 5), min(len(self.text), at + 5) + 1)
        marked = (f"{'-->' if number == at else '   '} {self.text[number - 1]}" for number in window)
        raise MalformedProgram(what, "\n".join(marked))

    # ---- storages

    def _new(self, *, contents: Node | None = None) -> int:
        self.parents.append(len(self.parents))
        self.storages.append(_Storage(self.now, -1, {contents} if contents is not None else set()))
        return len(self.parents) - 1

    def _root(self, storage: int) -> int:
        # Path halving keeps the walk short.
        while self.parents[storage] != storage:
            self.parents[storage] = self.parents[self.parents[storage]]
            storage = self.parents[storage]
        return storage

    def _of(self, variable: str) -> _Storage:
        return self.storages[self._root(self.variables[variable])]

    def _join(self, a: int, b: int) -> int:
        a, b = self._root(a), self._root(b)
        if a != b:
            one, other = self.storages[a], self.storages[b]
            self.parents[b] = a
            # Joined storages may be one memory, so each property is the stricter of the two.
            one.last_use = max(one.last_use, other.last_use)
            one.last_write = max(one.last_write, other.last_write)
            one.contents |= other.contents
            one.pending = other.pending if one.pending is None else one.pending
            one.in_flight |= other.in_flight
            one.in_arena = one.in_arena or other.in_arena
        return a

    # ---- statements

    def _statement(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Delete):
            for name in _stored(statement):
                self._drop(name)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            self._call(statement.value, [])
        elif isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
            self._call(statement.value, [*_stored(statement.targets[0])])
        elif isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name):
            self._inputs(statement)
        else:
            self._fault("a statement that no program has")

    def _inputs(self, statement: ast.Assign) -> None:
        """``[a, b, ...] = inputs``: placeholders whose fakes share memory share a storage."""
        variables = [*_stored(statement.targets[0])]
        if len(variables) != len(self.step.placeholders):
            self._fault("the program has another number of inputs than the step")
        by_key: dict[int, int] = {}
        for variable, node in zip(variables, self.step.placeholders, strict=True):
            storage = self._new(contents=node)
            for key in storage_keys(node.meta.get("val")):
                storage = self._join(by_key.setdefault(key, storage), storage)
            self._bind(variable, storage)
            self.inputs[node.name] = storage

    def _bind(self, variable: str, storage: int) -> None:
        if variable in self.variables and variable != UNUSED:
            self._fault(f"{variable} is bound again before it is dropped")
        if variable in self.names or variable == "inputs":
            self._fault(f"{variable} hides a global name")
        self.variables[variable] = storage

    def _drop(self, name: str) -> None:
        if name not in self.variables:
            self._fault(f"{name} is dropped, but not bound: dropped twice, or too early")
        # Another variable of the same storage may still be waited for.
        if self._of(name).pending is not None and self._is_last(name):
            self._fault(f"{name} is dropped before its collective is waited for")
        del self.variables[name]

    def _is_last(self, name: str) -> bool:
        root = self._root(self.variables[name])
        return sum(self._root(storage) == root for storage in self.variables.values()) == 1

    def _return(self, statement: ast.Return) -> None:
        returned = _read(statement)
        for name in self._bound(returned):
            if self._of(name).in_arena:
                self._fault(f"{name} is returned, but lies in the arena")
            if self._of(name).pending is not None:
                self._fault(f"{name} is returned before its collective is waited for")
        if left := sorted(self.variables.keys() - set(returned)):
            self._fault(f"never dropped: {', '.join(left)}")
        for started in self.reads_of:
            self._fault("a collective is never waited for", self.statement_lines[started])
        self._check_updates()
        self._check_arena()

    def _bound(self, names: Sequence[str]) -> list[str]:
        """Those of the names that are variables. Faults at one that is not bound and no global either."""
        for name in names:
            if name not in self.variables and name not in self.names and name not in _BUILTINS:
                self._fault(f"{name} is used, but not bound here")
        return [name for name in names if name in self.variables]

    # ---- calls

    def _call(self, call: ast.Call, results: list[str]) -> None:
        if isinstance(call.func, ast.Attribute):  # inputs.clear()
            return
        assert isinstance(call.func, ast.Name)
        if call.func.id not in self.names:
            self._fault(f"{call.func.id} is called, but not bound")
        function = self.names[call.func.id]
        node = self.lines[self.line - 1]
        read = [name for name in self._bound(_read(call)) if name != self.arena]
        if _is_new_arena(function):
            self.arena_bytes = _number(call.args[0])
            (self.arena,) = results
        # Reads before writes before results, as the call does it.
        self._read_by(function, call, read, node)
        written = self._written(function, call, node)
        for name in written:
            self._write(name, node)
        # A copy carries the value that it copies, so an update by a copy counts as written by the node of that value.
        if function is aten.copy_.default:
            self._of(written[0]).contents |= {node for name in read for node in self._of(name).contents}
        # The lines of a node also hold clones and copies that the placement has added; only its own call computes it.
        if node is not None and node not in self.computed and function in _forms(node):
            self.computed[node] = self.now
        storages = self._results(function, call, results, read, node)
        if calls_collective(function):
            used = [storage for name, storage in zip(results, storages, strict=True) if name != UNUSED]
            self._start([*used, *map(self.variables.__getitem__, written)], [self.variables[name] for name in read])
        self._place(call, storages)
        for variable, storage in zip(results, storages, strict=True):
            self._bind(variable, storage)

    def _read_by(self, function: Any, call: ast.Call, read: Sequence[str], node: Node | None) -> None:
        waits = calls_wait(function)
        if waits:
            for name in read:
                self._wait(self._of(name))
        for name in read:
            storage = self._of(name)
            storage.last_use = self.now
            if storage.pending is not None and function is not operator.getitem:
                self._fault(f"{name} is used before its collective is waited for")
        if node is not None and function in _forms(node) and not waits:
            for name, used in self._operands(call, node):
                if self._of(name).last_write > self._computed(used):
                    self._fault(f"{name} is overwritten before {node.name} reads {used.name} in it")

    def _operands(self, call: ast.Call, node: Node) -> Iterator[tuple[str, Node]]:
        """Variables of a call, each with the node whose value the graph wants there."""
        words = [*zip(node.args, call.args, strict=False)]
        by_name = {keyword.arg: keyword.value for keyword in call.keywords}
        words += [(value, by_name[name]) for name, value in node.kwargs.items() if name in by_name]
        for value, word in words:
            nodes: list[Node] = []
            torch.fx.node.map_arg(value, nodes.append)
            variables = self._bound(_read(word))
            # Otherwise a constant of the graph has become a global name, and positions do not match.
            if len(nodes) == len(variables):
                yield from zip(variables, nodes, strict=True)

    def _computed(self, node: Node) -> int:
        """Number of the statement after which a node's value is there. One without a statement (an element, a view that
        is not made, a view that is written back) is there when what it stands for is."""
        if node in self.computed or node.op == "placeholder":
            return self.computed.get(node, -1)
        if node not in self.stood_for:
            self.stood_for[node] = max(map(self._computed, _stands_for(node)), default=-1)
        return self.stood_for[node]

    def _written(self, function: Any, call: ast.Call, node: Node | None) -> list[str]:
        """The variables that a call overwrites."""
        what = written_arguments(function) if isinstance(function, OpOverload) else getattr(function, "effects", None)
        by_name = {keyword.arg: keyword.value for keyword in call.keywords}
        found: list[str] = []
        for at, name in what.writes if what is not None else ():
            word = call.args[at] if at < len(call.args) else by_name.get(name)
            variables = self._bound(_read(word)) if word is not None else []
            # Fused optimizers write gradients only to unscale them: without a scale the old values are the new ones.
            if name == "grads" and node is not None and node.kwargs.get("grad_scale") is None:
                for variable in variables:
                    self._of(variable).contents.add(node)
            else:
                found += [variable for variable in variables if variable != self.arena]
        return found

    def _write(self, name: str, node: Node | None) -> None:
        storage = self._of(name)
        if storage.in_flight:
            self._fault(f"{name} is overwritten while a collective reads it")
        storage.last_write = self.now
        storage.contents |= {node} if node is not None else set()

    def _results(
        self, function: Any, call: ast.Call, results: list[str], read: Sequence[str], node: Node | None
    ) -> list[int]:
        """A storage for each result: a new one, joined with those of the operands that it may be a view of."""
        found = []
        for at in range(len(results)):
            storage = self._new(contents=node)
            for name in self._aliased(function, call, at, len(results), read, node):
                storage = self._join(self.variables[name], storage)
            if function is aten.clone.default:
                self.storages[storage].contents |= self._of(read[0]).contents
            found.append(storage)
        return found

    def _aliased(
        self, function: Any, call: ast.Call, at: int, count: int, read: Sequence[str], node: Node | None
    ) -> Sequence[str]:
        if function is operator.getitem or function in _UNMARKED_VIEWS:
            return self._bound(_read(call.args[0]))
        if isinstance(function, OpOverload):
            returns = function._schema.returns
            alias = returns[at if len(returns) == count else 0].alias_info if returns else None
            return [] if alias is None else self._arguments_of(function, call, alias)
        if _is_new_arena(function) or isinstance(function, MultiTensor):
            return []  # a MultiTensor that is called as it is computes out of place
        if getattr(function, "shares_as_fakes", False) and node is not None:
            val = node.meta["val"]
            one = val[at] if isinstance(val, (list, tuple)) and count == len(val) else val
            keys = set(storage_keys(one))
            return [name for name, used in self._operands(call, node) if not keys.isdisjoint(storages(used))]
        # Nothing is known of this callable: its result may be a view of anything that it reads.
        return read

    def _arguments_of(self, function: OpOverload, call: ast.Call, alias: Any) -> list[str]:
        found: list[str] = []
        by_name = {keyword.arg: keyword.value for keyword in call.keywords}
        for at, argument in enumerate(function._schema.arguments):
            word = call.args[at] if at < len(call.args) else by_name.get(argument.name)
            if word is None or argument.alias_info is None or argument.name == "out":
                continue
            if argument.alias_info.before_set & alias.before_set or not alias.before_set:
                found += self._bound(_read(word))
        return found

    # ---- collectives

    def _start(self, results: Sequence[int], operands: Sequence[int]) -> None:
        # A collective in place has one storage as operand and as result, which is pending until the wait anyway.
        own = {self._root(storage) for storage in results}
        for storage in own:
            self.storages[storage].pending = self.now
        self.waits_for[self.now] = len(own)
        self.reads_of[self.now] = [storage for storage in operands if self._root(storage) not in own]
        for storage in self.reads_of[self.now]:
            self.storages[self._root(storage)].in_flight.add(self.now)

    def _wait(self, result: _Storage) -> None:
        started, result.pending = result.pending, None
        if started is None:
            return
        self.waits_for[started] -= 1
        # Stricter than NCCL needs, where the first wait is for all results of a call. gloo runs them one by one.
        if self.waits_for[started]:
            return
        for storage in self.reads_of.pop(started):
            operand = self.storages[self._root(storage)]
            operand.in_flight.discard(started)
            operand.last_use = self.now

    # ---- the arena

    def _place(self, call: ast.Call, storages: Sequence[int]) -> None:
        """Note where in the arena a call was told to put its results."""
        out = next((keyword.value for keyword in call.keywords if keyword.arg == "out"), None)
        if out is None:
            return
        words = out.elts if isinstance(out, ast.List) else [out]
        for at, word in enumerate(words):
            for span in ast.walk(word):
                if isinstance(span, ast.Call) and self._is_part(span):
                    storage = storages[at if len(storages) == len(words) else 0] if storages else self._new()
                    self._place_at(span, storage)

    def _is_part(self, call: ast.Call) -> bool:
        return isinstance(call.func, ast.Name) and self.names.get(call.func.id) is part

    def _place_at(self, span: ast.Call, storage: int) -> None:
        offset = _number(span.args[1])
        sizes, strides = ([_number(word) for word in words.elts] for words in span.args[2:4])  # type: ignore[attr-defined]
        dtype = getattr(torch, ast.unparse(span.args[4]).removeprefix("torch."))
        last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        end = offset + (last + 1) * dtype.itemsize if 0 not in sizes else offset
        if offset < 0 or end > self.arena_bytes or offset % dtype.itemsize:
            self._fault(f"bytes {offset} to {end} are no place in an arena of {self.arena_bytes} bytes")
        self.storages[self._root(storage)].in_arena = True
        self.blocks.append(_ArenaBlock(offset, end, self.now, storage, self.line))

    def _check_arena(self) -> None:
        """No byte belongs to two values that are alive at once. A value is alive during the call that computes it and
        during the one that uses it last: a kernel may write its results before it has read all of its operands."""
        alive: list[tuple[int, _ArenaBlock]] = []
        for block in self.blocks:  # in the order of their starts
            # Equal positions overlap: see above on kernels.
            alive = [(last, other) for last, other in alive if last >= block.start]
            for _, other in alive:
                if block.offset < other.end and other.offset < block.end:
                    where = f"bytes {max(block.offset, other.offset)} to {min(block.end, other.end)} of the arena"
                    line = self.text[other.line - 1].strip()
                    self._fault(f"two values that are alive at once lie in {where}, the other from: {line}", block.line)
            alive.append((self.storages[self._root(block.storage)].last_use, block))

    # ---- updates

    def _check_updates(self) -> None:
        """The new value of each updated input was written into its storage: in place, or by a copy."""
        for entry, value in self.step.updates():
            origin = self._origin(value)
            if origin.name != entry.name and origin not in self.storages[self._root(self.inputs[entry.name])].contents:
                self._fault(f"the new value of input {entry.name}, {value.name}, is not written into it")

    def _origin(self, node: Node) -> Node:
        """The node whose statement computes the value of ``node``."""
        while is_wait(node) or (node not in self.computed and (looks_into(node) or node.target in SCATTERS)):
            node = _stands_for(node)[-1]
        return node


def _stands_for(node: Node) -> list[Node]:
    """The nodes whose value a node without a statement is; the last one is what was written last."""
    sources = node.args[:2] if node.target in SCATTERS else node.all_input_nodes[:1]
    return [used for used in sources if isinstance(used, Node)]


def _forms(node: Node) -> tuple[Any, ...]:
    """The functions by which a program may compute a node."""
    target = operation_of(node.target)
    out = getattr(target.overloadpacket, "out", None) if isinstance(target, OpOverload) else None
    return tuple(form for form in (target, writing_form(node), out) if form is not None)


def _is_new_arena(function: Any) -> bool:
    return getattr(function, "__name__", "") == new_arena.__name__  # tests put another one in its place


def _read(tree: ast.AST) -> list[str]:
    """The names that are read, in the order of the text."""
    if isinstance(tree, ast.Name):
        return [tree.id] if isinstance(tree.ctx, ast.Load) else []
    return [name for child in ast.iter_child_nodes(tree) for name in _read(child)]


def _stored(tree: ast.AST) -> list[str]:
    """The names that are bound or dropped, in the order of the text."""
    if isinstance(tree, ast.Name):
        return [] if isinstance(tree.ctx, ast.Load) else [tree.id]
    return [name for child in ast.iter_child_nodes(tree) for name in _stored(child)]


def _number(word: ast.expr) -> int:
    return int(ast.literal_eval(word))
