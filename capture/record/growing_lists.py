"""Lists and deques to which each call of a step appends: ``losses.append(loss.item())``.

What is in such a list says nothing about the step, so no guard compares it, and a call may find another list in its
place. While the step is captured, a stand-in is at the place of the list. It notes what is appended, and gives it back
from the end: ``log[-1]["loss"]``. What the step asks of numbers in the list is asked anew by each call
(:class:`ListReduction`): their sum, mean, maximum or minimum, how many there are, and single ones. The last few
(``losses[-10:]``) may be read in any way. Every other use counts as reading: the list is then an object like any other,
which must be the same at each call.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from weft.capture.record.python_numbers import ChangingState, PathsFound, PythonNumbers
from weft.capture.state.code_names import takes_entries
from weft.capture.state.containers import GROWING_KINDS, Container, StatePlace, item_of
from weft.capture.state.patterns import Growing, last_of
from weft.capture.step_interface import Role
from weft.source_files import is_own_file

# What a stand-in may be asked without being read.
_SILENT = frozenset(
    {"__class__", "__doc__", "__getattribute__", "__init__", "__init_subclass__", "__new__", "__setattr__"}
    | {"__subclasshook__", "__class_getitem__", "__delattr__", "__dir__", "__hash__"}
)


# Of a stand-in that only this file holds: the variable, the argument of the count, and what stands for its items.
_OWN_REFERENCES = 3


class ListsGrew(PathsFound):
    """The step makes lists longer that this attempt at its capture took for other objects."""


class ListsRead(ListsGrew):
    """The step uses lists otherwise than to append to them, of which this attempt at its capture keeps no account."""


Reduce = Callable[["ListReduction", list[Any], torch.dtype], Any]
_DTYPES = {float: torch.float64, int: torch.int64}


class ListReduction:
    """The target of a node that computes one number of the numbers in a list.

    Args:
        place: of the list, which the call has not appended to yet.
        function: takes all numbers.
        last: how many of them count, from the end; None for all.
    """

    def __init__(self, place: StatePlace, function: Callable[..., Any], last: int | None) -> None:
        self.place, self.function, self.last = place, function, last
        self.__name__ = self.__qualname__ = f"{function.__name__}_of_list"
        self.__module__ = __name__

    def __call__(self, count: int, appended: int, *numbers: Any, **options: Any) -> Any:
        """The number, for how many entries the list has, and what the call appended, followed by further arguments."""
        own, rest = numbers[:appended], numbers[appended:]
        found, earlier = self.place.outer(), None if self.last is None else max(self.last - appended, 0)
        found = found.before if isinstance(found, AppendedList) else found  # in a capture
        return self.function([*last_of(found, earlier), *own], *rest, **options)


class _Numbers:
    """What an attempt knows of the numbers in one list.

    Attributes:
        place: of the list.
        kind: the type of the numbers that are read together, None where none are.
        last: how many of them are read, from the end; None for all.
    """

    def __init__(self, value: Any, place: StatePlace, numbers: PythonNumbers) -> None:
        self._value, self.place = value, place
        self.kind: type | None = None
        self.last: int | None = 0
        self._numbers = numbers
        self._read: dict[Any, Any] = {}

    def read(self, at: Any) -> Any:
        """The symbol of the entry at a position, or of their number; None where there is none."""
        if at not in self._read:
            self._read[at] = self._numbers.read_late(item_of(self._value, at), self.place.inside(at))
        return self._read[at]


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
    """Base of the stand-ins, of a list or of its last entries.

    Attributes:
        kind: the type of the list.
        items: what the list would hold.
        own: how many of them were appended in this call.
        log: of the capture: (stand-in, value) of all that was appended, in the order of the calls; None for a part.
        is_read: whether it was used otherwise than to append.
        is_asked: whether it was asked anything.
        is_numbers: whether it then had numbers that each call reads.
        before: the list itself.
        last: how many entries it has at most, None for any number.
        parts: the stand-ins of last entries.
    """

    kind: Any
    items: Any
    own: int
    log: list[tuple[AppendedList, Any]] | None
    is_read: bool
    is_asked = is_numbers = False
    before: Any
    last: int | None
    parts: list[AppendedList]
    _numbers: _Numbers
    _unread: _Unread

    def begin(self, value: Any, numbers: _Numbers, log: list[tuple[AppendedList, Any]] | None) -> None:
        """Stand for ``value`` from here on."""
        self.items, self.own, self.log, self.is_read, self.before = value.copy(), 0, log, False, value
        self.last = value.maxlen if isinstance(value, deque) else None
        self.parts, self._numbers, self._unread = [], numbers, _Unread(self)
        self.kind.extend(self, [self._unread] * len(value))

    def count(self) -> Any:
        """How many entries there are."""
        self.is_asked = True
        count = None if self.is_read else self._numbers.read(len)
        if count is None:
            self.read()
            return self.kind.__len__(self)
        return count + self.own if self.last is None else torch.sym_min(count + self.own, self.last)

    def __bool__(self) -> bool:
        return bool(self.count() > 0)

    def reduced(self, function: Callable[..., Any], call: Reduce, *args: Any, **options: Any) -> Any:
        """``function(self, *args, **options)`` for a function of Python's or numpy's that computes one number.

        Args:
            call: gives the result for a reduction, its operands, and the dtype for numbers of the type of those in the
                list; None where there is none.
        """
        if not self:
            return function([], *args, **options)
        made = None if self.is_read else self._reduced(function, call)
        return function(self, *args, **options) if made is None else made

    def _reduced(self, function: Callable[..., Any], call: Reduce) -> Any:
        own = [*self.items][max(len(self.items) - self.own, 0) :]
        kinds = {_PYTHON.get(type(each), type(each)) for each in self.items}
        count = self._numbers.read(len)
        if count is None or len(kinds) != 1 or not kinds <= _DTYPES.keys():
            return None
        (kind,) = kinds
        if self._numbers.kind not in (None, kind):
            return None
        made = call(ListReduction(self._numbers.place, function, self.last), [count, len(own), *own], _DTYPES[kind])
        if made is not None:
            self._numbers.kind = kind
            known = self._numbers.last
            self._numbers.last = None if None in (known, self.last) else max(known or 0, self.last or 0)
        return made

    def _last_entries(self, count: int) -> Any:
        part = _STAND_INS[list]()
        part.begin([*self.items][-count:], self._numbers, None)
        part.own, part.last = min(self.own, count), count if self.last is None else min(self.last, count)
        self.parts.append(part)
        return part

    def _entry(self, at: int) -> Any:
        """An entry that was there before the call, or a number among them; None where it is none."""
        if self.log is None:
            return None
        if at < 0:
            return self._numbers.read(at + self.own) if bool(self.count() >= -at) else None
        return self._numbers.read(at) if self.last is None and bool(self.count() > at + self.own) else None

    def append(self, value: Any) -> None:
        """Append, and note it."""
        if self.log is None:
            self.read()
            self.kind.append(self, value)
            return
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
        self.is_asked = True
        # What is at such a place is the same whatever the list held before.
        if type(at) is int and -min(self.own, len(self.items)) <= at < 0 and not self.is_read:
            return self.items[at]
        if type(at) is slice and self.kind is list and not self.is_read and (count := _of_last(at)):
            return self._last_entries(count) if at.stop is None else self._last_entries(count)[: at.stop]
        if type(at) is int and not self.is_read and (found := self._entry(at)) is not None:
            return found
        self.read()
        return self.kind.__getitem__(self, at)

    def guard(self, others: frozenset[int]) -> Growing:
        """What each call must find in the place of the list."""
        return Growing(self.kind, others, self.last, self.is_asked, self._numbers.kind, self._numbers.last)

    def read(self) -> None:
        """Be a list like any other from here on. Of a few last entries, numbers are read by each call."""
        if not self.is_read:
            entries = self._last_numbers() if self.log is None else None
            self.is_read, self.is_numbers = True, entries is not None
            self.kind.clear(self)
            self.kind.extend(self, self.items if entries is None else entries)

    def _last_numbers(self) -> list[Any] | None:
        earlier = int(self.count()) - self.own
        own = [*self.items][len(self.items) - self.own :]
        numbers = [self._numbers.read(-at) for at in range(earlier, 0, -1)]
        return None if any(number is None for number in numbers) else [*numbers, *own]

    def was_read(self) -> bool:
        """Whether it was read, or changed by code that gets past its methods; and whether anybody holds a part."""
        for part in self.parts:  # to which the list of parts refers, too
            if (part.was_read() and not part.is_numbers) or sys.getrefcount(part) > _OWN_REFERENCES + 1:
                return True
        present = list(self.kind.__iter__(self))
        return self.is_read or len(present) != len(self.items) or any(each is not self._unread for each in present)


def _of_last(at: slice) -> int:
    """Among how many last entries those of a slice are, 0 for a slice that counts from the beginning."""
    ends_there = at.stop is None or (type(at.stop) is int and at.stop < 0)
    return -at.start if ends_there and type(at.start) is int and at.start < 0 and at.step is None else 0


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


_PYTHON = {torch.SymFloat: float, torch.SymInt: int}
_STAND_INS = {kind: _stand_in_of(kind) for kind in GROWING_KINDS}


class GrowingLists:
    """The lists of one attempt at a capture to which the step appends.

    Args:
        changing: says which lists are to have stand-ins.
        numbers: of the attempt.
        kept: paths of those that must not have them all the same.
    """

    def __init__(self, changing: ChangingState, numbers: PythonNumbers, kept: Iterable[str] = ()) -> None:
        self._numbers = numbers
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
            made.begin(value, _Numbers(value, container.place_of(key, Role.SCALAR), self._numbers), self._log)
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
            for each in (stand_in, *stand_in.parts):
                each.items.clear()
                each.kind.clear(each)
            stand_in.parts.clear()
            for container, key in holders[at]:
                container.by_value[key] = stand_in.guard(known)
        if kept:
            raise ListsRead(kept)


def takes_out_entries(functions: Iterable[types.FunctionType]) -> bool:
    """Whether the user's code takes entries out of lists. One that grows now does not grow forever then: it is captured
    for each length, as a deque with ``maxlen`` is."""
    codes = (each.__code__ for each in functions)
    return any(is_own_file(each.co_filename) and takes_entries(each) for each in codes)
