"""All-gathers on CPU tensors that may be in flight together.

torch's kernel of `_c10d_functional::all_gather_into_tensor`, and of its coalesced form, hands the work to gloo in a
way that writes over freed memory once two or more are under way: torch 2.11 and 2.13 end, after some ten thousand of
them, with `malloc(): unaligned tcache chunk detected` or a segmentation fault. The `out=` form goes another way and
does not (tests/test_gloo.py does many). So on CPU tensors the two operations are done by that form, for whoever calls
them: the wrappers, a captured step, DTensor. Importing this module sees to it; what they compute is the same.
"""

from __future__ import annotations

import torch

_ops = torch.ops._c10d_functional
_library = torch.library.Library("_c10d_functional", "IMPL")


def _gather(tensor: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    """(n, ...) to (group_size * n, ...), to be waited for."""
    whole = tensor.new_empty((tensor.shape[0] * group_size, *tensor.shape[1:]))
    part, out = tensor.contiguous(), whole
    if tensor.is_complex():
        # The out= form knows no complex numbers. A wait is found by the storage, so `whole` can be waited for.
        part, out = torch.view_as_real(part), torch.view_as_real(whole)
    _ops.all_gather_into_tensor_out.default(part, group_size, group_name, out=out)
    return whole


def _gather_all(tensors: list[torch.Tensor], group_size: int, group_name: str) -> list[torch.Tensor]:
    return [_gather(tensor, group_size, group_name) for tensor in tensors]


_library.impl("all_gather_into_tensor", _gather, "CPU")
_library.impl("all_gather_into_tensor_coalesced", _gather_all, "CPU")
