"""Which of the objects that leave a step it made, and which it began with.

``s.last = s.metrics`` makes both names lead to one object, and ``return s.metrics`` gives the caller that very one. A
template (:mod:`weft.capture.record.templates`) that copied it would part what eager keeps together: a later change of
one would not be seen in the other. An object that the step made is another one at each call.

The walk of the Python state meets what the step reaches by names. What a library returned, it may not have met: such an
object is older than the capture, which Python's garbage collector knows, or something outside keeps it, as
``logging.getLogger`` does.
"""

from __future__ import annotations

import functools
import gc
import sys
import traceback
import types
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft.capture.record.argument_containers import PassedObject
from weft.capture.record.live_values import references
from weft.capture.record.made_for_opaque import MadeForOpaque
from weft.capture.record.template_parts import OwnObject
from weft.capture.state.containers import Container, StatePlace
from weft.capture.state.exception_parts import exception_parts
from weft.capture.state.function_parts import cell_parts, function_parts
from weft.capture.state.object_parts import ObjectForm, ObjectParts, closure_of, objects_in, parts_of
from weft.capture.state.reachable_state import ReachableState
from weft.capture.state.type_facts import SIMPLE_KINDS

# What each call computes.
_COMPUTED = (FakeTensor, torch.SymInt, torch.SymFloat, torch.SymBool)
# Steps make nearly all objects of these types that they leave, and the collector does not list each of them.
_LITERALS = frozenset({dict, list, tuple})


class OwnObjects:
    """The objects that the captured call began with.

    Args:
        met: ids of the objects that the walk of the Python state met before the step ran.
        state: what the walk found.
        made: tells the ids of the objects of a type that were made since the capture began.
        passed: the objects in the arguments.
        given: what opaque functions got so far.

    Attributes:
        held: ids of the objects that were made since then, and that something outside keeps.
    """

    def __init__(
        self,
        met: Collection[int],
        state: ReachableState,
        made: Callable[[type], set[int]],
        passed: Iterable[PassedObject] = (),
        given: MadeForOpaque | None = None,
    ) -> None:
        self.given = MadeForOpaque() if given is None else given
        self._made = functools.cache(made)
        self._kept = {id(each.obj) for each in state.containers}.union(met)
        self._places: dict[int, StatePlace | PassedObject] = {id(each.obj): each for each in passed}
        for place, obj in state.replaced_places:
            self._places.setdefault(id(obj), place)
        # The attributes of an object that each call replaces are an object, too.
        outer = ((id(each.obj), each.outer) for each in state.containers)
        self._places = {at: place for at, place in outer if place is not None} | self._places
        self.held: frozenset[int] = frozenset()

    def __contains__(self, value: object) -> bool:
        return id(value) in self._places or id(value) in self._kept

    def note_left(
        self,
        results: list[Any],
        changes: list[tuple[Container, Any, Any, Any]],
        appended: list[tuple[Container, Any, Any]],
        collect: Callable[[], object],
    ) -> None:
        """Find out which objects in what a step leaves something outside keeps.

        Args:
            results: what the step returned, which no variable holds.
            changes: (container, key, before, after) of what it left in the Python state and in arguments.
            appended: (container, key, value) of what it appended to lists with stand-ins.
            collect: collects garbage, which may refer to some of them.
        """
        # References that are none from outside: of these lists, of the user's own objects, and of the stand-ins.
        entries = {(id(container.obj), key): id(new) for container, key, _, new in changes}
        holders = Counter([*map(id, results), *(id(new) for *_, new in changes), *entries.values()])
        holders.update(3 * [id(value) for *_, value in appended])  # the stand-in holds each twice
        values = [*results, *(new for *_, new in changes), *(value for *_, value in appended)]
        self._note(values, holders, collect)

    def note_passed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The same for the arguments of a call inside the step, whose variables and objects are nothing outside it."""
        values = [*args, *kwargs.values()]
        self._note(values, Counter(map(id, values)), lambda: None, sys._getframe(1))

    def _note(
        self,
        values: list[Any],
        holders: Counter[int],
        collect: Callable[[], object],
        frame: types.FrameType | None = None,
    ) -> None:
        holders.update(self.given.ids)
        found: dict[int, Any] = {}
        while values:
            value = values.pop()
            if type(value) in SIMPLE_KINDS or isinstance(value, torch.Tensor) or id(value) in found or value in self:
                continue
            if (taken := self.new_parts(value)) is not None:
                found[id(value)] = value
                if isinstance(value, BaseException):
                    traceback.clear_frames(value.__traceback__)  # whose variables may hold it
                holders.update(map(id, (*taken.keys, *taken.parts)))
                values += (*taken.keys, *taken.parts)
        value = taken = None
        asked = [each for each in found.values() if type(each) not in _LITERALS]
        found.clear()

        def held() -> frozenset[int]:
            counts = [references(asked, at) - holders[id(asked[at])] for at in range(len(asked))]
            return frozenset(id(asked[at]) for at, more in enumerate(counts) if more > 0)

        if held():
            collect()
            if frame is not None and (now := held()):
                holders += _held_by_step([each for each in asked if id(each) in now], frame)
        self.held = held()

    def new_parts(self, value: Any) -> ObjectParts | None:
        """What an object is made of that was made since the capture began; None of one that is taken as a whole."""
        if (taken := parts_of(value)) is None:
            return self._bound(value)
        known = taken.form.is_fixed or type(value) in _LITERALS
        return taken if known or self.is_new(value) else None

    def _bound(self, value: Any) -> ObjectParts | None:
        """What an exception of the step is made of; what a function, a bound method or a ``functools.partial`` is made
        of, if the step made both it and something in it."""
        if isinstance(value, BaseException):
            return exception_parts(value) if self.is_new(value) else None
        if type(value) is types.FunctionType:
            return self._function(value)
        if type(value) is types.CellType:
            return cell_parts(value) if self.is_new(value) else None
        if type(value) is types.MethodType:
            inside, function = [value.__self__], value.__func__
            make = lambda parts: types.MethodType(function, *parts)
        elif type(value) is functools.partial and not vars(value):
            names, count = list(value.keywords), 1 + len(value.args)
            inside = [value.func, *value.args, *value.keywords.values()]
            make = lambda parts: functools.partial(*parts[:count], **dict(zip(names, parts[count:], strict=True)))
        else:
            return None
        made = (each for each in inside if each not in self and self.is_new(each))
        changeable = any((taken := parts_of(each)) is not None and not taken.form.is_fixed for each in made)
        form = ObjectForm(type(value), object, node=make)
        return ObjectParts(form, [], inside) if changeable and self.is_new(value) else None

    def _function(self, function: types.FunctionType) -> ObjectParts | None:
        """Its variables and defaults. One that closes over plain values alone is the same at each call."""
        changes = not vars(function) and self.is_new(function) and self._has_new(function, set())
        return function_parts(function) if changes else None

    def _has_new(self, function: types.FunctionType, asked: set[int]) -> bool:
        """Whether a function's variables and defaults hold what is another object at each call."""
        asked.add(id(function))
        named = (function.__kwdefaults__ or {}).values()
        values = [*closure_of(function), *(function.__defaults__ or ()), *named]
        for inner in [each for each in values if type(each) is types.FunctionType and id(each) not in asked]:
            if self._has_new(inner, asked):
                return True
        others = [each for each in values if type(each) not in (*SIMPLE_KINDS, types.FunctionType) and each not in self]
        return any(isinstance(each, _COMPUTED) or self.new_parts(each) is not None for each in others)

    def is_new(self, value: Any) -> bool:
        """Whether the collector lists an object among those that were made since the capture began."""
        return id(value) in self._made(type(value))

    def slot(self, value: Any) -> Any:
        """What stands for one of them in a template: itself, or where each call finds another one, an
        :class:`OwnObject`."""
        place = self._places.get(id(value))
        return value if place is None else OwnObject(place)

    def inside(self, value: Any) -> list[Any]:
        """Those of them that a value is or holds."""
        own = lambda each: each in self and not isinstance(each, tuple)
        parts = lambda each: None if own(each) else self.new_parts(each)
        return [each for each in objects_in(value, parts) if own(each)]


def _held_by_step(asked: list[Any], frame: types.FrameType | None) -> Counter[int]:
    """How many references to each of these objects the variables of the running functions have, and objects that were
    made since the capture began: the collector lists no others then."""
    ids = set(map(id, asked))
    found = Counter[int]()
    while frame is not None and frame.f_globals.get("__name__") != "weft.capture.record.tracer":
        in_cells = {*frame.f_code.co_cellvars, *frame.f_code.co_freevars}
        if frame.f_code.co_filename != __file__:
            found.update(id(each) for name, each in frame.f_locals.items() if name not in in_cells)
        frame = frame.f_back
    for holder in gc.get_referrers(*asked):
        if holder is not asked and not isinstance(holder, types.FrameType):
            found.update(map(id, gc.get_referents(holder)))
    return Counter({each: found[each] for each in ids})
