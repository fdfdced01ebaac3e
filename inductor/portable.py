"""A StepGraph as plain data (JSON), and a StepGraph from that: for a cache that other processes write and read.

Nothing of such data is executed. Operations, functions and classes are named, looked up in torch, in the standard
library's operators or in weft, and must be found there; expressions are trees of sympy's classes. What has no name that
another process knows (a hook, a generator, a stream) makes a graph :class:`NotPortable`.

Data made *against* a graph refers to the fake values of that graph where it has the same ones, and to the user's lines
by their numbers in it. It is read against an equal graph, so values that both have in common are shared afterwards as
they were before, and lines are those of the graph that it is read against: a script may have been edited around a step.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import importlib
import inspect
import json
import math
import operator
import types
from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch.utils._sympy import functions as torch_sympy

from weft import torch_adapter
from weft.capture.functional import Functionalized, KeepsForBackward
from weft.capture.graph import StepGraph
from weft.capture.user_code import Frame
from weft.torch_adapter import OpOverload

Node = torch.fx.Node

_MODULES = {"builtins": builtins, "_operator": operator, "operator": operator, "math": math, "torch": torch}
_NAMED = (torch.dtype, torch.layout, torch.memory_format)
_WORDS = {str(word): word for word in vars(torch).values() if isinstance(word, _NAMED)}
_BY_VALUE = (torch.dtype, torch.device, OpOverload, Frame)
_PLAIN = frozenset({int, bool, float, str, type(None)})
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_META = ("frames", "module", "stage", "effect", "operations", "stream", "inplace", "place", "number")
_OTHER_CLASSES = frozenset({Functionalized, KeepsForBackward, Frame})


class NotPortable(Exception):
    """A graph holds something that only this process knows."""


def dump(step: StepGraph, against: StepGraph | None = None) -> str:
    """The nodes of ``step``, with all that they carry, as JSON. Its inputs, outputs and groups are not in it.

    Raises:
        NotPortable: no other process could make the graph again.
    """
    return _Writer(step, against).text()


def load(text: str, against: StepGraph) -> StepGraph:
    """The graph that ``text`` was made from by ``dump(step, against)``; its inputs and outputs are those of
    ``against``.

    Raises:
        ValueError, LookupError, TypeError, AttributeError, ImportError: ``text`` is not what ``dump`` wrote.
    """
    return _Reader(json.loads(text), against).graph()


# ---- writing


def _frames(step: StepGraph) -> dict[Frame, int]:
    """The user's lines that a graph names, each with its number."""
    frames = dict.fromkeys(frame for node in step.graph.nodes for frame in node.meta.get("frames", ()))
    return {frame: number for number, frame in enumerate(frames)}


class _Writer:
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
        meta = self._meta({key: node.meta[key] for key in _META if key in node.meta})
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
            return ["op", value._schema.name, value._overloadname]
        if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
            described = ["function", value.__module__, value.__qualname__]
            if _function(value.__module__, value.__qualname__) is value:
                return described
        if isinstance(value, sympy.Basic):
            return ["expression", _written(value)]
        if isinstance(value, _NUMBERS):
            return ["number", type(value).__name__, _written(torch_adapter.expression(value))]
        where = type(value).__module__, type(value).__qualname__
        names = _parameters(type(value))
        if names is None or not all(hasattr(value, name) for name in names):
            raise NotPortable(".".join(where))
        return ["object", *where, *(self._word(getattr(value, name)) for name in names)]

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
        if val.layout is not torch.strided or val.is_conj() or val.is_neg():
            raise NotPortable("a fake of another layout")
        storage, key = val.untyped_storage(), torch_adapter.storage_key(val)
        if key not in self.storage_of:
            self.storage_of[key] = self._append(self.storages, self._size(storage.nbytes()))
        sizes, strides = [self._size(n) for n in val.shape], [self._size(n) for n in val.stride()]
        layout = self._entry_of([val.dtype, val.device, sizes, strides, self._size(val.storage_offset())])
        return ["tensor", layout, self.storage_of[key]]

    def _entry_of(self, layout: list[Any]) -> int:
        dtype, device, *numbers = layout
        key = self._entry(dtype), self._entry(device), repr(numbers)
        if key not in self.known:
            self.known[key] = self._append(self.table, ["layout", *key[:2], *numbers])
        return self.known[key]

    def _size(self, size: Any) -> Any:
        return size if type(size) is int else ["#", self._entry(size)]

    @staticmethod
    def _append(table: list[Any], entry: Any) -> int:
        table.append(entry)
        return len(table) - 1


# ---- reading


class _Reader:
    def __init__(self, tables: dict[str, Any], against: StepGraph) -> None:
        self.tables = tables
        self.against = against
        self.mode = torch_adapter.fake_mode_of(against.graph)
        self.given = [node.meta.get("val") for node in against.graph.nodes]
        self.frames = [*_frames(against)]
        self.nodes: list[Node] = []
        self.entries: list[Any] = [_UNREAD] * len(tables["table"])
        self.storages: list[Any] = [_UNREAD] * len(tables["storages"])
        self.vals: list[Any] = [_UNREAD] * len(tables["vals"])

    def graph(self) -> StepGraph:
        graph = torch.fx.Graph()
        for op, name, target, args, kwargs, meta, val in self.tables["nodes"]:
            target = target if isinstance(target, str) else self._entry(target)
            words = tuple([self._word(arg) for arg in args]), self._word(kwargs) if kwargs else {}
            node = torch_adapter.new_node(graph, op, target, *words, name)
            if node.name != name:
                raise ValueError(f"two nodes are called {name}")
            node.meta = dict(self._entry(meta))
            if val != 0:
                node.meta["val"] = self._val(val)
            self.nodes.append(node)
        step = self.against
        return StepGraph(graph, list(step.inputs), list(step.outputs), dict(step.groups))

    def _word(self, word: Any) -> Any:
        if type(word) is not list:
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
        if self.entries[number] is _UNREAD:
            self.entries[number] = self._made(*self.tables["table"][number])
        return self.entries[number]

    def _made(self, kind: str, *rest: Any) -> Any:
        if kind == "object":
            module, name, *values = rest
            return _class(module, name)(*(self._word(value) for value in values))
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
            name, overload = rest
            namespace, _, name = name.partition("::")
            return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
        if kind == "function":
            return _function(*rest)
        if kind == "expression":
            return _read(rest[0])
        if kind == "number":
            return torch_adapter.symbolic_number(self.mode, rest[0], _read(rest[1]))
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
            return self._given(kind, *rest)
        dtype, device, sizes, strides, offset = self.tables["table"][rest[0]][1:]
        sizes, strides = [self._word(n) for n in sizes], [self._word(n) for n in strides]
        layout = self._entry(device), self._entry(dtype), sizes, strides, self._word(offset)
        return torch_adapter.new_fake(self.mode, *layout, self._storage(rest[1]))

    def _given(self, position: int, at: int) -> Any:
        val = self.given[position]
        return val[at] if isinstance(val, (list, tuple)) else val

    def _storage(self, number: int) -> Any:
        if self.storages[number] is _UNREAD:
            described = self.tables["storages"][number]
            if isinstance(described, list) and described[0] != "#":
                self.storages[number] = self._given(*described).untyped_storage()
            else:
                meta = torch.empty(self._word(described), dtype=torch.uint8, device="meta")
                self.storages[number] = meta.untyped_storage()
        return self.storages[number]


_UNREAD: Any = object()


# ---- names


def _function(module: str, name: str) -> Any:
    """A function by name, of torch, of weft or of Python's operators."""
    known = _MODULES.get(module)
    if known is None and module.partition(".")[0] in ("torch", "weft"):
        known = importlib.import_module(module)
    return functools.reduce(getattr, name.split("."), known) if known is not None else None


def _class(module: str, name: str) -> type:
    found = functools.reduce(getattr, name.split("."), importlib.import_module(module)) if _is_own(module) else None
    if not isinstance(found, type) or _parameters(found) is None:
        raise ValueError(f"{module}.{name} is no class of a graph")
    return found


def _is_own(module: str) -> bool:
    return module.startswith("weft.")


@functools.cache
def _parameters(kind: type) -> tuple[str, ...] | None:
    """What objects of a class are made from: the parameters of its constructor, which are attributes too. None for
    classes that are no data of a graph."""
    if kind not in _OTHER_CLASSES and not kind.__module__.startswith("weft.inductor."):
        return None
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind) if field.init)
    if hasattr(kind, "_fields"):
        return kind._fields  # type: ignore[attr-defined]
    return tuple(inspect.signature(kind.__init__).parameters)[1:]


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
    if isinstance(tree, int):
        return sympy.Integer(tree)
    kind, *rest = tree
    if kind == "Symbol":
        return sympy.Symbol(rest[0], **dict(rest[1]))
    if kind == "Float":
        return sympy.Float(rest[0], precision=rest[1])
    if kind == "Rational":
        return sympy.Rational(*rest)
    found = getattr(torch_sympy, kind, None) or getattr(sympy, kind, None) or getattr(sympy.core.numbers, kind)
    if not (isinstance(found, type) and issubclass(found, sympy.Basic)):
        raise ValueError(f"{kind} is no expression")
    return found(*map(_read, rest))


def symbols_of(values: Iterable[Any]) -> set[sympy.Symbol]:
    """The symbols of fake values, in tensors' sizes too."""
    found: set[sympy.Symbol] = set()
    waiting = list(values)
    while waiting:
        val = waiting.pop()
        if isinstance(val, (list, tuple)):
            waiting += val
        elif isinstance(val, torch.Tensor):
            waiting += [n for n in (*val.shape, *val.stride(), val.storage_offset()) if type(n) is not int]
        elif isinstance(val, _NUMBERS):
            found |= torch_adapter.expression(val).free_symbols
    return found
