"""Environment variables that a step reads: each one is a guard of the captured graph.

Only reads by the user's code count, not those of torch or the standard library.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

from weft.capture.user_code import called_by_user, user_line
from weft.errors import UncapturableDraw

# Reads go through these before they come to the mapping: os.getenv, Mapping.get, Mapping.__contains__.
_BETWEEN = ("os.py", "_collections_abc.py", "<frozen os>", "<frozen _collections_abc>")


class EnvironmentReads:
    """Notes the environment variables that the step reads.

    Attributes:
        found: the value of each variable that was read, None where it is not set.
    """

    def __init__(self, intercepts: Callable[[], bool]) -> None:
        self.found: dict[str, str | None] = {}
        self._intercepts = intercepts

    def replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """(owner, name, replacement) of the methods of ``os.environ``."""
        kind = type(os.environ)
        yield kind, "__getitem__", self._noting(kind.__getitem__)
        if "__contains__" in vars(kind):
            yield kind, "__contains__", self._noting(kind.__contains__)
        yield kind, "__iter__", self._noting_all(kind.__iter__)
        for name in ("__setitem__", "__delitem__"):
            yield kind, name, self._refusing(getattr(kind, name))

    def _counts(self, mapping: Any) -> bool:
        return mapping is os.environ and self._intercepts()

    def _noting(self, original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def read(mapping: Any, key: Any) -> Any:
            if self._counts(mapping) and called_by_user(*_BETWEEN) and isinstance(key, str):
                self.found.setdefault(key, present(key))
            return original(mapping, key)

        return read

    def _noting_all(self, original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def keys(mapping: Any) -> Iterator[str]:
            names = list(original(mapping))
            if self._counts(mapping) and called_by_user(*_BETWEEN):
                self.found |= {name: present(name) for name in names}
            return iter(names)

        return keys

    def _refusing(self, original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def write(mapping: Any, key: Any, *value: Any) -> None:
            if self._counts(mapping) and called_by_user(*_BETWEEN):
                why = "a compiled step runs no Python, so it would be set once only"
                raise UncapturableDraw(f"os.environ[{key!r}] = ...", user_line(), why, "set it before the step")
            original(mapping, key, *value)

        return write


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
