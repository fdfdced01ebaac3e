"""Writes down every operation that reaches the dispatcher, as a graph of values.

The recorder is a dispatch mode that sits under autograd and above everything else, so it sees the operations of
forward, backward and optimizer alike, with tensor subclasses (DTensor) already taken apart. Operations run on fake
tensors: shapes and dtypes are computed, nothing is allocated. In-place operations and views are turned into values as
they come: a *buffer* is a storage with the node of its current value, an *alias* is a tensor looking into one.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from weft import torch_adapter
from weft.capture.fake_results import FakeResults
from weft.capture.functional import (
    Effects,
    as_run,
    as_strided_like,
    effects,
    out_of_place,
    single_view,
    write_back,
)
from weft.capture.geometry import apart, extent, offset_within, same_layout
from weft.capture.known_numbers import known_number
from weft.capture.operands import argument_of, handed_back, map_operands, tensors_in
from weft.capture.state import identity
from weft.capture.symbols import Number, Symbols
from weft.capture.user_code import Frame, user_frames, user_line
from weft.errors import RuntimeCheckFailed, UncapturableCollective, UncapturableLayout, UncapturableMutation
from weft.torch_adapter import OpOverload, TorchDispatchMode

aten = torch.ops.aten
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_SAME_VALUE = (aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift.default)
_DEVICE = torch.ops.prim.device.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default


def check(holds: bool, condition: str, names: str, *values: int) -> None:
    """Raise unless ``holds``: what the graph assumes about numbers that only the data decides."""
    if not holds:
        found = ", ".join(f"{name} = {value}" for name, value in zip(names.split(), values, strict=True))
        raise RuntimeCheckFailed(condition, found)


_active: list[Recorder] = []


def recording() -> Recorder | None:
    """The recorder of the capture that is going on, if any."""
    return _active[-1] if _active else None


class Buffer:
    """One storage: the node of its present value and how often it was written."""

    __slots__ = ("node", "storage", "version", "whole")

    def __init__(self, node: torch.fx.Node, storage: torch.UntypedStorage) -> None:
        self.node = node
        self.whole: Alias | None = None
        self.version = 0
        self.storage = storage


class Alias:
    """One tensor: either the whole of a buffer (no ``parent``) or a view made from another tensor."""

    __slots__ = ("buffer", "node", "parent", "replay", "val", "version")

    def __init__(
        self,
        buffer: Buffer,
        node: torch.fx.Node,
        val: torch.Tensor,
        parent: Alias | None = None,
        replay: tuple[OpOverload, tuple[Any, ...]] | None = None,
    ) -> None:
        self.buffer = buffer
        self.node = node
        self.val = val
        self.parent = parent
        self.replay = replay
        self.version = buffer.version


class Recorder(TorchDispatchMode):
    """Records operations into ``graph`` while active.

    Args:
        fake_mode: the fake world the operations run in; must also be active, below this mode.

    Attributes:
        graph: what was recorded; a tensor of the user's becomes a placeholder when an operation first meets it.
        placeholders: each placeholder with the user's tensor it stands for.
        recorded: operations written down; passed: those that ran while recording was paused.
        shares_memory: the user's tensors that lie in a storage, for one of them that is met for the first time.
    """

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__()
        self.graph = torch.fx.Graph()
        self.fake_mode = fake_mode
        self.symbols = Symbols(torch_adapter.shape_env_of(fake_mode), self.graph, self._stamp)
        self.recorded = 0
        self.passed = 0
        self.module_path: Callable[[], str] = lambda: ""
        self.optimizing = False
        self.stream: Callable[[], int] | None = None
        self.input_name: Callable[[torch.Tensor], str] = lambda tensor: "input"
        self.shares_memory: Callable[[int], Iterable[torch.Tensor]] = lambda storage: ()
        self.float_tags: dict[float, torch.SymFloat] = {}
        self.moments: Any = None
        self._results = FakeResults(fake_mode)
        self._buffers: dict[int, Buffer] = {}
        self._inputs: dict[tuple[Any, ...], Alias] = {}
        self.placeholders: list[tuple[torch.fx.Node, torch.Tensor]] = []
        self._input_storages: dict[int, list[tuple[Alias, torch.Tensor]]] = {}
        self._origin: dict[int, tuple[tuple[Frame, ...], str, int]] = {}
        self._after_inputs = self.graph._root
        self._paused_in: tuple[TorchDispatchMode, ...] | None = None
        self._asserted: set[Any] = set()
        # Each rank has a device of its own; in the graph it is the one that is current, the same text on every rank.
        self._own_device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else None

    # ---- dispatch

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap every dispatch to keep its own compiler out; none runs here

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        # In a backward the modes of a fake world are on here, and would see each look at a tensor.
        with torch_adapter.no_torch_function_modes():
            return self._dispatch(func, types, args, kwargs or {})

    def _dispatch(self, op: OpOverload, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if op is _DEVICE:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        if any(not torch_adapter.is_plain_tensor_type(t) for t in types):
            return NotImplemented
        if self._paused_in is not None or op.namespace == "profiler":
            self.passed += op.namespace != "profiler"
            with torch_adapter.only_mode(*(self._paused_in or ())):
                return op(*args, **kwargs)
        if any(isinstance(t, FakeTensor) and t.fake_mode is not self.fake_mode for t in tensors_in((args, kwargs))):
            return op(*args, **kwargs)
        if op.namespace == "c10d":
            remedy = (
                "use the collectives of torch.distributed that work on tensors of all ranks, "
                "or move the call out of the step"
            )
            raise UncapturableCollective(op._schema.name.split("::")[1], user_line(), remedy)
        return self._record(op, args, kwargs)

    def __enter__(self) -> Recorder:
        _active.append(self)
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        _active.pop()
        super().__exit__(exc_type, exc_val, exc_tb)

    @contextmanager
    def paused(self, *modes: TorchDispatchMode) -> Iterator[None]:
        """Operations inside leave no trace and run for real, under ``modes`` alone."""
        self._paused_in = modes
        try:
            yield
        finally:
            self._paused_in = None

    def _record(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.recorded += 1
        fakes = map_operands(args, self._fake), map_operands(kwargs, self._fake)
        if op is aten._local_scalar_dense.default:
            return self._record_scalar(op, args, fakes[0])
        what = effects(op)
        if what is not None:
            return self._record_write(op, what, args, kwargs, *fakes)
        if op is _ALL_TO_ALL:
            _check_splits(*fakes[0][:3])
        try:
            out = self._results(op, *fakes)
        except Exception as error:
            error.add_note(f"while capturing {op} at {user_line()}")
            raise
        self.emit_new_checks()
        if op in _SAME_VALUE and isinstance(out, FakeTensor):
            return self._share(out, self.alias(args[0]))
        if op is _WAIT:
            return self._record_wait(out, args[0])
        node = self.emit(as_run(op), *map_operands(args, self.value), val=out, **map_operands(kwargs, self.value))
        self._bind(out, node, op, args, kwargs)
        return out

    def _record_scalar(self, op: OpOverload, args: tuple[Any, ...], fakes: tuple[Any, ...]) -> Any:
        operand = self.value(args[0])
        known = known_number(operand)
        if known is not None:
            return known
        out = op(*fakes)
        if isinstance(out, _NUMBERS):
            node = self.emit(op, operand, val=out)
            self.symbols.define(out, lambda: node)
            self.take_pending_symbols()
        return out

    def _record_wait(self, out: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """A wait hands back the storage it was given, now holding the result: the value after it is the wait's."""
        alias = self.alias(given)
        node = self.emit(_WAIT, self.read(alias), val=alias.val)
        if torch_adapter.storage_key(out) != torch_adapter.storage_key(alias.val):
            self._bind_fresh(out, node)
            return out
        alias.buffer.version += 1
        alias.node, alias.version = node, alias.buffer.version
        alias.buffer.node = node
        return self._share(out, alias)

    # ---- writes

    def _record_write(
        self,
        op: OpOverload,
        what: Effects,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        fake_args: tuple[Any, ...],
        fake_kwargs: dict[str, Any],
    ) -> Any:
        if torch.Tag.inplace_view in op.tags:
            return self._record_reshape_in_place(op, args, kwargs, fake_args, fake_kwargs)
        if op is aten.copy_.default and self._copies_whole(*fake_args[:2]):
            self.write(self.alias(args[0]), self.value(args[1]))
            return args[0]
        named = {a.name: position for position, a in enumerate(op._schema.arguments)}
        inputs = map_operands(args, self.value), map_operands(kwargs, self.value)
        wide = self._widened(op, what, fake_args, fake_kwargs)
        out = op(*fake_args, **fake_kwargs)
        results = () if out is None else out if isinstance(out, tuple) else (out,)
        fresh = [r for r, spec in zip(results, op._schema.returns, strict=False) if spec.alias_info is None]
        written = [argument_of(args, kwargs, position, name) for position, name in what.writes]
        vals = [*fresh, *map_operands(written, self._fake)] if wide is None else [wide]
        single = len(vals) == 1
        node = self.emit(what.functional, *inputs[0], val=vals[0] if single else tuple(vals), **inputs[1])
        if wide is None:
            node.meta["inplace"] = op
        parts = [node] if single else [self.pick(node, i, v) for i, v in enumerate(vals)]
        for value, part in zip(fresh, parts, strict=False):
            if isinstance(value, torch.Tensor):
                self._bind_fresh(value, part)
        for target, part in zip(written, parts[len(fresh) :], strict=True):
            self._write_all(target, part)
        return handed_back(op, out, args, kwargs, named)

    def _copies_whole(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Whether ``target.copy_(source)`` makes target equal to source in every respect, so that no copy is needed."""
        same = target.dtype == source.dtype and target.device == source.device
        return same and self.alias(target).parent is None and same_layout(target, source)

    def _widened(
        self, op: OpOverload, what: Effects, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        """What the functional form returns where that has another dtype than the tensor it replaces (bfloat16 +=
        float32)."""
        tensors = tensors_in((args, kwargs))
        if len(tensors) < 2 or op in (aten.copy_.default,) or all(t.dtype == tensors[0].dtype for t in tensors):
            return None
        first = argument_of(args, kwargs, *what.writes[0])
        if not isinstance(first, torch.Tensor) or not isinstance(what.functional, OpOverload):
            return None
        result = what.functional(*args, **kwargs)
        return result if isinstance(result, torch.Tensor) and result.dtype != first.dtype else None

    def _write_all(self, target: Any, part: torch.fx.Node) -> None:
        if isinstance(target, torch.Tensor):
            self.write(self.alias(target), part)
        elif isinstance(target, (list, tuple)):
            for at, tensor in enumerate(target):
                self.write(self.alias(tensor), self.pick(part, at, self._fake(tensor)))

    def write(self, alias: Alias, new: torch.fx.Node) -> None:
        """Make ``new`` the value of the tensor, and of every tensor that shares its storage."""
        val = new.meta.get("val")
        if isinstance(val, torch.Tensor) and val.dtype != alias.val.dtype:
            new = self.emit(aten._to_copy.default, new, val=alias.val, dtype=alias.val.dtype)
        if alias.parent is None:
            alias.buffer.version += 1
            alias.buffer.node = new
        else:
            op, args = alias.replay  # type: ignore[misc]
            parent = alias.parent
            base = write_back(self.emit, op, args, self.read(parent), parent.val, new, alias.val)
            self.write(parent, base)
        alias.node, alias.version = new, alias.buffer.version

    def _record_reshape_in_place(
        self,
        op: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        fake_args: tuple[Any, ...],
        fake_kwargs: dict[str, Any],
    ) -> Any:
        """``t.transpose_()`` and its like change what the tensor object is: from now on it is a view of what it was."""
        target = args[0]
        variant = out_of_place(op)
        if variant is None or not _known(target):
            raise UncapturableMutation(f"{op} at {user_line()}: a tensor of your own cannot change its shape in a step")
        before = self.alias(target)
        viewed = self._record(variant, args, kwargs)
        with torch_adapter.only_mode(self.fake_mode):
            as_it_was = target.detach()
        for node in self.graph.nodes:
            node.meta["val"] = map_operands(node.meta["val"], lambda val: as_it_was if val is target else val)
        with torch.no_grad():
            op(*fake_args, **fake_kwargs)
        after = self.alias(viewed)
        before_again = Alias(before.buffer, before.node, as_it_was, before.parent, before.replay)
        before_again.version = before.version
        target._weft_alias = Alias(after.buffer, after.node, viewed, before_again, after.replay)  # type: ignore[attr-defined]
        return target

    # ---- values

    def read(self, alias: Alias) -> torch.fx.Node:
        """The node of the tensor's present value, made again from its base where that was written since."""
        if alias.version != alias.buffer.version:
            if alias.parent is None:
                alias.node = alias.buffer.node
            else:
                op, args = alias.replay  # type: ignore[misc]
                alias.node = self.emit(op, self.read(alias.parent), *args, val=alias.val)
            alias.version = alias.buffer.version
        return alias.node

    def value(self, argument: Any) -> Any:
        """What stands for ``argument`` in the graph: nodes for tensors and symbolic numbers, itself otherwise."""
        if isinstance(argument, torch.Tensor):
            return self.read(self.alias(argument))
        if isinstance(argument, _NUMBERS):
            return self.symbols.node(argument)
        if type(argument) is float and argument in self.float_tags:
            return self.symbols.node(self.float_tags[argument])
        if type(argument) is torch.device and argument == self._own_device:
            return torch.device(argument.type)
        return argument

    def alias(self, tensor: torch.Tensor) -> Alias:
        found = tensor.__dict__.get("_weft_alias") if isinstance(tensor, FakeTensor) else None
        return found if found is not None else self._input(tensor)

    def _fake(self, argument: Any) -> Any:
        if not isinstance(argument, torch.Tensor):
            return argument
        return argument if isinstance(argument, FakeTensor) and _known(argument) else self.alias(argument).val

    def current(self, tensor: torch.Tensor) -> torch.fx.Node:
        """The node that holds the value of ``tensor`` now, whole or view."""
        return self.read(self.alias(tensor))

    def redirect(self, tensor: torch.Tensor, alias: Alias) -> None:
        """From now on the user's own ``tensor`` stands for ``alias`` (``tensor.data = ...``)."""
        self.alias(tensor)
        self._inputs[identity(tensor)] = alias

    # ---- inputs

    def _input(self, tensor: torch.Tensor) -> Alias:
        key = identity(tensor)
        if key not in self._inputs:
            whole = self._whole(tensor, key[0])
            if whole is not tensor:
                self._input(whole)
            self._inputs[key] = self._overlapping(tensor, key[0]) or self.new_input(tensor)
        return self._inputs[key]

    def _whole(self, tensor: torch.Tensor, storage: int) -> torch.Tensor:
        """The largest of the user's tensors that ``tensor`` is a part of: as an input it serves both."""
        known = [t for t in self.shares_memory(storage) if offset_within(tensor, t) is not None]
        largest = max(known, key=extent, default=tensor)
        return largest if extent(largest) > extent(tensor) else tensor

    def _overlapping(self, tensor: torch.Tensor, storage: int) -> Alias | None:
        """A tensor that lies inside the memory of an input already known is a view of that input."""
        for known, real in self._input_storages.get(storage, ()):
            inside = offset_within(tensor, real)
            if inside is None and apart(tensor, real):
                continue
            if inside is None:
                raise UncapturableMutation(
                    f"tensors that share a part of their memory, at {user_line()}; clone one of them"
                )
            size, stride, offset = list(tensor.shape), list(tensor.stride()), inside
            with torch_adapter.only_mode(self.fake_mode):
                val = torch.as_strided(known.val, size, stride, offset)
            op = aten.as_strided.default
            node = self.emit(op, self.read(known), size, stride, offset, val=val)
            return self._mark(val, Alias(known.buffer, node, val, known, (op, (size, stride, offset))))
        return None

    def new_input(self, tensor: torch.Tensor, val: torch.Tensor | None = None) -> Alias:
        """A placeholder for ``tensor``, standing before all operations; ``val`` overrides its fake (dynamic sizes)."""
        if val is None:
            val = torch_adapter.fake_like(self.fake_mode, tensor)
        alias = self.stand_in(val, self.input_name(tensor))
        self._inputs[identity(tensor)] = alias
        self._input_storages.setdefault(identity(tensor)[0], []).append((alias, tensor))
        self.placeholders.append((alias.node, tensor))
        return alias

    def stand_in(self, val: torch.Tensor, name: str) -> Alias:
        """A placeholder for a fake in memory of its own."""
        return self._bind_fresh(val, self._placeholder(name, val))

    def _placeholder(self, name: str, val: Any) -> torch.fx.Node:
        with self.graph.inserting_after(self._after_inputs):
            node = self._after_inputs = self.graph.placeholder(name)
        node.meta["val"] = val
        return node

    def known_input(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The fake that stands for a tensor of the user's, where it already is an input."""
        alias = self._inputs.get(identity(tensor))
        return alias.val if alias else None

    def is_users(self, tensor: torch.Tensor) -> bool:
        """Whether a fake tensor is one of the user's own (made in a fake world before the capture)."""
        return not _known(tensor)

    def scalar_input(self, value: Number, name: str) -> torch.fx.Node:
        """A placeholder for a Python number that changes from call to call."""
        node = self._placeholder(name, value)
        self.symbols.define(value, lambda: node)
        return node

    # ---- nodes

    def emit(self, target: Callable[..., Any], *args: Any, val: Any, **kwargs: Any) -> torch.fx.Node:
        """Append a call to the graph."""
        name = _name(target) if isinstance(target, OpOverload) else None  # other functions keep the name that fx gives
        node = torch_adapter.new_node(self.graph, "call_function", target, args, kwargs, name)
        node.meta["val"] = val
        self._stamp(node)
        return node

    def _stamp(self, node: torch.fx.Node) -> None:
        """Mark a node with the user's line, the module and the stage it belongs to, and the stream it was issued on."""
        meta = node.meta
        stream = self.stream() if self.stream is not None else 0
        running = torch_adapter.running_autograd_node()
        if running is None:
            meta["frames"], meta["module"] = user_frames(4), self.module_path()
            meta["stage"] = "optimizer" if self.optimizing else "forward"
            self._origin.setdefault(torch_adapter.last_sequence_number(), (meta["frames"], meta["module"], stream))
        else:
            unknown = ((), "", 0)
            meta["frames"], meta["module"], issued = self._origin.get(torch_adapter.sequence_number(running), unknown)
            stream = stream or issued  # autograd runs a backward on the stream of its forward
            if not meta["frames"]:
                meta["frames"] = user_frames(4)
            meta["stage"] = "backward"
        if stream:
            meta["stream"] = stream

    def first(self, target: Callable[..., Any], *args: Any) -> torch.fx.Node:
        """A call that stands before all operations."""
        with self.graph.inserting_after(self._after_inputs):
            return self.graph.create_node("call_function", target, args)

    def emit_sizes(self, target: Callable[..., Any], *args: Any, val: Any) -> torch.fx.Node:
        return self.emit(target, *args, val=val)

    def effect(self, target: Callable[..., Any], *args: Any, val: Any = None, **kwargs: Any) -> torch.fx.Node:
        """Append a call that must run whether or not its result is used."""
        node = self.effect_on_nodes(
            target, *map_operands(args, self.value), val=val, **map_operands(kwargs, self.value)
        )
        if isinstance(val, torch.Tensor):
            self._bind_fresh(val, node)
        return node

    def effect_on_nodes(self, target: Callable[..., Any], *args: Any, val: Any = None, **kwargs: Any) -> torch.fx.Node:
        """:meth:`effect` for operands that are nodes already."""
        node = self.emit(target, *args, val=val, **kwargs)
        node.meta["effect"] = True
        return node

    def emit_new_checks(self) -> None:
        """What the operations so far assume about data-dependent numbers becomes a check in the graph, before its
        use."""
        for expr, _ in torch_adapter.new_runtime_asserts(self.symbols.shape_env, self._asserted):
            if all(self.symbols.knows(symbol) for symbol in expr.free_symbols):
                symbols = sorted(expr.free_symbols, key=str)
                values = [self.symbols.expression(symbol) for symbol in symbols]
                names = " ".join(map(str, symbols))
                self.effect_on_nodes(check, self.symbols.expression(expr), self.symbols.shown(expr), names, *values)

    def pick(self, node: torch.fx.Node, index: int, val: Any) -> torch.fx.Node:
        return self.emit(operator.getitem, node, index, val=val)

    def _bind(
        self, out: Any, node: torch.fx.Node, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        many = isinstance(out, (list, tuple))
        for at, value in enumerate(out if many else (out,)):
            index = at if many else None
            if isinstance(value, torch.Tensor):
                if value.layout is not torch.strided:
                    raise UncapturableLayout(str(op), value.layout, user_line())
                part = self.pick(node, at, value) if many else node
                self._bind_result(value, part, op, args, kwargs, index)
            elif isinstance(value, _NUMBERS):
                part = self.pick(node, at, value) if many else node
                self.symbols.define(value, lambda part=part: part)
        self.take_pending_symbols()

    def _bind_result(
        self,
        val: torch.Tensor,
        node: torch.fx.Node,
        op: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        index: int | None,
    ) -> None:
        buffer = self._buffers.get(torch_adapter.storage_key(val))
        if buffer is None:
            self._bind_fresh(val, node)
            return
        if _known(val):
            return
        viewed = [alias for t in tensors_in((args, kwargs)) if (alias := self.alias(t)).buffer is buffer]
        simple = viewed and not kwargs and op is not aten.as_strided.default and viewed[0] is self.alias(args[0])
        if simple and index is not None:
            op, args = single_view(op, args[1:], index, val)
        elif simple:
            args = args[1:]
        else:
            op, args = as_strided_like(val)
        # as_strided counts from the start of the storage, not of the view it is called on.
        parent = buffer.whole if op is aten.as_strided.default else viewed[0]
        self._mark(val, Alias(buffer, node, val, parent, (op, tuple(map_operands(args, self.value)))))

    def _bind_fresh(self, val: torch.Tensor, node: torch.fx.Node) -> Alias:
        buffer = self._buffers[torch_adapter.storage_key(val)] = Buffer(node, val.untyped_storage())
        self.symbols.define_sizes(val, node, self.emit_sizes)
        buffer.whole = self._mark(val, Alias(buffer, node, val))
        return buffer.whole

    def _share(self, out: torch.Tensor, source: Alias) -> torch.Tensor:
        """``out`` is another tensor object for exactly what ``source`` is."""
        if not _known(out):
            self._mark(out, source)
        return out

    def _mark(self, val: torch.Tensor, alias: Alias) -> Alias:
        val._weft_alias = alias  # type: ignore[attr-defined]
        return alias

    def forget(self, val: torch.Tensor) -> None:
        """Take from a fake what is known of it: nothing more will be recorded of it."""
        val.__dict__.pop("_weft_alias", None)

    def take_pending_symbols(self) -> None:
        """Fresh data-dependent symbols are ours now; torch would complain about ones nobody claimed."""
        pending = self.symbols.shape_env.pending_fresh_unbacked_symbols
        if pending:
            del pending[:]


@functools.cache
def _name(op: OpOverload) -> str:
    """``mm`` for ``aten.mm.default``."""
    return op._schema.name.split("::")[1]


def _check_splits(sent: torch.Tensor, theirs: list[Any], ours: list[Any]) -> None:
    """Splits of an exchange that only the data decides: each must be a size, and those of what is sent must cover
    it."""
    for size in (*theirs, *ours):
        torch._check(size >= 0, lambda size=size: f"{size} is no size to split by")
    torch._check(sum(ours) == sent.shape[0], lambda: f"splits {ours} do not cover {sent.shape[0]} rows")


def _known(tensor: Any) -> bool:
    return isinstance(tensor, FakeTensor) and "_weft_alias" in tensor.__dict__
