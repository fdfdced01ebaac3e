"""Replacements of functions and other attributes of libraries that only one thread sees.

A capture and a fake world replace functions of torch. A module or class has one attribute for all threads, and another
thread may train with torch meanwhile. So what is put in place is a *dispatcher*: it calls the replacement in the
thread that asked for it, and the original in every other thread. Threads may replace the same attribute at the same
time, and end in any order. The original is put back when no thread replaces the attribute any more.

    with replaced(torch, "manual_seed", record_seed):
        ...

    patches = Patches()                                    # under every name by which a module holds the function
    patches.function(torch, "manual_seed", record_seed)

A dispatcher that somebody kept (a module imported meanwhile) goes on to call the original.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

_ABSENT = object()
# Guards the two registries and the places themselves; held for a few assignments.
_lock = threading.RLock()


class _Active(threading.local):
    """The replacements of the running thread, the innermost last."""

    def __init__(self) -> None:
        self.members: list[Any] = []


class _Dispatcher:
    """Stands for one original, a member of a module, class or object.

    Attributes:
        original: the function, class, static or class method or property.
        member: what is put in its place, of the same kind.
    """

    def __init__(self, original: Any) -> None:
        self.original = original
        self._active = _Active()
        self.member = self._member()

    def present(self) -> Any:
        """The member as the running thread sees it."""
        members = self._active.members
        return members[-1] if members else self.original

    def push(self, replacement: Any) -> None:
        """Replace the original in this thread."""
        self._active.members.append(replacement)

    def pop(self, replacement: Any) -> None:
        """Take one replacement of this thread back."""
        members = self._active.members
        at = max(at for at, member in enumerate(members) if member is replacement)
        del members[at]

    def _member(self) -> Any:
        original, present = self.original, self.present
        if isinstance(original, property):
            return _dispatching_property(original, present)
        if isinstance(original, (staticmethod, classmethod)):
            return type(original)(self._function(original.__func__))
        if isinstance(original, type):
            return _dispatching_class(original, present)
        return self._function(original)

    def _function(self, function: Any) -> Callable[..., Any]:
        active = self._active

        @functools.wraps(function)
        def dispatch(*args: Any, **kwargs: Any) -> Any:
            members = active.members
            return (_function_of(members[-1]) if members else function)(*args, **kwargs)

        return dispatch


def _function_of(member: Any) -> Any:
    return member.__func__ if isinstance(member, (staticmethod, classmethod)) else member


def _dispatching_property(original: property, present: Callable[[], Any]) -> property:
    accessors: list[Any] = [
        (lambda *args, name=name: getattr(present(), name)(*args)) if getattr(original, name) else None
        for name in ("fget", "fset", "fdel")
    ]
    return property(*accessors, doc=original.__doc__)


def _dispatching_class(original: type, present: Callable[[], Any]) -> type:
    """A subclass whose calls make what the running thread's class makes. Objects of either are instances of it."""

    def kinds() -> tuple[type, ...]:
        return tuple(kind for kind in (original, present()) if isinstance(kind, type))

    class Meta(type(original)):  # type: ignore[misc]
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return present()(*args, **kwargs) if cls is made else super().__call__(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, kinds()) if cls is made else super().__instancecheck__(instance)

        def __subclasscheck__(cls, other: type) -> bool:
            return issubclass(other, kinds()) if cls is made else super().__subclasscheck__(other)

    names = {"__doc__": original.__doc__, "__module__": original.__module__, "__qualname__": original.__qualname__}
    made: type = Meta(original.__name__, (original,), names)
    return made


class _PatchedPlace:
    """An attribute that holds another object while somebody uses it.

    Attributes:
        raw: what the attribute held; _ABSENT where a class inherits it.
        uses: number of replacements that need it now.
    """

    def __init__(self, owner: Any, name: str, raw: Any, member: Any) -> None:
        self.owner, self.name, self.raw, self.member = owner, name, raw, member
        self.uses = 0

    def use(self) -> None:
        if not self.uses:
            setattr(self.owner, self.name, self.member)
        self.uses += 1

    def leave(self) -> None:
        self.uses -= 1
        if self.uses or _raw(self.owner, self.name) is not self.member:  # somebody else's patch stays
            return
        if self.raw is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.raw)


# Kept for good: a dispatcher that a module took meanwhile is the one that the next replacement finds.
# The dispatchers are found by the ids of their originals and members, which they keep alive.
_places: dict[tuple[int, str], _PatchedPlace] = {}
_dispatchers: dict[int, _Dispatcher] = {}


def _raw(owner: Any, name: str) -> Any:
    """What the attribute holds itself; _ABSENT where it is inherited or missing."""
    if isinstance(owner, types.CellType):
        return owner.cell_contents
    return vars(owner).get(name, _ABSENT)


def _occupied(owner: Any, name: str, member: Callable[[Any], Any]) -> _PatchedPlace:
    """The place of an attribute, in use from here on; ``member`` makes what it holds from what it held."""
    raw = _raw(owner, name)
    place = _places.get((id(owner), name))
    if place is None or raw is not (place.member if place.uses else place.raw):
        inherited = inspect.getattr_static(owner, name, None) if isinstance(owner, type) else getattr(owner, name)
        place = _places[id(owner), name] = _PatchedPlace(owner, name, raw, member(inherited if raw is _ABSENT else raw))
    place.use()
    return place


def _dispatcher_of(member: Any) -> _Dispatcher:
    """The dispatcher that stands for ``member``, or that it belongs to. One original has one dispatcher."""
    found = _dispatchers.get(id(member))
    if found is None:
        found = _Dispatcher(member)
        _dispatchers[id(member)] = _dispatchers[id(found.member)] = found
    return found


def present(owner: Any, name: str) -> Any:
    """The attribute as the running thread sees it: what a replacement of its own calls to do more than the original."""
    raw = inspect.getattr_static(owner, name) if isinstance(owner, type) else getattr(owner, name)
    found = _dispatchers.get(id(raw))
    return getattr(owner, name) if found is None else _function_of(found.present())


def original(function: Any) -> Any:
    """The function that a dispatcher stands for; any other as it is."""
    found = _dispatchers.get(id(function))
    return function if found is None else found.original


@contextmanager
def replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Inside, ``owner.name`` is ``replacement`` in this thread.

    Args:
        owner: a module, a class, an object, or the cell of a closure (then ``name`` is ``cell_contents``).
        name: of a function, method or property. A static or class method and a property are replaced by their like.
    """
    with _lock:
        place = _occupied(owner, name, lambda raw: _dispatcher_of(raw).member)
    dispatcher = _dispatchers[id(place.member)]
    dispatcher.push(replacement)
    try:
        yield
    finally:
        dispatcher.pop(replacement)
        with _lock:
            place.leave()


@contextmanager
def stand_in(owner: Any, name: str, member: Any) -> Iterator[None]:
    """Inside, ``owner.name`` is ``member`` in all threads; ``member`` must tell them apart itself.

    The owner may have no such attribute otherwise.

    The first use of an attribute decides on its ``member``: callers give the same one each time.
    """
    with _lock:
        place = _occupied(owner, name, lambda raw: member)
    try:
        yield
    finally:
        with _lock:
            place.leave()


class Patches:
    """Replacements in this thread between `apply` and `undo`.

    A function is replaced under every name by which a loaded module holds it: a script that ran
    `from torch.distributed import init_process_group` holds the function under a name of its own. `undo` searches all
    modules again, so that a module that was imported in between and took a dispatcher gets the original. Only modules
    are searched: a function in a container or a default argument is not found.
    """

    def __init__(self) -> None:
        self._functions: dict[int, tuple[_Dispatcher, Any]] = {}
        self._attributes: list[tuple[Any, str, Any]] = []
        self._undo = ExitStack()

    def function(self, owner: Any, name: str, replacement: Any) -> None:
        """Replace the function or class `owner.name` under every name by which a module holds it."""
        with _lock:
            dispatcher = _dispatcher_of(getattr(owner, name))
        self._functions[id(dispatcher)] = dispatcher, replacement

    def attribute(self, owner: Any, name: str, replacement: Any) -> None:
        """Replace one attribute of a class: a method or a property."""
        self._attributes.append((owner, name, replacement))

    def apply(self) -> None:
        """Put all replacements in place."""
        dispatchers = [dispatcher for dispatcher, _ in self._functions.values()]
        with _lock:
            for module, name, dispatcher in list(_holders(dispatchers)):
                self._undo.callback(_leave, _occupied(module, name, lambda raw, to=dispatcher: to.member))
        for dispatcher, replacement in self._functions.values():
            dispatcher.push(replacement)
            self._undo.callback(dispatcher.pop, replacement)
        for owner, name, replacement in self._attributes:
            self._undo.enter_context(replaced(owner, name, replacement))

    def undo(self) -> None:
        """Restore the originals, in reverse order."""
        self._undo.close()
        with _lock:
            for module, name, dispatcher in list(_holders([each for each, _ in self._functions.values()])):
                place = _places.get((id(module), name))
                if vars(module)[name] is dispatcher.member and (place is None or not place.uses):
                    setattr(module, name, dispatcher.original)


def _leave(place: _PatchedPlace) -> None:
    with _lock:
        place.leave()


def _holders(dispatchers: Iterable[_Dispatcher]) -> Iterator[tuple[types.ModuleType, str, _Dispatcher]]:
    """Each attribute of a loaded module that holds the original or the member of one of these."""
    known = {id(held): each for each in dispatchers for held in (each.original, each.member)}
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            found = known.get(id(value))
            if found is not None and (value is found.original or value is found.member):
                yield module, name, found


def wrap_callable(member: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """`member`, a value from a class's `vars`, with its functions wrapped by `wrap`.

    Methods, static and class methods and properties are wrapped. Anything else is returned as it is.
    """
    if isinstance(member, staticmethod | classmethod):
        return type(member)(wrap(member.__func__))
    if isinstance(member, property):
        accessors: list[Any] = [member.fget, member.fset, member.fdel]
        return property(*(accessor and wrap(accessor) for accessor in accessors), doc=member.__doc__)
    if callable(member) and not isinstance(member, type):
        return wrap(member)
    return member
