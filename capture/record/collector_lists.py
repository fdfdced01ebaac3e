"""Lists of the objects that Python's garbage collector knows, which do no harm to other threads.

``gc.get_objects()`` also returns tuples that another thread is filling. CPython resizes such a tuple in place and
demands that nobody else refers to it: ``tuple(generator)`` raises a SystemError while a list holds the tuple. So no
list of all objects may exist while another thread runs. The functions here select in one expression of iterators in C,
in which the interpreter cannot switch threads. What they return is no tuple; tuples are described by their ids.

An expression that needs the objects twice asks the collector twice. New objects are appended to the youngest
generation, so the second list begins like the first one, and ``compress`` and ``zip`` stop with the first. That holds
while the collector is paused (``garbage_collection_paused``), which also keeps finalizers, which are Python, from
running. Every list is read to its end: it holds the iterators too, so a list that one of them still held would never
be freed.
"""

from __future__ import annotations

import gc
import operator
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, compress
from typing import Any, TypeVar

_T = TypeVar("_T")
_TUPLE = id(tuple)


class CollectorList:
    """The objects that the collector lists at the time of each call.

    Args:
        generations: which of the collector's generations.
    """

    def __init__(self, generations: Iterable[int] = range(3)) -> None:
        self._generations = list(generations)

    def ids(self) -> set[int]:
        """The ids of all objects."""
        return {each for at in self._generations for each in list(map(id, _listed(at)))}

    def of_types(self, types: Iterable[type]) -> list[Any]:
        """The objects whose type is one of ``types``; no tuples."""
        wanted = set(map(id, types)) - {_TUPLE}
        found = [list(compress(_listed(at), map(wanted.__contains__, _types(at)))) for at in self._generations]
        return list(chain.from_iterable(found))

    def except_types(self, types: Iterable[type] = ()) -> list[Any]:
        """The objects whose type is none of ``types``; no tuples."""
        left_out = {_TUPLE, *map(id, types)}
        kept = lambda at: map(operator.not_, map(left_out.__contains__, _types(at)))
        return list(chain.from_iterable([list(compress(_listed(at), kept(at))) for at in self._generations]))

    def tuples(self) -> dict[int, list[int]]:
        """For the id of each tuple, the ids of what it refers to."""
        opened = lambda at: _at_once(map(gc.get_referents, _tuples(at)))
        found = [list(zip(map(id, _tuples(at)), opened(at), strict=False)) for at in self._generations]
        return {each: list(map(id, referents)) for part in found for each, referents in part}

    def tuples_with(self, ids: Collection[int]) -> list[tuple[Any, ...]]:
        """The tuples of these ids, which must be ones that no other thread can be filling."""
        asked = lambda at: _at_once(map(ids.__contains__, map(id, _tuples(at))))
        return list(chain.from_iterable([list(compress(_tuples(at), asked(at))) for at in self._generations]))


def _listed(generation: int) -> Iterator[Any]:
    """The objects of a generation: the list is made when the iterator is asked first."""
    return chain.from_iterable(map(gc.get_objects, (generation,)))


def _types(generation: int) -> Iterator[int]:
    """The id of the type of each object of a generation."""
    return _at_once(map(id, map(type, _listed(generation))))


def _tuples(generation: int) -> Iterator[tuple[Any, ...]]:
    return compress(_listed(generation), map(_TUPLE.__eq__, _types(generation)))


def _at_once(values: Iterator[_T]) -> Iterator[_T]:
    """An iterator that reads ``values`` to their end when it is asked first."""
    return chain.from_iterable(map(list, (values,)))
