"""``torch.LongTensor(ids)``, ``torch.Tensor(rates)``: tensors of lists, made by classes.

These classes read a list in C++, number by number, and no mode sees their calls: each list would be a capture. While a
step is captured they hand lists with numbers that change to ``torch.tensor``. Classes such as ``torch.LongTensor``
cannot be changed, so the code of the step finds stand-ins by their names, which are the classes to everything else.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from weft.capture.record.array_calls import map_leaves
from weft.capture.record.held_references import StandIn, original_of
from weft.capture.record.host_arrays import HostArray
from weft.capture.record.host_lists import HostList
from weft.capture.record.plain_numbers import PYTHON_TYPES
from weft.thread_patches import present, replaced

_WHOLE, _FLOATS = (int, torch.SymInt), (int, float, torch.SymInt, torch.SymFloat)
_DTYPES = {
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
}


class ClassStandIn(type, StandIn):
    """The class of classes that stand for others, which they are to everything but ``is``."""

    weft_original: Any

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.weft_original)

    def __eq__(cls, other: object) -> bool:
        return original_of(other) is cls.weft_original

    def __hash__(cls) -> int:
        return hash(cls.weft_original)

    def __repr__(cls) -> str:
        return repr(cls.weft_original)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.weft_original, name)


class TensorClass(ClassStandIn):
    """The class of the stand-ins."""

    weft_dtype: torch.dtype

    def __call__(cls, *args: Any, **options: Any) -> Any:
        made = None if options else _of_numbers(args, cls.weft_dtype)
        return cls.weft_original(*args, **options) if made is None else made


def tensor_class_replacements(objects: Iterable[Any]) -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, replacement) of the classes whose names stand in functions that the step can call."""
    codes = [each.__code__ for each in objects if type(each) is types.FunctionType]
    used = {name for code in codes for each in with_inner(code) for name in each.co_names}
    for name in sorted(used & _DTYPES.keys()):
        names = {"weft_original": getattr(torch, name), "weft_dtype": _DTYPES[name]}
        yield torch, name, TensorClass(name, (), names)


@contextlib.contextmanager
def tensors_of_symbols() -> Iterator[None]:
    """Inside, ``torch.Tensor(numbers)`` takes symbolic numbers."""
    original: Callable[..., Any] = present(torch.Tensor, "__new__")

    def new(cls: Any, *args: Any, **options: Any) -> Any:
        made = _of_numbers(args, torch.get_default_dtype()) if cls is torch.Tensor and not options else None
        return original(cls, *args, **options) if made is None else made

    with replaced(torch.Tensor, "__new__", new):
        yield


def with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function and of the functions that it defines."""
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from with_inner(each)


def _of_numbers(args: tuple[Any, ...], dtype: torch.dtype) -> torch.Tensor | None:
    """The tensor of the one argument, an array or a list with numbers that change; None where torch's class makes it.

    It is on the CPU, whatever the default device is.
    """
    if len(args) != 1:
        return None
    data = map_leaves(args[0], _of_python)
    if type(data) is HostList:
        whole = data.weft_tensor.dtype is torch.int64
        return torch.tensor(data, dtype=dtype, device="cpu") if whole or dtype.is_floating_point else None
    if type(data) is HostArray:
        is_taken = data.dtype.kind in ("iuf" if dtype.is_floating_point else "iu")
        return torch.tensor(data, dtype=dtype, device="cpu") if is_taken else None
    kinds, numbers = (_FLOATS if dtype.is_floating_point else _WHOLE), symbolic_numbers(data)
    if type(data) not in (list, tuple) or not numbers or any(type(each) not in kinds for each in numbers):
        return None
    return torch.tensor(data, dtype=dtype, device="cpu")


def _of_python(number: Any) -> Any:
    """A number of numpy's as one of Python's: the class decides the dtype."""
    if type(number) is HostArray:
        return number if number.ndim else number.item()
    return number.item() if type(number).__module__ == "numpy" and getattr(number, "ndim", 1) == 0 else number


def symbolic_numbers(data: Any) -> list[Any]:
    """The numbers in nested lists, where at least one of them is symbolic and all are numbers; else none."""
    if type(data) in PYTHON_TYPES:
        return [data]
    if type(data) not in (list, tuple):
        return []
    pending, found = list(data[::-1]), []
    while pending:
        value = pending.pop()
        if type(value) in (list, tuple):
            pending += value[::-1]
        else:
            found.append(value)
    known = all(type(each) in PYTHON_TYPES or type(each) in (bool, int, float) for each in found)
    return found if known and any(type(each) in PYTHON_TYPES for each in found) else []
