"""Guards on what an object is: its class, the bases of that class, and which dictionary holds its attributes.

A program may assign all three between calls (``obj.__class__ = Other``, ``Other.__bases__ = ...``, ``obj.__dict__ =
loaded``). The entries of dictionaries are guarded elsewhere (:mod:`weft.capture.guards.container_guard`): those of a
dictionary that the object has no longer stay as they are.
"""

from __future__ import annotations

import operator
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import torch

from weft import state_checks
from weft.capture.guards.steady_checks import Steady
from weft.capture.state.contents import attributes_of
from weft.capture.state.origin import is_own

# Objects whose class is never assigned, or that have other attributes in each thread.
_OF_ONE_KIND = (type, types.ModuleType, types.FunctionType, threading.local, weakref.ref)
_bases_of = operator.attrgetter("__mro__")


class ObjectGuard:
    """Guards on objects with attributes, and on classes.

    Objects other than modules are held weakly: a program may look whether they are alive.

    Args:
        walked: the objects and classes with their paths.
    """

    def __init__(self, walked: Sequence[tuple[Any, str]]) -> None:
        modules = [(obj, path) for obj, path in walked if isinstance(obj, torch.nn.Module)]
        others = [(obj, path) for obj, path in walked if not isinstance(obj, (torch.nn.Module, *_OF_ONE_KIND))]
        self._modules = [module for module, _ in modules]
        self._others = [_weakly(obj) for obj, _ in others]
        self._paths = [path or "the module" for _, path in (*modules, *others)]
        objects = [*self._modules, *(obj for obj, _ in others)]
        self._kinds = list(map(type, objects))
        classes = (*self._kinds, *(obj for obj, _ in walked if isinstance(obj, type)))
        self._own = [kind for kind in dict.fromkeys(classes) if is_own(kind)]
        self._bases = list(map(_bases_of, self._own))
        # Some objects make another dictionary whenever they are asked for it.
        self._has_dictionary = [attributes_of(obj) is attributes_of(obj) for obj in objects]
        self._dictionaries = [attributes_of(obj) for obj in compress(objects, self._has_dictionary)]
        held = [*self._modules, *(ref if type(ref) is weakref.ref else ref() for ref in self._others)]
        dictionaries = [
            attributes_of(obj) if has else None for obj, has in zip(objects, self._has_dictionary, strict=True)
        ]
        self._same = state_checks.same_attributes(list(zip(held, self._kinds, dictionaries, strict=True)))

    def listed(self) -> list[str]:
        """The conditions as text."""
        return [f"{path} is a {kind.__qualname__}" for path, kind in zip(self._paths, self._kinds, strict=True)]

    def holds(self) -> bool:
        """Whether everything is as it was."""
        return (self._same() and self._bases_are_same()) or self.failure() is None

    def steady(self) -> Steady:
        """What holds only if :meth:`holds` would."""
        return Steady([self._same], self._bases_are_same if self._own else None)

    def _bases_are_same(self) -> bool:
        return all(map(operator.is_, map(_bases_of, self._own), self._bases))

    def failure(self) -> str | None:
        """The first difference, as text; None where there is none."""
        dictionaries = iter(self._dictionaries)
        for obj, path, kind, has in zip(self._objects(), self._paths, self._kinds, self._has_dictionary, strict=True):
            dictionary = next(dictionaries) if has else None
            if obj is None:  # it is gone; whether the step finds another one in its place is asked elsewhere
                continue
            if type(obj) is not kind:
                return f"the class of {path} is {type(obj).__qualname__}, was {kind.__qualname__}"
            if has and attributes_of(obj) is not dictionary:
                return f"{path}.__dict__ is another dictionary"
        changed = (kind for kind, bases in zip(self._own, self._bases, strict=True) if kind.__mro__ != bases)
        return next((f"the bases of {kind.__qualname__} changed" for kind in changed), None)

    def _objects(self) -> list[Any]:
        return [*self._modules, *map(operator.call, self._others)]


def _weakly(obj: Any) -> Callable[[], Any]:
    """What gives the object, or None once it is gone."""
    try:
        return weakref.ref(obj)
    except TypeError:  # the class has slots and none for references
        return lambda: obj
