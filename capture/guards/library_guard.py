"""Guards on the functions and methods of libraries that a step goes by.

Nearly always nobody has replaced one. So a call compares the version of each dictionary, and looks at the entries that
count only where one was changed.
"""

from __future__ import annotations

import abc
import importlib
import sys
from collections.abc import Collection, Iterator
from itertools import repeat
from typing import Any

from weft import thread_patches
from weft.capture.guards.dict_watch import DictWatch
from weft.capture.guards.steady_checks import Steady
from weft.capture.state.containers import MISSING, same_simple
from weft.capture.state.library_names import Libraries, Namespace

# Of an abstract class: weak references to the classes registered with it, and what it remembers of others. Python has
# no other way to ask for the former.
_parts_of: Any = importlib.import_module("_abc")._get_dump


class LibraryGuard:
    """Guards on what is in the namespaces of libraries, and on what is registered with abstract classes, as it is when
    this is made."""

    def __init__(self, libraries: Libraries) -> None:
        self._namespaces = namespaces = libraries.namespaces
        self._token = abc.get_cache_token()  # grows with each registration with any class
        self._registered = [(kind, set(_registered(kind))) for kind in libraries.abstract]
        # No object of the step is of a class from a module that was imported later.
        self._modules = frozenset(sys.modules) if self._registered else frozenset()
        self._watch = DictWatch([each.entries for each in namespaces])
        # Read before the entries: what another thread changes meanwhile is another version at the next call.
        self._watch.accept(self._watch.changes())
        self._expected = [_read(each) for each in namespaces]

    def listed(self) -> list[str]:
        """The conditions as text, one for each namespace."""
        return [f"{each.path or 'builtins'} has the same {', '.join(each.names)}" for each in self._namespaces]

    def holds(self) -> bool:
        """Whether nothing was replaced."""
        changes, token = self._watch.changes(), abc.get_cache_token()
        if (changes or token != self._token) and self._failure(changes) is not None:
            return False
        self._watch.accept(changes)
        self._token = token
        return True

    def steady(self) -> Steady | None:
        """What holds only if :meth:`holds` would, without a change."""
        return self._watch.steady_or(self.holds, lambda: abc.get_cache_token() == self._token)

    def failure(self) -> str | None:
        """What was replaced, as text; None where nothing was."""
        return self._failure(self._watch.changes())

    def _failure(self, changes: Collection[int]) -> str | None:
        if (changed := self._changed(changes)) is not None:
            return f"{changed} was replaced or changed"
        if abc.get_cache_token() != self._token:
            for kind, before in self._registered:
                new = {each for each in set(_registered(kind)) - before if each.__module__ in self._modules}
                if new:
                    named = ", ".join(sorted(each.__qualname__ for each in new))
                    return f"{named} was registered with {kind.__qualname__}"
        return None

    def _changed(self, changes: Collection[int]) -> str | None:
        """The first name whose value is another one, in the dictionaries that were changed."""
        for at in sorted(changes):
            namespace = self._namespaces[at]
            for name, value, expected in zip(namespace.names, _read(namespace), self._expected[at], strict=True):
                if value is not expected and not _same(value, expected):
                    return f"{namespace.path}.{name}" if namespace.path else name
        return None


def _read(namespace: Namespace) -> list[Any]:
    return list(map(namespace.entries.get, namespace.names, repeat(MISSING)))


def _same(value: Any, expected: Any) -> bool:
    """Whether a value is the expected one for this thread: another thread may replace it for itself."""
    return same_simple(value, expected) or thread_patches.original(value) is thread_patches.original(expected)


def _registered(kind: type) -> Iterator[type]:
    """The classes that were registered with an abstract class or with a class that derives from it."""
    if isinstance(kind, abc.ABCMeta):
        yield from filter(None, (reference() for reference in _parts_of(kind)[0]))
    for derived in type.__subclasses__(kind):
        yield from _registered(derived)
