"""Functions and generators that the user's code holds under names of its own, replaced while a step is captured.

``from random import random`` binds the function before the capture replaces ``random.random``. So the replacement is
also put where the user's code holds the original: in the globals of the user's modules, and in the containers that the
step can reach.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from weft.capture.loaded_modules import remembered
from weft.capture.record.module_scans import MODULE_SCANS
from weft.capture.record.stand_ins import StandIns
from weft.capture.state.containers import Container
from weft.source_files import is_user_file

# A function that stands in for another carries that one under this name.
ORIGINAL = "__weft_original__"
# Installed packages that hold such functions for ends of their own.
_MACHINERY = frozenset({"sympy", "numpy", "triton", "pytest", "_pytest", "hypothesis", "mpmath"})
OPENED = frozenset({tuple, functools.partial, staticmethod, classmethod})
"""What holds functions in the place of which others may stand."""


@contextlib.contextmanager
def held_references_replaced(
    containers: Callable[[], Iterable[Container]],
    objects: Iterable[Any],
    users: list[dict[str, Any]],
    held: StandIns,
    reached: StandIns,
    builtins: dict[str, Any],
) -> Iterator[None]:
    """Inside, stand-ins are in the globals of the user's modules, in containers, and in the defaults of functions.

    A container also takes the stand-in for what it was found with: it is no change that the step made.

    Args:
        containers: tells those that the step can reach, as far as they are known.
        objects: the functions among them can be called by the step.
        users: the names of the user's modules.
        held: for values that any module of the user's holds.
        reached: for values that the step can reach.
        builtins: what the users' modules get for names of Python's own, where they define none of that name.
    """

    def replacement(value: Any) -> Any | None:
        if type(value) not in OPENED:
            return reached.of(value)
        if type(value) is tuple:
            new = [replacement(item) for item in value]
            if all(item is None for item in new):
                return None
            return tuple(old if item is None else item for old, item in zip(value, new, strict=True))
        if type(value) is functools.partial:
            function = replacement(value.func)
            return None if function is None else functools.partial(function, *value.args, **value.keywords)
        function = replacement(value.__func__)
        return None if function is None else type(value)(function)

    with contextlib.ExitStack() as stack:
        opened = StandIns(reached.by_id, replacement, reached.plain)
        for container in list(containers()):
            for key, value, new in opened.in_values(container.before):
                container.set(key, new)
                container.before[key] = new
                stack.callback(_put_back, container, key, value)
        modules = {id(names): names for names in users}
        unlisted: dict[int, dict[str, Any]] = {}  # of modules that Python does not list
        for function in objects:
            if type(function) is types.FunctionType:
                _replace_defaults(stack, function, replacement)
                names = function.__globals__
                if is_user_file(function.__code__.co_filename) and id(names) not in modules:
                    unlisted[id(names)] = names
        modules |= unlisted
        scans = MODULE_SCANS
        stack.callback(scans.restored)
        stack.callback(_take_out, containers, set(map(id, containers())), modules, builtins)
        for names, name, value, new in scans.found(users, unlisted.values(), held):
            names[name] = new
            stack.callback(_put_back_name, names, name, value, new)
        for names in modules.values():
            if names.keys().isdisjoint(builtins):  # most modules
                names.update(builtins)
            else:
                names.update({name: new for name, new in builtins.items() if name not in names})
        scans.replaced()
        stack.callback(scans.kept)
        yield


class StandIn:
    """Stands in for an object; ``weft_original`` is the original, ``weft_place`` where each call finds its own, if that
    is another one."""

    weft_place: Any = None

    def __init__(self, original: Any) -> None:
        self.weft_original = original


def _replace_defaults(
    stack: contextlib.ExitStack, function: types.FunctionType, replacement: Callable[[Any], Any | None]
) -> None:
    positional, named = function.__defaults__, function.__kwdefaults__ or {}
    if positional and (new := replacement(positional)) is not None:
        stack.callback(setattr, function, "__defaults__", positional)
        function.__defaults__ = new
    replaced = {name: new for name, value in named.items() if (new := replacement(value)) is not None}
    if replaced:
        stack.callback(setattr, function, "__kwdefaults__", named)
        function.__kwdefaults__ = named | replaced


def original_of(value: Any) -> Any:
    """The original of a function or object that stood in for it, where the step stored or returned it; else
    ``value``."""
    if isinstance(value, StandIn):
        return value.weft_original
    return vars(value).get(ORIGINAL, value) if type(value) is types.FunctionType else value


@remembered
def users_modules() -> list[dict[str, Any]]:
    """The names of each loaded module of the user's, installed packages included."""
    return [vars(module) for module in list(sys.modules.values()) if is_users_module(module)]


def is_users_module(module: Any) -> bool:
    """Whether it is a module of the user's, or of an installed package that holds nothing for ends of its own."""
    if not isinstance(module, types.ModuleType):
        return False
    filename = vars(module).get("__file__")
    if not (isinstance(filename, str) and is_user_file(filename)) and module.__name__ != "__main__":
        return False  # first, since most modules are torch's or Python's
    return module.__name__.split(".")[0] not in _MACHINERY


def _put_back(container: Container, key: Any, value: Any) -> None:
    unchanged = all(changed != key for changed, _, _ in container.changes())
    container.before[key] = value
    if unchanged:
        container.set(key, value)


def _take_out(
    containers: Callable[[], Iterable[Container]],
    known: set[int],
    modules: dict[int, dict[str, Any]],
    builtins: dict[str, Any],
) -> None:
    """Let no stand-in be left in modules, nor in what containers were found with while stand-ins were in them.

    Args:
        known: ids of the containers that were found before.
    """
    for names in modules.values():
        for name in [name for name, new in builtins.items() if names.get(name) is new]:
            del names[name]
    for container in containers():
        if id(container) in known:
            continue
        if id(container.obj) in modules:
            for name in [name for name, new in builtins.items() if container.before.get(name) is new]:
                del container.before[name]
        replaced = {key: own for key, value in container.before.items() if (own := original_of(value)) is not value}
        container.before.update(replaced)


def _put_back_name(names: dict[str, Any], name: str, value: Any, new: Any) -> None:
    if names.get(name) is new:
        names[name] = value
