"""Tensors in the memory of numpy arrays and of other buffers (``torch.from_numpy``, ``Tensor.numpy()``).

A compiled call computes what the step computes with tensors first, and then repeats what the step wrote to arrays.
Where a tensor lies in the memory of an array, eager reads through one of them what was written through the other
before. A step that writes to one of them and reads the other is therefore refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft.capture.state.containers import Container, Content
from weft.capture.strided_overlap import span
from weft.errors import UncapturableMutation


def refuse_writes_to_shared_memory(
    containers: Iterable[Container],
    written: Sequence[Container],
    tensors: Iterable[tuple[torch.Tensor, bool]],
    path_of: Callable[[torch.Tensor], str],
) -> None:
    """Raise where the step writes to memory that it knows both as an array and as a tensor.

    Args:
        containers: of the Python state that the step can reach; the contents of arrays are among them.
        written: those that the step changed.
        tensors: the real tensors that the step used, with whether it wrote to them.
        path_of: the path of a tensor, as the user would write it; "constant" where it is at no place.

    Raises:
        UncapturableMutation: names both.
    """
    arrays = [(each, *bounds) for each in containers if type(each) is Content and (bounds := _bounds(each.obj))]
    if not arrays:
        return
    changed = {id(each) for each in written}
    for tensor, is_written in tensors:
        if isinstance(tensor, FakeTensor) or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            continue
        storage = tensor.untyped_storage()
        first, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        for array, begins, ends in arrays:
            if (is_written or id(array) in changed) and first < ends and begins < end:
                names = [_name(path_of(tensor), array.path), array.path]
                write, read = names[::-1] if id(array) in changed else names
                raise UncapturableMutation(
                    f"a write to {write}: {read} is in the same memory, and the step uses it too. A compiled step "
                    "writes to arrays after all that it computes with tensors. Use only the tensor in the step, or "
                    "move what uses the array into a function marked @weft.opaque"
                )


def refuse_writes_to_overlapping(
    tensors: Iterable[tuple[torch.Tensor, bool]], arrays: Iterable[torch.Tensor], path_of: Callable[[torch.Tensor], str]
) -> None:
    """Raise where the step writes to memory that is an input twice: as an array among the arguments, and as another
    array or a tensor. Neither input would see what is written to the other one.

    Args:
        tensors: the real tensors that the step used, with whether it wrote to them.
        arrays: those that lie in the memory of arrays among the arguments.

    Raises:
        UncapturableMutation: names both.
    """
    of_arrays = set(map(id, arrays))
    if not of_arrays:
        return
    used = [(tensor, is_written, extent) for tensor, is_written in tensors if (extent := extent_on_host(tensor))]
    for array, array_is_written, mine in used:
        for other, is_written, theirs in used if id(array) in of_arrays else ():
            if other is not array and (array_is_written or is_written) and meet(mine, theirs):
                write, read = (array, other) if array_is_written else (other, array)
                raise UncapturableMutation(
                    f"a write to {path_of(write)}: {path_of(read)} is in the same memory, and the step uses it too. "
                    "Pass a copy of one of them, or use only one in the step"
                )


def extent_on_host(tensor: Any) -> tuple[int, int] | None:
    """The addresses of the first byte of a tensor on a CPU and of the byte behind its last one; None for any other."""
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor) or tensor.device.type != "cpu":
        return None
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel():
        return None
    return tensor.data_ptr(), tensor.data_ptr() + span(tensor) * tensor.element_size()


def meet(a: tuple[int, int], b: tuple[int, int]) -> bool:
    """Whether two ranges of addresses have a byte in common."""
    return a[0] < b[1] and b[0] < a[1]


def _name(tensor: str, array: str) -> str:
    return f"a tensor made of {array}" if tensor == "constant" else tensor


def _bounds(obj: Any) -> tuple[int, int] | None:
    """The addresses of the first byte of an array or buffer and of the byte behind its last one."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    try:
        array = obj if isinstance(obj, numpy.ndarray) else numpy.frombuffer(obj, numpy.uint8)
    except (TypeError, ValueError, BufferError):  # no buffer, or an empty one
        return None
    if not array.size:
        return None
    steps = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    first = array.__array_interface__["data"][0]
    return first + sum(s for s in steps if s < 0), first + sum(s for s in steps if s > 0) + array.itemsize
