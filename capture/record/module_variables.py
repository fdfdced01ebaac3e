"""``globals()`` and ``vars(module)`` while a step is captured: the variables of a module of the user's.

The module holds stand-ins under names of Python's own then (:mod:`weft.capture.record.held_references`), which eager
does not see. And to follow all variables of a training script, its loop counters among them, would capture the step
anew at each call. So the step gets a dictionary that tells which variables it asks for.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from weft.capture.record.held_references import StandIn, original_of
from weft.capture.state.containers import BuiltinLike

# Made of the methods above; those of a dictionary would look into an empty one.
_METHODS: Any = MutableMapping


class ModuleVariables(StandIn, dict[str, Any]):
    """The dictionary of a module, for the step.

    Args:
        original: the dictionary itself.
        asked: called before a variable is read or written; with "" before the step goes through their names.
    """

    def __init__(self, original: dict[str, Any], asked: Callable[[dict[str, Any], str], None]) -> None:
        super().__init__(original)
        self._asked = asked

    def __getitem__(self, name: Any) -> Any:
        self._ask(name)
        if _is_hidden(self.weft_original, name):
            raise KeyError(name)
        return self.weft_original[name]

    def __setitem__(self, name: Any, value: Any) -> None:
        self._ask(name)
        self.weft_original[name] = value

    def __delitem__(self, name: Any) -> None:
        self._ask(name)
        if _is_hidden(self.weft_original, name):
            raise KeyError(name)
        del self.weft_original[name]

    def __iter__(self) -> Iterator[Any]:
        self._asked(self.weft_original, "")
        return (name for name in list(self.weft_original) if not _is_hidden(self.weft_original, name))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __reversed__(self) -> Iterator[Any]:
        return reversed(list(self))

    def __repr__(self) -> str:
        return repr(self.copy())

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    def copy(self) -> dict[Any, Any]:
        """A plain dictionary with the variables as they are now."""
        return {name: self[name] for name in self}

    __copy__ = copy
    __contains__, __eq__, get, pop = _METHODS.__contains__, _METHODS.__eq__, _METHODS.get, _METHODS.pop
    keys, values, items = _METHODS.keys, _METHODS.values, _METHODS.items
    popitem, clear, update, setdefault = _METHODS.popitem, _METHODS.clear, _METHODS.update, _METHODS.setdefault

    def _ask(self, name: Any) -> None:
        # Python's own names are no state, and stand-ins must not come to be among them.
        if type(name) is str and name != "__builtins__" and not _is_hidden(self.weft_original, name):
            self._asked(self.weft_original, name)


def _is_hidden(variables: dict[str, Any], name: Any) -> bool:
    """Whether a variable is there for the time of the capture only."""
    own = vars(builtins).get(name) if type(name) is str and name in variables else None
    if own is None or (value := variables[name]) is own:
        return False
    return isinstance(value, BuiltinLike) or original_of(value) is own
