"""Lists and deques to which each call of a step appends, and which it does not read: ``losses.append(loss.item())``.

What is in such a list says nothing about the step, so no guard compares it, and a call may find another list in its
place. That the step does not read it must be seen. While the step is captured, a stand-in is at the place of the list.
It notes what is appended, and gives it back from the end: ``log[-1]["loss"]``. Every other use of it counts as reading,
be it one of its length: the list is then an object like any other, which must be the same at each call.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from weft.capture.record.python_numbers import ChangingState
from weft.capture.state.code_names import takes_entries
from weft.capture.state.containers import GROWING_KINDS, Container, Growing
from weft.source_files import is_own_file

# What a stand-in may be asked without being read.
_SILENT = frozenset(
    {"__class__", "__doc__", "__getattribute__", "__init__", "__init_subclass__", "__new__", "__setattr__"}
    | {"__subclasshook__", "__class_getitem__", "__delattr__", "__dir__", "__hash__"}
)


# Of a stand-in that only this file holds: the variable, the argument of the count, and what stands for its items.
_OWN_REFERENCES = 3


class ListsGrew(Exception):
    """The step makes lists longer that this attempt at its capture took for other objects.

    Attributes:
        paths: how the user would write them.
    """

    def __init__(self, paths: set[str]) -> None:
        super().__init__(paths)
        self.paths = paths


class ListsRead(ListsGrew):
    """The step uses lists otherwise than to append to them, of which this attempt at its capture keeps no account."""


class _Unread:
    """What code that gets past the methods of a stand-in finds in the place of an item: good for nothing."""

    __slots__ = ("_owner",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, owner: AppendedList) -> None:
        self._owner = owner

    def _used(self, *args: Any) -> Any:
        self._owner.is_read = True
        raise TypeError("an item of a list that a step only appends to")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __repr__ = __getattr__ = _used


class AppendedList:
    """Base of the stand-ins.

    Attributes:
        kind: the type of the list.
        items: what the list would hold.
        own: how many of them were appended in this call.
        log: of the capture: (stand-in, value) of all that was appended, in the order of the calls.
        is_read: whether it was used otherwise than to append.
    """

    kind: Any
    items: Any
    own: int
    log: list[tuple[AppendedList, Any]]
    is_read: bool
    _unread: _Unread

    def begin(self, value: Any, log: list[tuple[AppendedList, Any]]) -> None:
        """Stand for ``value`` from here on."""
        self.items, self.own, self.log, self.is_read = value.copy(), 0, log, False
        self._unread = _Unread(self)
        self.kind.extend(self, [self._unread] * len(value))

    def append(self, value: Any) -> None:
        """Append, and note it."""
        self.items.append(value)
        self.own += 1
        self.kind.append(self, value if self.is_read else self._unread)
        self.log.append((self, value))

    def extend(self, values: Iterable[Any]) -> None:
        """Append several."""
        for value in list(values):
            self.append(value)

    def __iadd__(self, values: Iterable[Any]) -> Any:
        self.extend(values)
        return self

    def __radd__(self, other: Any) -> Any:
        self.read()
        return NotImplemented  # then Python joins the two

    def __getitem__(self, at: Any) -> Any:
        # What is at such a place is the same whatever the list held before.
        if type(at) is int and -min(self.own, len(self.items)) <= at < 0 and not self.is_read:
            return self.items[at]
        self.read()
        return self.kind.__getitem__(self, at)

    def read(self) -> None:
        """Be a list like any other from here on."""
        if not self.is_read:
            self.is_read = True
            self.kind.clear(self)
            self.kind.extend(self, self.items)

    def was_read(self) -> bool:
        """Whether it was read, or changed by code that gets past its methods."""
        present = list(self.kind.__iter__(self))
        return self.is_read or len(present) != len(self.items) or any(each is not self._unread for each in present)


def _reading(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: AppendedList, *args: Any, **kwargs: Any) -> Any:
        self.read()
        return original(self, *args, **kwargs)

    return method


def _stand_in_of(kind: type) -> Any:
    names = [name for name in dir(kind) if name not in _SILENT and name not in vars(AppendedList)]
    methods: dict[str, Any] = {name: _reading(getattr(kind, name)) for name in names if callable(getattr(kind, name))}
    # Where the code that asks is not the user's, `type` is Python's own; the class is that of the list everywhere.
    methods |= {"kind": kind, "__class__": property(lambda self: kind), "__hash__": None}
    return type(f"{kind.__name__}_stand_in", (AppendedList, kind), methods)


_STAND_INS = {kind: _stand_in_of(kind) for kind in GROWING_KINDS}


class GrowingLists:
    """The lists of one attempt at a capture to which the step appends.

    Args:
        changing: says which lists are to have stand-ins.
        kept: paths of those that must not have them all the same.
    """

    def __init__(self, changing: ChangingState, kept: Iterable[str] = ()) -> None:
        self._paths = changing.growing.difference(kept)
        self._known = changing.growing | changing.read
        self._closed = changing.closed
        self._log: list[tuple[AppendedList, Any]] = []
        self._places: dict[int, tuple[AppendedList, str, Container, Any]] = {}  # by the id of the list

    def put_into(self, containers: Iterable[Container]) -> None:
        """Put stand-ins into the entries of containers."""
        for container in containers if self._paths else ():
            for key, value in container.before.items():
                path = container.label(key)
                if path in self._paths and type(value) in GROWING_KINDS and key not in container.stand_ins:
                    container.stand_in(key, self._stand_in(value, path, container, key))

    def check_arguments(self, passed: Iterable[int]) -> None:
        """Raise where the step gets one of the lists as an argument, too, which no stand-in can be.

        Args:
            passed: ids of the objects among the arguments.

        Raises:
            ListsRead: names them.
        """
        if paths := {self._places[each][1] for each in passed if each in self._places}:
            raise ListsRead(paths)

    def check_changed(self, changes: Iterable[tuple[Container, Any, Any, Any]]) -> None:
        """Raise where the step changed lists that it may only append to.

        Raises:
            ListsGrew: names them.
        """
        paths = {container.path for container, *_ in changes if container.may_be_appended_to()}
        if not self._closed and not paths <= self._known:
            raise ListsGrew(paths - self._known)

    def _stand_in(self, value: Any, path: str, container: Container, key: Any) -> AppendedList:
        if id(value) not in self._places:
            made = _STAND_INS[type(value)](*([(), value.maxlen] if isinstance(value, deque) else []))
            made.begin(value, self._log)
            self._places[id(value)] = made, path, container, key
        return self._places[id(value)][0]

    def appended(self) -> Iterator[tuple[Container, Any, Any]]:
        """(holder of a list, its key there, value) of all that was appended, in the order of the calls.

        Raises:
            ListsRead: a list was read.
        """
        read = {path for stand_in, path, _, _ in self._places.values() if stand_in.was_read()}
        if read:
            raise ListsRead(read)
        places = {id(stand_in): (container, key) for stand_in, _, container, key in self._places.values()}
        for stand_in, value in self._log:
            yield *places[id(stand_in)], value

    def settle(self, containers: Iterable[Container]) -> None:
        """Tell the containers, after the step and when their entries are what they were, which of them hold such lists.

        Raises:
            ListsRead: something else holds a stand-in.
        """
        self._log.clear()
        kept = set()
        containers = list(containers)
        holders: dict[int, list[tuple[Container, Any]]] = {}
        for container in containers if self._places else ():
            for key, value in container.before.items():
                holders.setdefault(id(value), []).append((container, key))
        known = frozenset(id(each.obj) for each in containers)
        for at in list(self._places):
            stand_in, path, _, _ = self._places.pop(at)
            if sys.getrefcount(stand_in) > _OWN_REFERENCES:
                kept.add(path)
            stand_in.items.clear()
            stand_in.kind.clear(stand_in)
            for container, key in holders[at]:
                container.by_value[key] = Growing(stand_in.kind, known)
        if kept:
            raise ListsRead(kept)


def takes_out_entries(functions: Iterable[types.FunctionType]) -> bool:
    """Whether the user's code takes entries out of lists. One that grows now does not grow forever then: it is captured
    for each length, as a deque with ``maxlen`` is."""
    codes = (each.__code__ for each in functions)
    return any(is_own_file(each.co_filename) and takes_entries(each) for each in codes)
