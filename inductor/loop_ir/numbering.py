"""Numbered nests: equal loops over different tensors are one object.

The operations of equal layers differ in the names of their tensors alone. In a numbered nest, buffers are called
``b0``, ``b1``, ... in the order of their use, and their names are kept beside it. What lowering, inlining, fusion and
code generation conclude from a numbered nest, they conclude once, however often its layer is repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from weft.inductor.loop_ir.ir import Load, Nest, Store, Value, is_position, rewrite_stores


class Numbered(NamedTuple):
    """A nest over numbered buffers, and the names that ``b0``, ``b1``, ... had."""

    form: Nest
    buffers: tuple[str, ...]


def numbered(nest: Nest) -> Numbered:
    """The nest with its buffers numbered."""
    buffers = buffers_of(nest)
    return Numbered(renamed(nest, dict(zip(buffers, numbers(len(buffers)), strict=True))), tuple(buffers))


def numbers(count: int) -> Sequence[str]:
    """The names of the first ``count`` numbered buffers."""
    return [f"b{number}" for number in range(count)]


def number_of(name: str) -> int:
    """The number of a numbered buffer."""
    return int(name[1:])


def buffers_of(nest: Nest) -> list[str]:
    """The buffers of a nest in the order of their numbers."""
    # Loads first, in the order of evaluation, then stores: the order depends on the nest alone, so equal nests agree
    # on it.
    return list(dict.fromkeys([load.buffer for load in nest.reads if not is_position(load)] + nest.writes))


def renumbered(form: Nest, places: Sequence[int]) -> Nest:
    """A numbered nest beside others: its buffer ``k`` has the number ``places[k]`` there."""
    return renamed(form, {f"b{number}": f"b{place}" for number, place in enumerate(places)})


def renamed(nest: Nest, names: Mapping[str, str]) -> Nest:
    """The nest over buffers of other names; ``names`` has one for each."""
    if all(old == new for old, new in names.items()):
        return nest

    def change(value: Value) -> Value:
        if not isinstance(value, Load) or is_position(value):
            return value
        return Load(names[value.buffer], value.index, value.dtype, value.mask, value.other)

    stores = rewrite_stores(nest.stores, change)
    return Nest(nest.sizes, tuple(Store(names[s.buffer], s.index, s.value, s.mask) for s in stores))
