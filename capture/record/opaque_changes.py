"""What a function marked opaque changes although the step's own code reads it later in the same call.

The capture does not run such a function, so the code of the step saw the state without its changes: ``note(loss)``
appends to ``s.log``, and then the step computes with ``len(s.log)``. That shows when the program calls the function.
Which state the step may read is known by name: by the code that comes after the call.
"""

from __future__ import annotations

import contextlib
import dis
import re
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from weft.capture.state.code_names import code_names, functions_in
from weft.capture.state.containers import Container, items_of
from weft.capture.user_code import user_line
from weft.errors import PythonStateChanged
from weft.source_files import is_user_file

_READS = ("_ATTR", "_METHOD", "_GLOBAL", "_NAME", "_DEREF", "_FAST")
_NAME = re.compile(r"[^\W\d]\w*$")


class OpaqueChanges:
    """Checks of one call of an opaque function.

    Args:
        function: its name.
        containers: of the state that it can reach and that the step's code names.
        names: what both read or write.
        kept: of its arguments, the lists and dictionaries that the step made and still holds: positions and names.
    """

    def __init__(
        self, function: str, containers: Iterable[Container], names: frozenset[str], kept: Sequence[int | str]
    ) -> None:
        self._function, self._line = function, user_line()
        self._names = names
        self._watched = [each for each in containers if self._may_count(each)]
        self._kept = kept

    @contextlib.contextmanager
    def checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Around the function's run with these arguments.

        Raises:
            PythonStateChanged: it changed what the step reads later.
        """
        kept = [kwargs[at] if isinstance(at, str) else args[at] for at in self._kept]
        before = [_ids(each) for each in kept]
        entries = [each.entries() for each in self._watched]
        yield
        if before != [_ids(each) for each in kept]:
            raise self._error("a list or dictionary that it made")
        for container, old in zip(self._watched, entries, strict=True):
            new = container.entries()
            for key in new.keys() | old.keys():
                if new.get(key, self) is not old.get(key, self) and _name(container, key) in self._names:
                    raise self._error(container.label(key))

    def _error(self, path: str) -> PythonStateChanged:
        where = f"in {self._function}, which is marked @weft.opaque, called at {self._line}; it uses that later"
        remedy = "make the change in the step itself, use the value in an opaque function too, or pass a copy"
        return PythonStateChanged(path, where, remedy, "the capture runs no opaque function and did not see the change")

    def _may_count(self, container: Container) -> bool:
        names = container.keys - container.left_out if isinstance(container.keys, frozenset) else {_name(container, 0)}
        return not self._names.isdisjoint(names)


def _ids(value: Any) -> list[Any]:
    return [(key, id(item)) for key, item in items_of(value)]


def _name(container: Container, key: Any) -> str:
    """The variable or attribute that leads to an entry."""
    label = container.label(key)
    found = _NAME.search(container.path if label.endswith("]") else label)
    return found.group() if found else ""


def made_and_held(args: tuple[Any, ...], kwargs: dict[str, Any], own: Sequence[Any]) -> list[int | str]:
    """Positions and names of the lists and dictionaries among arguments that more than the arguments hold.

    Args:
        own: objects that are the user's, and not made by the step.
    """
    known = set(map(id, own))
    items: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    found = [(at, type(value) in (list, dict) and id(value) not in known) for at, value in items]
    items.clear()
    held = [sys.getrefcount(args[at] if isinstance(at, int) else kwargs[at]) > _UNHELD for at, _ in found]
    return [at for (at, made), more in zip(found, held, strict=True) if made and more]


def _references(*args: Any) -> int:
    return sys.getrefcount(args[0])


_UNHELD = _references([])


def names_read_later(frame: types.FrameType | None, functions: Iterable[types.FunctionType]) -> frozenset[str]:
    """The names in code of the user's that runs after the call that ``frame`` makes, functions that it may call
    included.

    Args:
        functions: those that the step can call.
    """
    names: set[str] = set()
    while frame is not None and frame.f_globals.get("__name__") != "weft.capture.record.tracer":
        if is_user_file(frame.f_code.co_filename):
            names |= _names_after(frame)
        frame = frame.f_back
    by_name: dict[str, list[types.FunctionType]] = {}
    for function in functions:
        by_name.setdefault(function.__name__, []).append(function)
    pending = list(names)
    while pending:
        for function in by_name.pop(pending.pop(), ()):
            new = code_names(function.__code__) | set(function.__code__.co_freevars)
            pending += new - names
            names |= new
    return frozenset(names)


def _names_after(frame: types.FrameType) -> set[str]:
    steps = list(dis.get_instructions(frame.f_code))
    start = frame.f_lasti
    for step in steps:  # in a loop, what comes before the call in the text comes after it too
        if step.offset > frame.f_lasti and "JUMP" in step.opname and step.argval < start:
            start = step.argval
    return {step.argval for step in steps if step.offset > start and step.opname.endswith(_READS) and step.argval}


def names_in(function: Any) -> frozenset[str]:
    """The names in the code of an opaque function, or in that of the methods of a callable object."""
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    codes = [code] if code is not None else [each.__code__ for each in functions_in(type(function).__call__)]
    return frozenset().union(*(code_names(each) | set(each.co_freevars) for each in codes))
