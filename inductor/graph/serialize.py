"""A StepGraph as plain data (JSON), and a StepGraph from that: for a cache that other processes write and read.

Reading such data executes nothing that the data names. Operations are looked up in a closed set of namespaces,
functions and expressions in closed tables, objects are made of the classes that
:mod:`weft.inductor.graph.serializable` lists, from values of the declared types; nothing is imported. What has no name
in those tables (a hook, a generator, a stream, an operation of the user's library) makes a graph :class:`NotPortable`.

Data made *against* a graph refers to the fake values of that graph where it has the same ones, and to the user's lines
by their numbers in it. It is read against an equal graph, so values that both have in common are shared afterwards as
they were before, and lines are those of the graph that it is read against: a script may have been edited around a step.
"""

from __future__ import annotations

import builtins
import json
import keyword
import math
import operator
import re
import types
from collections.abc import Callable, Iterable
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._sympy import functions as torch_sympy
from torch.utils._sympy.value_ranges import ValueRanges

from weft import torch_adapter
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import COLLECTIVE_NAMESPACES
from weft.capture.node_meta import meta_fault
from weft.capture.record import clocks, float_arithmetic, host_draws, randomness, recorder, streams, torch_functions
from weft.capture.record.functional_ops import Functionalized, WithGradMode
from weft.capture.user_code import Frame
from weft.inductor.graph import host_scalars
from weft.inductor.graph.serializable import construct, fields_of, serializable
from weft.torch_adapter import OpOverload

Node = torch.fx.Node

_NAMED = (torch.dtype, torch.layout, torch.memory_format)
_WORDS = {str(word): word for word in vars(torch).values() if isinstance(word, _NAMED)}
_BY_VALUE = (torch.dtype, torch.device, OpOverload, Frame)
_PLAIN = frozenset({int, bool, float, str, type(None)})
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
for _kind in (Functionalized, WithGradMode, Frame):  # of capture/, which knows nothing of this file
    serializable(_kind)

# Operations of the namespaces that weft itself emits. Custom operations of a user's library are left out: what they do
# when they run is not known here.
OPERATION_NAMESPACES = frozenset({"aten", "prims", "prim", "weft", *COLLECTIVE_NAMESPACES})
# They open the file that an argument names.
_OF_FILES = frozenset({"aten::from_file", "aten::save", "prim::load"})

_MODULES: dict[Any, Iterable[str]] = {
    operator: (
        *("getitem", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "abs", "lshift", "rshift"),
        *("and_", "or_", "xor", "not_", "invert", "eq", "ne", "lt", "le", "gt", "ge"),
    ),
    math: ("ceil", "floor", "trunc", *float_arithmetic.MATH),
    float_arithmetic: ("is_close", "is_finite", "is_infinite", "is_nan", "plain_float", "plain_int", "sum_of"),
    builtins: ("abs", "max", "min", "pow", "round"),
    torch: [name for name in dir(torch) if name.startswith("sym_")],
    recorder: ("check",),
    randomness: ("get_rng_state", "set_rng_state", "set_seed", "new_seed", "initial_seed"),
    host_draws: ("draw_python", "draw_numpy", "seed_python", "seed_numpy"),
    clocks: ("read_clock",),
    streams: ("stream_wait",),
    torch_functions: ("to_list",),
    host_scalars: ("to_memory",),
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    f"{module.__name__}.{name}": getattr(module, name) for module, names in _MODULES.items() for name in names
}
"""The functions that nodes may call, by their names in data: arithmetic on sizes, and what capture and passes add."""
_FUNCTION_NAMES = {function: name for name, function in reversed(FUNCTIONS.items())}

_EXPRESSIONS: dict[str, type] = {
    name: kind
    for name, kind in vars(torch_sympy).items()
    if isinstance(kind, type) and issubclass(kind, sympy.Basic) and kind.__module__ == torch_sympy.__name__
}
_EXPRESSIONS |= {
    kind.__name__: kind
    for kind in (
        *(sympy.Add, sympy.Mul, sympy.Pow, sympy.Abs, sympy.floor, sympy.ceiling, sympy.exp, sympy.log),
        *(sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge, sympy.And, sympy.Or, sympy.Not),
        *(sympy.ITE, sympy.Piecewise),
        *map(type, (sympy.true, sympy.false, sympy.oo, -sympy.oo, sympy.nan, sympy.E, sympy.pi)),
        sympy.functions.elementary.piecewise.ExprCondPair,
    )
}
# Powers beyond this are refused, not computed: 2 ** (2 ** 40) would take all memory.
_LARGEST_EXPONENT = 64
_LARGEST_NUMBER = 1 << 4096
_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?(e[-+]?\d{1,4})?")
# Values of a graph with each counted as often as it is referred to. A table whose entries refer to earlier ones twice
# is small, and what it describes has no end.
_MOST_VALUES = 1 << 25


class InvalidGraphData(ValueError):
    """Data that :func:`dump` did not write: damaged, of another version, or made to do harm."""


class NotPortable(Exception):
    """A graph holds something that only this process knows."""


def dump(step: StepGraph, against: StepGraph | None = None) -> str:
    """The nodes of ``step``, with all that they carry, as JSON. Its inputs, outputs and groups are not in it.

    Raises:
        NotPortable: no other process could make the graph again.
    """
    return _GraphWriter(step, against).text()


def load(text: str, against: StepGraph, mode: FakeTensorMode | None = None) -> StepGraph:
    """The graph that ``text`` was made from by ``dump(step, against)``; its inputs and outputs are those of
    ``against``.

    Args:
        mode: of the fake values that are made; that of ``against`` if not given. Of the symbols of numbers it learns
            the names, and nothing of their values; symbols of sizes it has to know.

    Raises:
        InvalidGraphData: ``text`` is not what ``dump`` wrote.
    """
    try:
        return _GraphReader(json.loads(text), against, mode).graph()
    # RuntimeError: torch refuses a device or a size, fx a node, Python the depth of a nest.
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, AssertionError) as error:
        raise InvalidGraphData(f"{type(error).__name__}: {error}") from error


# ---- writing


def _frames(step: StepGraph) -> dict[Frame, int]:
    """The user's lines that a graph names, each with its number."""
    # By number, so that an edit above the step, which moves all lines, leaves the data valid.
    frames = dict.fromkeys(frame for node in step.graph.nodes for frame in node.meta.get("frames", ()))
    return {frame: number for number, frame in enumerate(frames)}


class _GraphWriter:
    """Everything that occurs again and again is an entry of a table, written once."""

    def __init__(self, step: StepGraph, against: StepGraph | None) -> None:
        self.step = step
        self.frames = _frames(step if against is None else against)
        self.order: dict[Node, int] = {}
        self.table: list[Any] = []
        self.entries: dict[str, int] = {}  # text of an entry -> its number
        self.known: dict[Any, int] = {}  # value, or id of it -> its entry
        self.alive: list[Any] = []  # what is known by its id
        self.vals: list[Any] = []
        self.val_of: dict[int, int] = {}
        self.storages: list[Any] = []
        self.storage_of: dict[int, int] = {}
        self.shared: dict[int, list[Any]] = {}
        if against is not None:
            self._share(against)

    def _share(self, against: StepGraph) -> None:
        for position, node in enumerate(against.graph.nodes):
            val = node.meta.get("val")
            for at, item in enumerate(val if isinstance(val, (list, tuple)) else [val]):
                if item is not None:
                    self.shared.setdefault(id(item), [position, at])
                    if isinstance(item, torch.Tensor):
                        key = torch_adapter.storage_key(item)
                        if key not in self.storage_of:
                            self.storage_of[key] = self._append(self.storages, [position, at])

    def text(self) -> str:
        nodes = [self._node(position, node) for position, node in enumerate(self.step.graph.nodes)]
        tables = {"nodes": nodes, "table": self.table, "vals": self.vals, "storages": self.storages}
        return json.dumps(tables, separators=(",", ":"))

    def _node(self, position: int, node: Node) -> list[Any]:
        target = node.target if isinstance(node.target, str) else self._entry(node.target)
        args, kwargs = [self._word(arg) for arg in node.args], self._word(node.kwargs) if node.kwargs else 0
        meta = self._meta({key: value for key, value in node.meta.items() if key != "val"})
        val = self._val(node.meta["val"]) if "val" in node.meta else 0
        self.order[node] = position
        return [node.op, node.name, target, args, kwargs, meta, val]

    def _word(self, value: Any) -> Any:
        """``value`` as JSON: what has a form of its own as it is, everything else as a list that begins with its
        kind."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is Node:
            return ["%", self.order[value]]
        if isinstance(value, (list, tuple)) and not hasattr(kind, "_fields"):
            return ["(" if isinstance(value, tuple) else "[", *(self._word(item) for item in value)]
        if isinstance(value, dict):
            return ["{", *([self._word(key), self._word(item)] for key, item in value.items())]
        if kind is slice:
            return [":", self._word(value.start), self._word(value.stop), self._word(value.step)]
        return ["#", self._entry(value)]

    def _meta(self, meta: dict[str, Any]) -> int:
        key = "meta", *meta.items()
        if key not in self.known:
            self.known[key] = self._entry(meta)
        return self.known[key]

    def _entry(self, value: Any) -> int:
        # Others by identity. Equal ones get one entry, by its text.
        by_value = isinstance(value, _BY_VALUE)
        key = value if by_value else id(value)
        found = self.known.get(key)
        if found is None:
            entry = self._description(value)
            text = json.dumps(entry)
            found = self.entries.get(text)
            if found is None:
                found = self.entries[text] = self._append(self.table, entry)
            self.known[key] = found
            self.alive.append(value)
        return found

    def _description(self, value: Any) -> list[Any]:
        """An entry of the table: its kind, and what it is made from."""
        if isinstance(value, Frame) and value in self.frames:
            return ["frame", self.frames[value]]
        if isinstance(value, dict):
            return ["dict", self._word(value)]
        if isinstance(value, frozenset):
            return ["frozenset", *map(self._word, sorted(value))]
        if isinstance(value, _NAMED):
            return ["word", str(value)]
        if isinstance(value, torch.device):
            return ["device", str(value)]
        if isinstance(value, OpOverload):
            if not _is_listed(value):
                raise NotPortable(str(value))
            return ["op", value._schema.name, value._overloadname]
        if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)) and value in _FUNCTION_NAMES:
            return ["function", _FUNCTION_NAMES[value]]
        if isinstance(value, sympy.Basic):
            return ["expression", _written(value)]
        if isinstance(value, _NUMBERS):
            return ["number", type(value).__name__, _written(torch_adapter.expression(value))]
        fields = fields_of(value)
        if fields is None:
            raise NotPortable(f"{type(value).__module__}.{type(value).__qualname__}")
        return ["object", type(value).__qualname__, *map(self._word, fields)]

    # ---- fake values

    def _val(self, val: Any) -> Any:
        if isinstance(val, (list, tuple)):
            return ["(" if isinstance(val, tuple) else "[", *map(self._val, val)]
        if isinstance(val, (torch.Tensor, *_NUMBERS)):
            known = self.val_of.get(id(val))
            if known is None:
                known = self.val_of[id(val)] = self._append(self.vals, self._described_val(val))
                self.alive.append(val)
            return ["@", known]
        return self._word(val)

    def _described_val(self, val: Any) -> list[Any]:
        if id(val) in self.shared:
            return self.shared[id(val)]
        if not isinstance(val, torch.Tensor):
            return ["number", self._entry(val)]
        # A fake is made again from sizes and strides, which say nothing of these.
        if val.layout is not torch.strided or val.is_conj() or val.is_neg():
            raise NotPortable("a fake of another layout")
        key = torch_adapter.storage_key(val)
        if key not in self.storage_of:
            self.storage_of[key] = self._append(self.storages, self._size(val.untyped_storage().nbytes()))
        return ["tensor", self._layout(val), self.storage_of[key]]

    def _layout(self, val: torch.Tensor) -> int:
        shape, strides, offset = val.shape, val.stride(), val.storage_offset()
        # Symbols have no hash that is theirs alone: they are compared as they are written.
        if all(type(n) is int for n in (*shape, *strides, offset)):
            numbers: list[Any] = [[*shape], [*strides], offset]
            key: Any = val.dtype, val.device, shape, strides, offset
        else:
            numbers = [[self._size(n) for n in shape], [self._size(n) for n in strides], self._size(offset)]
            key = val.dtype, val.device, repr(numbers)
        if key not in self.known:
            layout = ["layout", self._entry(val.dtype), self._entry(val.device), *numbers]
            self.known[key] = self._append(self.table, layout)
        return self.known[key]

    def _size(self, size: Any) -> Any:
        return size if type(size) is int else ["#", self._entry(size)]

    @staticmethod
    def _append(table: list[Any], entry: Any) -> int:
        table.append(entry)
        return len(table) - 1


# ---- reading


class _GraphReader:
    def __init__(self, tables: dict[str, Any], against: StepGraph, mode: FakeTensorMode | None) -> None:
        self.tables = tables
        self.against = against
        self.alone = mode is not None
        self.mode = mode or torch_adapter.fake_mode_of(against.graph)
        self.known_values = [node.meta.get("val") for node in against.graph.nodes]
        self.frames = [*_frames(against)]
        self.nodes: list[Node] = []
        self.entries: list[Any] = [_UNREAD] * len(tables["table"])
        self.storages: list[Any] = [_UNREAD] * len(tables["storages"])
        self.vals: list[Any] = [_UNREAD] * len(tables["vals"])
        self.values = 0  # see _MOST_VALUES
        self.sizes: dict[int, int] = {}  # entry -> values in it

    def graph(self) -> StepGraph:
        graph = torch.fx.Graph()
        for op, name, target, args, kwargs, meta, val in self.tables["nodes"]:
            target = self._target(op, target)
            words = tuple([self._word(arg) for arg in args]), self._kwargs(kwargs)
            node = torch_adapter.new_node(graph, op, target, *words, name)
            # Fx makes names unique and identifiers, but for a line feed at the end. Programs are written with them.
            if node.name != name or not _is_identifier(name):
                raise ValueError(f"no node, or two, can be called {name!r}")
            node.meta.update(self._entry(meta))
            if val != 0:
                node.meta["val"] = self._val(val)
            if (fault := meta_fault(node)) is not None:
                raise ValueError(fault)
            self.nodes.append(node)
        step = self.against
        return StepGraph(graph, list(step.inputs), list(step.outputs), dict(step.groups))

    def _target(self, op: str, target: Any) -> Any:
        if op == "call_function":
            target = self._entry(target)
            if not callable(target) or isinstance(target, (torch.dtype, torch.device, type)):
                raise ValueError(f"a node calls {target!r}")
        elif op not in ("placeholder", "output") or type(target) is not str:
            raise ValueError(f"a node of kind {op!r}")
        return target

    def _kwargs(self, word: Any) -> dict[str, Any]:
        found = self._word(word) if word else {}
        if type(found) is not dict or not all(map(_is_identifier, found)):
            raise ValueError("names of arguments are no identifiers")
        return found

    def _word(self, word: Any) -> Any:
        self.values += 1
        if self.values > _MOST_VALUES:
            raise ValueError(f"more than {_MOST_VALUES} values")
        if type(word) is not list:
            if type(word) not in _PLAIN:
                raise ValueError(f"no word is a {type(word).__name__}")
            return word
        kind, *rest = word
        if kind == "%":
            return self.nodes[rest[0]]
        if kind == "#":
            return self._entry(rest[0])
        if kind == "(":
            return tuple(self._word(item) for item in rest)
        if kind == "[":
            return [self._word(item) for item in rest]
        if kind == "{":
            return {self._word(key): self._word(item) for key, item in rest}
        if kind == ":":
            return slice(*(self._word(item) for item in rest))
        raise ValueError(f"no word is of kind {kind!r}")

    def _entry(self, number: int) -> Any:
        # Entries are read when they are first referred to, so one can refer to any other, and a cycle ends in
        # RecursionError, a RuntimeError.
        if self.entries[number] is _UNREAD:
            before = self.values
            self.entries[number] = self._decoded(*self.tables["table"][number])
            self.sizes[number] = self.values - before
        else:
            self.values += self.sizes[number]
        return self.entries[number]

    def _decoded(self, kind: str, *rest: Any) -> Any:
        if kind == "object":
            name, *values = [rest[0], *map(self._word, rest[1:])]
            # Names and lines are written into comments of programs; a kernel's text is checked before it is compiled.
            if name != "KernelSource" and not all(value.isprintable() for value in values if type(value) is str):
                raise ValueError(f"control characters in a {name}")
            return construct(name, values)
        if kind == "frame":
            return self.frames[rest[0]]
        if kind == "dict":
            return self._word(rest[0])
        if kind == "frozenset":
            return frozenset(self._word(item) for item in rest)
        if kind == "word":
            return _WORDS[rest[0]]
        if kind == "device":
            return torch.device(rest[0])
        if kind == "op":
            return _operation(*rest)
        if kind == "function":
            return FUNCTIONS[rest[0]]
        if kind == "expression":
            return _read(rest[0])
        if kind == "number":
            expression = _read(rest[1])
            if self.alone and rest[0] == "SymFloat":
                for symbol in expression.free_symbols:
                    torch_adapter.shape_env_of(self.mode).var_to_range.setdefault(symbol, ValueRanges.unknown())
            return torch_adapter.symbolic_number(self.mode, rest[0], expression)
        raise ValueError(f"no entry is of kind {kind!r}")

    # ---- fake values

    def _val(self, val: Any) -> Any:
        if type(val) is not list:
            return val
        kind, *rest = val
        if kind == "@":
            if self.vals[rest[0]] is _UNREAD:
                self.vals[rest[0]] = self._new_val(*self.tables["vals"][rest[0]])
            return self.vals[rest[0]]
        if kind in ("(", "["):
            return (tuple if kind == "(" else list)(map(self._val, rest))
        return self._word(val)

    def _new_val(self, kind: Any, *rest: Any) -> Any:
        if kind == "number":
            return self._entry(rest[0])
        if kind != "tensor":
            return self._known_value(kind, *rest)
        kind, dtype, device, sizes, strides, offset = self.tables["table"][rest[0]]
        if kind != "layout":
            raise ValueError(f"no layout is a {kind!r}")
        sizes, strides = [self._word(n) for n in sizes], [self._word(n) for n in strides]
        layout = self._entry(device), self._entry(dtype), sizes, strides, self._word(offset)
        return torch_adapter.new_fake(self.mode, *layout, self._storage(rest[1]))

    def _known_value(self, position: int, at: int) -> Any:
        val = self.known_values[position]
        return val[at] if isinstance(val, (list, tuple)) else val

    def _storage(self, number: int) -> Any:
        if self.storages[number] is _UNREAD:
            described = self.tables["storages"][number]
            if isinstance(described, list) and described[0] != "#":
                self.storages[number] = self._known_value(*described).untyped_storage()
            else:
                meta = torch.empty(self._word(described), dtype=torch.uint8, device="meta")
                self.storages[number] = meta.untyped_storage()
        return self.storages[number]


_UNREAD: Any = object()


# ---- names


def _is_listed(op: OpOverload) -> bool:
    return op.namespace in OPERATION_NAMESPACES and op._schema.name not in _OF_FILES


def _operation(name: str, overload: str) -> OpOverload:
    namespace, _, name = name.partition("::")
    if namespace not in OPERATION_NAMESPACES or not (_is_identifier(name) and _is_identifier(overload or "default")):
        raise ValueError(f"{namespace}::{name} is no operation of a serialized graph")
    # The result is checked, not the name: attributes of these objects are not only operations.
    found = getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
    if not isinstance(found, OpOverload) or not _is_listed(found):
        raise ValueError(f"{found} is no operation of a serialized graph")
    return found


def _is_identifier(name: Any) -> bool:
    return type(name) is str and name.isidentifier() and not keyword.iskeyword(name)


# ---- expressions


def _written(expression: Any) -> Any:
    """An expression as JSON; raises NotPortable for one that does not come back as it was."""
    written = _tree(expression)
    if _read(written) != expression:
        raise NotPortable(f"the expression {expression}")
    return written


def _tree(expression: Any) -> Any:
    if isinstance(expression, sympy.Integer):
        return int(expression)
    if isinstance(expression, sympy.Float):
        return ["Float", str(expression), expression._prec]
    if isinstance(expression, sympy.Rational):
        return ["Rational", expression.p, expression.q]
    if isinstance(expression, sympy.Symbol):
        return ["Symbol", expression.name, sorted(expression.assumptions0.items())]
    return [type(expression).__name__, *map(_tree, expression.args)]


def _read(tree: Any) -> Any:
    """An expression from JSON. Only numbers and expressions reach sympy's constructors: they evaluate strings."""
    if type(tree) is int:
        return sympy.Integer(tree)
    kind, *rest = tree
    if kind == "Symbol":
        name, assumptions = rest
        # Expressions over symbols are printed as Python and compiled.
        if not _is_identifier(name) or not all(type(value) is bool for _, value in assumptions):
            raise ValueError(f"{name!r} is no symbol")
        return sympy.Symbol(name, **dict(assumptions))
    if kind == "Float":
        if not (_NUMBER.fullmatch(rest[0]) and type(rest[1]) is int and rest[1] <= 1024):
            raise ValueError(f"{rest[0]!r} is no number")
        return sympy.Float(rest[0], precision=rest[1])
    if kind == "Rational":
        if [type(part) for part in rest] != [int, int]:
            raise ValueError(f"{rest!r} is no number")
        return sympy.Rational(*rest)
    found, operands = _EXPRESSIONS[kind], [*map(_read, rest)]
    if kind in ("Pow", "PowByNatural", "LShift"):
        bounds = zip(operands, (_LARGEST_NUMBER, _LARGEST_EXPONENT), strict=True)
        if any(operand.is_number and abs(operand) > bound for operand, bound in bounds):
            raise ValueError(f"a power of {operands[1]}")
    return found(*operands)
