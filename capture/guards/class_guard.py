"""Guards on attributes that the classes of objects may get: a method for which a step looks, or that an operator runs.

What a class has of the names in the step's code is Python state, where the class is the user's. What it lacks is too
much to compare, since code names thousands of attributes. So a call compares one version of each class, and looks at
its names only where the class was changed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from weft.capture.guards.dict_watch import DictWatch
from weft.capture.guards.steady_checks import Steady
from weft.capture.state.code_names import may_run
from weft.capture.state.contents import dictionary_behind

# Cannot be changed, as ``object``.
_IMMUTABLE = 1 << 8
# What Python leaves in a class when somebody asks for it.
_LEFT_BY_PYTHON = frozenset({"__annotations__", "__annotations_cache__", "__annotate_func__", "__abstractmethods__"})


class ClassGuard:
    """Guards on the classes of objects, on classes that the step uses, and on all of their bases.

    Args:
        walked: the objects and classes with their paths.
        names: those in the code that the step can run.
    """

    def __init__(self, walked: Sequence[tuple[Any, str]], names: frozenset[str]) -> None:
        asked = [kind for obj, _ in walked for kind in (type(obj), obj) if isinstance(kind, type)]
        bases = dict.fromkeys(base for kind in dict.fromkeys(asked) for base in kind.__mro__)
        self._classes = [kind for kind in bases if not kind.__flags__ & _IMMUTABLE]
        self._names = names
        dictionaries = [dictionary_behind(vars(kind)) for kind in self._classes]
        self._watch = DictWatch(dictionaries)
        self._watch.accept(self._watch.changes())
        self._known = list(map(frozenset, dictionaries))

    def holds(self) -> bool:
        """Whether no class has got an attribute that counts."""
        changes = self._watch.changes()
        if changes and self._failure(changes) is not None:
            return False
        self._watch.accept(changes)
        return True

    def steady(self) -> Steady | None:
        """What holds only if :meth:`holds` would, without a change."""
        return self._watch.steady_or(self.holds)

    def failure(self) -> str | None:
        """The first new attribute, as text; None where there is none."""
        return self._failure(self._watch.changes())

    def _failure(self, changes: Collection[int]) -> str | None:
        for at in sorted(changes):
            kind = self._classes[at]
            for name in vars(kind).keys() - self._known[at] - _LEFT_BY_PYTHON:
                if type(name) is str and may_run(name, self._names) and not _is_of_capture(vars(kind).get(name)):
                    return f"{kind.__qualname__} has got an attribute {name}"
        return None


def _is_of_capture(value: Any) -> bool:
    """Whether an attribute of a class is there for the time of a capture, maybe in another thread."""
    return (getattr(value, "__module__", None) or "").startswith("weft.")
