"""Looks at the memory of tensors, which fake tensors do not have: addresses, storages, copies made in C++.

The answers would be wrong (all fakes have the address 0), or a kernel would read memory that is not there. Torch's own
code may look, where it does so with care; code of the user's and of libraries is refused with its line.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.record.recorder import recording
from weft.capture.user_code import user_line
from weft.errors import MemoryOfTensor
from weft.source_files import is_user_file

_COMPARE = "compare tensors with `is`, or their sizes"
_OUTSIDE = "do it outside the step"
_COPY = "use tensor.detach().clone()"
_WHOLE = "use torch operations on whole tensors"
_OPERATION = "call it in an operation registered by torch.library.custom_op"
# What the function is called in a message, what to do instead, and whether Python code of torch's may call it.
MEMORY_ACCESS: dict[Any, tuple[str, str, bool]] = {
    torch.Tensor.data_ptr: ("data_ptr()", _COMPARE, True),
    torch.Tensor.is_set_to: ("is_set_to()", _COMPARE, True),
    torch.Tensor.untyped_storage: ("untyped_storage()", _OUTSIDE, True),
    torch_adapter.version_getter(): ("_version", _OUTSIDE, True),
    torch.Tensor.storage_type: ("storage_type()", "ask for tensor.dtype", False),
    torch.Tensor.storage: ("storage()", _OUTSIDE, False),
    torch.Tensor.share_memory_: ("share_memory_()", _OUTSIDE, False),
    torch.Tensor.pin_memory: ("pin_memory()", _OUTSIDE, False),
    torch.Tensor.apply_: ("apply_()", _WHOLE, False),
    torch.Tensor.map_: ("map_()", _WHOLE, False),
    torch.Tensor.map2_: ("map2_()", _WHOLE, False),
    torch.Tensor.__dlpack__: ("__dlpack__()", _COPY, False),
    torch.Tensor.__deepcopy__: ("copy.deepcopy()", _COPY, False),
}


def refuse_memory_access(function: Callable[..., Any]) -> None:
    """Called with each torch function, from a function mode, before it runs.

    Raises:
        MemoryOfTensor: it looks at memory, and is not called by torch's own code.
    """
    found = MEMORY_ACCESS.get(function)
    if found is None:
        return
    name, remedy, by_torch = found
    if not by_torch or is_user_file(sys._getframe(2).f_code.co_filename):
        raise MemoryOfTensor(name, user_line(), remedy)


@contextlib.contextmanager
def storages_keep_their_memory() -> Iterator[None]:
    """Inside, a storage is not resized by a thread that captures: the memory belongs to the user's real tensors. Nor
    are these pickled, or given to kernels of ``torch.cuda.jiterator``: torch does both without a call that a function
    mode sees."""
    module, name = torch_adapter.JITERATOR_LAUNCH
    launch_original = getattr(module, name, None)
    resize_original, reduce_original = torch.UntypedStorage.resize_, torch.Tensor.__reduce_ex__

    def resize(storage: Any, *args: Any, **kwargs: Any) -> Any:
        # Torch resizes the storage of a fake without elements to zero bytes.
        by_torch = storage.device.type == "meta" and not is_user_file(sys._getframe(1).f_code.co_filename)
        if recording() is not None and not by_torch:
            raise MemoryOfTensor("resize_() of a storage", user_line(), _OUTSIDE)
        return resize_original(storage, *args, **kwargs)

    def reduce(tensor: torch.Tensor, protocol: Any) -> Any:
        if recording() is not None:
            raise MemoryOfTensor("pickle or torch.save", user_line(), _OUTSIDE)
        return reduce_original(tensor, protocol)

    def launch(*args: Any) -> Any:
        if recording() is not None:
            raise MemoryOfTensor("a kernel of torch.cuda.jiterator", user_line(), _OPERATION)
        return launch_original(*args)  # type: ignore[misc]

    if launch_original is not None:
        setattr(module, name, launch)
    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
    torch.Tensor.__reduce_ex__ = reduce  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del torch.UntypedStorage.resize_
        torch.Tensor.__reduce_ex__ = reduce_original  # type: ignore[method-assign]
        if launch_original is not None:
            setattr(module, name, launch_original)
