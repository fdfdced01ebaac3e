"""Lists and dictionaries that a step leaves at several places, or that are the user's own: one object in all of them.

``s.last = s.metrics`` makes both names lead to one dictionary, and ``return s.metrics`` gives the caller that very one.
A template (:mod:`weft.capture.record.templates`) that copied them would part what eager keeps together: a later change
of one would not be seen in the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from weft.capture.state.containers import Container

_KINDS = (list, tuple, dict)


class OwnObject:
    """Takes the user's own object that a container is about."""

    def __init__(self, container: Container) -> None:
        self.container = container

    def fill(self, outputs: list[Any]) -> Any:
        """The object itself; where each call finds another one at its place, that of this call."""
        return self.container.obj if self.container.outer is None else self.container.outer.outer()


class SharedSlot:
    """Takes the one object of a call that stands for an object of the capture.

    Args:
        key: of the object, another one for each object of the capture.
        template: what it is made from.
    """

    def __init__(self, key: int, template: Any) -> None:
        self.key, self.template = key, template

    def of_call(self, outputs: list[Any], made: dict[int, Any]) -> Any:
        """The object, made when the first of its places asks for it.

        Args:
            made: the objects of this call so far, by key.
        """
        if self.key not in made:
            made[self.key] = self.template.fill(outputs, made)
        return made[self.key]


class SharedObjects:
    """The objects of one capture that templates must not copy.

    Args:
        containers: of the Python state and of the arguments, all of whose entries are followed.
        leaving: what leaves the step.
    """

    def __init__(self, containers: Iterable[Container], leaving: Iterable[Any] = ()) -> None:
        self._own = {id(each.obj): each for each in containers if each.keys is None and type(each.obj) in (list, dict)}
        self._own = {at: each for at, each in self._own.items() if each.outer is not None or not each.frozen}
        self._templates: dict[int, SharedSlot] = {}
        self._times: Counter[int] = Counter()
        self._leaving = list(leaving)  # held, so that no id is given to another object
        for value in self._leaving:
            self._count(value)

    def is_own(self, value: Any) -> bool:
        """Whether a list or dictionary is the user's own."""
        return id(value) in self._own

    def own(self, value: Any) -> list[Any]:
        """The user's own objects in a value."""
        if id(value) in self._own:
            return [value]
        return [each for item in _items(value) for each in self.own(item)]

    def marked(self, value: Any, template_of: Callable[[Any], Any]) -> Any:
        """The value with a slot in the place of each such object.

        Args:
            template_of: makes the template of an object that is shared.
        """
        if id(value) in self._own:
            return OwnObject(self._own[id(value)])
        if self._times[id(value)] > 1 and type(value) is not tuple:
            if id(value) not in self._templates:
                self._templates[id(value)] = SharedSlot(id(value), template_of(value))
            return self._templates[id(value)]
        return self.inside(value, template_of)

    def inside(self, value: Any, template_of: Callable[[Any], Any]) -> Any:
        """The same for what is in the value, which itself is taken as it is."""
        items = _items(value)
        new = [self.marked(item, template_of) for item in items]
        if all(mine is theirs for mine, theirs in zip(new, items, strict=True)):
            return value
        return dict(zip(value, new, strict=True)) if type(value) is dict else type(value)(new)

    def end(self) -> None:
        """Let go of what leaves the step, after the last template was made."""
        self._leaving.clear()

    def _count(self, value: Any) -> None:
        if type(value) in _KINDS and id(value) not in self._own:
            self._times[id(value)] += 1
            for item in _items(value) if self._times[id(value)] == 1 else ():
                self._count(item)


def _items(value: Any) -> list[Any]:
    return list(value.values() if type(value) is dict else value) if type(value) in _KINDS else []
