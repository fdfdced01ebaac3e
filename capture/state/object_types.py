"""The types of the objects that a step can reach: it may assign ``obj.__class__``, as torch's parametrizations do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from weft.capture.state.containers import Container, label_of


class ObjectTypes(Container):
    """The type of each object, by the object's path with ``.__class__``.

    No call is guarded by it: guards compare types where they compare objects.
    """

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}
        self._changed: set[str] = set()
        self._noted: set[int] = set()  # ids of objects
        super().__init__(object(), "", label=str)
        self.frozen = True

    def note(self, objects: Iterable[tuple[Any, str]]) -> None:
        """Remember the types of objects, given with their paths, that are not known yet."""
        for obj, path in objects:
            if id(obj) in self._noted:
                continue
            self._noted.add(id(obj))
            key = label_of(path)("__class__")
            if key not in self._objects and not isinstance(obj, type):
                self._objects[key] = obj
                self.before[key] = type(obj)

    def entries(self) -> dict[str, type]:
        """The types now."""
        return {key: type(obj) for key, obj in self._objects.items()}

    def get(self, key: Any) -> Any:
        """The type of one object now."""
        return type(self._objects[key])

    def set(self, key: Any, value: Any) -> None:
        """Give an object another type."""
        self._objects[key].__class__ = value

    def changes(self) -> Iterator[tuple[Any, Any, Any]]:
        """The objects that have another type than they had."""
        found = list(super().changes())
        self._changed |= {key for key, *_ in found}
        return iter(found)

    def forget_unchanged(self) -> None:
        """Drop the references to objects whose types the step did not change."""
        self._noted.clear()
        self._objects = {key: self._objects[key] for key in self._changed}
        self.before = {key: self.before[key] for key in self._changed}
