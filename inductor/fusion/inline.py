"""Inlining: pointwise nests are computed in the nests that read them, where that costs less than memory traffic.

A pointwise nest is inlined if it has one reader and no point is computed twice, or if it needs no more memory traffic
than a read of its result (a constant, an upcast, a position). It stays a nest of its own if inlining would keep a much
larger operand alive until the reader runs: the logits of a row, for the one logit at its label. Buffers that remain are
read by several kernels or by ATen calls.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from weft import knobs
from weft.inductor.fusion.lifetimes import Lifetimes
from weft.inductor.graph.faults import Guard, unguarded
from weft.inductor.loop_ir.axes import (
    AxisExpression,
    size_hint,
    solve_access,
    split_axes,
    squeeze_and_merge,
    substitute,
    substitute_values,
)
from weft.inductor.loop_ir.ir import Call, Load, Nest, Reduce, Store, Value, map_values, rewrite_stores
from weft.inductor.loop_ir.numbering import Numbered, number_of, numbered, numbers, renumbered
from weft.inductor.loop_ir.ops import OPS
from weft.inductor.lowering.lowered_step import Loop, Lowered
from weft.inductor.lowering.registry import convert, masked
from weft.inductor.lowering.verify import verify_lowered

_CHEAP = 24  # instructions of a value that is recomputed in several kernels
_TRIVIAL = 3  # instructions of a value that is recomputed many times for the same point
_MAX_MASKED_RATIO = 4  # loop points of a masked load for each point where its mask holds
_MAX_VALUES = 256  # values of a nest: more do not fit into registers
_MAX_READS = 24  # tensors that a nest reads: each takes registers for its address. A choice.


class _Producer(NamedTuple):
    """A pointwise nest, over numbered buffers, and its one store."""

    nest: Nest
    store: Store
    cost: int


def inline(lowered: Lowered, guard: Guard = unguarded) -> Lowered:
    """Inline pointwise nests into the nests that read them, and drop nests that nobody reads any more.

    Args:
        guard: the context in which each nest is worked on.
    """
    # Operations by buffer, counted: `_Inliner` asks whether a reader is the only one.
    writers: dict[str, int] = {}
    readers: dict[str, int] = {}
    for operation in lowered.operations:
        for name in operation.writes:
            writers[name] = writers.get(name, 0) + 1
        for name in operation.reads:
            readers[name] = readers.get(name, 0) + 1
    inliner = _Inliner(lowered, readers)
    operations = []
    for at, operation in enumerate(lowered.operations):
        if isinstance(operation, Loop):
            with guard(operation.nodes):
                # One form for equal loops first: a producer over [B * S, C] and a reader over [B, S, C] then have the
                # same axes.
                operation = replace(operation, form=inliner.merged(operation.form))
                operation = inliner.with_producers(operation, at)
                # After inlining, so that chains collapse: a producer already holds what it took from its own
                # producers. Each element that a reader may load must have its nest's value: one writer.
                if all(writers[name] == 1 for name in operation.writes):
                    inliner.producers |= dict.fromkeys(operation.writes, operation)
        operations.append(operation)
    # Buffers of dropped nests stay described; nobody refers to them.
    inlined = replace(lowered, operations=_without_dead_loops(operations, inliner.lifetimes.results))
    if knobs.verify_graphs:
        verify_lowered(inlined, inlined.operations, "inlining", guard)
    return inlined


def _without_dead_loops(operations: list, kept: frozenset[str]) -> list:
    alive = []
    read = set(kept)
    for operation in reversed(operations):
        # Backwards, so that a nest whose only reader was dropped is dropped too.
        if isinstance(operation, Loop) and operation.writes.isdisjoint(read):
            continue
        read |= operation.reads
        alive.append(operation)
    return alive[::-1]


class _Inliner:
    """Inlines producers into their readers.

    Attributes:
        producers: the loops that may be inlined, by what they write.
        merged: a nest with neighbouring axes joined, see :func:`~weft.inductor.loop_ir.axes.squeeze_and_merge`.
    """

    def __init__(self, lowered: Lowered, readers: dict[str, int]) -> None:
        self.lifetimes = Lifetimes(lowered)
        self.producers: dict[str, Loop] = {}
        self._lowered, self._readers = lowered, readers
        # Equal layers ask equal questions, see `loop_ir/numbering.py`.
        self.merged = functools.cache(squeeze_and_merge)
        self._producer = functools.cache(_producer)
        self._inlined = functools.cache(_inlined)

    def with_producers(self, loop: Loop, at: int) -> Loop:
        """Operation ``at`` with its operands inlined, where that pays."""
        # The reads as they were: what a producer brings along was not worth inlining into it, so it is not tried again
        # here.
        for name in dict.fromkeys([loop.names[load.buffer] for load in loop.form.reads]):
            producer = self.producers.get(name)
            if producer is None or name not in loop.buffers or self.lifetimes.would_extend(producer.reads, (name,), at):
                continue
            # Only then the producer's nest disappears, with its store and its load.
            alone = self._readers[name] == 1 and name not in self.lifetimes.results
            taken = self._taken(loop, name, producer, alone)
            if taken is not None:
                loop = taken
                # The producer's operands are now read here: their live ranges grow, and later decisions must know.
                self.lifetimes.read(producer.reads, at)
                for buffer in producer.reads:
                    # Where the producer also stays a nest of its own, its operands get one more reader.
                    self._readers[buffer] = self._readers.get(buffer, 0) + (0 if alone else 1)
        return replace(loop, inlined=tuple(dict.fromkeys(loop.inlined)))

    def _taken(self, loop: Loop, name: str, producer: Loop, alone: bool) -> Loop | None:
        """``loop`` with the producer of ``name`` inlined; None where that does not pay or cannot be done."""
        made = self._producer(producer.form)
        if made is None:
            return None
        # Both nests over common numbers: the reader's, then those of what the producer alone reads.
        place = {buffer: number for number, buffer in enumerate(loop.buffers)}
        common = tuple([place.setdefault(buffer, len(place)) for buffer in producer.buffers])
        described = [self._lowered.buffers.get(buffer) for buffer in place]
        dtypes = tuple([None if buffer is None else buffer.dtype for buffer in described])
        found = self._inlined(loop.form, place[name], made, common, dtypes, alone)
        if found is None:
            return None
        names = list(place)
        buffers = tuple([names[number_of(buffer)] for buffer in found.buffers])
        return replace(loop, form=found.form, buffers=buffers, inlined=(*loop.inlined, *producer.nodes))


def _producer(nest: Nest) -> _Producer | None:
    """The nest as one that readers may inline: pointwise, with one store. None for any other."""
    if len(nest.stores) != 1:
        return None
    store = nest.stores[0]
    # Each element that a reader may load must have this nest's value: no mask.
    if store.mask is not None or store.index.indirect:
        return None
    values = nest.values()
    # A reduction in its reader would run again for every element that is read.
    if any(isinstance(value, Reduce) for value in values):
        return None
    return _Producer(nest, store, sum(OPS[value.op].cost for value in values if isinstance(value, Call)))


def _inlined(
    nest: Nest,
    at: int,
    producer: _Producer,
    common: tuple[int, ...],
    dtypes: tuple[torch.dtype | None, ...],
    alone: bool,
) -> Numbered | None:
    """A numbered nest with the producer of its buffer ``at`` inlined; None where that does not pay or cannot be done.

    Args:
        common: the numbers that the buffers of the producer have beside those of the nest.
        dtypes: of the buffers of both, by number; None for one that is not in memory as a tensor.
        alone: whether nobody else reads the producer's buffer.
    """
    name = numbers(len(dtypes))[at]
    cheap = _adds_no_traffic(producer, nest, name, [dtypes[number] for number in common])
    if not (cheap or (alone and _computes_once(producer, nest, name))):
        return None
    moved = renumbered(producer.nest, common)
    dtype = dtypes[at]
    assert dtype is not None, "a nest stores to no tensor"
    taken = _substituted(nest, name, _Producer(moved, moved.stores[0], producer.cost), dtype)
    if taken is None or len(taken.values()) > _MAX_VALUES or len(taken.reads) > _MAX_READS:
        return None
    return numbered(taken)


def _adds_no_traffic(producer: _Producer, nest: Nest, name: str, dtypes: Sequence[torch.dtype | None]) -> bool:
    """Whether inlining reads no more bytes than the value itself has, and takes few instructions. ``dtypes`` are those
    of the producer's buffers."""
    if producer.cost > (_CHEAP if _computes_once(producer, nest, name) else _TRIVIAL):
        return False
    # Operands that change along fewer axes (a bias, a scale) are small and come from the caches.
    whole = frozenset(range(len(producer.nest.sizes)))
    # Bytes for each point of the producer, against the bytes of its result: reading operands instead of the result
    # must not move more.
    itemsizes = [8 if dtype is None else dtype.itemsize for dtype in dtypes]
    read = sum(itemsizes[number_of(load.buffer)] for load in producer.nest.reads if load.axes == whole and whole)
    # A gather moves a whole memory sector for each element.
    gathers = any(load.index.indirect for load in producer.nest.reads)
    return read <= itemsizes[number_of(producer.store.buffer)] and not gathers


def _computes_once(producer: _Producer, nest: Nest, name: str) -> bool:
    """Whether the reader computes no point of the producer more than once.

    A part of a concatenation is read under a mask: where the mask does not hold it costs instructions, but no memory
    traffic, so a few more points are allowed.
    """
    loads = [load for load in nest.reads if load.buffer == name]
    cheap = producer.cost <= _CHEAP
    # Loads at different indices compute the value once each.
    if len(loads) > 1 and not cheap:
        return False
    points = _point_count(producer.nest.sizes)
    most = [points * (_MAX_MASKED_RATIO if cheap and load.mask is not None else 1) for load in loads]
    # Estimates, from hints: a wrong one costs time, not correctness.
    walked = [_point_count([nest.sizes[axis] for axis in _computed_axes(nest, load)]) for load in loads]
    return all(here <= limit for here, limit in zip(walked, most, strict=True))


def _computed_axes(nest: Nest, load: Load) -> frozenset[int]:
    """The axes along which a load is computed: those of its index, as long as it can be hoisted out of the others.

    Code generation computes a value once for all points along which it does not change only in row kernels; elsewhere
    it is computed at every point.
    """
    return load.axes if nest.reduces else frozenset(range(len(nest.sizes)))


def _point_count(sizes: list | tuple) -> float:
    total = 1.0
    for size in sizes:
        total *= size_hint(size)
    return total


def _substituted(nest: Nest, name: str, producer: _Producer, dtype: torch.dtype) -> Nest | None:
    """``nest`` with every load of ``name`` replaced by the producer's value there; None where one cannot be."""
    while True:
        load = next((load for load in nest.reads if load.buffer == name), None)
        if load is None:
            return nest
        # The same at every point: no correspondence of loops is needed, and any index will do.
        constant = not producer.store.value.axes
        if constant:
            value = convert(producer.store.value, dtype)
            nest = _replaced(nest, load, value if load.mask is None else masked(value, load.mask, load.other))
            continue
        found = solve_access(producer.store.index, producer.nest.sizes, load.index, nest.sizes, load.mask)
        # Every load must be replaced, or the producer's buffer would still be needed.
        if found is None:
            return None
        # The reader's loops are split where the producer has two loops for one of them.
        split = split_axes(found.factors, nest.sizes)
        stores = nest.stores
        if any(len(place.terms) != 1 for place in split.values()) or list(split) != [
            place.terms[0][0] for place in split.values()
        ]:
            new = substitute_values([value for store in stores for value in store.values()], split)
            moved = new[load]
            assert isinstance(moved, Load)
            stores = tuple(map_values(store, new, substitute(store.index, split)) for store in stores)
            load = moved
        nest = Nest(tuple(found.sizes), stores)
        # The indices of a gather become positions along the producer's axes.
        terms = load.index.indirect
        gathered = {
            axis: AxisExpression((), 0, (convert(terms[at][0], torch.int64),)) for axis, at in found.gathered.items()
        }
        substitution = found.substitution | gathered
        # Positions included: a producer that draws random numbers or counts sees its own position again.
        value = substitute_values([producer.store.value], substitution)[producer.store.value]
        if load.mask is not None:
            value = masked(value, load.mask, load.other)
        # In the buffer's register type, which the load had.
        nest = _replaced(nest, load, convert(value, dtype))


def _replaced(nest: Nest, load: Load, value: Value) -> Nest:
    return Nest(nest.sizes, tuple(rewrite_stores(nest.stores, lambda old: value if old is load else old)))
