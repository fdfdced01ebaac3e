"""Results of a recording that share memory with each other or with inputs share it in what a replay returns, too.

A recording's results lie in its own memory, which the next replay overwrites, so callers get copies. Copies one by one
would lose what eager results have in common: a write to one is seen in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from weft import torch_adapter
from weft.inductor.graph.sizes import spanned

# Copied memory begins at a multiple of so many bytes of its storage: at an element, for every dtype.
_ALIGNMENT = 16

Tensor = torch.Tensor


class _Extent(NamedTuple):
    """The bytes from the first to behind the last element of a tensor, within its storage."""

    begin: int
    end: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Extent:
        size = tensor.element_size()
        begin = int(tensor.storage_offset()) * size
        return cls(begin, begin + spanned(tensor.shape, tensor.stride()) * size)

    def overlaps(self, other: _Extent) -> bool:
        return self.begin < other.end and other.begin < self.end

    def contains(self, other: _Extent) -> bool:
        return self.begin <= other.begin and other.end <= self.end and other.begin < other.end


def view_of_input(value: Tensor, inputs: Sequence[Any]) -> Callable[[Sequence[Any]], Tensor] | None:
    """A function from the inputs of a call to the view of one of them that ``value`` is of the recorded ``inputs``;
    None where it is none."""
    extent = _Extent.of(value)
    for at, recorded in enumerate(inputs):
        if not isinstance(recorded, Tensor) or not _same_storage(recorded, value):
            continue
        if (whole := _Extent.of(recorded)).contains(extent):
            from_start = extent.begin - whole.begin
            # A call's input has the layout of the recorded one, wherever it lies.
            return lambda inputs: _over_memory(value, inputs[at], _Extent.of(inputs[at]).begin + from_start)
    return None


class SharedCopies:
    """Results that share memory with others, in groups. Each group is copied as one piece.

    Args:
        results: by position.
    """

    def __init__(self, results: dict[int, Tensor]) -> None:
        self._groups: list[tuple[Tensor, int, dict[int, Tensor]]] = []
        for members in _groups(results):
            begin = min(_Extent.of(value).begin for value in members.values()) // _ALIGNMENT * _ALIGNMENT
            end = max(_Extent.of(value).end for value in members.values())
            any_member = next(iter(members.values()))
            piece = torch.empty(0, dtype=torch.uint8, device=any_member.device)
            piece.set_(any_member.untyped_storage(), begin, torch.Size([end - begin]), (1,))
            self._groups.append((piece, begin, members))
        self.positions = frozenset(at for *_, members in self._groups for at in members)

    def copied(self) -> dict[int, Tensor]:
        """Copies of the results, by position."""
        found = {}
        for piece, begin, members in self._groups:
            copy = piece.clone()
            for at, value in members.items():
                found[at] = _over_memory(value, copy, _Extent.of(value).begin - begin)
        return found


def _groups(results: dict[int, Tensor]) -> list[dict[int, Tensor]]:
    """The results whose extents overlap, directly or through others; those that share with none are left out."""
    groups: list[dict[int, Tensor]] = []
    # In the order of storages and bytes, one that overlaps with any before it overlaps with the group's reach.
    order = sorted(results, key=lambda at: (torch_adapter.storage_key(results[at]), *_Extent.of(results[at])))
    reach = _Extent(0, 0)
    for at in order:
        value = results[at]
        extent = _Extent.of(value)
        last = groups[-1] if groups else {}
        if last and _same_storage(next(iter(last.values())), value) and reach.overlaps(extent):
            last[at] = value
            reach = _Extent(reach.begin, max(reach.end, extent.end))
        else:
            groups.append({at: value})
            reach = extent
    return [members for members in groups if len(members) > 1]


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return torch_adapter.storage_key(a) == torch_adapter.storage_key(b)


def _over_memory(like: Tensor, memory: Tensor, begin: int) -> Tensor:
    """A tensor with the layout and dtype of ``like`` over the storage of ``memory``, from byte ``begin`` of it."""
    made = torch.empty(0, dtype=like.dtype, device=memory.device)
    made.set_(memory.untyped_storage(), begin // like.element_size(), like.shape, like.stride())
    # Bits that say how memory is read are not part of its layout.
    if like.is_conj():
        made = made.conj()
    return torch.ops.aten._neg_view.default(made) if like.is_neg() else made
