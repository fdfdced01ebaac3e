"""Values that are cheaper to compute again than to fetch are computed where they are read.

A pointwise nest goes into its readers when nobody else needs its buffer and no point is computed twice, or when it
costs no more memory traffic than reading its result would (a constant, a cast up, a position). It stays where it is if
little is made of much, and much would have to be kept for the reader: a row's logit at its label, of logits that are
done with. What is left in memory afterwards is what several kernels share, and what calls of ATen kernels read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from weft.inductor.axes import Place, magnitude, merge, move_values, pieces, solve, squeeze, substitute
from weft.inductor.ir import Call, Index, Load, Nest, Reduce, Store, Value, map_values, rewrite
from weft.inductor.lifetimes import Lifetimes
from weft.inductor.lower import Loop, Lowered
from weft.inductor.lowering.registry import convert, literal
from weft.inductor.ops import OPS

_CHEAP = 24  # instructions a value may cost to be computed in several places
_NOTHING = 3  # instructions a value may cost to be computed again and again for the same point
_MOST_MASKED = 4  # positions a masked load may stand at for each one that its mask lets through
_LONGEST = 256  # values a nest may grow to: registers are finite
_MOST_READS = 24


class _Producer(NamedTuple):
    loop: Loop
    nest: Nest
    store: Store
    cost: int


def inline(lowered: Lowered) -> Lowered:
    """Move pointwise nests into the nests that read them, and drop the ones that nobody reads any more."""
    writers: dict[str, int] = {}
    readers: dict[str, int] = {}
    for operation in lowered.operations:
        for name in operation.writes:
            writers[name] = writers.get(name, 0) + 1
        for name in operation.reads:
            readers[name] = readers.get(name, 0) + 1
    producers: dict[str, _Producer] = {}
    lives = Lifetimes(lowered)
    operations = []
    for at, operation in enumerate(lowered.operations):
        if isinstance(operation, Loop):
            operation = replace(operation, nest=merge(squeeze(operation.nest)))
            operation = _take_in(operation, at, producers, lowered, readers, lives)
            producer = _producer(operation, writers)
            if producer is not None:
                producers[producer.store.buffer] = producer
        operations.append(operation)
    return replace(lowered, operations=_without_unread(operations, lives.kept))


def _without_unread(operations: list, kept: frozenset[str]) -> list:
    alive = []
    read = set(kept)
    for operation in reversed(operations):
        if isinstance(operation, Loop) and operation.writes.isdisjoint(read):
            continue
        read |= operation.reads
        alive.append(operation)
    return alive[::-1]


def _producer(loop: Loop, writers: dict[str, int]) -> _Producer | None:
    """The nest as one that readers may compute again, None where they may not."""
    nest = loop.nest
    if len(nest.stores) != 1:
        return None
    store = nest.stores[0]
    if store.mode != "set" or store.mask is not None or store.index.picks or writers[store.buffer] != 1:
        return None
    values = nest.values()
    if any(isinstance(value, Reduce) for value in values):
        return None
    cost = sum(OPS[value.op].cost for value in values if isinstance(value, Call))
    return _Producer(loop, nest, store, cost)


def _take_in(
    loop: Loop,
    at: int,
    producers: dict[str, _Producer],
    lowered: Lowered,
    readers: dict[str, int],
    lives: Lifetimes,
) -> Loop:
    """The nest of operation number ``at`` with what it reads computed in place, where that pays."""
    nest, inlined = loop.nest, list(loop.inlined)
    for name in list(dict.fromkeys(load.buffer for load in nest.reads)):
        producer = producers.get(name)
        if producer is None or lives.too_long(producer.loop.reads, (name,), at):
            continue
        alone = readers[name] == 1 and name not in lives.kept
        if not (_free(producer, nest, name, lowered) or (alone and _once(producer, nest, name))):
            continue
        taken = _substituted(nest, name, producer, lowered.buffers[name].dtype)
        if taken is not None and len(taken.values()) <= _LONGEST and len(taken.reads) <= _MOST_READS:
            nest = taken
            lives.read(producer.loop.reads, at)
            inlined += (*producer.loop.inlined, producer.loop.node)
            for buffer in {load.buffer for load in producer.nest.reads}:
                readers[buffer] = readers.get(buffer, 0) + (0 if alone else 1)
    return replace(loop, nest=nest, inlined=tuple(dict.fromkeys(inlined)))


def _free(producer: _Producer, nest: Nest, name: str, lowered: Lowered) -> bool:
    """Whether computing the value reads no more bytes than it has, and costs next to nothing at all points that read
    it."""
    if producer.cost > (_CHEAP if _once(producer, nest, name) else _NOTHING):
        return False
    whole = frozenset(range(len(producer.nest.sizes)))
    read = sum(
        lowered.buffers[load.buffer].dtype.itemsize if load.buffer in lowered.buffers else 8
        for load in producer.nest.reads
        if load.axes == whole and whole
    )
    gathers = any(load.index.picks for load in producer.nest.reads)
    return read <= lowered.buffers[producer.store.buffer].dtype.itemsize and not gathers


def _once(producer: _Producer, nest: Nest, name: str) -> bool:
    """Whether the reader computes no point of the producer more than once or so.

    A part of a concatenation is read under a mask: elsewhere it costs instructions, but no memory is read.
    """
    loads = [load for load in nest.reads if load.buffer == name]
    cheap = producer.cost <= _CHEAP
    if len(loads) > 1 and not cheap:
        return False
    points = _points(producer.nest.sizes)
    most = [points * (_MOST_MASKED if cheap and load.mask is not None else 1) for load in loads]
    walked = [_points([nest.sizes[axis] for axis in _walked(nest, load)]) for load in loads]
    return all(here <= limit for here, limit in zip(walked, most, strict=True))


def _walked(nest: Nest, load: Load) -> frozenset[int]:
    """The axes along which a load is computed: those of its index, as long as it can be hoisted out of the others.

    Code generation computes a value once for all points along which it does not change only in row kernels; elsewhere
    it is computed at every point.
    """
    return load.axes if nest.reduces else frozenset(range(len(nest.sizes)))


def _points(sizes: list | tuple) -> float:
    total = 1.0
    for size in sizes:
        total *= magnitude(size)
    return total


def _substituted(nest: Nest, name: str, producer: _Producer, dtype: torch.dtype) -> Nest | None:
    """``nest`` with every load of ``name`` replaced by the producer's value there; None where one cannot be."""
    while True:
        load = next((load for load in nest.reads if load.buffer == name), None)
        if load is None:
            return nest
        constant = not producer.store.value.axes
        if constant:
            value = convert(producer.store.value, dtype)
            nest = _replaced(nest, load, value if load.mask is None else _masked(value, load.mask, load.other))
            continue
        found = solve(producer.store.index, producer.nest.sizes, load.index, nest.sizes, load.mask)
        if found is None:
            return None
        split = pieces(found.factors, nest.sizes)
        stores = nest.stores
        if any(len(place.terms) != 1 for place in split.values()) or list(split) != [
            place.terms[0][0] for place in split.values()
        ]:
            new = move_values([value for store in stores for value in store.values()], split)
            moved = new[load]
            assert isinstance(moved, Load)
            stores = tuple(map_values(store, new, substitute(store.index, split)) for store in stores)
            load = moved
        nest = Nest(tuple(found.sizes), stores)
        places = found.places | {
            axis: Place((), 0, (_whole(load.index.picks[number][0]),)) for axis, number in found.picked.items()
        }
        value = move_values([producer.store.value], places)[producer.store.value]
        if load.mask is not None:
            value = _masked(value, load.mask, load.other)
        nest = _replaced(nest, load, convert(value, dtype))


def _whole(value: Value) -> Value:
    """A picked position in the type of positions."""
    return convert(value, torch.int64)


def _masked(value: Value, mask: Value, other: float) -> Value:
    """``value`` where ``mask`` holds, reading nothing elsewhere."""

    def guard(part: Value) -> Value:
        if not isinstance(part, Load):
            return part
        both = mask if part.mask is None else Call("and", (mask, part.mask), torch.bool)
        return Load(part.buffer, part.index, part.dtype, both, part.other)

    guarded = rewrite([value], guard)[value]
    return Call("where", (mask, guarded, literal(other, value.dtype)), value.dtype)


def _replaced(nest: Nest, load: Load, value: Value) -> Nest:
    new = rewrite([root for store in nest.stores for root in store.values()], lambda old: value if old is load else old)
    stores = [map_values(store, new, Index(store.index.strides, store.index.offset)) for store in nest.stores]
    return Nest(nest.sizes, tuple(stores))
