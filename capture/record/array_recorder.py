"""Records what a step does with numpy arrays whose values exist only when it runs.

An array that ``numpy.random`` draws, and all that numpy computes from it, is a :class:`HostArray` while a step is
captured. Its memory (:class:`ArrayMemory`) is a tensor on the CPU in the graph, so all that holds for tensors holds for
it: writes and aliases are followed, branches keep it, ``torch.from_numpy`` shares it. A function of numpy that is
applied to it becomes a node (:mod:`weft.capture.record.array_calls`), which every call of the step runs in the order of
the step.

Shape, dtype and strides of a result are found by a call of the same function on sample arrays. They are the same for
all values, but for functions such as ``nonzero``: there the sizes are asked for first, as a branch of the step asks for
a number. A node checks its result, so a shape that was guessed wrong is an error and no wrong number.

The arrays that the step itself makes (``numpy.zeros``) are :class:`HostArray` s too, because a drawn value may be
written to them later. Until then their values are known, and what is computed from known values is computed at once.
"""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.record.array_calls import (
    ArrayCall,
    ArrayOperand,
    ArraySlot,
    Layout,
    NumpyCall,
    empty_like,
    evaluate,
    map_leaves,
    name_of,
)
from weft.capture.record.array_functions import dispatch, dispatch_ufunc
from weft.capture.record.held_references import original_of
from weft.capture.record.host_arrays import HostArray
from weft.capture.record.host_lists import HostList
from weft.capture.record.late_text import late_text
from weft.capture.record.open_sizes import Sizes, open_shape
from weft.capture.record.recorder import OpRecorder, recording
from weft.capture.strided_overlap import span
from weft.capture.user_code import user_line
from weft.errors import UncapturableDraw, WeftError
from weft.short_tracebacks import users_mistake

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_FUNCTIONS = (types.FunctionType, types.MethodType)
WITH_TORCH = "draw with torch, whose draws the graph records (torch.rand, torch.randint, torch.randperm)"
OUTSIDE = "draw before the step and pass the result as an argument"
# Values of the sample arrays: one that a function takes is enough. A share is one divided by the size of the array.
_ONE, _ZERO, _SHARE = "one", "zero", "share"


class ArrayMemory:
    """The memory of an array, which views share.

    Attributes:
        known: its contents, while no drawn value was written to it; C-contiguous.
        sample: an array of the same shape and dtype; ``known`` where that is not None.
        fake: the tensor that it is in the graph; None while nothing needed one.
        shared: whether a tensor of the step shares it.
        argument: whether it is that of an argument, which the caller has too.
        of_tensor: whether it is that of a tensor of the step, which ``Tensor.numpy()`` gave out.
        read_only: whether numpy must refuse to write to it.
        open_sizes: its sizes that are symbols. Only what becomes of the whole array as a tensor works for any size.
        source: what made it, and on which line.
    """

    def __init__(self, sample: Any, source: str, *, known: bool = False, fake: torch.Tensor | None = None) -> None:
        self.known = sample if known else None
        self.sample = sample
        self.fake = fake
        self.shared = False
        self.argument = False
        self.of_tensor = False
        self.read_only = False
        self.open_sizes: list[torch.SymInt] = []
        self.source = source


class ArrayRecorder:
    """Records calls of numpy for one capture.

    Args:
        recorder: of the capture.
        described: where the sources of symbolic numbers are noted, by symbol.

    Attributes:
        busy: whether a function is being called on sample arrays.
        active: whether the step is still running; afterwards no array of it can be used.
    """

    def __init__(self, recorder: OpRecorder, described: dict[Any, str]) -> None:
        self.busy = False
        self.active = True
        self._recorder = recorder
        self._described = described

    def is_of(self, fake_mode: Any) -> bool:
        """Whether the arrays are of the capture with this mode."""
        return self._recorder.fake_mode is fake_mode

    # ---- calls

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        *,
        writes: Any = None,
        sized: bool = False,
        scratch: Callable[..., Any] | None = None,
    ) -> Any:
        """``function(*args, **kwargs)``, computed at once where all is known, else as a node.

        Args:
            writes: the array among the arguments that the function writes to; it returns nothing else.
            sized: whether the shape of the result depends on values.
            scratch: stands in for a function that draws, in the call on samples.

        Raises:
            UncapturableDraw: the call has no place in a graph.
        """
        self._check_active()
        if writes is None and scratch is None and not sized:
            found = self._open_result(function, args, kwargs or {})
            if found is not None:
                return found
        args, kwargs = map_leaves((args, kwargs or {}), self._leaf)
        call = ArrayCall(function, args, kwargs)
        leaves = _leaves(call)
        undecided = any(not isinstance(each, ArrayMemory) or each.known is None for each in leaves)
        if writes is not None:
            return self._write(call, writes, undecided or scratch is not None)
        if not undecided and scratch is None:
            return self._result(call, self._evaluated(call), leaves, known=True)
        sample = self._sampled(call if scratch is None else ArrayCall(scratch, args, kwargs), leaves)
        return self._result(call, sample, leaves, sized=sized, draws=scratch is not None)

    def _open_result(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call on arrays with open sizes, where its shape is known for all of them; else None."""
        shape = open_shape(function, args, kwargs)
        if shape is None:
            return None
        leaf = lambda each: each.weft_call if type(each) is HostArray else each
        call = ArrayCall(function, *map_leaves((args, kwargs), leaf))
        leaves = _leaves(call)
        sample = self._sampled(call, leaves)
        memories = [each.sample for each in leaves if isinstance(each, ArrayMemory)]
        shares = any(sys.modules["numpy"].may_share_memory(sample, each) for each in memories)
        if shares or len(shape) != sys.modules["numpy"].ndim(sample) or not getattr(sample, "flags", None):
            return None
        contiguous = sample.flags.c_contiguous and is_tensor_dtype(sample.dtype)
        return self._fresh(call, sample, shape=shape) if contiguous else None

    def made(self, function: Callable[..., Any], array: Any) -> HostArray:
        """An array that the step made with ``function``, of plain numbers."""
        return self._fresh(ArrayCall(function, (), {}), array, known=True)

    def argument(self, fake: torch.Tensor, value: Any, path: str) -> HostArray:
        """An array or a number of numpy's among the arguments; ``fake`` is the input in its memory."""
        numpy = sys.modules["numpy"]
        array = numpy.asarray(value)
        memory = ArrayMemory(empty_like(array), f"the argument {path}", fake=fake)
        memory.argument = True
        memory.read_only = not array.flags.writeable
        memory.open_sizes = [each for each in (*fake.shape, *fake.stride()) if isinstance(each, torch.SymInt)]
        if isinstance(value, numpy.generic):
            return HostArray(self, ArrayCall(operator.getitem, (memory, ()), {}), memory, memory.sample[()])
        return HostArray(self, memory, memory, memory.sample)

    def of_tensor(self, tensor: torch.Tensor) -> HostArray:
        """``tensor.numpy()``: an array in the memory of a tensor on the CPU."""
        fake = tensor.detach()
        sizes, strides = ([torch_adapter.hint(each) for each in given] for given in (fake.shape, fake.stride()))
        if None in (*sizes, *strides):
            sizes, strides = [*map(int, fake.shape)], [*map(int, fake.stride())]
        with torch_adapter.only_mode():
            sample = torch.empty_strided(sizes, strides, dtype=fake.dtype, device="cpu").numpy()  # type: ignore[bad-argument-type]
        memory = ArrayMemory(sample, f"Tensor.numpy at {user_line()}", fake=fake)
        memory.of_tensor = True
        memory.open_sizes = [each for each in (*fake.shape, *fake.stride()) if isinstance(each, torch.SymInt)]
        return HostArray(self, memory, memory, memory.sample)

    def of_list(self, numbers: HostList) -> HostArray:
        """The numbers of a list among the arguments as an array, which nobody else has."""
        fake = numbers.weft_tensor
        sizes = tuple(map(torch_adapter.hint, fake.shape))
        sample = sys.modules["numpy"].zeros(sizes, "int64" if fake.dtype is torch.int64 else "float64")
        memory = ArrayMemory(sample, f"the argument {numbers.weft_place.path}", fake=fake)
        memory.open_sizes = [each for each in fake.shape if isinstance(each, torch.SymInt)]
        return HostArray(self, memory, memory, memory.sample)

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, _FUNCTIONS):
            raise self.refusal(name_of(leaf), "numpy is to call a function of yours on an array that is drawn")
        if type(leaf) is HostArray:
            settle(leaf.weft_memory)
            return leaf.weft_call
        return frozen(leaf) if isinstance(leaf, sys.modules["numpy"].ndarray) else original_of(leaf)

    def _write(self, call: ArrayCall, target: Any, undecided: bool) -> None:
        if type(target) is not HostArray:
            why = "it writes a drawn value to an array that the step did not make itself"
            raise self.refusal(name_of(call.function), why, "make a copy in the step: numpy.array(x)")
        memory = target.weft_memory
        if memory.of_tensor:
            why, remedy = "it is in the memory of a tensor, and is written to", "write to a copy: x.numpy().copy()"
            raise self.refusal("an array of a tensor", why, remedy)
        if memory.read_only:
            raise users_mistake(ValueError("assignment destination is read-only"))
        if not undecided:
            self._evaluated(call)
            return
        self.materialise(memory)
        node = self._emit(call, Layout(memory.sample), written=memory)
        self._recorder.storages.write(self._recorder.storages.of(memory.fake), node)

    def _evaluated(self, call: Any) -> Any:
        """The value of a call of which all is known."""
        self.busy = True
        try:
            return evaluate(call, lambda leaf: leaf.known if isinstance(leaf, ArrayMemory) else leaf)
        finally:
            self.busy = False

    def _sampled(self, call: ArrayCall, leaves: list[Any]) -> Any:
        """The result of a call on sample arrays."""
        failures = []
        self.busy = True
        try:
            for kind in (_ONE, _ZERO, _SHARE):
                try:
                    with sys.modules["numpy"].errstate(all="ignore"):
                        return evaluate(call, lambda leaf, kind=kind: _sample(leaf, kind))
                except WeftError:
                    raise
                except Exception as error:  # noqa: BLE001 - functions of numpy raise errors of any kind
                    failures.append(error)
        finally:
            self.busy = False
        why = f"numpy raises for arrays of these shapes and dtypes: {failures[0]}"
        raise self.refusal(f"{name_of(call.function)}", why) from failures[0]

    def _result(
        self,
        call: Any,
        sample: Any,
        leaves: list[Any],
        *,
        known: bool = False,
        sized: bool = False,
        draws: bool = False,
    ) -> Any:
        """What the step gets for the result of a call, of which ``sample`` is one; its value, where that is known."""
        numpy = sys.modules["numpy"]
        if type(sample) in (list, tuple) and not draws:
            parts = [(ArrayCall(operator.getitem, (call, at), {}), each) for at, each in enumerate(sample)]
            return type(sample)(self._result(part, each, leaves, known=known, sized=sized) for part, each in parts)
        if isinstance(sample, numpy.ndarray):
            memories = [each for each in leaves if isinstance(each, ArrayMemory)]
            memory = next((each for each in memories if numpy.may_share_memory(each.sample, sample)), None)
            if memory is not None:
                return self._view(call, sample, memory)
            return self._fresh(call, sample, known=known, sized=sized)
        if known:
            return sample
        if isinstance(sample, (bool, int, float, numpy.generic)):
            return self._fresh(call, sample)
        why = f"it gives a {type(sample).__name__}, which is neither array nor number"
        raise self.refusal(name_of(call.function), why)

    def _view(self, call: Any, sample: Any, memory: ArrayMemory) -> HostArray:
        """A view, which is taken again wherever it is used: nothing but its memory may change until then."""

        def constant(leaf: Any) -> Any:
            if not isinstance(leaf, ArrayMemory) or leaf is memory or not leaf.sample.ndim:
                return leaf
            if leaf.known is None:
                why = "a drawn array decides which part of another it is a view of"
                raise self.refusal(name_of(call.function), why)
            return frozen(leaf.known)

        return HostArray(self, map_leaves(call, constant), memory, sample)

    def _fresh(
        self, call: Any, sample: Any, *, known: bool = False, sized: bool = False, shape: Sizes | None = None
    ) -> Any:
        numpy = sys.modules["numpy"]
        if sized and not known:
            sample = numpy.zeros(self._sizes(call, sample.ndim), sample.dtype)
        layout = Layout(sample, shape)
        if not is_tensor_dtype(layout.dtype):
            if known:
                return sample
            raise self.refusal(name_of(call.function), f"torch has no tensors of dtype {layout.dtype}")
        contents = layout.memory(sample)
        if not contents.flags.c_contiguous:
            raise self.refusal(name_of(call.function), "its result has gaps in memory", "make a copy: numpy.array(x)")
        drawn = [each.source for each in _leaves(call) if isinstance(each, ArrayMemory) and each.known is None]
        source = drawn[0] if drawn else f"{_full_name(name_of(call.function))} at {user_line()}"
        if known:
            memory = ArrayMemory(contents if contents.flags.writeable else contents.copy(), source, known=True)
        else:
            memory = ArrayMemory(numpy.zeros(layout.shape, layout.dtype), source)
            self._bind(memory, self._emit(call, layout))
            memory.open_sizes = [each for each in shape or () if isinstance(each, torch.SymInt)]
        if layout.order is None:
            scalar = HostArray(self, ArrayCall(operator.getitem, (memory, ()), {}), memory, memory.sample[()])
            return scalar if isinstance(sample, numpy.generic) else self.number(scalar)
        inverse = layout.inverse
        made = memory if inverse is None else ArrayCall(numpy.transpose, (memory, inverse), {})
        return HostArray(self, made, memory, memory.sample if inverse is None else memory.sample.transpose(inverse))

    def _sizes(self, call: Any, dimensions: int) -> tuple[int, ...]:
        """The sizes of a result, of which the step's Python asks: the capture goes on for one answer."""
        sizes = self._fresh(ArrayCall(shape_of, (call,), {}), sys.modules["numpy"].zeros(dimensions, "int64"))
        return tuple(int(sizes[dim]) for dim in range(dimensions))

    def sizes(self, array: HostArray) -> tuple[Any, ...]:
        """The shape of an array, with symbols for sizes that are still open."""
        memory = array.weft_memory
        whole = memory.open_sizes and array.weft_call is memory and memory.fake is not None
        return tuple(memory.fake.shape) if whole else array.weft_sample.shape

    def settle(self, array: HostArray) -> None:
        """Fix the sizes of an array that are still open."""
        settle(array.weft_memory)

    def function(self, function: Any, args: Any, kwargs: Any) -> Any:
        """A function of numpy that was given one of the arrays."""
        return dispatch(self, function, args, kwargs)

    def ufunc(self, ufunc: Any, method: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """A ``numpy.ufunc``, or a method of one, that was given one of the arrays or a symbolic number."""
        return dispatch_ufunc(self, ufunc, method, inputs, options)

    def plain(self, tree: Any) -> Any:
        """``tree`` with plain numbers in the place of symbolic ones, which the step then branches on."""

        def leaf(value: Any) -> Any:
            if type(value) is HostArray:
                return value.__index__() if not value.ndim and value.dtype.kind in "iu" else value
            return int(value) if isinstance(value, torch.SymInt) else value

        return map_leaves(tree, leaf)

    # ---- nodes

    def _emit(self, call: Any, layout: Layout, written: ArrayMemory | None = None) -> torch.fx.Node:
        operands: dict[int, int] = {}
        nodes: list[Any] = []

        def leaf(value: Any) -> Any:
            if isinstance(value, ArrayMemory) and value.fake is None:
                return frozen(value.known)
            if isinstance(value, (ArrayMemory, *_NUMBERS)):
                if id(value) not in operands:
                    operands[id(value)] = len(nodes)
                    nodes.append(self._recorder.value(value.fake if isinstance(value, ArrayMemory) else value))
                return ArrayOperand(operands[id(value)])
            return value

        mapped = map_leaves(call, leaf)
        number = None if written is None else operands[id(written)]
        target = NumpyCall(mapped, layout, number, is_pure=_is_pure(call))
        val = self._fake(layout) if written is None else written.fake
        return self._recorder.emit_effect(target, target.text, *nodes, val=val)

    def _fake(self, layout: Layout) -> torch.Tensor:
        dtype = torch.from_numpy(sys.modules["numpy"].zeros(0, layout.dtype)).dtype
        with torch_adapter.only_mode(self._recorder.fake_mode):
            return torch.empty(layout.shape if layout.sizes is None else layout.sizes, dtype=dtype, device="cpu")

    def _bind(self, memory: ArrayMemory, node: torch.fx.Node) -> None:
        memory.fake = node.meta["val"]
        self._recorder.storages.bind_fresh(memory.fake, node)

    def materialise(self, memory: ArrayMemory) -> None:
        """Make a memory a tensor of the graph; its values are not known from here on."""
        if memory.fake is None:
            if not is_tensor_dtype(memory.sample.dtype):
                raise self.refusal("an array", f"torch has no tensors of dtype {memory.sample.dtype}")
            contents = frozen(memory.known)
            self._bind(memory, self._emit(ArrayCall(array_constant, (contents,), {}), Layout(contents)))
            memory.known = None

    # ---- values

    def known(self, array: HostArray) -> Any:
        """The value of an array, or number, of which all is known; None for any other."""
        self._check_active()
        if any(not isinstance(each, ArrayMemory) or each.known is None for each in _leaves(array.weft_call)):
            return None
        return self._evaluated(array.weft_call)

    def number(self, array: HostArray) -> Any:
        """The one element of an array as a number of Python's: a symbolic one where it is not known."""
        known = self.known(array)
        if known is not None:
            return known.item()
        settle(array.weft_memory)
        if array.size != 1:
            raise users_mistake(ValueError("can only convert an array of size 1 to a Python scalar"))
        memory, call = array.weft_memory, array.weft_call
        element = isinstance(call, ArrayCall) and call.function is operator.getitem and call.args[0] is memory
        whole = call is memory or element
        if memory.sample.ndim or memory.fake is None or not whole:
            return self.number(self.call(operator.getitem, (array, (0,) * array.ndim)))
        number = memory.fake.item()
        if isinstance(number, _NUMBERS):
            for symbol in torch_adapter.expression(number).free_symbols:
                self._described.setdefault(symbol, memory.source)
        return number

    def tensor(self, array: HostArray, *, sharing: bool = True) -> torch.Tensor:
        """A tensor in the memory of an array, as ``torch.from_numpy`` makes it; ``sharing``: and the step keeps it."""
        memory, sample = array.weft_memory, array.weft_sample
        if memory.open_sizes and array.weft_call is memory and memory.fake is not None:
            memory.shared |= sharing
            return memory.fake.detach()
        settle(memory)
        numbers = any(isinstance(each, _NUMBERS) for each in _leaves(array.weft_call))
        if numbers or sample.dtype != memory.sample.dtype or min(sample.strides, default=0) < 0:
            why = "it has negative strides, another dtype than its memory, or a place in it that a number decides"
            raise self.refusal("torch.from_numpy", why, "make a copy: numpy.array(x)")
        self.materialise(memory)
        memory.shared |= sharing
        assert memory.fake is not None
        address = lambda each: each.__array_interface__["data"][0]
        offset = (address(sample) - address(memory.sample)) // sample.itemsize if sample.size else 0
        strides = [each // sample.itemsize for each in sample.strides]
        # `offset` counts from the start of the array, one given to `as_strided` from the start of the storage. Without
        # one, `as_strided` begins where its operand does.
        begin = memory.fake.as_strided((span(memory.fake),), (1,))[offset:] if offset else memory.fake
        return begin.as_strided(sample.shape, strides)

    def text(self, array: HostArray, frame: types.FrameType, method: str, arguments: tuple[Any, ...]) -> str | None:
        """A mark for the text of an array or number, as it is now; None where the code in ``frame`` may read it."""
        whole = array if isinstance(array.weft_sample, sys.modules["numpy"].ndarray) else None
        made = self.call(operator.getitem, (array, ())) if whole is None else self.call(numpy_copy, (array,))
        memory, call = made.weft_memory, made.weft_call
        if memory.fake is None:
            return None
        convert = lambda tensor: evaluate(call, lambda leaf: tensor.numpy() if leaf is memory else leaf)
        return late_text(self._recorder, frame, memory.fake, method, arguments, convert=convert)

    def slot(self, array: HostArray, keep: Callable[[Any], int], left: dict[int, int]) -> ArraySlot:
        """What an array becomes that leaves the step; ``left`` has the ids of the memories of those before."""
        memory = array.weft_memory
        scalar = not isinstance(array.weft_sample, sys.modules["numpy"].ndarray)
        passed_on = memory.argument and recording() is self._recorder  # to a function that is called from the program
        shares = memory.of_tensor and not scalar
        if not scalar and not passed_on and not shares and (memory.shared or id(memory) in left):
            why = "two arrays of one memory leave the step, or an array and a tensor"
            raise self.refusal("an array", why, "return a copy: numpy.array(x)")
        if not scalar and memory.argument and not passed_on:
            raise self.refusal("an array", "a part of an argument leaves the step", "return a copy: numpy.array(x)")
        left[id(memory)] = 0
        operands: list[int] = []

        def leaf(value: Any) -> Any:
            if isinstance(value, ArrayMemory) and value.fake is None:
                return frozen(value.known)
            if isinstance(value, (ArrayMemory, *_NUMBERS)):
                current = self._recorder.value(value.fake if isinstance(value, ArrayMemory) else value)
                operands.append(keep(current))
                return ArrayOperand(len(operands) - 1)
            return value

        return ArraySlot(map_leaves(array.weft_call, leaf), tuple(operands), shares)

    def refusal(self, what: str, why: str, remedy: str = f"{WITH_TORCH}, or {OUTSIDE}") -> UncapturableDraw:
        """The error for what has no place in a graph."""
        return UncapturableDraw(_full_name(what), user_line(), why, remedy)

    def _check_active(self) -> None:
        if not self.active:
            raise self.refusal("an array of a captured step", "it is used after the capture", "return it from the step")


def _full_name(name: str) -> str:
    return name if "." in name or " " in name else f"numpy.{name}"


def shape_of(result: Any) -> Any:
    """The sizes of an array, as an array."""
    return sys.modules["numpy"].array(result.shape, dtype="int64")


def numpy_copy(array: Any) -> Any:
    """A copy with the order of the array in memory."""
    return array.copy(order="K")


def array_constant(array: Any) -> Any:
    """An array of its own with the contents of another, which numpy made in the capture."""
    return array.copy()


def settle(memory: ArrayMemory) -> None:
    """Fix the sizes of an array: a function of numpy gives results whose shape only numpy knows."""
    sizes, memory.open_sizes = memory.open_sizes, []
    for size in sizes:
        int(size)


def frozen(array: Any) -> Any:
    """A copy, of the same layout, that cannot be written to."""
    copy = array.copy(order="K")
    copy.flags.writeable = False
    return copy


def is_tensor_dtype(dtype: Any) -> bool:
    """Whether torch has tensors of a dtype of numpy's."""
    try:
        torch.from_numpy(sys.modules["numpy"].zeros(0, dtype))
    except (TypeError, ValueError):
        return False
    return True


def _is_pure(call: Any) -> bool:
    """Whether a call, and those among its arguments, call functions of numpy and of operators, and draw nothing."""
    if isinstance(call, ArrayCall):
        owner = getattr(call.function, "__objclass__", type(call.function))
        modules = str(getattr(call.function, "__module__", "")), owner.__module__
        known = any(each.split(".")[0] in ("numpy", "operator", "_operator") for each in modules)
        return known and _is_pure(call.args) and _is_pure(call.kwargs)
    if isinstance(call, (list, tuple)):
        return all(map(_is_pure, call))
    return all(map(_is_pure, call.values())) if isinstance(call, dict) else True


def _leaves(call: Any) -> list[Any]:
    """The memories and the symbolic numbers that a call takes."""
    found: dict[int, Any] = {}
    map_leaves(call, lambda leaf: found.setdefault(id(leaf), leaf) if isinstance(leaf, (ArrayMemory, *_NUMBERS)) else 0)
    return list(found.values())


def _sample(leaf: Any, kind: str) -> Any:
    if isinstance(leaf, ArrayMemory):
        if leaf.known is None:
            share = 1 / max(leaf.sample.size, 1) if leaf.sample.dtype.kind == "f" else 0
            leaf.sample[...] = {_ONE: 1, _ZERO: 0, _SHARE: share}[kind]
        view = leaf.sample.view()
        view.flags.writeable = False
        return view
    if isinstance(leaf, _NUMBERS):
        hint = leaf.node.hint if leaf.node.has_hint() else int(kind == _ONE)
        return leaf.node.pytype(hint)
    return leaf
