"""Shapes of results of numpy for arrays whose sizes are symbols.

Only numpy knows the shapes of its results, and finds them for one size on sample arrays. Of functions that work element
by element, and of reductions, the shapes are known for all sizes. A step that normalises an array of varying length
before it makes a tensor of it has one form then.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any

from weft import torch_adapter
from weft.capture.record.host_arrays import HostArray, names

Sizes = tuple[Any, ...]

_ELEMENTWISE = names("astype copy clip round around where nan_to_num numpy_copy array_of_list")
_REDUCTIONS = names("mean std var sum max min amax amin any all prod")
_OPERATORS = frozenset(
    getattr(operator, name)
    for name in names("add sub mul truediv floordiv mod pow and_ or_ xor lt le eq ne gt ge neg pos abs invert")
)


def open_shape(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sizes | None:
    """The shape of ``function(*args, **kwargs)``, with symbols for the open sizes of the arrays; None where there are
    no open sizes, or where the shape is not known for all of them."""
    arrays = [each for each in (*args, *kwargs.values()) if type(each) is HostArray]
    opened = [each for each in arrays if each.weft_memory.open_sizes]
    if not opened or any(each.weft_call is not each.weft_memory for each in opened):
        return None
    if any(isinstance(each, (list, tuple, dict, slice)) for each in (*args, *kwargs.values())):
        return None
    name = getattr(function, "__name__", "")
    numpy = sys.modules["numpy"]
    module = str(getattr(function, "__module__", "") or getattr(function, "__objclass__", numpy).__module__)
    of_numpy = module.split(".")[0] == "numpy" or getattr(function, "__objclass__", None) is numpy.ndarray
    if name in _REDUCTIONS and of_numpy and args and arrays == [args[0]]:
        return _reduced(args, kwargs)
    is_ufunc = isinstance(function, numpy.ufunc) and function.nout == 1 and function.signature is None
    plain = {"dtype", "copy", "min", "max", "casting", "decimals"}.issuperset(kwargs)
    named = name in _ELEMENTWISE and (of_numpy or name == "numpy_copy") and not (name == "where" and len(args) != 3)
    if not plain or not (is_ufunc or named or function in _OPERATORS):
        return None
    return _broadcast([each.shape for each in arrays])


def _reduced(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sizes | None:
    shape, axis = args[0].shape, kwargs.get("axis", args[1] if len(args) > 1 else None)
    if len(args) > 2 or not {"axis", "keepdims", "ddof"}.issuperset(kwargs) or not (axis is None or type(axis) is int):
        return None
    if axis is not None and not -len(shape) <= axis < len(shape):
        return None
    gone = set(range(len(shape))) if axis is None else {axis % len(shape)}
    kept = kwargs.get("keepdims", False) is True
    return tuple(1 if dim in gone else size for dim, size in enumerate(shape) if kept or dim not in gone)


def _broadcast(shapes: list[Sizes]) -> Sizes | None:
    """The shape that arrays are brought to; None where that depends on the value of a symbol."""
    count = max(map(len, shapes))
    found: list[Any] = [1] * count
    for shape in shapes:
        for dim, size in enumerate(shape, count - len(shape)):
            before = found[dim]
            if type(before) is int and before == 1:
                found[dim] = size
            elif not (type(size) is int and size == 1) and not torch_adapter.surely_equal(before, size):
                return None
    return tuple(found)
