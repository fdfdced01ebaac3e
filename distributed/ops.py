"""The three operations of weft that a captured step may hold besides ATen's and the functional collectives.

A parameter of `size` rows over `parts` ranks lives in shards of ceil(size / parts) rows; the last ranks may
hold fewer or none. Collectives want equal parts, so shards are padded before and cut after. Each is one
operation, whether the size divides or not and however many ranks there are: a graph has as many nodes on
4,096 ranks as on 8. Their arguments are the same on every rank; what differs, the length of this rank's
shard, is found inside from the rank in the group.

    weft::pad_shard(Tensor shard, int size, int parts, ScalarType dtype) -> Tensor
        (m, ...) with m <= rows to (rows, ...) in dtype, rows = ceil(size / parts), zeros behind. With parts=1
        a whole tensor is padded to `size` rows.
    weft::unpad_shard(Tensor padded, int size, str group_name, ScalarType dtype) -> Tensor
        (rows, ...) to this rank's part of it in dtype.
    weft::take_shard(Tensor whole, int parts, str group_name) -> Tensor
        (size, ...) to this rank's padded shard (rows, ...) of it.

All return new memory, never an alias: functionalization does not know custom operations that may alias.
"""

from __future__ import annotations

import torch

import weft.gloo  # noqa: F401 - all-gathers on the CPU that may be in flight together
from weft import torch_adapter

_library = torch.library.Library("weft", "FRAGMENT")
_library.define("pad_shard(Tensor shard, int size, int parts, ScalarType dtype) -> Tensor")
_library.define("unpad_shard(Tensor padded, int size, str group_name, ScalarType dtype) -> Tensor")
_library.define("take_shard(Tensor whole, int parts, str group_name) -> Tensor")


def shard_rows(size: int, parts: int) -> int:
    """Rows in every padded shard of a dimension of `size` over `parts` ranks."""
    return -(-size // parts)


def shard_length(size: int, parts: int, rank: int) -> int:
    """Rows of `size` that rank `rank` of `parts` holds, the rule of torch.chunk and of DTensor's Shard."""
    rows = shard_rows(size, parts)
    return min(max(size - rank * rows, 0), rows)


def pad_shard(shard: torch.Tensor, size: int, parts: int, dtype: torch.dtype) -> torch.Tensor:
    """`weft::pad_shard`: (m, ...) to (ceil(size / parts), ...) in `dtype`, zeros behind; contiguous."""
    return torch.ops.weft.pad_shard.default(shard, size, parts, dtype)


def unpad_shard(padded: torch.Tensor, size: int, group_name: str, dtype: torch.dtype) -> torch.Tensor:
    """`weft::unpad_shard`: what this rank holds of `size` rows over the group, in `dtype`; contiguous."""
    return torch.ops.weft.unpad_shard.default(padded, size, group_name, dtype)


def take_shard(whole: torch.Tensor, parts: int, group_name: str) -> torch.Tensor:
    """`weft::take_shard`: this rank's padded shard of what every rank of the group holds; contiguous."""
    return torch.ops.weft.take_shard.default(whole, parts, group_name)


@torch.library.impl(_library, "pad_shard", "CompositeExplicitAutograd")
def _pad_shard(shard: torch.Tensor, size: int, parts: int, dtype: torch.dtype) -> torch.Tensor:
    padded = _padded_like(shard, size, parts, dtype)
    length = shard.shape[0]
    padded[:length].copy_(shard)
    padded[length:].zero_()
    return padded


@torch.library.register_fake("weft::pad_shard", lib=_library)
def _padded_like(shard: torch.Tensor, size: int, parts: int, dtype: torch.dtype) -> torch.Tensor:
    return shard.new_empty((shard_rows(size, parts), *shard.shape[1:]), dtype=dtype)


@torch.library.impl(_library, "unpad_shard", "CompositeExplicitAutograd")
def _unpad_shard(padded: torch.Tensor, size: int, group_name: str, dtype: torch.dtype) -> torch.Tensor:
    length = _own_length(padded, size, group_name)
    return padded[:length].to(dtype, copy=True, memory_format=torch.contiguous_format)


@torch.library.register_fake("weft::unpad_shard", lib=_library)
def _unpadded_like(padded: torch.Tensor, size: int, group_name: str, dtype: torch.dtype) -> torch.Tensor:
    return padded.new_empty((_own_length(padded, size, group_name), *padded.shape[1:]), dtype=dtype)


@torch.library.impl(_library, "take_shard", "CompositeExplicitAutograd")
def _take_shard(whole: torch.Tensor, parts: int, group_name: str) -> torch.Tensor:
    size = whole.shape[0]
    start = min(torch_adapter.group_rank(group_name) * shard_rows(size, parts), size)
    return _pad_shard(whole[start : start + shard_rows(size, parts)], size, parts, whole.dtype)


@torch.library.register_fake("weft::take_shard", lib=_library)
def _taken_like(whole: torch.Tensor, parts: int, group_name: str) -> torch.Tensor:
    return _padded_like(whole, whole.shape[0], parts, whole.dtype)


def _own_length(padded: torch.Tensor, size: int, group_name: str) -> int:
    rows = padded.shape[0]
    return min(max(size - torch_adapter.group_rank(group_name) * rows, 0), rows)
