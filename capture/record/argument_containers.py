"""Lists, dictionaries and data objects among the arguments that the step changes.

A captured step gets copies of them, with fakes inside: ``batch.pop("labels")`` or ``metrics["loss"] = loss`` changes a
copy. What changed is an effect of the step, which each call repeats on the objects that its caller passed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch

from weft.capture.record.shared_arguments import Slot, at_steps
from weft.capture.state.containers import Attributes, Container, items_of
from weft.capture.state.object_parts import slot_names
from weft.capture.state.tensor_memory import own_attributes
from weft.errors import PythonStateChanged


class PassedObject:
    """An object among the arguments. In the capture ``obj`` is what the step was given; at a call, what the caller
    passed."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def outer(self) -> Any:
        """The object of the present call."""
        return self.obj


class ArgumentContainer(Container):
    """One of them. In the capture ``obj`` is what the step was given; at a call, what the caller passed."""

    def grew(self) -> bool:
        """No: guards hold the number of entries that each call brings."""
        return False

    def may_be_appended_to(self) -> bool:
        """No, for the same reason."""
        return False


class ArgumentSlots(ArgumentContainer, Attributes):
    """The attributes in slots of a data object."""

    def set(self, key: Any, value: Any) -> None:
        """Assign an attribute, of a frozen data class, too."""
        object.__setattr__(self.obj, key, value)


class TensorAttributes(ArgumentContainer):
    """What a program put on a tensor among the arguments, as attributes."""

    def entries(self) -> dict[Any, Any]:
        """The attributes, but for those of torch's own."""
        return own_attributes(self.obj) if isinstance(self.obj, torch.Tensor) else {}

    def set(self, key: Any, value: Any) -> None:
        """Assign an attribute."""
        setattr(self.obj, key, value)

    def remove(self, key: Any) -> None:
        """Delete an attribute."""
        vars(self.obj).pop(key, None)


class ArgumentContainers:
    """All of them in the arguments of a captured call.

    Args:
        given: the positional and the keyword arguments that the step gets in the capture.
        passed: those that the caller passed.
        held: ids of the objects of the Python state.
    """

    def __init__(self, given: tuple[Any, Any], passed: tuple[Any, Any], held: Collection[int]) -> None:
        self._found: list[tuple[tuple[Any, ...], ArgumentContainer]] = []
        self._met = set(held)  # an object that is passed twice has one copy
        self._identity: list[int] = []  # of what the caller passed, for each that was found
        self._tensors: list[tuple[tuple[Any, ...], TensorAttributes]] = []
        self._orders: list[tuple[ArgumentContainer, list[Any]]] = []  # of dictionaries whose entries moved
        self._objects: list[tuple[tuple[Any, ...], PassedObject]] = []
        for at, (mine, theirs) in enumerate(zip(given[0], passed[0], strict=True)):
            self._walk(mine, theirs, (0, at), f"args[{at}]")
        for name, mine in given[1].items():
            self._walk(mine, passed[1][name], (1, name), name)

    def _walk(self, given: Any, passed: Any, steps: tuple[Any, ...], path: str) -> None:
        if id(given) in self._met:
            return
        if isinstance(given, torch.Tensor):
            self._met.add(id(given))
            self._tensors.append((steps, TensorAttributes(given, path, label=lambda key: f"{path}.{key}")))
            return
        if given is passed or type(given) is not type(passed):
            return  # another leaf
        self._met.add(id(given))
        if isinstance(given, (list, tuple, dict, deque)):
            self._items(given, passed, steps, path, lambda key: f"{path}[{key!r}]")
        if not isinstance(given, tuple):
            self._objects.append((steps, PassedObject(given)))
        if hasattr(given, "__dict__"):
            self._items(vars(given), vars(passed), (*steps, vars), path, lambda key: f"{path}.{key}")
        if names := slot_names(type(given)):
            self._found.append((steps, slots := ArgumentSlots(given, path, names, lambda key: f"{path}.{key}")))
            self._identity.append(id(passed))
            for name, item in slots.before.items():
                self._walk(item, getattr(passed, name), (*steps, Slot(name)), f"{path}.{name}")

    def _items(self, given: Any, passed: Any, steps: tuple[Any, ...], path: str, label: Callable[[Any], str]) -> None:
        container = ArgumentContainer(given, path, label=label)
        if not isinstance(given, tuple):
            self._found.append((steps, container))
            self._identity.append(id(passed))
        theirs = dict(items_of(passed))
        for key, item in container.before.items():
            self._walk(item, theirs[key], (*steps, key), label(key))

    @property
    def found(self) -> list[Container]:
        """The containers."""
        return [container for _, container in self._found]

    @property
    def objects(self) -> list[PassedObject]:
        """The lists, dictionaries and data objects themselves."""
        return [each for _, each in self._objects]

    def changes(self, state: Iterable[Container]) -> Iterator[tuple[Container, Any, Any, Any]]:
        """(container, key, before, after) of each entry that the step changed.

        Args:
            state: the containers of the Python state.

        Raises:
            PythonStateChanged: the caller passed an object that the step came to reach otherwise while it ran, and
                the step changed it there, or the copy that it got.
        """
        paths = {identity: found.path for (_, found), identity in zip(self._found, self._identity, strict=True)}
        reached = {id(each.obj): each for each in state if id(each.obj) in paths}
        for each in reached.values():
            for key, *_ in each.changes():
                raise _changed_twice(each.label(key), f"of an object that is also the argument {paths[id(each.obj)]}")
        for steps, attributes in self._tensors:
            if any(True for _ in attributes.changes()):
                self._found.append((steps, attributes))
                self._identity.append(id(attributes))
        for (_, container), identity in zip(self._found, self._identity, strict=True):
            for key, old, new in container.changes():
                if identity in reached:
                    how = reached[identity].path or "a variable"
                    raise _changed_twice(container.label(key), f"of an object that the step also reaches as {how}")
                yield container, key, old, new
            now = container.entries()
            kept = [key for key in container.before if key in now]
            if isinstance(container.obj, dict) and list(now)[: len(kept)] != kept:
                self._orders.append((container, list(now)))

    def restore(self) -> None:
        """Undo what the step put on the tensors that it got as they are."""
        for _, attributes in self._tensors:
            attributes.restore()
        self._tensors.clear()

    def order_entries(self) -> None:
        """After the changes: bring entries that the step took out and put back to where they are in eager."""
        for container, keys in self._orders:
            for key in keys:
                value = container.get(key)
                container.remove(key)
                container.set(key, value)

    def forget(self) -> None:
        """Let go of what the step was given."""
        self.restore()
        for _, container in self._found:
            container.obj, container.before = {}, {}
        for _, passed in self._objects:
            passed.obj = None

    def bind(self, call: tuple[Any, Any]) -> None:
        """Refer to the objects in the arguments of another call: (positional, keyword)."""
        for steps, each in (*self._found, *self._objects):
            each.obj = at_steps(call, steps)


def _changed_twice(path: str, what: str) -> PythonStateChanged:
    why = "in the capture, arguments are copies of what the caller passes"
    return PythonStateChanged(path, what, "let the step reach it in one way only, or pass a copy", why)
