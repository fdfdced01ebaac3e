"""What a function itself holds: its code, and the defaults of its arguments."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from weft.capture.state.containers import MISSING, Attributes, Container, label_of
from weft.capture.state.type_facts import OF_FUNCTIONS


class Defaults(Container):
    """The defaults of positional arguments one by one: a list among them gets a stand-in, which no tuple can."""

    def entries(self) -> dict[Any, Any]:
        """The defaults as they are now, by position."""
        return dict(enumerate(self.obj.__defaults__ or ()))

    def get(self, key: Any) -> Any:
        """One default as it is now, MISSING where there is none."""
        return self.entries().get(key, MISSING)

    def set(self, key: Any, value: Any) -> None:
        """Give an argument another default; a key one past the end gives one more argument a default."""
        self.obj.__defaults__ = tuple((self.entries() | {key: value}).values())

    def remove(self, key: Any) -> None:
        """Take away the default at a position, and those behind it."""
        self.obj.__defaults__ = (self.obj.__defaults__ or ())[:key] or None


def containers_of(function: types.FunctionType, growing: frozenset[str]) -> Iterator[Container]:
    """What a function holds.

    Args:
        growing: paths of lists to which the step appends. Other functions have their defaults compared as one tuple.
    """
    name = function.__name__
    defaults = Defaults(function, f"{name}.__defaults__")
    apart = not growing.isdisjoint(map(defaults.label, defaults.before)) if growing else False
    yield Attributes(function, name, OF_FUNCTIONS - {"__defaults__"} if apart else OF_FUNCTIONS, label_of(name))
    if apart:
        yield defaults
