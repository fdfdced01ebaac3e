"""Which arguments of a call are the same object, and which are objects that the Python state holds.

A step can tell: by ``a is b``, and by a change of one that it sees in the other. A capture gets copies of lists,
dictionaries and data objects. So one object has one copy, wherever it is passed, and an object of the state is passed
as itself: what the step changes of it is a change of the state. Another call must share in the same way, see
:mod:`weft.capture.guards.sharing_guard`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import torch

from weft.capture.state.containers import holder_of, item_of, items_of
from weft.capture.state.object_parts import slot_names, structure_of

Steps = tuple[Any, ...]


@dataclass(frozen=True)
class Slot:
    """Leads from an object to what is in a slot of it."""

    name: str


def at_steps(call: Any, steps: Steps) -> Any:
    """What is at the end of positions, keys, slots and ``vars``."""
    found = call
    for step in steps:
        if isinstance(step, Slot):
            found = getattr(found, step.name)
        else:
            found = vars(found) if step is vars else item_of(found, step)
    return found


class CallLeaves(list[Any]):
    """The leaves of the arguments of a call.

    Attributes:
        call: the positional and the keyword arguments.
    """

    def __init__(self, leaves: list[Any], call: tuple[Any, Any]) -> None:
        super().__init__(leaves)
        self.call = call


class SharedArguments:
    """Gives a capture one object for each that the caller passed, and those of the state as they are.

    Args:
        held: ids of the objects of the Python state.

    Attributes:
        objects: what leads to each list, tuple, dictionary and data object among the arguments, and the object that
            the caller passed. An object that was met before is not looked into again.
    """

    def __init__(self, held: Container[int]) -> None:
        self._held = held
        self._first: dict[int, Any] = {}
        self.objects: list[tuple[Steps, Any]] = []

    def of_call(self, given: tuple[Any, Any], passed: tuple[Any, Any]) -> tuple[Any, Any]:
        """The positional and keyword arguments for the step, of copies of those that the caller passed."""
        args = tuple(self._of(mine, passed[0][at], (0, at)) for at, mine in enumerate(given[0]))
        return args, {name: self._of(mine, passed[1][name], (1, name)) for name, mine in given[1].items()}

    def _of(self, given: Any, passed: Any, steps: Steps) -> Any:
        if given is passed or isinstance(given, torch.Tensor) or type(given) is not type(passed):
            return given  # a leaf
        self.objects.append((steps, passed))
        if id(passed) in self._first:
            return self._first[id(passed)]
        if id(passed) in self._held:
            self._first[id(passed)] = passed
            return passed
        self._first[id(passed)] = given
        if isinstance(given, tuple):
            self._first[id(passed)] = given = self._tuple(given, passed, steps)
        elif isinstance(given, (list, dict, deque)):
            self._items(given, items_of(given), dict(items_of(passed)), steps, holder_of(type(given)).__setitem__)
        if hasattr(given, "__dict__"):
            theirs = vars(passed)
            self._items(vars(given), list(vars(given).items()), theirs, (*steps, vars), dict.__setitem__)
        for name in slot_names(type(given)):
            if hasattr(given, name):
                mine = getattr(given, name)
                if (new := self._of(mine, getattr(passed, name), (*steps, Slot(name)))) is not mine:
                    object.__setattr__(given, name, new)
        return given

    def _items(
        self,
        given: Any,
        items: list[tuple[Any, Any]],
        theirs: dict[Any, Any],
        steps: Steps,
        put: Callable[[Any, Any, Any], None],
    ) -> None:
        for key, mine in items:
            if (new := self._of(mine, theirs[key], (*steps, key))) is not mine:
                put(given, key, new)

    def _tuple(self, given: Any, passed: Any, steps: Steps) -> Any:
        new = [
            self._of(mine, theirs, (*steps, at)) for at, (mine, theirs) in enumerate(zip(given, passed, strict=True))
        ]
        if all(one is other for one, other in zip(new, given, strict=True)):
            return given
        taken = structure_of(given)
        assert taken is not None  # tuples are what they hold
        return taken.form.fixed([*new, *taken.parts[len(new) :]])


def numbers_of(ids: list[int]) -> list[int]:
    """For each object the number of the first one that is the same."""
    first: dict[int, int] = {}
    return [first.setdefault(each, at) for at, each in enumerate(ids)]
