"""Put other functions in the place of a library's, wherever loaded modules hold them, and take them back."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any


class Swaps:
    """Replacements that are in force between `apply` and `undo`.

    A function is replaced under every name that a loaded module holds it by, so that a script that said `from
    torch.distributed import init_process_group` long ago is reached too. `undo` looks through the modules
    again: one that was imported in between and took a replacement gets the original. (Modules are all that is
    searched: a function kept in a container or as a default argument is not found.)
    """

    def __init__(self) -> None:
        self._functions: dict[int, tuple[Any, Any]] = {}
        self._attributes: list[tuple[Any, str, Any]] = []
        self._undo = ExitStack()

    def function(self, owner: Any, name: str, replacement: Any) -> None:
        """Replace the function or class that `owner` calls `name`, under whatever name a module holds it."""
        original = getattr(owner, name)
        self._functions[id(original)] = (original, _distinct(replacement))

    def attribute(self, owner: Any, name: str, replacement: Any) -> None:
        """Replace one attribute of one class: a method or a property."""
        self._attributes.append((owner, name, replacement))

    def apply(self) -> None:
        back = {id(new): (new, old) for old, new in self._functions.values()}
        self._undo.callback(_replace_in_modules, back)
        _replace_in_modules(self._functions)
        for owner, name, replacement in self._attributes:
            if name in vars(owner):
                self._undo.callback(setattr, owner, name, vars(owner)[name])
            else:
                self._undo.callback(delattr, owner, name)
            setattr(owner, name, replacement)

    def undo(self) -> None:
        self._undo.close()


def _distinct(replacement: Any) -> Any:
    """An object that no module holds yet: `undo` looks for it by identity, and one stand-in may serve several
    names."""
    if isinstance(replacement, type):
        return type(replacement.__name__, (replacement,), {"__doc__": replacement.__doc__})

    @functools.wraps(replacement)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return replacement(*args, **kwargs)

    return stand_in


def wrap_callable(member: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """`member`, a value from a class's `vars`, with its function wrapped: methods, static and class methods,
    properties; anything else comes back as it is."""
    if isinstance(member, staticmethod | classmethod):
        return type(member)(wrap(member.__func__))
    if isinstance(member, property):
        accessors: list[Any] = [member.fget, member.fset, member.fdel]
        return property(*(accessor and wrap(accessor) for accessor in accessors), doc=member.__doc__)
    if callable(member) and not isinstance(member, type):
        return wrap(member)
    return member


def _replace_in_modules(replacements: dict[int, tuple[Any, Any]]) -> None:
    """For each `id: (old, new)`, let every module name that is bound to `old` be bound to `new`."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if names is None:
            continue
        for name, value in list(names.items()):
            found = replacements.get(id(value))
            if found is not None and found[0] is value:
                names[name] = found[1]
