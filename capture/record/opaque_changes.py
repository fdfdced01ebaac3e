"""What a function marked opaque changes although the step's own code reads it later in the same call.

The capture does not run such a function, so the code of the step saw the state without its changes: ``note(loss)``
appends to ``s.log``, and then the step computes with ``len(s.log)``. That shows when the program calls the function.
Which state the step may read is known by name: by the code that comes after the call.
"""

from __future__ import annotations

import contextlib
import dis
import pickle
import re
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from weft.capture.record.live_values import calls_keep_arguments, references
from weft.capture.record.own_objects import OwnObjects
from weft.capture.record.template_parts import copied_kinds
from weft.capture.state.code_names import code_names, functions_in
from weft.capture.state.containers import Container
from weft.capture.state.object_parts import closure_of, identity_of_parts, objects_in, parts_of
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
        shows: whether the function prints its arguments, whose classes may have a `__repr__` that changes something.
    """

    def __init__(
        self, function: str, containers: Iterable[Container], names: frozenset[str], *, shows: bool = False
    ) -> None:
        self._shows = shows
        self._function, self._line = function, user_line()
        self._names = names
        self._watched = [each for each in containers if self._may_count(each)]

    @contextlib.contextmanager
    def checked(self, made: Sequence[Any]) -> Iterator[None]:
        """Around the function's run.

        Args:
            made: objects that the step made and that are left after the run: the program makes them once more.

        Raises:
            PythonStateChanged: it changed what the step reads later.
        """
        before = [*map(_ids, made)]
        entries = [each.entries() for each in self._watched]
        yield
        if before != [*map(_ids, made)]:
            raise self._error("an object that it made")
        for container, old in zip(self._watched, entries, strict=True):
            new = container.entries()
            for key in new.keys() | old.keys():
                if new.get(key, self) is not old.get(key, self) and _name(container, key) in self._names:
                    raise self._error(container.label(key))

    def _error(self, path: str) -> PythonStateChanged:
        how = "in a `__repr__` or `__str__` run by {}" if self._shows else "in {}, which is marked @weft.opaque"
        where = f"{how.format(self._function)}, called at {self._line}; it uses that later"
        remedy = "make the change in the step itself, use the value in an opaque function too, or pass a copy"
        return PythonStateChanged(path, where, remedy, "the capture runs no opaque function and did not see the change")

    def _may_count(self, container: Container) -> bool:
        names = container.keys - container.left_out if isinstance(container.keys, frozenset) else {_name(container, 0)}
        return not self._names.isdisjoint(names)


def _ids(value: Any) -> list[Any]:
    return [pickle.dumps(value)] if isinstance(value, copied_kinds()) else identity_of_parts(value)


def _name(container: Container, key: Any) -> str:
    """The variable or attribute that leads to an entry."""
    label = container.label(key)
    found = _NAME.search(container.path if label.endswith("]") else label)
    return found.group() if found else ""


def held_elsewhere(
    made: Mapping[int, tuple[Any, Any]],
    known: Iterable[int],
    call: tuple[tuple[Any, ...], dict[str, Any]],
    caller: types.FrameType,
) -> list[Any]:
    """Those objects that can be changed and that more than the others hold, and what is in them: (object, its part).

    Args:
        made: the objects that the step made for a call, and their parts in its template, by id.
        known: ids of objects for which other references are known, once for each.
        call: the arguments, by position and by name, in the containers that the call itself makes.
        caller: the frame that makes the call.
    """
    values = [value for value, _ in made.values()]
    # By id: a list of the parts would refer to them.
    inside = [[] if (taken := parts_of(value)) is None else [*map(id, taken.parts)] for value in values]
    taken = None
    within = Counter(each for parts in inside for each in parts)
    within.update(id(each) for pair in made.values() for each in pair)
    within.update(known)
    # A call `f(*values)` hands over a container, and keeps that alone.
    in_container = dis.opname[caller.f_code.co_code[caller.f_lasti]] == "CALL_FUNCTION_EX"
    if calls_keep_arguments() and not in_container:
        within.update(map(id, (*call[0], *call[1].values())))
    calls = {id(call), *map(id, call)}
    pending = [at for at in range(len(values)) if references(values, at) > within[id(values[at])]]
    pending = [at for at in pending if id(values[at]) not in calls]
    numbers = {id(value): at for at, value in enumerate(values)}
    found: dict[int, tuple[Any, Any]] = {}
    while pending:
        at = pending.pop()
        if at not in found:
            found[at] = values[at], made[id(values[at])][1]
            pending += (numbers[each] for each in inside[at] if each in numbers)
    return list(found.values())


def made_in_closure(function: Any, own: OwnObjects) -> list[Any]:
    """The objects that the step made and that an opaque function closes over."""
    parts = lambda each: parts_of(each) if each not in own and own.is_new(each) else None
    return [each for value in closure_of(function) for each in objects_in(value, parts) if parts(each) is not None]


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


def names_in_texts(values: Any) -> frozenset[str]:
    """The names in the code that makes the texts of objects, and of those in them."""
    methods = ("__repr__", "__str__", "__format__")
    kinds = {type(each) for each in objects_in(values)}
    found = [function for kind in kinds for name in methods for function in functions_in(getattr(kind, name))]
    return frozenset().union(*(code_names(each.__code__) for each in found if is_user_file(each.__code__.co_filename)))
