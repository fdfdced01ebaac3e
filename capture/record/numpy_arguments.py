"""Arrays and numbers of numpy among the arguments, whose values are inputs of the graph.

Such an argument is a guard by its value until it is seen to change, as a Python number is. From then on each call makes
a tensor in its memory (``torch.from_numpy``), and that tensor is the input: what a capture knows of tensors among the
arguments, sizes that vary, writes and overlaps, holds for arrays too. The step gets a
:class:`~weft.capture.record.host_arrays.HostArray` in the place of the array.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Iterable
from typing import Any

import torch

from weft.capture.record.number_lists import NumberList
from weft.capture.state.contents import LARGEST_BYTES

_KINDS = "biufc"  # of dtypes: booleans, integers, floats and complex numbers


def may_be_input(value: Any) -> bool:
    """Whether a tensor can lie in the memory of a value: an array of numpy's, of no subclass, whose dtype and strides
    torch has and whose elements do not overlap; or a number of numpy's."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)) or value.dtype.kind not in _KINDS:
        return False
    if isinstance(value, numpy.generic):
        return _as_tensor(value) is not None
    return (
        type(value) is numpy.ndarray and not (value.size and _overlaps_itself(value)) and _as_tensor(value) is not None
    )


def must_be_input(value: Any) -> bool:
    """Whether a value is an input from the first capture on: a list of numbers that is one leaf, or an array whose
    content is no guard because to compare it would take too long."""
    return type(value) is NumberList or (may_be_input(value) and value.nbytes > LARGEST_BYTES)


def kind_of(value: Any) -> tuple[Any, ...]:
    """What must stay the same from call to call, besides what holds for the tensor: the type, and whether the step may
    write to the array."""
    if type(value) is NumberList:
        return NumberList, value.kind, len(value.sizes)
    flags = getattr(value, "flags", None)
    return type(value), getattr(flags, "writeable", None)


def tensors_of(values: Iterable[Any]) -> list[torch.Tensor]:
    """A tensor in the memory of each array, the same one for an array that occurs twice.

    Raises:
        TypeError, ValueError: a value is no array that torch can share memory with.
    """
    made: dict[int, torch.Tensor] = {}
    found = []
    for value in values:
        if id(value) not in made:
            made[id(value)] = value.tensor() if type(value) is NumberList else torch.from_numpy(_array(value))
        found.append(made[id(value)])
    return found


@functools.cache
def _expect_unwritable_arrays() -> None:
    """Have torch give its one warning of arrays that cannot be written to, so that no later call gives it: what a step
    writes to one is an error, as in eager."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(sys.modules["numpy"].frombuffer(bytes(1), "uint8"))


def _array(value: Any) -> Any:
    numpy = sys.modules["numpy"]
    return numpy.array(value) if isinstance(value, numpy.generic) else value


def _as_tensor(value: Any) -> torch.Tensor | None:
    if not value.flags.writeable:
        _expect_unwritable_arrays()
    try:
        return tensors_of([value])[0]
    except (TypeError, ValueError):
        return None


def _overlaps_itself(array: Any) -> bool:
    """Whether two elements may lie in the same memory, as in a broadcast array or in sliding windows."""
    reached = array.itemsize
    for stride, size in sorted((abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1):
        if stride < reached:
            return True
        reached += stride * (size - 1)
    return False
