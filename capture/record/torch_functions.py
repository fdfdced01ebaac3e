"""Torch functions that the recorder cannot see at the dispatcher.

Most of what a step does arrives at the dispatcher and is recorded there. A few functions do their work in C++ above
it: ``tolist`` reads the data, ``tensor.data = ...`` replaces the memory of a tensor, ``numpy()`` gives it away. A
torch function mode sees these calls first.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from weft import torch_adapter
from weft.capture.record.array_calls import map_leaves
from weft.capture.record.array_sources import ArraySources
from weft.capture.record.constant_scalars import constant_numbers
from weft.capture.record.float_arguments import FLOAT_FUNCTIONS, FloatArguments, Inside, has_symbolic_float
from weft.capture.record.held_references import StandIn, original_of
from weft.capture.record.host_lists import HostList, tensor_of_list
from weft.capture.record.memory_access import MEMORY_ACCESS, refuse_memory_access
from weft.capture.record.packed_sequences import PACKED_FUNCTIONS, batch_size, packed_function
from weft.capture.record.plain_numbers import NumpyFloat, plain_number
from weft.capture.record.printed import TEXTS, text_of_tensor
from weft.capture.record.recorder import OpRecorder
from weft.capture.record.recurrent_networks import RECURRENT_FUNCTIONS, recurrent_function
from weft.capture.record.replaced_functions import original_function
from weft.capture.record.selected_parts import with_numbers_in_slices, with_selections
from weft.capture.record.shown_symbols import ShownSymbols
from weft.capture.record.size_arguments import SIZE_FUNCTIONS, calls_size_function
from weft.capture.record.sparse_products import SPARSE_FUNCTIONS, sparse_function
from weft.capture.record.tensor_classes import symbolic_numbers
from weft.capture.record.tensor_copies import deep_copy
from weft.capture.user_code import user_line
from weft.errors import NumpyOnTensor, UncapturableMutation
from weft.short_tracebacks import mark_refused_call
from weft.thread_patches import present, replaced

_TRUTH = (torch.Tensor.__bool__, torch.is_nonzero, torch.Tensor.is_nonzero)
_MAKE_TENSORS = (torch.tensor, torch.as_tensor)
_INDEXED = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
# The dtypes that they give to numbers; None is the default dtype.
_DTYPES = {torch.SymFloat: None, torch.SymInt: torch.int64, torch.SymBool: torch.bool}
_FUSED = tuple(
    getattr(torch, name)
    for name in ("_fused_adamw_", "_fused_adam_", "_fused_sgd_", "_fused_adagrad_")
    if hasattr(torch, name)
)


# What torch says of a tensor, or of a number that only the data decides, among sizes that must be plain numbers.
_WANTS_SIZES = ("expected to contain only concrete integers", "failed to unpack the object at pos")


def to_list(tensor: torch.Tensor) -> list[Any]:
    """The numbers of a 1-D tensor as Python numbers, in one copy to the host; the target of a node."""
    return tensor.tolist()


class TorchFunctionInterceptor(TorchFunctionMode):
    """Function mode of a capture; it is active above the recorder."""

    def __init__(self, recorder: OpRecorder, arrays: ArraySources, shown: ShownSymbols) -> None:
        super().__init__()
        self._recorder = recorder
        self._shown = shown
        self._arrays = arrays
        self._floats = FloatArguments(recorder.float_tags)
        self._inside = Inside()

    @contextlib.contextmanager
    def active_in_backward(self) -> Iterator[None]:
        """Inside, the mode sees calls in hooks and checkpoints. ``Tensor.backward`` is a call that it handles, and a
        mode is off while it handles a call."""
        name = torch_adapter.autograd_engine_entry()[1]
        run_engine = present(torch.autograd, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            with contextlib.nullcontext() if self in torch_adapter.function_modes() else self:
                return run_engine(*args, **kwargs)

        with replaced(torch.autograd, name, run):
            yield

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, args, kwargs = self._arrays.torch_function(original_function(func), args, kwargs or {})
        if kwargs and isinstance(generator := kwargs.get("generator"), StandIn):
            kwargs = {**kwargs, "generator": generator.weft_original}
        if func in _LOOKED_INTO:  # most calls are others: they read an attribute of a tensor
            if func is torch.Tensor.tolist and args[0].dim() == 1:
                return self._to_list(args[0])
            if func in _MAKE_TENSORS:
                args = map_leaves(args, lambda each: plain_number(each) if type(each) is NumpyFloat else each)
            if func in _MAKE_TENSORS and len(args) == 1 and type(args[0]) is HostList:
                return tensor_of_list(args[0], kwargs)
            if func in _MAKE_TENSORS and len(args) == 1 and (numbers := symbolic_numbers(args[0])):
                return _tensor_of(args[0], numbers, kwargs)
            if func is torch.Tensor.__getitem__ and (size := batch_size(*args)) is not None:
                return size
            if func in _INDEXED:
                index = with_numbers_in_slices(args[0], _with_tensors(args[1], args[0].device))
                args = (args[0], index, *args[2:]) if index is not args[1] else args
            if func in _INDEXED and (selected := with_selections(*args[:2])) is not None:
                part, rest = selected
                if func is torch.Tensor.__getitem__:
                    return func(part, rest) if rest else part
                return func(part, rest or ..., *args[2:])
            if func in SPARSE_FUNCTIONS and (sparse := sparse_function(func, args)) is not None:
                return sparse()
            if func in SIZE_FUNCTIONS and (sized := SIZE_FUNCTIONS[func](self._recorder, *args, **kwargs)) is not None:
                return sized
            if func in _POWERS and type(args[-1]) is torch.SymInt and args[0].is_floating_point():
                args = (args[0], torch.sym_float(args[1]))
            if func is torch.Tensor.type:
                args = tuple(map(original_of, args))
            if func in _TRUTH and args[0].numel() == 1 and args[0].dtype is not torch.bool:
                args = (args[0].ne(0),)  # the number would have more outcomes, or one at each call
            if func is torch_adapter.nn_functions.pad_sequence and any(
                isinstance(each.shape[0], torch.SymInt) for each in args[0]
            ):
                return _padded(*args, **kwargs)
            if func in PACKED_FUNCTIONS:
                return packed_function(func, args)
            if func in RECURRENT_FUNCTIONS and (recurrent := recurrent_function(func, args)) is not None:
                return recurrent()
            if func in _CTC and len(args) >= 4:
                # It makes a tensor of lengths in a tuple in C++, and writes to memory that a fake one does not have. Of
                # lengths on the CPU for a loss on a GPU it does the same.
                args = (*args[:2], *(_as_tensor(each, args[0].device) for each in args[2:4]), *args[4:])
            if func is torch.Tensor.__deepcopy__:
                if not args[0].is_leaf:
                    return func(*args, **kwargs)  # which raises
                if (copied := deep_copy(self._recorder, *args)) is not None:
                    return copied
            refuse_memory_access(func)
            if (text := text_of_tensor(func, args)) is not None:
                return text
            if func is torch.Tensor.numpy:
                return self._arrays.numpy(*args, **kwargs)
            if func is torch.Tensor.__array__:
                raise NumpyOnTensor(user_line())
            if func == _SET_DATA:
                return self._set_data(*args)
            if func in _CHOOSE_KERNELS and not _wants_gradients((*args, *kwargs.values())):
                with torch_adapter.below_autograd():
                    return func(*args, **kwargs)
            if func is torch.functional.norm:
                func = self._inside(func, self)
            if func in _FUSED:
                kwargs = {
                    name: self._recorder.float_tags.tag(value) if isinstance(value, torch.SymFloat) else value
                    for name, value in kwargs.items()
                }
        if has_symbolic_float(args, kwargs):
            if func in FLOAT_FUNCTIONS:
                return self._floats.call(func, args, kwargs)
            func = self._inside(func, self)
        elif calls_size_function(func, args, kwargs):
            func = self._inside(func, self)
        try:
            return func(*args, **kwargs)
        except Exception as error:
            if not (isinstance(error, (RuntimeError, TypeError)) and any(text in str(error) for text in _WANTS_SIZES)):
                mark_refused_call(error)
                self._shown.show_numbers(error)
                raise
        return func(
            *_with_plain_sizes(args), **dict(zip(kwargs, _with_plain_sizes(tuple(kwargs.values())), strict=True))
        )

    def _to_list(self, tensor: torch.Tensor) -> list[Any]:
        """One node for the whole list; each number becomes a symbol of its own."""
        recorder = self._recorder
        length = tensor.shape[0]
        if not isinstance(length, int):
            return tensor.tolist()
        if (constants := constant_numbers(recorder.value(tensor), recorder.literals)) is not None:
            return constants
        values = [torch_adapter.fresh_number(recorder.symbols.shape_env, tensor.dtype) for _ in range(length)]
        node = recorder.effect(to_list, tensor, val=values)
        for at, value in enumerate(values):
            recorder.symbols.define(value, lambda at=at, value=value: recorder.getitem(node, at, value))
        recorder.claim_pending_symbols()
        return values

    def _set_data(self, target: torch.Tensor, value: torch.Tensor) -> None:
        """``target.data = value``: target keeps its identity and hooks and shares the memory of value from here on.

        Raises:
            UncapturableMutation: value has another shape or dtype, or makes an inference tensor of target.
        """
        fake = self._recorder.storages.of(value).val
        if fake.shape != target.shape or fake.dtype != target.dtype:
            raise UncapturableMutation(
                f"`tensor.data = ...` with another shape or dtype at {user_line()}; assign a new tensor instead"
            )
        if fake.is_inference() and not target.is_inference():
            what = f"`tensor.data = ...` with an inference tensor at {user_line()}"
            raise UncapturableMutation(f"{what}; copy the values with tensor.copy_(...), or use torch.no_grad()")
        self._recorder.set_data(target, value)


def _tensor_of(data: Any, numbers: list[Any], options: dict[str, Any]) -> torch.Tensor:
    """``torch.tensor(data, **options)`` of these numbers, with functions that take symbolic ones."""
    options = dict(options)
    kinds = {_DTYPES.get(type(each), {bool: torch.bool, int: torch.int64}.get(type(each))) for each in numbers}
    if options.get("dtype") is None:
        options["dtype"] = None if None in kinds else torch.int64 if torch.int64 in kinds else torch.bool
    requires_grad = options.pop("requires_grad", False)
    made = [torch.scalar_tensor(number, **options) for number in numbers]
    sizes = []
    while type(data) in (list, tuple):
        sizes.append(len(data))
        data = data[0]
    made = torch.stack(made).reshape(sizes) if sizes else made[0]
    return made.requires_grad_() if requires_grad else made


def _as_tensor(lengths: Any, device: torch.device) -> torch.Tensor:
    if isinstance(lengths, torch.Tensor):
        return lengths.to(device)
    numbers = symbolic_numbers(lengths)
    return (_tensor_of(lengths, numbers, {}) if numbers else torch.tensor(lengths)).to(device)


def _with_tensors(index: Any, device: torch.device) -> Any:
    """An index with tensors for lists of symbolic numbers, which torch would turn into tensors of their present values.

    A list in which there are lists means another thing than in a tuple: torch takes it for a tuple.
    """
    if type(index) is tuple:
        made = tuple(_with_tensors(each, device) if type(each) is list else each for each in index)
        return made if any(new is not old for new, old in zip(made, index, strict=True)) else index
    if type(index) is not list or any(type(each) in (list, tuple) for each in index):
        return index
    numbers = symbolic_numbers(index)
    return _tensor_of(index, numbers, {"device": device}) if numbers else index


def _padded(
    sequences: Any, batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
) -> torch.Tensor:
    """``pad_sequence`` by the operations of torch's, which makes plain numbers of the lengths in C++."""
    first = sequences[0]
    longest: Any = functools.reduce(torch.sym_max, [each.shape[0] for each in sequences])
    sizes = (len(sequences), longest) if batch_first else (longest, len(sequences))
    out = torch.full((*sizes, *first.shape[1:]), padding_value, dtype=first.dtype, device=first.device)
    for at, each in enumerate(sequences):
        length = each.shape[0]
        start = longest - length if padding_side == "left" else 0
        out.select(0 if batch_first else 1, at).narrow(0, start, length).copy_(each)
    return out


def _wants_gradients(operands: Iterable[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in operands)


def _is_size(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and not value.is_floating_point()
    return isinstance(value, torch.SymInt)


def _with_plain_sizes(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments with plain numbers for sizes, alone or in a list: what only the data decides is a branch."""
    return tuple(
        type(each)(_with_plain_sizes(tuple(each)))
        if type(each) in (tuple, list)
        else int(each)
        if _is_size(each)
        else each
        for each in args
    )


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_POWERS = (torch.pow, torch.Tensor.pow, torch.Tensor.__pow__)
# They call one kernel where a gradient may be wanted, and take fake tensors for ones of which that is so, and else
# another one. Left whole, they choose when they run.
_CHOOSE_KERNELS = (
    *(torch.linalg.svdvals, torch.linalg.eigvals, torch.linalg.eigvalsh, torch.linalg.cond, torch.linalg.matrix_rank),
    *(torch.linalg.norm, torch.linalg.matrix_norm, torch.nuclear_norm),
)
_CTC = (torch.ctc_loss, torch.nn.functional.ctc_loss)
_LOOKED_INTO = frozenset(
    {
        torch.Tensor.tolist,
        *_CTC,
        *_CHOOSE_KERNELS,
        torch.functional.norm,
        torch_adapter.nn_functions.pad_sequence,
        _SET_DATA,
        *_MAKE_TENSORS,
        *_INDEXED,
        *_TRUTH,
        torch.Tensor.type,
        *SIZE_FUNCTIONS,
        *_POWERS,
        torch.Tensor.numpy,
        torch.Tensor.__array__,
        *_FUSED,
        *PACKED_FUNCTIONS,
        *RECURRENT_FUNCTIONS,
        *SPARSE_FUNCTIONS,
        *MEMORY_ACCESS,
        *TEXTS,
    }
)
