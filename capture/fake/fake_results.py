"""A cache of the results of operations on fake tensors, by the layouts of their operands.

The layers of a network call the same operations on the same layouts. Torch has a cache of fake results too, but a hit
takes 0.15 ms. A hit takes a quarter of that here, which halves the time of a capture. Operations with symbolic sizes,
and those whose results depend on data, are not cached.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from weft import torch_adapter
from weft.capture.fake.fake_rules import fake_result
from weft.capture.node_kinds import COLLECTIVE_NAMESPACES
from weft.torch_adapter import OpOverload

_PLAIN = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
# The results of collectives, and of operations on shards, depend on layouts and on the named group, which is fixed.
_NAMESPACES = frozenset({"aten", "weft", *COLLECTIVE_NAMESPACES})
# Tags of operations whose results depend on more than layouts.
_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_LIFTS = {torch.ops.aten.lift.default, torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default}


class _ResultLayout(NamedTuple):
    """Layout of one result. ``source``: number of the operand that it is a view of, -1 for new memory."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    source: int


class _Uncacheable(Exception):
    """An operand or a result that its layout does not determine."""


class FakeResultCache:
    """Runs operations on the fake tensors of one mode. Every call returns new tensors.

    Valid as long as the process groups do not change, because results of collectives depend on their sizes.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        # The id of an operation stands for it in a key: torch computes its hash in Python. The value holds it.
        self._met: dict[int, tuple[OpOverload, bool]] = {}  # whether the results depend on layouts alone
        self._known: dict[Any, tuple[OpOverload, type | None, list[_ResultLayout]]] = {}

    def __call__(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not op.is_view or type(args[0]) is not FakeTensor:
            return self._result(op, args, kwargs)
        with torch_adapter.inference_mode_of(args[0]):
            return self._result(op, args, kwargs)

    def _result(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        depends = self._met.get(id(op))
        if depends is None:
            depends = self._met[id(op)] = op, _depends_on_layouts(op)
        if not depends[1]:
            return fake_result(op, args, kwargs)
        tensors: list[torch.Tensor] = []
        try:
            named = [(name, _described(value, tensors)) for name, value in kwargs.items()] if kwargs else ()
            key = id(op), _described(args, tensors), *named, torch.get_default_dtype()
        except _Uncacheable:
            return fake_result(op, args, kwargs)
        known = self._known.get(key)
        if known is not None:
            return self._new_results(*known[1:], tensors)
        out = fake_result(op, args, kwargs)
        try:
            many = isinstance(out, (list, tuple))
            sources: dict[int, int] = {}
            for at, tensor in enumerate(tensors):
                sources.setdefault(torch_adapter.storage_key(tensor), at)
            operands = set(map(id, tensors))
            layouts = [_layout(item, operands, sources) for item in (out if many else [out])]
            self._known[key] = op, type(out) if many else None, layouts
        except _Uncacheable:
            pass
        return out

    def _new_results(self, many: type | None, layouts: list[_ResultLayout], tensors: list[torch.Tensor]) -> Any:
        results = []
        for sizes, strides, offset, dtype, device, source in layouts:
            storage = None if source < 0 else tensors[source].untyped_storage()
            results.append(torch_adapter.new_fake(self._mode, device, dtype, sizes, strides, offset, storage))
        return results[0] if many is None else many(results)


def _depends_on_layouts(op: OpOverload) -> bool:
    return op.namespace in _NAMESPACES and not op._schema.is_mutable and op not in _LIFTS and _DATA.isdisjoint(op.tags)


def _described(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The key of an operand: the properties that decide layouts of results. Appends its tensors to ``tensors``."""
    kind = type(value)
    if kind is FakeTensor:
        if value._has_symbolic_sizes_strides or value.constant is not None or value.layout is not torch.strided:
            raise _Uncacheable
        tensors.append(value)
        marks = value.is_conj(), value.is_neg(), value.storage_offset()
        return value.shape, value.stride(), value.dtype, value.fake_device, marks
    if kind in _PLAIN:
        return kind, value
    if kind in (list, tuple):
        return kind, *[_described(item, tensors) for item in value]
    raise _Uncacheable


def _layout(out: Any, operands: set[int], sources: dict[int, int]) -> _ResultLayout:
    """The layout of a result. Raises _Uncacheable where a new tensor of this layout would not be the same.

    Args:
        operands: their ids.
        sources: their numbers, by their storages.
    """
    if type(out) is not FakeTensor or out._has_symbolic_sizes_strides or out.constant is not None:
        raise _Uncacheable
    if out.layout is not torch.strided or out.is_conj() or out.is_neg() or id(out) in operands:
        raise _Uncacheable
    sizes, strides, offset = tuple(out.shape), tuple(out.stride()), int(out.storage_offset())
    source = sources.get(torch_adapter.storage_key(out), -1)
    if source < 0:
        last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        elements = 0 if 0 in sizes else last + 1
        if offset != 0 or out.untyped_storage().nbytes() != elements * out.element_size():
            raise _Uncacheable
    return _ResultLayout(sizes, strides, offset, out.dtype, out.fake_device, source)
