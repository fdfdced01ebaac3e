"""The closed list of classes whose objects may occur in a serialized graph.

A class enters the list by the decorator :func:`serializable`. Reading a serialized graph makes objects of these classes
only, from values whose types are those of the constructor's annotations: data from a file can neither import a module
nor name a function to call. Works without torch, which the processes that compile kernels do not import.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import types
import typing
from typing import Any, TypeVar, Union

_Class = TypeVar("_Class", bound=type)

_CLASSES: dict[str, type] = {}
_EXACT = (int, bool, str)


def serializable(kind: _Class) -> _Class:
    """Class decorator: objects may be written into serialized graphs, by the parameters of their constructor.

    Each parameter must be annotated and also be an attribute. The constructor runs on values from a file that had the
    annotated types: it must not run text, open files or call what it was given.
    """
    name = kind.__qualname__
    # Class names are unique in weft; a second one would make the meaning of a file depend on what was imported.
    assert _CLASSES.get(name, kind).__module__ == kind.__module__, f"two serializable classes are called {name}"
    _CLASSES[name] = kind
    return kind


def is_serializable(kind: type) -> bool:
    """Whether objects of exactly this class may occur in a serialized graph."""
    return _CLASSES.get(kind.__qualname__) is kind


def fields_of(value: Any) -> list[Any] | None:
    """What :func:`construct` takes to make an equal object; None where ``value`` is of no class of the list."""
    kind = type(value)
    if not is_serializable(kind):
        return None
    return [getattr(value, name) for name in _parameters(kind)]


def construct(name: str, values: collections.abc.Sequence[Any]) -> Any:
    """An object of the class called ``name`` from its fields.

    Raises:
        ValueError: no such class is in the list, or a value has another type than its parameter's annotation.
    """
    # Looked up in the closed list and never imported by name: the data could name any class.
    kind = _CLASSES.get(name)
    if kind is None:
        raise ValueError(f"{name} is no class of a serialized graph")
    check_fields(kind, values)
    return kind(*values)


def check_fields(kind: type, values: collections.abc.Sequence[Any]) -> None:
    """Raise ValueError unless ``values`` are of the types that the constructor of ``kind`` declares."""
    parameters = _parameters(kind)
    if len(values) != len(parameters):
        raise ValueError(f"{kind.__qualname__} has {len(parameters)} fields, not {len(values)}")
    for (name, hint), value in zip(parameters.items(), values, strict=True):
        if not fits(value, hint):
            raise ValueError(f"{kind.__qualname__}.{name} is declared as {hint}, not as {type(value).__name__}")


@functools.cache
def _parameters(kind: type) -> dict[str, Any]:
    """The parameters of a constructor with their annotations, in order."""
    if issubclass(kind, tuple):  # a NamedTuple
        return typing.get_type_hints(kind)
    hints = typing.get_type_hints(kind.__init__)  # type: ignore[misc]
    return {name: hints[name] for name in [*inspect.signature(kind.__init__).parameters][1:]}  # type: ignore[misc]


def fits(value: Any, hint: Any) -> bool:
    """Whether ``value``, with all that is in it, has the type of an annotation. Subclasses of numbers and strings do
    not count as such: a symbolic number is no ``int``."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(fits(value, argument) for argument in arguments)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if arguments[-1:] == (...,):
            return all(fits(item, arguments[0]) for item in value)
        return len(value) == len(arguments) and all(map(fits, value, arguments))
    if origin in (dict, collections.abc.Mapping):
        return isinstance(value, dict) and all(
            fits(key, arguments[0]) and fits(item, arguments[1]) for key, item in value.items()
        )
    if origin is not None:
        inside = isinstance(value, origin) and not isinstance(value, (str, bytes))
        return inside and all(fits(item, arguments[0]) for item in value)
    # An int is written as it is, where a float is declared, and bool is no number here: `type`, not `isinstance`.
    if hint is float:
        return type(value) in (int, float)
    if hint in _EXACT:
        return type(value) is hint
    return value is None if hint is None else isinstance(value, hint)
