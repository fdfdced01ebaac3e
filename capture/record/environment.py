"""Environment variables that a step reads: each one is a guard of the captured graph.

Only reads by the user's code count, not those of torch or the standard library.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from weft.capture.user_code import called_by_user, user_line
from weft.errors import UncapturableDraw

# Between the user's code and the question whose it is: os.getenv, Mapping.get, Mapping.__contains__, this file.
_BETWEEN = ("os.py", "_collections_abc.py", "<frozen os>", "<frozen _collections_abc>", __file__)


class EnvironmentReads:
    """Notes the environment variables that the step reads.

    Attributes:
        found: the value of each variable that was read, None where it is not set.
    """

    def __init__(self, intercepts: Callable[[], bool]) -> None:
        self.found: dict[str, str | None] = {}
        self._intercepts = intercepts

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Note what the step reads, while it runs."""
        environment = os.environ
        with _changing:
            if not _following:
                _kinds.append(type(environment))
                environment.__class__ = _noting_class(type(environment))
            _following.append(self)
        try:
            yield
        finally:
            with _changing:
                _following.remove(self)
                if not _following:
                    environment.__class__ = _kinds.pop()

    def counts(self) -> bool:
        """Whether what this thread does now is a read by the user's code in the step."""
        return self._intercepts() and called_by_user(*_BETWEEN)


_changing = threading.Lock()
_following: list[EnvironmentReads] = []  # of all threads that capture now
_kinds: list[type] = []  # the class of os.environ before


@functools.cache
def _noting_class(kind: Any) -> Any:
    """A class of os.environ whose reads are noted, and whose writes are refused, in captured steps.

    It takes the place of the class itself. Methods replaced in the class would not do: CPython 3.13 goes on calling the
    old ``__getitem__`` from code that has called it often, once a class was changed some thousand times.
    """

    class NotedEnvironment(kind):  # type: ignore[misc]
        def __getitem__(self, key: Any) -> Any:
            _note(kind, self, key)
            return kind.__getitem__(self, key)

        def __contains__(self, key: Any) -> bool:
            _note(kind, self, key)
            return bool(kind.__contains__(self, key))

        def __iter__(self) -> Iterator[str]:
            names = list(kind.__iter__(self))
            for reads in _reading():
                reads.found |= {name: kind.__getitem__(self, name) for name in names}
            return iter(names)

        def __setitem__(self, key: Any, value: Any) -> None:
            _refuse_write(key)
            kind.__setitem__(self, key, value)

        def __delitem__(self, key: Any) -> None:
            _refuse_write(key)
            kind.__delitem__(self, key)

    return NotedEnvironment


def _note(kind: Any, environment: Any, key: Any) -> None:
    """Note the value of a variable where the step reads it."""
    if isinstance(key, str):
        for reads in _reading():
            reads.found.setdefault(key, _value(kind, environment, key))


def _value(kind: Any, environment: Any, key: str) -> str | None:
    """The value of a variable, None where it is not set, without a note of the read."""
    try:
        return str(kind.__getitem__(environment, key))
    except KeyError:
        return None


def _reading() -> list[EnvironmentReads]:
    return [reads for reads in list(_following) if reads.counts()]


def _refuse_write(key: Any) -> None:
    if _reading():
        why = "a compiled step runs no Python, so it would be set once only"
        raise UncapturableDraw(f"os.environ[{key!r}] = ...", user_line(), why, "set it before the step")


def present(key: str) -> str | None:
    """The value of an environment variable now, None where it is not set."""
    return os.environ.get(key)


def environment_failure(found: dict[str, str | None]) -> str | None:
    """The first variable that is another now than in the capture, as text; None where none is."""
    for key, before in found.items():
        if (now := present(key)) != before:
            return f"environment variable {key} is {_shown(now)}, was {_shown(before)}"
    return None


def _shown(value: str | None) -> str:
    return "not set" if value is None else repr(value)
