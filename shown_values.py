"""How messages show the values that they were given: short, on one line, at most ten of many."""

from __future__ import annotations

import difflib
import inspect
import re
import reprlib
from collections.abc import Sequence

_MAX_NAMES = 10


def listed(names: Sequence[str]) -> str:
    """At most ten names, and how many more there are."""
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more:,} more" if more > 0 else "")


def counted(count: int, noun: str) -> str:
    """``1 form``, ``2 forms``, ``1,024 ranks``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def choices(value: object, known: Sequence[object]) -> str:
    """At most ten of the values that an option takes, those first that look like the one given."""
    near = difflib.get_close_matches(str(value), [one for one in known if isinstance(one, str)])
    return listed([repr(one) for one in sorted(known, key=lambda one: one not in near)])


def shown(value: object) -> str:
    """A user's value as a message shows it: short, on one line, without addresses in memory."""
    return _shown.repr(value)


class _ShownValues(reprlib.Repr):
    """Texts, numbers and containers as Python writes them, other values by their type."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 100

    def repr1(self, x: object, level: int) -> str:
        if isinstance(x, type):
            return f"the class {_without_scope(x.__qualname__)}"
        if inspect.isroutine(x):
            name = _without_scope(str(getattr(x, "__qualname__", type(x).__qualname__)))
            return "a lambda" if name == "<lambda>" else f"the function {name}"
        if hasattr(x, "shape") and hasattr(x, "dtype"):
            kind = "tensor" if hasattr(x, "untyped_storage") else type(x).__qualname__
            return f"a {x.dtype} {kind} of shape {tuple(x.shape)}"
        return super().repr1(x, level)

    def repr_instance(self, x: object, level: int) -> str:
        text = "" if hasattr(x, "named_modules") else super().repr_instance(x, level)
        plain = text and "\n" not in text and re.search(r" at 0x|<", text) is None
        return text if plain else f"a {_without_scope(type(x).__qualname__)}"


def _without_scope(qualname: str) -> str:
    """The name of a function or class without that of the function it was defined in."""
    return qualname.rpartition("<locals>.")[2]


_shown = _ShownValues()
