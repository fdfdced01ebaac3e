"""Attributes and variables that a step asks for by other means than a name in its code: a text that it computes, or all
of an object's attributes at once.

They are known when the step asks for them. Where the walk of the Python state does not follow one, it does from then
on, and the next attempt at the capture follows it from the beginning (:mod:`weft.capture.record.computed_names`).
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable
from typing import Any

from weft.capture.state.containers import Container, LoadedModules, label_of
from weft.capture.state.contents import subclasses_of

_MODULES = "sys.modules:"


class AskedAttributes:
    """Those that are followed in one attempt at a capture for this reason. The classes of objects are not asked for
    with ``isinstance``, which may run code of theirs that asks again.

    Args:
        walk: the :class:`ReachableState` that follows them.
        known: what the step is known to ask for, as :attr:`new` has it.

    Attributes:
        new: what else it was found to ask for: names of attributes, ``path.__dict__`` of objects of which all
            attributes count, ``module:name`` of global variables, ``module:`` where the names of all count,
            ``sys.modules:name`` of modules.
    """

    def __init__(self, walk: Any, known: Iterable[str]) -> None:
        self._walk = walk
        self._known = frozenset(known)
        self.new: set[str] = set()
        self._variables: set[tuple[int, str]] = set()
        self._modules: frozenset[str] = frozenset()

    @property
    def names(self) -> list[str]:
        """The names of attributes that the step is known to ask for."""
        return list(filter(str.isidentifier, self._known))

    @property
    def modules(self) -> list[str]:
        """The names of the modules that the step is known to look up or import."""
        return [each.removeprefix(_MODULES) for each in self._known if each.startswith(_MODULES)]

    def has_all(self, path: str) -> bool:
        """Whether all attributes of the object at ``path`` count, those that it may get included."""
        return f"{path}.__dict__" in self._known

    def variables(self, module: dict[str, Any]) -> list[str]:
        """The global variables of a module that the step is known to ask for, and that are not followed yet."""
        prefix = f"{module.get('__name__')}:"
        names = [each.removeprefix(prefix) for each in self._known if each.startswith(prefix)]
        new = [name for name in names if (id(module), name) not in self._variables]
        self._variables.update((id(module), name) for name in new)
        return new

    def attribute(self, obj: Any, name: str) -> None:
        """The step is about to read or write an attribute of an object."""
        walk = self._walk
        if walk.is_unknown(obj, name):
            self._add(name)
            if id(obj) in walk.modules:  # of which all attributes count that it has
                path = walk.modules[id(obj)][1]
                walk.containers.append(Container(vars(obj), path, frozenset({name}), label_of(path)))
            walk.go_on()

    def texts(self, names: Iterable[str]) -> None:
        """The step is about to read attributes of these names, of objects that are not known yet."""
        if unknown := set(names) - self._walk.names.read:
            for name in unknown:
                self._add(name)
            self._walk.go_on()

    def everything(self, obj: Any) -> None:
        """The step is about to read all attributes of an object, or to get the dictionary that they are in."""
        self._walk.schedulers.read(obj, "__dict__")
        path = None if issubclass(type(obj), types.ModuleType) else self._walk.path_of(obj)
        if path is not None and not self.has_all(path):
            self.new.add(f"{path}.__dict__")
            self._walk.follow_all(obj, path)
            self._walk.go_on()

    def subclasses(self, kind: type) -> None:
        """The step is about to ask for the subclasses of a class."""
        self._walk.containers.append(subclasses_of(kind))
        for each in type.__subclasses__(kind):
            self._walk.add(each, each.__qualname__)

    def variable(self, module: dict[str, Any], name: str) -> None:
        """The step is about to read or write a global variable of a module, or with "" to read the names of all."""
        if (id(module), name) in self._variables:
            return
        self._variables.add((id(module), name))
        entry = f"{module.get('__name__')}:{name}"
        self.new |= {entry} - self._known
        self._walk.follow_variables(module, [name])
        self._walk.go_on()

    def module(self, name: str) -> None:
        """The step has imported a module, or is about to look whether it is loaded."""
        if name and name not in self._walk.names.modules:
            self._walk.names.modules.add(name)
            self.new.add(_MODULES + name)
            self._walk.go_on()

    def follow_modules(self) -> None:
        """Follow the modules that code looks up by name, as far as they are not followed yet."""
        if names := frozenset(self._walk.names.modules) - self._modules:
            self._modules |= names
            self._walk.containers.append(LoadedModules(names))
            for name in names & sys.modules.keys():
                self._walk.add(sys.modules[name], name)

    def _add(self, name: str) -> None:
        self._walk.names.add_text(name)
        self.new.add(name)
