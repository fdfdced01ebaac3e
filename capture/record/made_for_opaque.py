"""Objects that a step makes, gives to an opaque function, and still holds: one object for both, as in eager.

``history.append(metrics)`` in an opaque function keeps the very dictionary that the step returns afterwards. In a
compiled step the function runs in the middle of the program, and what the step leaves is made at its end. So what a
function has kept is not made again: it gets the parts that the object has at the end, and a tensor the memory. Each
such object has a number, which all templates of the capture give it.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from weft.capture.record.live_values import references
from weft.capture.record.template_parts import MadeObject, OutputSlot
from weft.capture.state.object_parts import identity_of_parts, parts_of


class MadeForOpaque:
    """The objects that one capture makes and gives to opaque functions, with their numbers."""

    def __init__(self) -> None:
        self._objects: dict[int, list[Any]] = {}  # by id: the object, its number, what it was made of
        # A reference to a tensor would make it look used.
        self._tensors: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def number(self, value: Any) -> int:
        """The number of an object, which is negative; 0 for an object that no opaque function got."""
        if isinstance(value, torch.Tensor):
            tensor, number = self._tensors.get(id(value), (lambda: None, 0))
            return number if tensor() is value else 0
        known = self._objects.get(id(value))
        return 0 if known is None else known[1]

    def add(self, made: Iterable[tuple[Any, Any]]) -> None:
        """Give numbers to those of these objects, each with its part in a template, that a function can get."""
        for value, part in made:
            new = self.number(value) or -1 - len(self._objects) - len(self._tensors)
            if type(part) is MadeObject:
                known = self._objects.setdefault(id(value), [value, new, []])
                known[2] = identity_of_parts(value)
                part.number = new
            elif type(part) is OutputSlot and type(part.index) is int and isinstance(value, torch.Tensor):
                self._tensors[id(value)] = weakref.ref(value), new
                part.number = new

    @property
    def ids(self) -> Iterator[int]:
        """Ids of the objects other than tensors, once for each reference."""
        return iter(self._objects)

    def changed(self) -> list[Any]:
        """The objects whose parts differ from those that the last opaque function saw."""
        return [value for value, _, before in self._objects.values() if identity_of_parts(value) != before]

    def end(self) -> None:
        """Let go of them."""
        self._objects.clear()
        self._tensors.clear()


class _KeptInThread(threading.local):
    """What opaque functions have kept in the call that the running thread makes, by number."""

    kept: dict[int, Any] | None = None


_mine = _KeptInThread()


def begin_call(kept: dict[int, Any] | None) -> dict[int, Any] | None:
    """Begin a call of a step, or end one with what this returned: what functions keep is in ``kept`` from now on."""
    before, _mine.kept = _mine.kept, kept
    return before


def kept_in_call() -> dict[int, Any]:
    """What functions have kept so far, by number."""
    return {} if _mine.kept is None else _mine.kept


def note_kept(made: dict[int, Any], passed: Iterable[Any]) -> list[torch.Tensor]:
    """After a function: note which objects it keeps, and what is in them.

    Args:
        made: what was made for it, by the ids of the parts of templates and by number.
        passed: the tensors that may be in it. Nothing else holds any of both.

    Returns:
        The tensors that it keeps, of those that have a number.
    """
    if _mine.kept is None or all(key >= 0 for key in made):
        return []
    values = list({id(value): value for value in made.values()}.values())
    within = Counter(map(id, made.values()))
    within.update(map(id, (*_mine.kept.values(), *passed)))
    inside = [[] if (taken := parts_of(value)) is None else [*map(id, taken.parts)] for value in values]
    taken = None  # it would count as a reference below
    within.update(each for parts in inside for each in parts)
    at_id = {id(value): at for at, value in enumerate(values)}
    pending = [at for at in range(len(values)) if references(values, at) > within[id(values[at])]]
    found = set[int]()
    while pending:
        if (at := pending.pop()) not in found:
            found.add(at)
            pending += [at_id[inner] for inner in inside[at] if inner in at_id]
    kept = {key: value for key, value in made.items() if key < 0 and at_id[id(value)] in found}
    _mine.kept.update(kept)
    return [value for value in kept.values() if isinstance(value, torch.Tensor)]
