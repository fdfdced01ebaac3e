"""Records every operation that reaches the dispatcher as a node of a graph of values.

The recorder is a ``TorchDispatchMode``. It runs below autograd, so it sees the operations of forward, backward and
optimizer alike, and tensor subclasses (DTensor) have already been taken apart. Each operation runs on fake tensors:
shapes, strides and dtypes are computed, nothing is allocated. Then one of three things happens:

- An operation that computes a new value becomes a call node.
- A view becomes a call node too, and its result is noted as a view of its base.
- An in-place operation becomes the functional operation that computes the new value; every tensor that shares the
  storage reads that value from then on.

:mod:`weft.capture.record.tracked_storages` keeps the book on which node is the current value of which tensor; its
docstring follows ``p.grad.add_()`` until it is a graph value. A tensor of the user becomes a placeholder when an
operation first meets it. :mod:`weft.capture.record.tracer` runs the step under this mode and makes the StepGraph.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from weft import torch_adapter
from weft.capture.fake.fake_results import FakeResultCache
from weft.capture.fake.fake_rules import fake_result
from weft.capture.fake.kernel_errors import REFUSALS, kernel_error
from weft.capture.node_kinds import check_layout, check_operands
from weft.capture.record.constant_scalars import constant_scalar
from weft.capture.record.float_tags import FloatTags
from weft.capture.record.functional_ops import WrittenArguments, out_of_place
from weft.capture.record.list_writes import check_independent
from weft.capture.record.literals import LIFTS, is_literal, record_literal
from weft.capture.record.number_results import with_symbols
from weft.capture.record.op_facts import OpFacts, facts_of
from weft.capture.record.operands import argument_of, inplace_results, map_operands, tensors_in
from weft.capture.record.real_operations import operations_for_real
from weft.capture.record.resized_outputs import written_by
from weft.capture.record.runtime_checks import CHECKS, check, check_in_python
from weft.capture.record.symbols import Number, Symbols
from weft.capture.record.tracked_storages import MEMO_NODE, NUMBER, DataSet, TrackedStorages, TrackedTensor, is_tracked
from weft.capture.record.value_gradients import ValueGradients
from weft.capture.record.widened_writes import WidenedWrites
from weft.capture.state.exception_parts import CAPTURE_NOTE
from weft.capture.state.tensor_memory import memory_key
from weft.capture.strided_overlap import offset_within, overlap, span
from weft.capture.user_code import Frame, user_frames, user_line
from weft.errors import UncapturableCollective, UncapturableMutation
from weft.torch_adapter import OpOverload, TorchDispatchMode

aten = torch.ops.aten
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_SAME_VALUE = (aten.detach.default, aten.alias.default, *LIFTS)
_DEVICE = torch.ops.prim.device.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_OF_WRAPPERS = (
    "torch's wrappers of modules issue it. Wrap the model with weft.replicate in place of DistributedDataParallel, and "
    "with weft.fully_shard in place of torch's. A call of your own: use a function of torch.distributed that works on "
    "tensors of all ranks"
)


class _RecorderOfThread(threading.local):
    """The recorder of the capture that is going on in the running thread."""

    recorder: OpRecorder | None = None


_mine = _RecorderOfThread()


def recording() -> OpRecorder | None:
    """The recorder of the capture that is going on in this thread, None outside of captures."""
    return _mine.recorder


class OpRecorder(TorchDispatchMode):
    """Records operations into ``graph`` while active.

    Args:
        fake_mode: the mode that computes fake results; must be active too, below this mode.

    Attributes:
        graph: the operations so far; late_texts: what marks in texts stand for; is_paused: whether recording is paused.
        symbols: the symbolic numbers and the nodes that compute them; storages: the current value of each tensor.
        placeholders: each placeholder with the user's tensor that it stands for.
        literals: by placeholder, each tensor that the step makes from Python numbers.
        recorded: number of operations recorded; passed: of those that ran while recording was paused.
        module_path, input_name: asked for the module of a new node and for the name of a new placeholder.
        optimizing: whether ``optimizer.step()`` is running; float_tags: floats that stand for symbolic numbers.
        stream: asked for the number of the current CUDA stream; None where there is one alone.
        shares_memory: asked for the user's tensors in a storage, when one of them is met for the first time.
        data_set: the user's tensors whose ``.data`` was assigned, by id.
        snapshots: makes the snapshots of Python state that opaque calls need; packed: the step's packed sequences.
        runs_operation: whether a fake result is being computed: what is asked meanwhile, the step did not ask.
        computed: calls what computes a fake result, and answers what torch asks about numbers of the data meanwhile.
    """

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__()
        self.graph = torch.fx.Graph()
        self.fake_mode = fake_mode
        self.symbols = Symbols(torch_adapter.shape_env_of(fake_mode), self.graph, self._stamp)
        define_sizes = lambda val, node: self.symbols.define_sizes(val, node, self.emit)
        self.storages = TrackedStorages(self.emit, self.value, self._input, define_sizes)
        self.recorded = 0
        self.passed = 0
        self.module_path: Callable[[], str] = lambda: ""
        self.optimizing = False
        self.stream: Callable[[], int] | None = None
        self.input_name: Callable[[torch.Tensor], str] = lambda tensor: "input"
        self.shares_memory: Callable[[int], Iterable[torch.Tensor]] = lambda storage: ()
        self.data_set: dict[int, DataSet] = {}
        self.float_tags = FloatTags()
        self.late_texts: list[Any] = []
        self.snapshots: Any = None
        self.packed: Any = None
        self.runs_operation = False
        self.computed: Callable[[Callable[[], Any]], Any] = lambda fake_result: fake_result()
        self.placeholders: list[tuple[torch.fx.Node, torch.Tensor]] = []
        self.literals: dict[torch.fx.Node, torch.Tensor] = {}
        self._results = FakeResultCache(fake_mode)
        self._widened = WidenedWrites(lambda op, args, kwargs: self._fake_result(facts_of(op), args, kwargs))
        self._gradients = ValueGradients()
        self._inputs: dict[tuple[Any, ...], TrackedTensor] = {}
        self._input_storages: dict[int, list[tuple[TrackedTensor, torch.Tensor]]] = {}
        self._forward_origins: dict[int, tuple[tuple[Frame, ...], str, int]] = {}
        self._last_input = self.graph._root
        self.is_paused = False
        self._outer: list[OpRecorder | None] = []
        # Each rank has a GPU of its own. The graph says "cuda", the current one, so its text is equal on all ranks.
        self._own_device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else None

    # ---- dispatch

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap every dispatch to keep its own compiler out; none runs here

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # which autograd's engine asks of each gradient, more often than all else
        # In a backward the function modes of a fake world are on here, and would see each look at a tensor.
        with torch_adapter.no_torch_function_modes():
            return self._dispatch(func, types, args, kwargs or {})

    def _dispatch(self, op: OpOverload, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if op is _DEVICE:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        for kind in types:
            if kind is not FakeTensor and not torch_adapter.is_plain_tensor_type(kind):
                return NotImplemented  # the subclass takes its tensor apart; its operations on plain tensors come here
        self._gradients.register()
        facts = facts_of(op)
        if facts.namespace == "profiler":
            with torch_adapter.only_mode():
                return op(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        for tensor in tensors:
            if type(tensor) is FakeTensor and tensor.fake_mode is not self.fake_mode:
                return op(*args, **kwargs)  # bookkeeping of torch's own, on fakes that are no values of the step
        if op is aten._to_copy.default and not tensors:  # vmap casts a number, which torch hands over as it is
            facts, kwargs = facts_of(aten.scalar_tensor.default), {"dtype": kwargs["dtype"]}
        if facts.is_taken_apart:  # torch leaves it whole below autograd, and in inference mode
            return self._run_composite(op, args, kwargs)
        if facts.namespace == "c10d":
            raise UncapturableCollective(facts.name, user_line(), _OF_WRAPPERS)
        if op in CHECKS and (checked := check_in_python(op, self._fake(args[0]))) is not None:
            with self:
                return checked(*args, **kwargs)
        if self.packed is not None and (total := self.packed.sum_of(op, args)) is not None:
            return total
        self.runs_operation = True
        try:
            return self._record(facts, args, kwargs, tensors)
        finally:
            self.runs_operation = False

    def __enter__(self) -> OpRecorder:
        self._outer.append(_mine.recorder)
        _mine.recorder = self
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        _mine.recorder = self._outer.pop()
        super().__exit__(exc_type, exc_val, exc_tb)

    @contextmanager
    def paused(self, *modes: TorchDispatchMode) -> Iterator[None]:
        """Operations inside are not recorded and run for real, under ``modes`` alone."""

        def count() -> None:
            self.passed += 1

        outer, self.is_paused = self.is_paused, True
        try:
            with operations_for_real(count, modes):
                yield
        finally:
            self.is_paused = outer

    def end(self) -> None:
        """Let go of all values, and of the user's tensors: only the graph holds values from here on."""
        self.storages.forget_all()
        self.symbols.end()
        self.packed = self.snapshots = None
        del self.module_path, self.input_name, self.shares_memory, self.computed
        known: tuple[Any, ...] = self._inputs, self._input_storages, self.data_set, self.float_tags, self.late_texts
        for each in (*known, self.placeholders, self._gradients):
            each.clear()

    # ---- operations that compute

    def _run_composite(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a composite operation as those that it calls."""
        with self:
            return torch_adapter.run_composite(op, args, kwargs)

    def _record(
        self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        """Record one operation over ``tensors``; returns its fake result, as the user's code and autograd see it."""
        op = facts.op
        self.recorded += 1
        if op in LIFTS and is_literal(args[0]):
            return record_literal(self, args[0])
        fakes = map_operands(args, self._fake), map_operands(kwargs, self._fake)
        if facts.reads_data:
            self._forget_stale_memos(tensors)
        if op is aten._local_scalar_dense.default:
            return self._record_item(op, args, fakes[0])
        if facts.needs_check:
            check_operands(op, fakes[0])
        if facts.writes is not None:
            out = self._record_write(op, facts.writes, args, kwargs, *fakes)
            if facts.gradient is not None:
                self._gradients.note(op._opname, facts.gradient, out, args, kwargs)
            return out
        out = self.computed(lambda: self._fake_result(facts, *fakes))
        self.emit_new_checks()
        if facts.is_composite and self.storages.shares_memory(out, fakes):  # a dropout that drops nothing, an einsum
            return self._run_composite(op, args, kwargs)
        if op in _SAME_VALUE and isinstance(out, FakeTensor):
            return self.storages.share(out, self.storages.of(args[0]))
        if op is _WAIT:
            return self._record_wait(out, args[0])
        operands = map_operands(args, self.value)
        target = facts.executable if torch.is_grad_enabled() else op
        node = self.emit(target, *operands, val=out, **map_operands(kwargs, self.value))
        self._bind(out, node, op, args, kwargs)
        if facts.gradient is not None:
            self._gradients.note(op._opname, facts.gradient, out, args, kwargs)
        return out

    def _fake_result(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operation returns for fake operands."""
        result = fake_result if facts.writes is not None else self._results
        compute = lambda: result(facts.op, args, kwargs)
        try:
            return with_symbols(facts.op, compute, self.symbols.shape_env) if facts.returns_numbers else compute()
        except REFUSALS as error:
            error.add_note(f"{CAPTURE_NOTE} {facts.op} at {user_line()}")
            refused = [error]  # emptied: the frames of its traceback would hold it, and it holds the values in them
        raise kernel_error(refused.pop(), facts.op, args, kwargs)

    def _record_item(self, op: OpOverload, args: tuple[Any, ...], fakes: tuple[Any, ...]) -> Any:
        """``tensor.item()``: a number where no input decides it, else a symbol that the node computes."""
        operand = self.value(args[0])
        constant = vars(args[0]).get(NUMBER, constant_scalar(operand, self.literals))
        if constant is not None:
            return constant
        out = op(*fakes)
        if isinstance(out, _NUMBERS):
            node = self.emit(op, operand, val=out)
            self.symbols.define(out, lambda: node)
            self.claim_pending_symbols()
        return out

    def _forget_stale_memos(self, tensors: list[torch.Tensor]) -> None:
        """Drop the symbols that torch remembers for the data of ``tensors`` where the value has changed since.

        Two reads of one value (one node) share a symbol. After a write the next read must get a new one, or both reads
        would be the number from before the write.
        """
        for tensor in tensors:
            fake, node = self._fake(tensor), self.value(tensor)
            if fake.__dict__.get(MEMO_NODE) is not node:
                torch_adapter.forget_data_memos(fake)
                setattr(fake, MEMO_NODE, node)

    def _record_wait(self, out: torch.Tensor, operand: torch.Tensor) -> torch.Tensor:
        """A wait hands back the storage of its operand, which holds the result of the collective from here on."""
        tracked = self.storages.of(operand)
        node = self.emit(_WAIT, self.storages.read(tracked), val=tracked.val)
        if torch_adapter.storage_key(out) != torch_adapter.storage_key(tracked.val):
            # The fake implementation hands back new memory, the real one the memory of its operand.
            layout = out.dtype, out.shape, out.stride(), out.storage_offset()
            out = torch_adapter.new_fake(self.fake_mode, out.device, *layout, tracked.val.untyped_storage())
        self.storages.replace_contents(tracked, node)
        return self.storages.share(out, tracked)

    # ---- operations that write

    def _record_write(
        self,
        op: OpOverload,
        writes: WrittenArguments,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        fake_args: tuple[Any, ...],
        fake_kwargs: dict[str, Any],
    ) -> Any:
        """Record an in-place or ``out=`` operation as its functional form and give the new values to what it writes.

        The functional form returns the fresh results first, then the new value of each written argument. Returns what
        the operation returns: the user's own tensor objects where it hands them back.
        """
        if torch.Tag.inplace_view in op.tags:
            return self._record_reshape_in_place(op, args, kwargs, fake_args, fake_kwargs)
        if op is aten.copy_.default and self.storages.overwrites_whole(*fake_args[:2]):
            self.storages.write(self.storages.of(args[0]), self.value(args[1]))
            return args[0]
        positions = {a.name: position for position, a in enumerate(op._schema.arguments)}
        # Operands are read before the operation runs: what it writes is an operand too, with its old value.
        operands = map_operands(args, self.value), map_operands(kwargs, self.value)
        for position, name in writes.writes:
            if isinstance(targets := argument_of(args, kwargs, position, name), (list, tuple)):
                check_independent(op, targets, [*args, *kwargs.values()], self.storages, self._fake)
        wide = self._widened.result(op, writes, fake_args, fake_kwargs)
        written = [argument_of(args, kwargs, position, name) for position, name in writes.writes]
        fakes = [argument_of(fake_args, fake_kwargs, position, name) for position, name in writes.writes]
        compute = lambda: self._fake_result(facts_of(op), fake_args, fake_kwargs)
        out = written_by(op, lambda: self.computed(compute), written, fakes, self.storages.has_views, self.value)
        results = () if out is None else out if isinstance(out, tuple) else (out,)
        fresh = [r for r, spec in zip(results, op._schema.returns, strict=False) if spec.alias_info is None]
        vals = [*fresh, *map_operands(written, self.storages.val)] if wide is None else [wide]
        single = len(vals) == 1
        node = self.emit(writes.functional, *operands[0], val=vals[0] if single else tuple(vals), **operands[1])
        if wide is None:
            node.meta["inplace"] = op  # the executor runs it, on a clone where something else needs the old value
        parts = [node] if single else [self.getitem(node, i, v) for i, v in enumerate(vals)]
        for value, part in zip(fresh, parts, strict=False):
            if isinstance(value, torch.Tensor):
                self.storages.bind_fresh(value, part)
            elif isinstance(value, _NUMBERS):
                self.symbols.define(value, lambda part=part: part)
        self.claim_pending_symbols()
        for target, part in zip(written, parts[len(fresh) :], strict=True):
            self._write_all(target, part)
        return inplace_results(op, out, args, kwargs, positions)

    def _write_all(self, target: Any, part: torch.fx.Node) -> None:
        """Give new values to a written argument: a tensor, or a list of tensors (foreach operations)."""
        if isinstance(target, torch.Tensor):
            self.storages.write(self.storages.of(target), part)
        elif isinstance(target, (list, tuple)):
            for at, tensor in enumerate(target):
                self.storages.write(self.storages.of(tensor), self.getitem(part, at, self._fake(tensor)))

    def _record_reshape_in_place(
        self,
        op: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        fake_args: tuple[Any, ...],
        fake_kwargs: dict[str, Any],
    ) -> Any:
        """``t.transpose_()`` and the like change what the tensor object is: from now on a view of what it was."""
        target = args[0]
        view = out_of_place(op)
        if view is None or self._is_argument(target) or not is_tracked(target):
            raise UncapturableMutation(f"{op} at {user_line()}: a tensor of your own cannot change its shape in a step")
        before = self.storages.of(target)
        sets = op is aten.set_.source_Tensor  # to the memory of another tensor, as ``t.data = ...``
        now = self.storages.of(args[1] if sets else self._record(facts_of(view), args, kwargs, tensors_in(args)))
        with torch_adapter.only_mode(self.fake_mode), torch_adapter.inference_mode_of(target):
            layout_before = target.detach()
        # The object is about to change its layout; nodes that it stands for keep the layout they were recorded with.
        for node in filter(lambda node: "val" in node.meta, self.graph.nodes):  # checks of values have none
            node.meta["val"] = map_operands(node.meta["val"], lambda val: layout_before if val is target else val)
        with torch.no_grad():
            op(*fake_args, **fake_kwargs)
        after = self.storages.copy_of(now) if sets else self.storages.reshaped(now, before, layout_before)
        self.storages.mark(target, after)
        return target

    def _is_argument(self, tensor: torch.Tensor) -> bool:
        return is_tracked(tensor) and any(tensor is known.val for known in self._inputs.values())

    # ---- values

    def value(self, argument: Any) -> Any:
        """The operand of a node for ``argument``: nodes for tensors and symbolic numbers, all else as it is."""
        if isinstance(argument, torch.Tensor):
            return self.storages.read(self.storages.of(argument))
        if isinstance(argument, _NUMBERS):
            return self.symbols.node(argument)
        if type(argument) is float and (number := self.float_tags.symbol(argument)) is not None:
            return self.symbols.node(number)
        if type(argument) is torch.device and argument == self._own_device:
            return torch.device(argument.type)
        return argument

    def current_value(self, tensor: torch.Tensor) -> torch.fx.Node:
        """The node of the value that ``tensor`` has now, whole or view."""
        return self.storages.read(self.storages.of(tensor))

    def value_of_memory(self, tensor: torch.Tensor) -> torch.fx.Node:
        """The node of the value in the memory that a tensor of the user's had when the step began."""
        return self.storages.read(self._inputs[memory_key(tensor)])

    def _fake(self, argument: Any) -> Any:
        """The fake tensor that an operation runs on in the place of ``argument``."""
        if not isinstance(argument, torch.Tensor):
            return argument
        return argument if is_tracked(argument) else self.storages.of(argument).val

    def set_data(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """``target.data = source``: target stays the same object and shares the memory of source from here on."""
        if self._is_argument(target):
            what = f"`tensor.data = ...` of an argument at {user_line()}"
            raise UncapturableMutation(f"{what}; copy the values with tensor.copy_(...), or assign to a clone of it")
        if isinstance(target, FakeTensor):
            self.storages.mark(target, self.storages.copy_of(self.storages.of(source)))
        else:  # an input; other tensors in its memory keep that memory
            self.data_set[id(target)] = self.storages.data_set(target, source, self.data_set.get(id(target)))

    # ---- inputs

    def _input(self, tensor: torch.Tensor) -> TrackedTensor:
        """What a tensor of the user is in the graph: a placeholder, or a view of one that shares its memory."""
        check_layout("an operation", tensor)
        if self.data_set and (known := self.data_set.get(id(tensor))) is not None:
            return known.now
        key = memory_key(tensor)
        if key not in self._inputs:
            whole = self._whole(tensor, key[0])
            if whole is not tensor:
                self._input(whole)
            self._inputs[key] = self.view_of_input(tensor) or self.new_input(tensor)
        return self._inputs[key]

    def _whole(self, tensor: torch.Tensor, storage: int) -> torch.Tensor:
        """The largest of the user's tensors that ``tensor`` is a part of: one input serves both."""
        known = [t for t in self.shares_memory(storage) if offset_within(tensor, t) is not None]
        largest = max(known, key=span, default=tensor)
        return largest if span(largest) > span(tensor) else tensor

    def view_of_input(self, tensor: torch.Tensor) -> TrackedTensor | None:
        """A tensor inside the memory of an input already known, as a view of that input; None where it is in none."""
        for known, real in self._input_storages.get(memory_key(tensor)[0], ()):
            offset = offset_within(tensor, real)
            if offset is None:
                continue
            with torch_adapter.only_mode(self.fake_mode):
                return self.storages.part(known, span(real), tensor, offset)
        return None

    def new_input(self, tensor: torch.Tensor, val: torch.Tensor | None = None) -> TrackedTensor:
        """A placeholder for a tensor of the user, before all operations; ``val`` overrides its fake (dynamic sizes)."""
        if val is None:
            val = torch_adapter.fake_like(self.fake_mode, tensor)
        tracked = self.new_operand(val, self.input_name(tensor))
        self._inputs[memory_key(tensor)] = tracked
        there = self._input_storages.setdefault(memory_key(tensor)[0], [])
        for known, real in there:
            if overlap(tensor, real):
                known.storage.overlaps(tracked.storage)
        there.append((tracked, tensor))
        self.placeholders.append((tracked.node, tensor))
        return tracked

    def new_operand(self, val: torch.Tensor, name: str) -> TrackedTensor:
        """A placeholder for a fake tensor that is no tensor of the user's, in memory of its own, which the step may not
        reuse."""
        tracked = self.storages.bind_fresh(val, self._placeholder(name, val))
        tracked.storage.is_input = True
        return tracked

    def _placeholder(self, name: str, val: Any) -> torch.fx.Node:
        with self.graph.inserting_after(self._last_input):
            node = self._last_input = self.graph.placeholder(name)
        node.meta["val"] = val
        return node

    def memory_of(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any] | None:
        """The user's tensor in whose memory a tensor of the step lies, and at which element of it; None if in none."""
        tracked = self.storages.of(tensor)
        for known, real in (each for there in self._input_storages.values() for each in there):
            if known.storage is tracked.storage and known.val.dtype == tracked.val.dtype:
                return real, tracked.val.storage_offset() - known.val.storage_offset()
        return None

    def input_fake(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The fake that stands for a tensor of the user; None where it is no input yet."""
        known = self.data_set.get(id(tensor))
        tracked = known.now if known is not None else self._inputs.get(memory_key(tensor))
        return tracked.val if tracked else None

    def input_fakes(self) -> list[torch.Tensor]:
        """The fakes of all inputs and of the user's tensors inside their memory."""
        return [tracked.val for tracked in (*self._inputs.values(), *(each.now for each in self.data_set.values()))]

    def scalar_input(self, value: Number, name: str) -> torch.fx.Node:
        """A placeholder for a Python number that changes from call to call (a learning rate)."""
        node = self._placeholder(name, value)
        self.symbols.define(value, lambda: node)
        return node

    # ---- nodes

    def emit(self, target: Callable[..., Any], *args: Any, val: Any, **kwargs: Any) -> torch.fx.Node:
        """Append a call to the graph; ``val`` is its fake result, operands are nodes already."""
        name = facts_of(target).name if isinstance(target, OpOverload) else None  # fx names other functions
        node = torch_adapter.new_node(self.graph, "call_function", target, args, kwargs, name)
        node.meta["val"] = val
        self._stamp(node)
        return node

    def _stamp(self, node: torch.fx.Node) -> None:
        """Mark a node with the user's line, the module and the stage it belongs to, and the stream it was issued on.

        A backward operation has no line of the user. It gets those of the forward operation that autograd's sequence
        number leads to.
        """
        meta = node.meta
        stream = self.stream() if self.stream is not None else 0
        running = torch_adapter.running_autograd_node()
        if running is None:
            meta["frames"], meta["module"] = origin = user_frames(4), self.module_path()
            meta["stage"] = "optimizer" if self.optimizing else "forward"
            self._forward_origins.setdefault(torch_adapter.last_sequence_number(), (*origin, stream))
        else:
            unknown = ((), "", 0)
            number = torch_adapter.sequence_number(running)
            meta["frames"], meta["module"], issued = self._forward_origins.get(number, unknown)
            stream = stream or issued  # autograd runs a backward on the stream of its forward
            if not meta["frames"]:
                meta["frames"] = user_frames(4)
            meta["stage"] = "backward"
        if stream:
            meta["stream"] = stream

    def emit_first(self, target: Callable[..., Any], *args: Any) -> torch.fx.Node:
        """A call before all operations; the caller sets its metadata."""
        name = facts_of(target).name if isinstance(target, OpOverload) else None
        with self.graph.inserting_after(self._last_input):
            return self.graph.create_node("call_function", target, args, name=name)

    def effect(self, target: Callable[..., Any], *args: Any, val: Any = None, **kwargs: Any) -> torch.fx.Node:
        """Append a call that must run whether or not its result is used; operands are the user's values."""
        operands, options = map_operands((args, kwargs), self.value)
        node = self.emit_effect(target, *operands, val=val, **options)
        if isinstance(val, torch.Tensor):
            self.storages.bind_fresh(val, node)
        return node

    def emit_effect(self, target: Callable[..., Any], *args: Any, val: Any = None, **kwargs: Any) -> torch.fx.Node:
        """:meth:`effect` for operands that are nodes already."""
        node = self.emit(target, *args, val=val, **kwargs)
        node.meta["effect"] = True
        return node

    def emit_new_checks(self) -> None:
        """Append a check for each new assumption about data-dependent numbers, before the nodes that rely on it."""
        for assumption in self.symbols.new_assumptions():
            self.emit_effect(check, *assumption)

    def getitem(self, node: torch.fx.Node, index: int, val: Any) -> torch.fx.Node:
        """Append a call that takes one of several results."""
        return self.emit(operator.getitem, node, index, val=val)

    def _bind(
        self, out: Any, node: torch.fx.Node, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Note for each result of an operation which node computes it, and whether it is a view of an operand."""
        many = isinstance(out, (list, tuple))
        for at, value in enumerate(out if many else (out,)):
            index = at if many else None
            if isinstance(value, torch.Tensor):
                check_layout(op, value)
                part = self.getitem(node, at, value) if many else node
                self.storages.bind_result(value, part, op, args, kwargs, index)
            elif isinstance(value, _NUMBERS):
                part = self.getitem(node, at, value) if many else node
                self.symbols.define(value, lambda part=part: part)
        self.claim_pending_symbols()

    def claim_pending_symbols(self) -> None:
        """Tell torch that fresh data-dependent symbols are defined; it raises for those that nobody claims."""
        pending = self.symbols.shape_env.pending_fresh_unbacked_symbols
        if pending:
            del pending[:]
