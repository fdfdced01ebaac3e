"""In-place operations and views as values: which node holds the contents of each storage.

A StepGraph has no mutation, but a training step is full of it: ``p.grad.add_(g)``, running statistics, the optimizer.
This module is the bookkeeping that turns such writes into values while the step runs (functionalization). It keeps
one :class:`TrackedStorage` a storage, with the node of its current contents, and one :class:`TrackedTensor` a fake
tensor, which is the whole of a storage or a view into it. Aliasing is decided by the storages of the fake tensors.

Take ``p.grad.add_(g)`` of a gradient that was there before the step.

1. The recorder asks for the current values of both operands (:meth:`TrackedStorages.read`). That of ``p.grad`` is a
   placeholder, which is made when the step first uses the gradient. It emits the functional form ``new = aten.add(grad,
   g)`` (:mod:`weft.capture.record.functional_ops` knows it).
2. :meth:`TrackedStorages.write` makes ``new`` the value of ``p.grad``, and the version of the storage goes up by one.
   If the step has made it as a view, such as ``flat[0:4]`` of a flat gradient buffer, the base gets a new value too:
   ``flat_1 = aten.slice_scatter(flat, new, 0, 0, 4, 1)``. A view that was there before the step is one by strides
   (:meth:`TrackedStorages.part`), and each of its view operations has its scatter.
3. Any other view of ``flat`` now has an older version than its storage. When it is next read, its view operation is
   emitted again on ``flat_1``; a view that is never read again costs no node.
4. At the end of the capture, views that leave the step are made anew from their bases (:meth:`TrackedStorages.end`),
   and the tracer reads every input once more (``_StepCapture._updates``). An input whose node is no longer its
   placeholder was written by the step, and the node becomes an :class:`~weft.capture.step_interface.Update` output. A
   gradient that the step made is found by comparing the state with what it was (``ReachableState.changes``), and
   becomes a :class:`~weft.capture.step_interface.Create` output.
5. The compiler runs the in-place operation again, on the user's tensor where nothing reads the old value later, else on
   a clone that is copied into it (:mod:`weft.inductor.runtime.placement`). What is created is assigned to ``p.grad`` by
   :mod:`weft.program_form`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensor

from weft import torch_adapter
from weft.capture.record.functional_ops import as_strided_like, single_view, write_back
from weft.capture.record.operands import map_operands, tensors_in
from weft.capture.strided_overlap import same_layout, span
from weft.capture.user_code import Frame, user_line
from weft.errors import UncapturableMutation
from weft.torch_adapter import OpOverload

aten = torch.ops.aten
_TRACKED = "_weft_tracked"
# On a fake tensor: a node. Torch remembers symbols for the data of a fake tensor (its length as a list, its number);
# they describe the value that this node computes.
MEMO_NODE = "_weft_memo_node"
# On a fake tensor of one element that nothing writes to: the number that it was made of.
NUMBER = "_weft_number"
# On a fake tensor that was tracked in a capture that is over: the user's lines that it was made at.
_CAPTURED = "_weft_captured"


class TrackedStorage:
    """One storage of the capture.

    Attributes:
        node: computes its current contents, as the tensor ``whole``.
        storage: of the fake tensors; held so that its address is not given to another one.
        version: how many writes to it were recorded.
        whole: the tensor from which views of this storage are taken; of an input, that of the user's tensor.
        is_input: whether it is the memory of an input, which the capture must not treat as its own.
        overlapped: storages of inputs that share memory with this one without being views of one tensor.
    """

    __slots__ = ("is_input", "node", "overlapped", "storage", "version", "whole")

    def __init__(self, node: torch.fx.Node, storage: torch.UntypedStorage) -> None:
        self.node = node
        self.whole: TrackedTensor | None = None
        self.is_input = False
        self.version = 0
        self.storage = storage
        self.overlapped = False

    def overlaps(self, other: TrackedStorage) -> None:
        """Note that two inputs share a part of their memory. The graph has a value for each, which serves reads only.

        Raises:
            UncapturableMutation: one of them was written already.
        """
        self.overlapped = other.overlapped = True
        if self.version:
            self.overwrite(self.node)

    def overwrite(self, node: torch.fx.Node) -> None:
        """Let ``node`` compute the contents from now on.

        Raises:
            UncapturableMutation: the write changes the contents of another input too.
        """
        if self.overlapped:
            raise UncapturableMutation(
                f"a write to a tensor that shares a part of its memory with another one, at {user_line()}; clone one "
                "of them before the step, or make both views of one tensor inside it"
            )
        self.version += 1
        self.node = node


class TrackedTensor:
    """One tensor of the capture: the whole of a storage, or a view of another tracked tensor.

    Attributes:
        storage: where its elements are.
        node: computes its value as of ``version`` of the storage.
        val: the fake tensor; layout and dtype of the value.
        parent: the tensor that it is a view of, None for the whole of a storage.
        view: operation and arguments that make it from ``parent``.
        version: of the storage when ``node`` was current. Behind the storage's: ``node`` is stale.
    """

    __slots__ = ("node", "parent", "storage", "val", "version", "view")

    def __init__(
        self,
        storage: TrackedStorage,
        node: torch.fx.Node,
        val: torch.Tensor,
        parent: TrackedTensor | None = None,
        view: tuple[OpOverload, tuple[Any, ...]] | None = None,
    ) -> None:
        self.storage = storage
        self.node = node
        self.val = val
        self.parent = parent
        self.view = view
        self.version = storage.version


class DataSet(NamedTuple):
    """``target.data = source``, of a tensor of the user's.

    Attributes:
        own: the memory that the target had when the step began.
        now: what the target is since.
    """

    target: torch.Tensor
    source: torch.Tensor
    own: TrackedStorage
    now: TrackedTensor


class TrackedStorages:
    """All storages that a capture has met.

    Args:
        emit: appends a call to the graph; its fake result is the keyword ``val``.
        value: the node of a tensor or symbolic number; any other argument as it is.
        add_input: called with a tensor of the user that the capture meets for the first time.
        define_sizes: called with the fake tensor and the node of each new storage and each view of one.
    """

    def __init__(
        self,
        emit: Callable[..., torch.fx.Node],
        value: Callable[[Any], Any],
        add_input: Callable[[torch.Tensor], TrackedTensor],
        define_sizes: Callable[[torch.Tensor, torch.fx.Node], None],
    ) -> None:
        self._emit = emit
        self._value = value
        self._add_input = add_input
        self._define_sizes = define_sizes
        self._storages: dict[int, TrackedStorage] = {}
        self._marked: list[torch.Tensor] = []
        self._copies: set[torch.fx.Node] = set()  # that the end of the step made

    def of(self, tensor: torch.Tensor) -> TrackedTensor:
        """What is known of a tensor. A real tensor, or a fake one made before the capture, becomes an input."""
        found = tensor.__dict__.get(_TRACKED) if isinstance(tensor, FakeTensor) else None
        return found if found is not None else self._add_input(tensor)

    def val(self, argument: Any) -> Any:
        """The fake tensor that has a tensor's memory now: of the source where its ``.data`` was set. All else as it
        is."""
        return self.of(argument).val if isinstance(argument, torch.Tensor) else argument

    # ---- reading and writing

    def read(self, tracked: TrackedTensor) -> torch.fx.Node:
        """The node of the tensor's current value.

        A view whose storage was written since is made again from the current value of its base.
        """
        if tracked.version != tracked.storage.version:
            if tracked.parent is None:
                tracked.node = tracked.storage.node
            else:
                op, args = tracked.view  # type: ignore[misc]
                tracked.node = self._emit(op, self.read(tracked.parent), *args, val=tracked.val)
            tracked.version = tracked.storage.version
        return tracked.node

    def write(self, tracked: TrackedTensor, new: torch.fx.Node) -> None:
        """Make ``new`` the value of the tensor; every tensor that shares its storage reads it from now on.

        A view passes its value on to its base, as the scatter that is the inverse of the view, up to the whole of
        the storage. ``new`` is converted to the tensor's dtype first, as an in-place operation does.
        """
        val = new.meta.get("val")
        if isinstance(val, torch.Tensor) and val.dtype != tracked.val.dtype:
            new = self._converted(tracked, new)
        if tracked.parent is None:
            tracked.storage.overwrite(new)
        else:
            op, args = tracked.view  # type: ignore[misc]
            parent = tracked.parent
            base = write_back(self._emit_values, op, args, self.read(parent), parent.val, new, tracked.val)
            self.write(parent, base)
        # The write counted the version up: without this the next read would take ``new`` for stale.
        tracked.node, tracked.version = new, tracked.storage.version

    def _emit_values(self, target: Callable[..., Any], *args: Any, val: Any) -> torch.fx.Node:
        """Append a call whose operands may be symbolic numbers, such as the sizes of a batch."""
        return self._emit(target, *map_operands(args, self._value), val=val)

    def overwrites_whole(self, target: torch.Tensor, source: Any) -> bool:
        """Whether ``target.copy_(source)`` makes target the value of source as it is: no node is needed.

        Not so for an input: its former value may be read later in the step, and the user holds views of its memory.
        """
        if not isinstance(source, torch.Tensor) or (target.dtype, target.device) != (source.dtype, source.device):
            return False
        to, of = self.of(target), self.of(source)
        if to.parent is not None or to.storage.is_input or of.storage.is_input:
            return False
        dense = torch_adapter.surely(span(target) == target.numel())  # as a copy of the value would be
        return dense and same_layout(target, source)

    def _converted(self, tracked: TrackedTensor, new: torch.fx.Node) -> torch.fx.Node:
        """A value in the dtype of the tensor that it is written to. For an input it is a copy into that input, so that
        views of the result are views of its memory."""
        if not tracked.storage.is_input:
            return self._emit(aten._to_copy.default, new, val=tracked.val, dtype=tracked.val.dtype)
        converted = self._emit(aten.copy.default, self.read(tracked), new, val=tracked.val)
        converted.meta["inplace"] = aten.copy_.default
        return converted

    def replace_contents(self, tracked: TrackedTensor, node: torch.fx.Node) -> None:
        """Make ``node`` the contents of the tensor's whole storage: a wait hands back the storage it was given."""
        tracked.storage.overwrite(node)
        tracked.node, tracked.version = node, tracked.storage.version

    # ---- results of operations

    def bind_fresh(self, val: torch.Tensor, node: torch.fx.Node) -> TrackedTensor:
        """Start to track ``val``, a fake tensor in new memory whose contents ``node`` computes."""
        storage = self._storages[torch_adapter.storage_key(val)] = TrackedStorage(node, val.untyped_storage())
        self._define_sizes(val, node)
        storage.whole = self.mark(val, TrackedTensor(storage, node, val))
        return storage.whole

    def bind_result(
        self,
        val: torch.Tensor,
        node: torch.fx.Node,
        op: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        index: int | None,
    ) -> None:
        """Start to track a result of ``op(*args, **kwargs)``: new memory, or a view of an operand.

        ``index`` is its position where the operation returns several results.
        """
        storage = self._storages.get(torch_adapter.storage_key(val))
        if storage is None:
            self.bind_fresh(val, node)
            return
        if is_tracked(val):
            return
        self._define_sizes(val, node)  # a slice that ends at a number of the data has a size of its own
        bases = [base for t in tensors_in((args, kwargs)) if (base := self.of(t)).storage is storage]
        # Without an offset, as_strided begins where its operand does; else it counts from the start of the storage.
        absolute = op is aten.as_strided.default and len(args) > 3 and args[3] is not None
        simple = bases and not kwargs and not absolute and bases[0] is self.of(args[0])
        if simple and index is not None:
            op, args = single_view(op, args[1:], index, val)
            simple = op is not aten.as_strided.default  # which counts from the start of the storage here
        elif simple:
            args = args[1:]
        parent = bases[0] if simple else storage.whole
        if not simple:
            assert parent is not None
            inside = val.storage_offset() - parent.val.storage_offset()
            if absolute or not isinstance(inside, int) or inside < 0:
                op, args = as_strided_like(val)
            else:
                parent = self._from(parent, inside + span(val), val, inside)
                op, args = aten.as_strided.default, (list(val.shape), list(val.stride()))
        self.mark(val, TrackedTensor(storage, node, val, parent, (op, tuple(map_operands(args, self._value)))))

    def part(self, whole: TrackedTensor, length: int, like: torch.Tensor, offset: int) -> TrackedTensor:
        """The part of an input that has the layout of ``like`` and begins ``offset`` elements after the input does.

        Only the operands' own offsets count: where the input's memory begins in its storage may differ between calls.

        Args:
            length: number of elements of the storage from the first to the last element of the input.
        """
        flat = self._from(whole, length, like, offset)
        return self._view(flat, aten.as_strided.default, (list(like.shape), list(like.stride())))

    def _from(self, whole: TrackedTensor, length: int, like: torch.Tensor, offset: int) -> TrackedTensor:
        """The elements in memory from the first to the last one of such a part."""
        flat = self._view(whole, aten.as_strided.default, ([length], [1]))
        return self._view(flat, aten.slice.Tensor, (0, offset, offset + span(like)))

    def _view(self, base: TrackedTensor, op: OpOverload, args: tuple[Any, ...]) -> TrackedTensor:
        with torch_adapter.inference_mode_of(base.val):
            val = op(base.val, *args)
        node = self._emit(op, self.read(base), *args, val=val)
        return self.mark(val, TrackedTensor(base.storage, node, val, base, (op, args)))

    def shares_memory(self, out: Any, operands: Any) -> bool:
        """Whether a result of an operation is an operand, or is in the memory of one."""
        memory = set(map(torch_adapter.storage_key, tensors_in(operands)))
        return any(torch_adapter.storage_key(each) in memory for each in tensors_in((out,)))

    def share(self, out: torch.Tensor, source: TrackedTensor) -> torch.Tensor:
        """Let ``out`` be another tensor object for exactly what ``source`` is (``detach``)."""
        if not is_tracked(out):
            self.mark(out, source)
        return out

    def reshaped(self, viewed: TrackedTensor, before: TrackedTensor, val: torch.Tensor) -> TrackedTensor:
        """A tensor object that ``t_()`` and the like turned into the view ``viewed`` of what it was before.

        ``val`` is a fake of the object's layout before; the object itself has the new layout by now. What ``resize_()``
        made is no view.
        """
        if viewed.view is None:
            return viewed
        base = TrackedTensor(before.storage, before.node, val, before.parent, before.view)
        base.version = before.version
        return TrackedTensor(viewed.storage, viewed.node, viewed.val, base, viewed.view)

    def copy_of(self, source: TrackedTensor) -> TrackedTensor:
        """A tensor of its own that is now the same view of the same storage (``a.data = b``)."""
        copy = TrackedTensor(source.storage, self.read(source), source.val, source.parent, source.view)
        copy.version = source.storage.version
        return copy

    def data_set(self, target: torch.Tensor, source: torch.Tensor, earlier: DataSet | None) -> DataSet:
        """``target.data = source`` for a tensor of the user's; ``earlier``: the same before in this step.

        Raises:
            UncapturableMutation: both would share memory that is another tensor's of the user.
        """
        own = self.of(target).storage if earlier is None else earlier.own
        tracked = self.of(source)
        storage = tracked.storage
        if storage.is_input and storage is not own:
            what = f"`tensor.data = ...` with the memory of another tensor of yours, at {user_line()}"
            raise UncapturableMutation(f"{what}; copy its values with tensor.data.copy_(...), or assign a clone of it")
        return DataSet(target, source, own, self.copy_of(tracked))

    def mark(self, val: torch.Tensor, tracked: TrackedTensor) -> TrackedTensor:
        """Let a fake tensor object stand for ``tracked``."""
        vars(val)[_TRACKED] = tracked
        self._marked.append(val)
        return tracked

    def has_views(self, tensor: torch.Tensor) -> bool:
        """Whether the capture made another tensor object of the memory of ``tensor``, which may be gone by now."""
        storage = self.of(tensor).storage
        return any(other is not tensor and self.of(other).storage is storage for other in self._marked)

    # ---- the end of the capture, or of its part up to a branch

    def all(self) -> list[TrackedStorage]:
        """Every storage, in the order in which the capture met them."""
        return list(self._storages.values())

    def tensors(self) -> list[torch.Tensor]:
        """Every fake tensor that is tracked, once."""
        return list({id(val): val for val in self._marked if is_tracked(val)}.values())

    def references(self) -> Iterator[torch.Tensor]:
        """The fake tensors that are held here, once for each reference."""
        yield from self._marked
        yield from (tracked.val for tracked in self._tracked())

    def exchange(self, copies: Mapping[int, torch.Tensor]) -> None:
        """Let go of fake tensors that nothing will be recorded of any more.

        Args:
            copies: by the id of such a tensor, another one of its layout and memory.
        """
        for tracked in list(self._tracked()):
            tracked.val = copies.get(id(tracked.val), tracked.val)
        self._marked = [val for val in self._marked if id(val) not in copies]

    def _tracked(self) -> Iterator[TrackedTensor]:
        pending = [storage.whole for storage in self.all()] + [getattr(val, _TRACKED, None) for val in self._marked]
        seen: set[int] = set()
        while pending:
            tracked = pending.pop()
            if tracked is not None and id(tracked) not in seen:
                seen.add(id(tracked))
                yield tracked
                pending.append(tracked.parent)

    def read_views_again(self) -> None:
        """Let every view be taken anew from the whole of its storage when it is next read."""
        for storage in self.all():
            storage.version += 1

    def end(self) -> None:
        """Let what leaves the step share memory as it does in eager: to be called before it is read.

        ``y.copy_(x)`` makes no node: that of ``x`` is the value of both from then on. Here ``y`` gets a copy, which is
        dead code where ``y`` does not leave the step. What leaves it as a view is made a view of its base as it is at
        the end, also where the value was computed before it was written to the base.
        """
        for storage in self.all():
            value, whole = storage.node, storage.whole
            assert whole is not None
            if value.meta["val"] is whole.val:
                continue
            if torch_adapter.storage_key(value.meta["val"]) != torch_adapter.storage_key(whole.val):
                storage.node = self._emit(aten.clone.default, value, val=whole.val)
                self._copies.add(storage.node)
        self.read_views_again()

    def without_copies(self, leaving: list[Any]) -> list[Any]:
        """What leaves the step, with the value itself in place of a copy that :meth:`end` made of it where nothing else
        that leaves the step, and no input, has the value's memory."""
        key = lambda node: torch_adapter.storage_key(node.meta["val"])
        tensors = [node for node in leaving if isinstance(node, torch.fx.Node) and is_tensor(node)]
        taken = {key(node) for node in tensors} | {
            torch_adapter.storage_key(storage.whole.val) for storage in self.all() if storage.is_input and storage.whole
        }
        values = {}
        for copy in dict.fromkeys(tensors):
            value = copy.args[0] if copy in self._copies and not copy.users else None
            if isinstance(value, torch.fx.Node) and key(value) not in taken and _bytes(value) == _bytes(copy):
                taken.add(key(value))
                values[copy] = value
        return [values.get(node, node) if isinstance(node, torch.fx.Node) else node for node in leaving]

    def forget_all(self) -> None:
        """Stop tracking everything: nothing here leads to fake tensors any more, nor they to the capture."""
        for val in self._marked:
            tracked = vars(val).get(_TRACKED)
            forget(val)
            if tracked is not None or _CAPTURED not in vars(val):  # a fake may be marked more than once
                vars(val)[_CAPTURED] = () if tracked is None else tracked.node.meta.get("frames", ())
        for storage in self._storages.values():
            storage.whole = None  # which holds the storage: fakes need no collection of garbage to be freed
        self._marked.clear()
        self._storages.clear()


def is_tensor(node: torch.fx.Node) -> bool:
    """Whether a node is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def _bytes(node: torch.fx.Node) -> str:
    """The size of the memory that a node's value keeps alive."""
    return str(node.meta["val"].untyped_storage().nbytes())


def is_tracked(tensor: Any) -> bool:
    """Whether a value is a fake tensor of the capture: an input's or a result's, not one the user made before."""
    return isinstance(tensor, FakeTensor) and _TRACKED in tensor.__dict__


def was_tracked(tensor: FakeTensor) -> bool:
    """Whether a fake tensor is or was one of a capture's."""
    return _TRACKED in tensor.__dict__ or _CAPTURED in tensor.__dict__


def made_at(tensor: FakeTensor) -> tuple[Frame, ...]:
    """The user's lines, innermost first, at which a fake tensor of a finished capture was computed."""
    return tensor.__dict__.get(_CAPTURED, ())


def forget(val: torch.Tensor) -> None:
    """Stop tracking a fake tensor object: nothing more will be recorded of it."""
    held = vars(val)
    held.pop(_TRACKED, None)
    held.pop(MEMO_NODE, None)
    if isinstance(val, FakeTensor):
        torch_adapter.forget_data_memos(val)
