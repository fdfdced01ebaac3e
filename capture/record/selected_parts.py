"""Integers of an index that each call finds anew: ``x[i]`` with a 0-d tensor ``i``, or with a number that changes.

Torch's indexing in C++ needs a plain number, and would make each value a form of its own. In eager an integer of an
index is a ``select``, whatever else is in the index and before anything else of it: ``x[i]`` is a view. So such
integers are selected first, with symbols for their values, and what is left of the index is applied to that view.

A slice takes symbols, but makes plain numbers of tensors: ``x[start:end]`` with 0-d tensors gets their symbols instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

# Subclasses may give indexing another meaning, and tensors on several ranks take plain numbers.
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
_MASKS = (torch.bool, torch.uint8)


def with_selections(tensor: Any, index: Any) -> tuple[torch.Tensor, tuple[Any, ...]] | None:
    """The view of a tensor by the integers of an index that only a call knows, and the rest of the index.

    None where there is no such integer, and where torch does not say yet which dimensions the entries of the index are
    for: it may be that the index is wrong, which torch says.
    """
    entries = index if type(index) is tuple else (index,)
    if not any(map(_is_found_by_calls, entries)) or type(tensor) not in _PLAIN_TENSORS:
        return None
    dims = _dims(entries, tensor.dim())
    if dims is None:
        return None
    rest, part, gone = [], tensor, 0
    for entry, dim in zip(entries, dims, strict=True):
        if _is_found_by_calls(entry):
            number: Any = entry.item() if isinstance(entry, torch.Tensor) else entry
            part, gone = torch.select(part, dim - gone, number), gone + 1
        else:
            rest.append(entry)
    return part, tuple(rest)


def with_numbers_in_slices(tensor: Any, index: Any) -> Any:
    """An index of a tensor, with the symbolic number of each tensor that is a bound or the step of a slice."""
    if type(tensor) not in _PLAIN_TENSORS:
        return index
    if type(index) is slice:
        bounds = (index.start, index.stop, index.step)
        return slice(*map(number_of, bounds)) if any(map(_is_integer_tensor, bounds)) else index
    if type(index) is not tuple:
        return index
    made = tuple(with_numbers_in_slices(tensor, each) if type(each) is slice else each for each in index)
    return made if any(new is not old for new, old in zip(made, index, strict=True)) else index


def number_of(value: Any) -> Any:
    """The symbolic number of a tensor that is given where torch wants an integer; any other value as it is."""
    return value.item() if _is_integer_tensor(value) else value


def _is_integer_tensor(value: Any) -> bool:
    """Whether torch takes a value for an integer: a tensor of one integer, of any rank. A boolean is a branch."""
    if type(value) not in _PLAIN_TENSORS or value.dtype is torch.bool or not _is_whole(value.dtype):
        return False
    return type(count := value.numel()) is int and count == 1


def _is_found_by_calls(entry: Any) -> bool:
    """Whether an entry is an integer without a plain value. A 0-d tensor of booleans is a mask; so is one of bytes."""
    if type(entry) in _PLAIN_TENSORS:
        return entry.dim() == 0 and entry.dtype not in _MASKS and _is_whole(entry.dtype)
    return type(entry) is torch.SymInt


def _is_whole(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex


def _dims(entries: Sequence[Any], rank: int) -> list[int] | None:
    """The dimension of the tensor that each entry begins at; None where that is not known."""
    widths = [_width(entry) for entry in entries]
    known = [width for width in widths if width is not None]
    open_at = [at for at, entry in enumerate(entries) if entry is Ellipsis]
    if len(known) < len(widths) or len(open_at) > 1 or sum(known) > rank:
        return None
    if open_at:
        known[open_at[0]] = rank - sum(known)
    return [sum(known[:at]) for at in range(len(known))]


def _width(entry: Any) -> int | None:
    """How many dimensions of the tensor an entry of an index is for; 0 for an ellipsis. None where that is not known
    here: of arrays of numpy's, and of lists of lists."""
    if entry is None or entry is Ellipsis or type(entry) is bool:
        return 0
    if type(entry) in (int, slice, range, torch.SymInt):
        return 1
    if type(entry) in _PLAIN_TENSORS:
        return entry.dim() if entry.dtype in _MASKS else 1
    flat = type(entry) in (list, tuple) and all(type(each) in (bool, int) for each in entry)
    return 1 if flat else None
