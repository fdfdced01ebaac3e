"""All-gathers on CPU tensors that may be in flight together.

torch's kernel of `_c10d_functional::all_gather_into_tensor`, and of its coalesced form, hands the work to gloo in a
way that writes over freed memory once two or more are under way: torch 2.11 and 2.13 end, after some ten thousand of
them, with `malloc(): unaligned tcache chunk detected` or a segmentation fault. The `out=` form goes another way and
does not (tests/test_gloo.py does many). So on CPU tensors the two operations are done by that form, for whoever calls
them: the wrappers, a captured step, DTensor. Importing this module sees to it; what they compute is the same.

Gloo also knows fewer dtypes than torch: no float8, no 16-bit integers, no unsigned ones of more than 8 bits.
All-gathers and broadcasts move elements and compute nothing, so tensors of these dtypes travel as bytes.
"""

from __future__ import annotations

import torch

import weft.threads_at_exit  # noqa: F401 - registers a handler

_ops = torch.ops._c10d_functional
_library = torch.library.Library("_c10d_functional", "IMPL")
KNOWN_DTYPES = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
    }
)


def _gather(tensor: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    """(n, ...) to (group_size * n, ...), to be waited for."""
    whole = tensor.new_empty((tensor.shape[0] * group_size, *tensor.shape[1:]))
    part, out = _for_gloo(tensor.contiguous()), _for_gloo(whole)  # a wait is found by the storage of `whole`
    _ops.all_gather_into_tensor_out.default(part, group_size, group_name, out=out)
    return whole


def _gather_all(tensors: list[torch.Tensor], group_size: int, group_name: str) -> list[torch.Tensor]:
    return [_gather(tensor, group_size, group_name) for tensor in tensors]


def _broadcast(tensor: torch.Tensor, source: int, group_name: str) -> torch.Tensor:
    """The tensor of rank `source` of the group, to be waited for."""
    received = tensor.clone(memory_format=torch.contiguous_format)
    _ops.broadcast_.default(_for_gloo(received), source, group_name)
    return received


def _for_gloo(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a contiguous tensor in a dtype that gloo knows, with the same rows."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    if tensor.dtype in KNOWN_DTYPES:
        return tensor
    return (tensor if tensor.dim() else tensor.reshape(1)).view(torch.uint8)


_library.impl("all_gather_into_tensor", _gather, "CPU")
_library.impl("all_gather_into_tensor_coalesced", _gather_all, "CPU")
_library.impl("broadcast", _broadcast, "CPU")
