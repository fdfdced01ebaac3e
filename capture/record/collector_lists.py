"""Lists of the objects that Python's garbage collector knows, which do no harm to other threads.

``gc.get_objects()`` also returns tuples that another thread is filling. CPython resizes such a tuple in place and
demands that nobody else refers to it: ``tuple(generator)`` raises a SystemError while a list holds the tuple. So no
list of all objects may exist while another thread runs. The functions here select within one call of C code, in which
the interpreter cannot switch threads: a pipeline of iterators that asks for the list when it is asked first, and has
dropped it when it ends. What they return is no tuple; tuples are described by their ids.

The pipeline must not run Python. So the collector must be paused (``garbage_collection_paused``), since a collection
may run finalizers, and the list is asked for once, since that runs audit hooks, before it is made. In a process with
audit hooks that are written in Python, :meth:`CollectorList.ids` and those for tuples run them all the same, as ``id``
and ``gc.get_referents`` do. Only a capture that failed or left values behind calls those.
"""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import chain, compress, tee
from typing import Any

_IS_TUPLE = partial(operator.is_, tuple)
# A number for each object, which no other one has while it is alive. Unlike id, it runs no audit hooks.
_IDENTITY = object.__hash__
# What follows the objects in a tee(), which keeps its last block, of 57 objects in CPython, as long as it lives.
_PADDING = (None,) * 200


class CollectorList:
    """The objects that the collector lists at the time of each call.

    Args:
        generations: which of the collector's generations.
    """

    def __init__(self, generations: Iterable[int] = range(3)) -> None:
        self._generations = list(generations)

    def ids(self) -> set[int]:
        """The ids of all objects."""
        return {
            each for at in self._generations for each in list(map(id, chain.from_iterable(map(gc.get_objects, (at,)))))
        }

    def of_types(self, types: Iterable[type]) -> list[Any]:
        """The objects whose type is one of ``types``, which are not ``tuple``."""
        # Of classes as objects: their own hashes and comparisons may be Python code of a metaclass.
        return self._where(frozenset(map(_IDENTITY, types)).__contains__, _IDENTITY)

    def except_tuples(self) -> list[Any]:
        """The objects of all other types."""
        return self._where(partial(operator.is_not, tuple))

    def _where(self, condition: Callable[[Any], bool], of_type: Callable[[type], Any] | None = None) -> list[Any]:
        found: list[Any] = []
        for at in self._generations:
            part = list(chain.from_iterable(_selected(at, condition, of_type)))
            found += part
            part.clear()  # it may have itself
        listed = [each for each in found if each is not None and each is not found]
        found.clear()
        return listed

    def tuples(self) -> dict[int, list[int]]:
        """For the id of each tuple, the ids of what it refers to."""
        found: list[tuple[int, list[Any]]] = []
        for at in self._generations:
            named, opened = _twice(_selected(at, _IS_TUPLE))
            described = map(zip, map(partial(map, id), named), map(partial(map, gc.get_referents), opened))
            found += list(chain.from_iterable(described))
        return {each: list(map(id, referents)) for each, referents in found if each != id(None)}

    def tuples_with(self, ids: Collection[int]) -> list[tuple[Any, ...]]:
        """The tuples of these ids, which must be ones that no other thread can be filling."""
        found: list[tuple[Any, ...]] = []
        for at in self._generations:
            objects, asked = _twice(_selected(at, _IS_TUPLE))
            wanted = map(partial(map, ids.__contains__), map(partial(map, id), asked))
            found += list(chain.from_iterable(map(compress, objects, wanted)))
        return found


def _selected(
    generation: int, condition: Callable[[Any], bool], of_type: Callable[[type], Any] | None = None
) -> Iterator[Iterator[Any]]:
    """One iterator over the objects of a generation, made when it is asked for: those whose types fulfil a condition,
    or for which ``of_type`` gives what fulfils it."""
    objects, asked = _twice(map(gc.get_objects, (generation,)))
    kinds = map(partial(map, type), asked)
    described = kinds if of_type is None else map(partial(map, of_type), kinds)
    return map(compress, objects, map(partial(map, condition), described))


def _twice(several: Iterator[Iterable[Any]]) -> tuple[Iterator[Iterator[Any]], Iterator[Iterator[Any]]]:
    """Two iterators over what each of several iterables has, and over the padding."""
    ones, others = tee(map(tee, map(chain, several, (_PADDING,))))
    return map(operator.itemgetter(0), ones), map(operator.itemgetter(1), others)
