"""Python numbers that a capture keeps symbolic: learning rates, counters, schedules, arguments that change.

A number of Python state or of the arguments is a guard by its value, until it is seen to change: by the step itself,
which is then captured once more, or between two captures. From then on it is a symbol, and an input of the graph. The
symbol stands at the place of the number while the step is captured. Lists and dictionaries that the step replaces by
new ones are guarded like tuples, by what they hold. A symbol is *backed*: its value in the captured call is
known, so a comparison in the step's Python has an outcome, and that outcome is the guard
(:mod:`weft.capture.guards.size_guard`). What the step leaves at the place is an effect, as a tensor would be.

Numbers that behave unlike their neighbours stay guards by value: infinities, NaN and -0.0, integers that need more than
64 bits, and subclasses of ``int`` and ``float`` (bools, enumerations). Numbers of numpy's that change are symbols among
the settings of optimizers; elsewhere each call reads them (:mod:`weft.capture.record.numpy_numbers`).
"""

from __future__ import annotations

import logging
import math
import operator
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch.fx

from weft import torch_adapter
from weft.capture.record.host_arrays import HostArray
from weft.capture.record.plain_numbers import NumpyFloat
from weft.capture.record.readable_names import readable_name
from weft.capture.record.recorder import OpRecorder
from weft.capture.state.containers import ANY, Container, Content, StatePlace
from weft.capture.state.object_parts import factory_of, followed_items, is_replaceable
from weft.capture.state.patterns import OfType, Pattern
from weft.capture.state.reachable_state import ReachableState
from weft.capture.step_interface import Role

_SYMBOLIC = (torch.SymInt, torch.SymFloat)
_MADE_OF_NUMBERS = (int, float, tuple)


@dataclass(frozen=True)
class PythonNumber:
    """A number that is a symbol of one capture.

    Attributes:
        symbol: of the number.
        node: its placeholder.
        place: where a call finds it.
        value: in the captured call.
        is_guarded: whether it is a guard by its value, which nothing else compares: an entry of a list that grows.
    """

    symbol: sympy.Symbol
    node: torch.fx.Node
    place: StatePlace
    value: int | float
    is_guarded: bool = False


@dataclass(frozen=True)
class ChangingState:
    """What of the Python state a capture takes for changing at every call, besides learning rates.

    Attributes:
        numbers: paths of numbers, and of the lists and dictionaries that the step replaces by others.
        tried: paths of arguments that are symbols although no call has changed them, until an operation uses them.
            Attempts in which the user's code meets an exception do without.
        growing: paths of lists to which the step appends, without reading them.
        read: paths of lists that the step reads.
        values: paths of arguments that change and are guarded by their values all the same, since a capture with their
            values unknown failed.
        lists: by path, the lists of numbers among the arguments that are one leaf each, with the positions and keys
            that lead to them.
        tables: paths of tables of the state that the step indexes with symbolic numbers.
        plain_tables: paths of lists that must be plain all the same, because the step writes to them.
        plain_floats: whether functions in C++ get the values of symbolic floats, since one of them computes with these.
        names: those of attributes that the step computes (:mod:`weft.capture.record.computed_names`).
        plain: whether no number and no size is a symbol, learning rates included, but for sizes marked as dynamic.
        closed: whether what the step is found to change, and is not among these, is taken for constant.
    """

    numbers: frozenset[str] = frozenset()
    tried: frozenset[str] = frozenset()
    growing: frozenset[str] = frozenset()
    read: frozenset[str] = frozenset()
    values: frozenset[str] = frozenset()
    lists: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    tables: frozenset[str] = frozenset()
    plain_tables: frozenset[str] = frozenset()
    plain_floats: bool = False
    names: frozenset[str] = frozenset()
    plain: bool = False
    closed: bool = False


FOUND_ALONE = ChangingState()
CONSTANTS = ChangingState(closed=True)


class PathsFound(Exception):
    """What an attempt at a capture found out about places of the Python state or of the arguments.

    Attributes:
        paths: of these places, as the user would write them.
    """

    def __init__(self, paths: set[str]) -> None:
        super().__init__(paths)
        self.paths = paths


class NumbersChanged(PathsFound):
    """The step changes numbers that this attempt at its capture took for constants."""


class NumbersUsed(PathsFound):
    """Operations use numbers that were symbols only by way of trial."""


def trying_arguments(changing: ChangingState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ChangingState:
    """Where a number among the arguments was seen to change, try symbols for the others too: a loop passes ``epoch``
    beside ``batch_idx``. A step that only logs or compares them then has one graph for all their values."""
    places = [*((f"args[{at}]", each) for at, each in enumerate(args)), *kwargs.items()]
    numbers = {path for path, each in places if type(each) in (int, float)}
    if changing.closed or numbers.isdisjoint(changing.numbers):
        return changing
    return replace(changing, tried=frozenset(numbers - changing.numbers - changing.values))


class PythonNumbers:
    """The symbolic Python numbers of one attempt at a capture.

    Args:
        recorder: of the capture.
        changing: says which numbers are to be symbols.
        kept: paths of those that must not become symbols all the same.

    Attributes:
        found: those that are.
    """

    def __init__(self, recorder: OpRecorder, changing: ChangingState, kept: Iterable[str] = ()) -> None:
        self.found: list[PythonNumber] = []
        self._recorder = recorder
        self._kept = frozenset(kept)
        self._changing = changing.numbers - self._kept
        self._tried = changing.tried
        self._closed = changing.closed
        self._plain = changing.plain
        self._by_entry: dict[tuple[int, Any], Any] = {}
        self._late: set[sympy.Symbol] = set()

    def put_into(self, containers: Iterable[Container]) -> None:
        """Put symbols into the entries of containers; those that have theirs keep them."""
        for container in containers:
            if (self._changing or container.holds_rates) and not isinstance(container, Content):
                if isinstance(container.obj, logging.Logger):  # which keeps what it finds out about its level
                    continue
                for key, value in container.before.items():
                    known = type(value) in (int, float, tuple) or is_rate_of_numpy(value, container)
                    if known and key not in container.stand_ins:
                        self._put(container, key, value)

    def argument(self, value: Any, place: StatePlace) -> Any:
        """What the step gets for an argument that is no tensor: a symbol, or the value itself."""
        return self._symbolic(value, place, rate=False) if type(value) in (int, float) else value

    def read_late(self, value: Any, place: StatePlace) -> Any:
        """The symbol of a number that the step is found to read only now; None where a symbol cannot stand for it."""
        if type(value) not in (int, float) or not may_be_symbolic(value):
            return None
        number = self._symbol(value, place)
        self._late.add(self.found[-1].symbol)
        return number

    def _put(self, container: Container, key: Any, value: Any) -> None:
        entry = id(container.obj), key
        if entry not in self._by_entry:
            place = container.place_of(key, Role.SCALAR)
            self._by_entry[entry] = self._symbolic(value, place, rate=container.holds_rates)
        if (new := self._by_entry[entry]) is not value:
            container.stand_in(key, new)

    def _symbolic(self, value: Any, place: StatePlace, *, rate: bool) -> Any:
        if type(value) is not tuple:
            wanted = (rate and isinstance(value, float) and not self._plain) or place.path in self._changing
            return self._symbol(value, place) if wanted and may_be_symbolic(value) else value
        items = [self._symbolic(item, place.inside(at), rate=False) for at, item in enumerate(value)]
        return value if all(map(operator.is_, items, value)) else tuple(items)

    def _symbol(self, value: int | float, place: StatePlace) -> Any:
        name = f"number{len(self.found)}"
        kind = float if isinstance(value, float) else int
        number = torch_adapter.number_symbol(self._recorder.symbols.shape_env, kind(value), name)
        node = self._recorder.scalar_input(number, readable_name(place.path))
        self.found.append(PythonNumber(torch_adapter.symbol_of(number), node, place, value))
        return NumpyFloat(number) if _is_float64(value) else number

    def check_changed(self, changes: Iterable[tuple[Container, Any, Any, Any]]) -> None:
        """Raise where the step changed numbers that could have been symbols.

        Raises:
            NumbersChanged: names them.
        """
        if self._closed:
            return
        changes = [each for each in changes if not isinstance(each[0], Content)]
        places = ((c.place_of(key, Role.SCALAR), old, new) for c, key, old, new in changes)
        paths = {path for place, old, new in places for path in _changed(place, old, new)}
        if not paths <= self._changing | self._kept:
            raise NumbersChanged(paths)

    def check_tried(self) -> None:
        """Raise where an operation computes with a number that was not seen to change: as a constant it costs nothing,
        and sizes that follow from it are plain.

        Raises:
            NumbersUsed: names them.
        """
        tried = [each for each in self.found if each.place.path in self._tried]
        if used := {each.place.path for each in tried if _in_operations(each.node)}:
            raise NumbersUsed(used)

    def settle(self, state: ReachableState) -> list[PythonNumber]:
        """Tell the containers, after the step, which of their entries are inputs of the graph or replaced by each call.

        Returns:
            The numbers that are symbols to the end. Those that the step's Python needed as numbers are guards.
        """
        shape_env = self._recorder.symbols.shape_env
        is_plain = {each.symbol: torch_adapter.replaced(shape_env, each.symbol).is_number for each in self.found}
        numbers = [each for each in self.found if not is_plain[each.symbol]]
        inputs, changing = {_identity(each.place) for each in numbers if each.symbol not in self._late}, self._changing
        entries = {identity[:2] for identity in inputs}
        # What is in a list or dictionary at several places is compared at the first of them.
        first: dict[int, StatePlace] = {}
        others = [place for place, obj in state.replaced_places if first.setdefault(id(obj), place) is not place]
        inputs |= set(map(_identity, others))
        objects = {entry[0] for entry in entries}
        for container in state.containers:
            if not (changing or id(container.obj) in objects) or isinstance(container, Content):
                continue  # most hold none of the numbers
            for key, value in container.before.items():
                replaced = bool(changing) and is_replaceable(value)
                if not replaced and type(value) not in _MADE_OF_NUMBERS and not is_rate_of_numpy(value, container):
                    continue
                place = container.place_of(key, Role.SCALAR)
                replaced = replaced and place.path in changing
                if replaced or (container.outer is None and (id(container.obj), key) in entries):
                    container.by_value[key] = _pattern(value, place, changing, inputs)
        self._by_entry.clear()
        late = (each for each in self.found if is_plain[each.symbol] and each.symbol in self._late)
        return [*numbers, *(replace(each, is_guarded=True) for each in late)]


def is_rate_of_numpy(value: Any, container: Container) -> bool:
    """Whether a value is a ``numpy.float64`` among the settings of an optimizer: a learning rate from a table.

    It is a ``float`` to Python and to torch, and a call gives the program the number of numpy's itself. Elsewhere it is
    a guard by its value, since code may ask for what only numpy's numbers have.
    """
    return _is_float64(value) and isinstance(container.obj, dict) and {"lr", "params"} <= container.obj.keys()


def is_number_of_numpy(value: Any) -> bool:
    """Whether a value is a number of numpy's, or a truth value."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in "biufc"


def _may_change(value: Any) -> bool:
    return may_be_symbolic(value) or is_number_of_numpy(value)


def _is_float64(value: Any) -> bool:
    return isinstance(value, float) and type(value).__name__ == "float64" and type(value).__module__ == "numpy"


def may_be_symbolic(value: Any) -> bool:
    """Whether a symbol can stand for a value: for an ``int`` of 64 bits, or a finite ``float`` that is not -0.0."""
    if type(value) is float or _is_float64(value):
        return math.isfinite(value) and (value != 0 or math.copysign(1, value) > 0)
    return type(value) is int and -(2**63) <= value < 2**63


def differing_numbers(containers: Iterable[Container]) -> Iterator[str]:
    """The paths of the numbers in containers, also in tuples, that are others now than they were found, and of the
    lists of numbers that were replaced by others."""
    for container in containers:
        if not isinstance(container, Content):
            for key, known in container.before.items():
                if type(known) in (int, float, tuple, list) or is_number_of_numpy(known):
                    yield from differing(container.label(key), container.get(key), known)


def differing(path: str, value: Any, expected: Any) -> Iterator[str]:
    """The paths at which a number, or a number in a tuple, is another one than expected and of the same type; where a
    list of numbers is another list of the same length than expected, those of it and of its numbers."""
    if replaced := value is not expected and _are_lists_of_numbers(value, expected) and len(value) == len(expected):
        yield path
    if replaced or type(value) is type(expected) is tuple:
        for at, (item, known) in enumerate(zip(value, expected, strict=False)):
            yield from differing(f"{path}[{at}]", item, known)
    elif type(value) is type(expected) and _may_change(value) and value is not expected and not bool(value == expected):
        yield path


def _are_lists_of_numbers(*lists: Any) -> bool:
    return all(type(each) is list and each and all(map(may_be_symbolic, each)) for each in lists)


def _changed(place: StatePlace, old: Any, new: Any, around: tuple[int, ...] = ()) -> Iterator[str]:
    """The paths at ``place`` of numbers that a step replaced by others, and of objects that it replaced by others of
    their type; ``around`` are the ids of those that hold ``old``."""
    if type(old) is type(new) and (type(old) is tuple or is_replaceable(old)) and old is not new:
        if id(old) in around:
            return
        if type(old) is not tuple:
            yield place.path
        items, around = dict(followed_items(new)), (*around, id(old))
        for key, known in followed_items(old):
            if key is vars:
                for name in known.keys() & items[vars].keys():
                    yield from _changed(place.inside(vars).inside(name), known[name], items[vars][name], around)
            elif key in items:
                yield from _changed(place.inside(key), known, items[key], around)
    elif _is_another_number(old, new):
        yield place.path


def _is_another_number(old: Any, new: Any) -> bool:
    """Whether a step put another number in the place of one that may change."""
    if is_number_of_numpy(old) and type(new) in (HostArray, type(old)):
        return type(new) is HostArray or not bool(new == old)
    return may_be_symbolic(old) and (isinstance(new, _SYMBOLIC) or (type(new) in (int, float) and new != old))


def _in_operations(number: torch.fx.Node) -> bool:
    """Whether a tensor is computed from a number, also by way of other numbers."""
    pending, known = [number], {number}
    while pending:
        users = [user for user in pending.pop().users if user not in known]
        if any(not isinstance(user.meta.get("val"), (*_SYMBOLIC, torch.SymBool, int, float)) for user in users):
            return True
        known.update(users)
        pending += users
    return False


def _identity(place: StatePlace) -> tuple[int, Any, tuple[Any, ...]]:
    return id(place.container.obj), place.key, place.items


def _pattern(value: Any, place: StatePlace, changing: Any, inputs: set[Any]) -> Any:
    """What a value must look like: ANY at the places of inputs."""
    if _identity(place) in inputs:
        return ANY
    if place.items and place.path in changing and is_number_of_numpy(value):
        return OfType(type(value))  # each call reads it anew
    if type(value) is tuple or (place.path in changing and is_replaceable(value)):
        items = {key: _pattern(item, place.inside(key), changing, inputs) for key, item in followed_items(value)}
        return Pattern(type(value), items, factory_of(value))
    return value
