"""Overlap of strided tensors in one storage.

The recorder uses it to decide whether a tensor of the user is a part of another one, so that one input serves both.
Offsets and spans are in elements.
"""

from __future__ import annotations

import itertools
import operator

import torch

from weft import torch_adapter


def offset_within(tensor: torch.Tensor, whole: torch.Tensor) -> int | None:
    """Offset of ``tensor`` inside ``whole``, in elements; None unless all of its elements are elements of ``whole``."""
    if tensor.dtype != whole.dtype:
        return None
    start = int(tensor.storage_offset() - whole.storage_offset())
    if start < 0 or start + span(tensor) > span(whole):
        return None
    return start if _is_dense(whole) or _is_slice(tensor, whole, start) or _has_all(whole, tensor) else None


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether there is no element of the storage between those of the tensor. Symbolic sizes are contiguous ones."""
    return not torch_adapter.surely(tensor.numel() < span(tensor))


def _is_slice(part: torch.Tensor, whole: torch.Tensor, start: int) -> bool:
    """Whether ``part``, which begins ``start`` elements behind ``whole``, is cut from it along its dimensions."""
    if part.stride() != whole.stride():
        return False
    for dim in sorted(range(whole.dim()), key=lambda dim: -whole.stride(dim)):
        at, start = divmod(start, whole.stride(dim)) if whole.stride(dim) else (0, start)
        if at + part.shape[dim] > whole.shape[dim]:
            return False
    return start == 0


def _has_all(whole: torch.Tensor, part: torch.Tensor) -> bool:
    """Whether each element of ``part`` is one of ``whole``; False where that would take long to find out."""
    return max(map(_elements, (part, whole))) <= _ENUMERATED and _places(part) <= _places(whole)


def same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether sizes and strides are known to be equal; strides of dimensions of size 1 do not count."""
    if a.dim() != b.dim() or not all(torch_adapter.surely(m == n) for m, n in zip(a.shape, b.shape, strict=True)):
        return False
    strides = zip(a.stride(), b.stride(), a.shape, strict=True)
    return all(torch_adapter.surely(s == t) or torch_adapter.surely(n == 1) for s, t, n in strides)


def apart(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one storage are disjoint, judged by the bytes of their first and last elements."""
    starts = [t.storage_offset() * t.element_size() for t in (a, b)]
    ends = [start + span(t) * t.element_size() for start, t in zip(starts, (a, b), strict=True)]
    return ends[0] <= starts[1] or ends[1] <= starts[0]


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one storage share an element; True where that would take long to find out."""
    if not (_elements(a) and _elements(b)) or apart(a, b):
        return False
    if max(map(_elements, (a, b))) > _ENUMERATED or a.dtype != b.dtype:
        return True
    return not _places(a).isdisjoint(_places(b))


def any_overlap(tensors: list[torch.Tensor]) -> bool:
    """Whether any two of these tensors of one storage share an element."""
    if len(tensors) < 2:
        return False
    ordered = sorted(filter(_elements, tensors), key=lambda t: int(t.storage_offset()) * t.element_size())
    if all(apart(a, b) for a, b in itertools.pairwise(ordered)):
        return False
    return any(overlap(a, b) for a, b in itertools.combinations(ordered, 2))


def overlapping(tensors: list[torch.Tensor]) -> dict[int, tuple[int, int]]:
    """Which of these tensors may overlap another one, judged by the bytes from their first to their last elements.

    Returns:
        By the number of each such tensor, but for the first of those that lie together: the number of that first one,
        and the distance from its start in bytes.
    """
    in_storage: dict[int, list[int]] = {}
    for at, key in enumerate(map(torch_adapter.storage_key, tensors)):
        in_storage.setdefault(key, []).append(at)
    found: dict[int, tuple[int, int]] = {}
    for members in in_storage.values():
        if len(members) == 1:  # nearly every tensor: nothing else need be known of it
            continue
        extents = [(*_bytes(tensors[at]), at) for at in members]
        groups: list[list[tuple[int, int, int]]] = []
        reached = -1
        for extent in sorted(each for each in extents if each[1] > each[0]):
            if extent[0] >= reached:
                groups.append([])
            groups[-1].append(extent)
            reached = max(reached, extent[1])
        for group in groups:
            first_start, _, first = min(group, key=operator.itemgetter(2))
            found |= {at: (first, start - first_start) for start, _, at in group if at != first}
    return found


def _bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """Where in its storage the elements of a tensor begin and end, in bytes."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + int(span(tensor)) * tensor.element_size()


_ENUMERATED = 1 << 16


def _elements(tensor: torch.Tensor) -> int:
    return int(tensor.numel())


def _places(tensor: torch.Tensor) -> set[int]:
    """The offsets of all elements in the storage."""
    found = {int(tensor.storage_offset())}
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        found = {at + i * int(stride) for at in found for i in range(int(size))}
    return found


def span(tensor: torch.Tensor) -> int:
    """Number of elements of the storage from the first to the last element of ``tensor``."""
    if torch_adapter.surely(tensor.numel() == 0):
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
