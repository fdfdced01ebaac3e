"""Fast readers of many places and container entries at once.

A step of a large model depends on thousands of entries of Python state. They are read before every call, while a GPU
may be idle. Here each entry costs one look-up in C (``map`` over ``dict.get``), and no call of a Python function.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, islice, pairwise, repeat
from operator import attrgetter, getitem, is_
from types import CellType, FunctionType, MappingProxyType
from typing import Any

import torch

from weft import state_checks
from weft.capture.state.containers import (
    MISSING,
    SPARSE_PARTS,
    Attributes,
    Container,
    Content,
    StatePlace,
    part_of,
    without_overrides,
)
from weft.capture.state.type_facts import OF_FUNCTIONS


class PlaceReader:
    """Reads many places at once, each as :meth:`StatePlace.get` does.

    Attributes:
        places: these.
    """

    def __init__(self, places: Sequence[StatePlace]) -> None:
        self.places = list(places)
        in_dicts = [
            type(place.container) is Container and isinstance(place.container.obj, dict) and not place.items
            for place in places
        ]
        self._dicts = [place.container.obj if found else {} for place, found in zip(places, in_dicts, strict=True)]
        self._keys = [place.key for place in places]
        in_lists = [
            type(place.container) is Container and type(place.container.obj) is list and not place.items
            for place in places
        ]
        self._in_lists = [(at, place) for at, place in enumerate(places) if in_lists[at]]
        # Those of the arguments are another list at every call, so that no list is kept here.
        self._list_containers = [place.container for _, place in self._in_lists]
        self._positions = [place.key for _, place in self._in_lists]
        # Gradients, whose container is a tensor and no dictionary; those of arguments are another tensor's each time.
        # Items of tuples take more than one look-up.
        self._elsewhere = [(at, place) for at, place in enumerate(places) if not in_dicts[at] and not in_lists[at]]
        inner = [(at, name) for at, place in enumerate(places) for name in place.inner]
        self._inner = [each for each in inner if each[1] not in SPARSE_PARTS]  # of DTensors: as many as parameters
        self._parts = [each for each in inner if each[1] in SPARSE_PARTS]
        self._only = "other" if inner else "lists" if all(in_lists) else "dictionaries" if all(in_dicts) else "other"

    def read(self) -> list[Any]:
        """The values, aligned with the places; MISSING where there is none."""
        if self._only == "lists":
            return self._read_lists()
        if self._only == "dictionaries":
            return list(map(dict.get, self._dicts, self._keys, repeat(MISSING)))
        values = list(map(dict.get, self._dicts, self._keys, repeat(MISSING)))
        for (at, _), value in zip(self._in_lists, self._read_lists(), strict=True):
            values[at] = value
        for at, place in self._elsewhere:
            values[at] = place.outer()
        for at, name in self._inner:
            values[at] = getattr(values[at], name, MISSING)
        for at, name in self._parts:
            values[at] = part_of(values[at], name)
        return values

    def _read_lists(self) -> list[Any]:
        try:
            return list(map(getitem, map(_object_of, self._list_containers), self._positions))
        except IndexError:  # a list is shorter than it was
            return [place.outer() for _, place in self._in_lists]


_object_of = attrgetter("obj")


class EntryReader:
    """Reads all entries of many containers at once, which are no dictionaries. The object of each container must stay
    the same.

    Attributes:
        containers: the containers in the order in which their entries are read.
        whole: the lists and deques of which all entries are guarded.
    """

    def __init__(self, containers: Sequence[Container]) -> None:
        plain = [each for each in containers if not isinstance(each, (Attributes, Content))]
        sequences = [each for each in plain if isinstance(each.obj, (list, deque))]
        leaves = [each for each in plain if isinstance(each.obj, torch.Tensor) and list(each.guarded()) == ["grad"]]
        known = {id(each) for each in (*sequences, *leaves)}
        others = [each for each in plain if id(each) not in known]
        attributes = [each for each in containers if isinstance(each, Attributes)]
        objects = [*others, *(each for each in attributes if not isinstance(each.obj, type))]
        slotted = [each for each in objects if _is_in_slots(each)]
        objects = [each for each in objects if not _is_in_slots(each)]
        classes = [each for each in attributes if isinstance(each.obj, type)]
        contents = [each for each in containers if isinstance(each, Content)]
        whole = [each for each in sequences if _is_whole(each)]
        parts = [each for each in sequences if not _is_whole(each)]
        self.containers = [*whole, *slotted, *parts, *objects, *classes, *contents, *leaves]
        self.whole = [without_overrides(each.obj) for each in whole]
        self._counts = [len(each.before) for each in whole]
        self._slots = [(each.obj, _attribute(each, key)) for each in slotted for key in each.guarded()]
        list_parts = list(map(without_overrides, _objects(parts))), [key for each in parts for key in each.guarded()]
        holders = _objects(objects)
        names = [_attribute(each, key) for each in objects for key in each.guarded()]
        own = [vars(each.obj) for each in classes for _ in each.guarded()]
        own_names = [key for each in classes for key in each.guarded()]
        readers = (
            (parts, partial(map, getitem, *list_parts)),
            (objects, lambda: map(getattr, holders, names, repeat(MISSING))),
            (classes, lambda: map(MappingProxyType.get, own, own_names, repeat(MISSING))),
            (contents, lambda: (each.read(each.obj) for each in contents)),
        )
        self._other_readers: list[Callable[[], Iterable[Any]]] = [read for found, read in readers if found]
        self._leaves = [each.obj for each in leaves]
        self._no_gradients: Callable[[], bool] | None = None
        self._compared: Sequence[Any] | None = None
        self._expects_none = False
        self._same_lists: Callable[[], bool] = lambda: False
        self._same_slots: Callable[[], bool] = lambda: False
        self._others: Sequence[Any] = ()  # what is expected of all that is in no list and no gradient

    def read(self) -> list[Any]:
        """The values of all entries that are guarded, now; MISSING where there is no such attribute.

        Raises:
            IndexError: a list is shorter than it was.
            ValueError: a variable that a function closes over has no value any more.
        """
        return list(self._values())

    def all_are(self, expected: Sequence[Any]) -> bool:
        """Whether :meth:`read` would give these very objects; as many as there are entries. A list or deque of which
        all entries are guarded must have kept its length."""
        if expected is not self._compared:
            self._compare_with(expected)
        if not self._same_lists() or not self._same_slots():
            return False
        if self._other_readers and not all(map(is_, self._other_values(), self._others)):
            return False
        if self._expects_none and self._no_gradients is not None:
            return self._no_gradients()
        return self._same_gradients(expected)

    def steady(self, expected: Sequence[Any]) -> tuple[list[Callable[[], bool]], Callable[[], bool] | None] | None:
        """Checks of :mod:`weft.state_checks`, and where need be one in Python, that together say what :meth:`all_are`
        says; None before that was asked."""
        if expected is not self._compared:
            return None
        compared, has_gradients = [self._same_lists, self._same_slots], bool(self._leaves)
        if has_gradients and self._expects_none and self._no_gradients is not None:
            compared.append(self._no_gradients)
            has_gradients = False
        if not has_gradients and not self._other_readers:
            return compared, None
        others = self._others

        def rest() -> bool:
            try:
                same = not self._other_readers or all(map(is_, self._other_values(), others))
            except (IndexError, ValueError):
                return False
            return same and (not has_gradients or self._same_gradients(expected))

        return compared, rest

    def _same_gradients(self, expected: Sequence[Any]) -> bool:
        gradients = islice(expected, len(expected) - len(self._leaves), None)
        return all(map(is_, map(_gradient, self._leaves), gradients))

    def _compare_with(self, expected: Sequence[Any]) -> None:
        """Prepare for comparisons with these values."""
        count = len(expected) - len(self._leaves)
        self._compared, self._expects_none = expected, all(gradient is None for gradient in expected[count:])
        if self._no_gradients is None:
            self._no_gradients = state_checks.no_gradients(self._leaves)
        starts = list(accumulate(self._counts, initial=0))
        known = [tuple(expected[start:end]) for start, end in pairwise(starts)]
        self._same_lists = state_checks.same_items(list(zip(self.whole, known, strict=True)))
        slots_end = starts[-1] + len(self._slots)
        slots = zip(self._slots, expected[starts[-1] : slots_end], strict=True)
        self._same_slots = state_checks.same_slots([(obj, name, value) for (obj, name), value in slots])
        self._others = expected[slots_end:count]

    def _values(self) -> Iterator[Any]:
        in_slots = (getattr(obj, name, MISSING) for obj, name in self._slots)
        return chain(chain.from_iterable(self.whole), in_slots, self._other_values(), map(_gradient, self._leaves))

    def _other_values(self) -> Iterator[Any]:
        return chain.from_iterable(read() for read in self._other_readers)


def _objects(containers: Sequence[Container]) -> list[Any]:
    """The object of each entry."""
    return [each.obj for each in containers for _ in each.guarded()]


_gradient = attrgetter("grad")


def _is_in_slots(container: Container) -> bool:
    """Whether the entries are in slots: the contents of a cell, what makes the missing values of a dictionary, or what
    :func:`state_checks.same_slots` knows of functions."""
    if isinstance(container.obj, defaultdict):
        return isinstance(container, Attributes)
    if type(container.obj) is FunctionType:
        return isinstance(container, Attributes) and container.guarded().keys() <= OF_FUNCTIONS
    return type(container.obj) is CellType


def _is_whole(container: Container) -> bool:
    """Whether the guarded entries of a list or deque are all that it had, and their number is guarded."""
    return container.keys is None and list(container.guarded()) == list(range(len(container.before)))


def _attribute(container: Container, key: Any) -> str:
    """The attribute that is the entry ``key`` of an object, of a leaf tensor or of a cell."""
    if isinstance(container, Attributes):
        return key
    return "grad" if isinstance(container.obj, torch.Tensor) else "cell_contents"
