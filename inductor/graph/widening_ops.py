"""Reduce-scatters that sum in a wider dtype than they send: operations of weft's own.

    weft_c10d::reduce_scatter_tensor(Tensor input, str reduce_op, int group_size, str group_name, ScalarType dtype)
    weft_c10d::reduce_scatter_tensor_coalesced(Tensor[] inputs, ..., ScalarType dtype) -> Tensor[]

They mean ``_c10d_functional``'s operations of these names on inputs cast to ``dtype``, which is the dtype of the
results. They are waited for like those. Called as they are, they cast first and send the wide values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_c10d = torch.ops._c10d_functional
_library = torch.library.Library("weft_c10d", "FRAGMENT")
_SIGNATURE = "str reduce_op, int group_size, str group_name, ScalarType dtype"
_library.define(f"reduce_scatter_tensor(Tensor input, {_SIGNATURE}) -> Tensor")
_library.define(f"reduce_scatter_tensor_coalesced(Tensor[] inputs, {_SIGNATURE}) -> Tensor[]")


@torch.library.impl(_library, "reduce_scatter_tensor", "CompositeExplicitAutograd")
def _reduce(input: torch.Tensor, reduce_op: str, group_size: int, group_name: str, dtype: torch.dtype) -> torch.Tensor:
    return _c10d.reduce_scatter_tensor.default(input.to(dtype), reduce_op, group_size, group_name)


@torch.library.impl(_library, "reduce_scatter_tensor_coalesced", "CompositeExplicitAutograd")
def _reduce_all(
    inputs: Sequence[torch.Tensor], reduce_op: str, group_size: int, group_name: str, dtype: torch.dtype
) -> list[torch.Tensor]:
    wide = [input.to(dtype) for input in inputs]
    return _c10d.reduce_scatter_tensor_coalesced.default(wide, reduce_op, group_size, group_name)


@torch.library.register_fake("weft_c10d::reduce_scatter_tensor", lib=_library)
def _reduced_like(
    input: torch.Tensor, reduce_op: str, group_size: int, group_name: str, dtype: torch.dtype
) -> torch.Tensor:
    return input.new_empty((input.shape[0] // group_size, *input.shape[1:]), dtype=dtype)


@torch.library.register_fake("weft_c10d::reduce_scatter_tensor_coalesced", lib=_library)
def _all_reduced_like(
    inputs: Sequence[torch.Tensor], reduce_op: str, group_size: int, group_name: str, dtype: torch.dtype
) -> list[torch.Tensor]:
    return [_reduced_like(input, reduce_op, group_size, group_name, dtype) for input in inputs]
