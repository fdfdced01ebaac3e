"""Stand-ins for values that the user's code holds, and the types whose objects have none, which need no look-up."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

from weft.capture.state.type_facts import SIMPLE_KINDS


class PlainKinds:
    """Types of which no object has a stand-in, unless it is known by its id.

    Attributes:
        ids: of the types. The id of a type that is freed is removed.
    """

    def __init__(self) -> None:
        self.ids: set[int] = set(map(id, SIMPLE_KINDS))
        self._alive: dict[int, weakref.ref[type]] = {}

    def add(self, kind: type) -> None:
        """Record that no object of a type has a stand-in."""
        at = id(kind)
        self._alive[at] = weakref.ref(kind, lambda _, ids=self.ids, alive=self._alive: _forget(at, ids, alive))
        self.ids.add(at)


def _forget(at: int, ids: set[int], alive: dict[int, weakref.ref[type]]) -> None:
    ids.discard(at)
    alive.pop(at, None)


class StandIns(NamedTuple):
    """What stands in for values that the user's code holds. A process holds thousands, and most are functions and
    classes in whose place nothing stands: they are told by their types and ids, without a call.

    Attributes:
        by_id: for objects that are known by their ids.
        of: tells what stands in for a value, those of ``by_id`` included; None where nothing does.
        plain: types of which no other object has a stand-in. ``of`` adds to them.
    """

    by_id: dict[int, Any]
    of: Callable[[Any], Any | None]
    plain: PlainKinds

    def may_have(self, values: Mapping[Any, Any], ids: Container[int] = ()) -> list[Any]:
        """The keys of the values that may have one, by ``by_id`` or, where they are given, by ``ids``."""
        known, plain = ids or self.by_id, self.plain.ids
        return [key for key, value in list(values.items()) if id(type(value)) not in plain or id(value) in known]

    def in_values(self, values: Mapping[Any, Any]) -> list[tuple[Any, Any, Any]]:
        """(key, value, stand-in) of those values that have one."""
        found = [(key, value := values[key], self.of(value)) for key in self.may_have(values)]
        return [each for each in found if each[2] is not None]
