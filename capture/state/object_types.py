"""The types of the objects that a step can reach, and the dictionaries of their attributes: it may assign
``obj.__class__``, as torch's parametrizations do, and ``obj.__dict__``, and change the order of attributes."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import Any

from weft.capture.state.containers import Container, label_of
from weft.capture.state.contents import attributes_of
from weft.capture.state.key_order import assigned_keys, moved_keys

_NAMES = ("__class__", "__dict__")


class ObjectTypes(Container):
    """The type of each object, by the object's path with ``.__class__``, and the dictionary of its attributes, by its
    path with ``.__dict__``.

    No call is guarded by it: guards compare both where they compare objects. The order of attributes is that in which
    they were assigned. Only code that goes through all of them sees it, and other containers hold some of them alone.
    """

    def __init__(self) -> None:
        self._objects: dict[str, tuple[Any, str]] = {}
        self._changed: set[str] = set()
        self._noted: set[int] = set()  # ids of objects
        self._orders: list[tuple[dict[str, Any], str, list[str]]] = []
        super().__init__(object(), "", label=str)
        self.frozen = True

    def note(self, objects: Iterable[tuple[Any, str]]) -> None:
        """Remember the types and dictionaries of objects, given with their paths, that are not known yet."""
        for obj, path in objects:
            if id(obj) in self._noted or isinstance(obj, type):
                continue
            self._noted.add(id(obj))
            attributes = attributes_of(obj)
            if type(attributes) is dict and type(obj) is not types.ModuleType:
                self._orders.append((attributes, path, list(attributes)))
            for name in _NAMES:
                key = label_of(path)(name)
                if key not in self._objects and (name == "__class__" or attributes_of(obj) is attributes_of(obj)):
                    self._objects[key] = obj, name
                    self.before[key] = self.get(key)

    def entries(self) -> dict[str, Any]:
        """The types and dictionaries now."""
        return {key: self.get(key) for key in self._objects}

    def get(self, key: Any) -> Any:
        """The type or dictionary of one object now."""
        obj, name = self._objects[key]
        return type(obj) if name == "__class__" else attributes_of(obj)

    def set(self, key: Any, value: Any) -> None:
        """Give an object another type or dictionary."""
        obj, name = self._objects[key]
        setattr(obj, name, value)

    def changes(self) -> Iterator[tuple[Any, Any, Any]]:
        """The objects that have another type or dictionary than they had."""
        found = list(super().changes())
        self._changed |= {key for key, *_ in found}
        return iter(found)

    def reordered(self) -> list[tuple[Container, list[str], frozenset[str]]]:
        """The attributes of objects that have to be moved to the end, one by one, so that all are in order; and those
        among them that are not, where they are there already."""
        found = [(attributes, path, *assigned_keys(keys, list(attributes))) for attributes, path, keys in self._orders]
        return [(Container(attributes, path), moved, new) for attributes, path, moved, new in found if moved]

    def restore(self) -> None:
        """Give the objects back their types, dictionaries, and the order of attributes."""
        super().restore()
        for attributes, path, keys in self._orders:
            if moved_keys(keys, list(attributes)):
                Container(attributes, path).move_to_end(key for key in keys if key in attributes)

    def forget_unchanged(self) -> None:
        """Drop the references to objects of which the step changed neither."""
        self._noted.clear()
        self._orders.clear()
        self._objects = {key: self._objects[key] for key in self._changed}
        self.before = {key: self.before[key] for key in self._changed}
