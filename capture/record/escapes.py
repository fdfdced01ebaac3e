"""No value of a capture stays with the user: the one check, after every capture, whether it ended well or not.

A step runs once on fake tensors and symbolic numbers, which mean nothing outside the capture. What the step stored at
places that the walk of the Python state knows is put back. A step can store at other places too: in an object of a
library, in a queue, in a generator that it returns. A training loop that went on with such a value would compute
nonsense, so this check looks for every fake and every symbolic number that somebody still holds.

It asks Python's garbage collector, which knows the holders of every object. While a step is captured, all objects that
existed before are frozen (``gc.freeze``). So the objects made since are exactly those that the collector lists, and
finding the fakes among them takes a hundredth of the time of the capture. After a capture that ended well only the
graph may hold fakes, and each reference to one is accounted for by its count. Where the counts differ, and after a
capture that failed (whose traceback holds everything), the holders are followed up to an object that is older than the
capture, or to something that the step returned. Weft's own records and the frames of the traceback do not count.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import time
import types
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from weft import torch_adapter
from weft.capture.garbage_collection import garbage_collection_paused, user_froze
from weft.capture.record.collector_lists import CollectorList
from weft.capture.record.host_arrays import HostArray
from weft.capture.record.host_lists import HostList
from weft.capture.record.live_values import references
from weft.capture.record.plain_keys import keep_entries
from weft.capture.record.template_parts import Template
from weft.capture.record.tracked_storages import made_at, was_tracked
from weft.capture.record.unread_arguments import UnreadValue
from weft.capture.state.containers import Container
from weft.capture.user_code import REMEMBERING, format_frame
from weft.errors import CaptureValueEscaped, EscapedTensor

_KINDS = (FakeTensor, HostArray, HostList, UnreadValue, torch.SymInt, torch.SymFloat, torch.SymBool)
# What holds values of a capture by right, or only while an exception travels. Holders of these are not followed.
_RECORDS = (torch.fx.Node, torch.fx.Graph, types.FrameType, types.TracebackType, type, types.ModuleType)
_OWN_MODULES = ("weft.", "torch._subclasses", "torch.fx", "torch.utils._sympy", "sympy")
# Old objects of these types cannot have come to hold a new one.
_UNCHANGEABLE = frozenset(
    {
        frozenset,
        types.CodeType,
        types.BuiltinFunctionType,
        types.MethodDescriptorType,
        types.WrapperDescriptorType,
        types.GetSetDescriptorType,
        types.MemberDescriptorType,
        types.GenericAlias,
        types.UnionType,
        weakref.ref,
        staticmethod,
        classmethod,
        property,
    }
)
_CHUNK = 500
_FEW = 32
_LONGEST_PATH = 6
# Seconds before each count of the references to values, where other threads run. A choice: a collection takes less.
_COUNTED_AFTER_S = (0.0, 0.001, 0.01, 0.1)


class EscapeCheck:
    """Finds values of one capture that others than the capture hold.

    Attributes:
        modes: the fake modes of the attempts at the capture.
        in_fake_world: whether the user's own tensors are fakes too.
        containers: asked for those of the walk, which name places.
    """

    def __init__(self) -> None:
        self.modes: list[FakeTensorMode] = []
        self.in_fake_world = False
        self.containers: Callable[[], Iterable[Container]] = lambda: ()
        self._frozen = False  # whether what existed before is frozen
        self._thawed = False  # whether what the user froze no longer is

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Keeps the objects that exist already apart from those that are made inside."""
        with garbage_collection_paused():
            # What is frozen here existed before. Objects that the user froze must stay frozen: then what exists goes to
            # the collector's oldest generation instead, where a collection that the step asks for puts new objects too.
            self._frozen = not user_froze()
            if self._frozen:
                gc.freeze()
            else:
                gc.collect(1)
            self._thawed = False
            try:
                yield
            finally:
                if self._frozen:
                    gc.unfreeze()
                elif self._thawed:
                    gc.freeze()  # more than the user froze, after an error

    def collect(self) -> None:
        """Collect garbage, inside :meth:`watching`, so that what is new can still be told from what is older.

        Where that is known by the collector's generations, only the youngest is collected: a full collection would move
        what an earlier attempt left with the user to the oldest.
        """
        gc.collect(2 if self._frozen else 0)

    def raise_for_escaped(self, step: str, legitimate: Iterable[Any], failure: BaseException | None = None) -> None:
        """Raise if anybody but the capture holds one of its values; called inside :meth:`watching`.

        Args:
            step: how the step is called in the message.
            legitimate: the values that the graph holds, once for each reference.
            failure: the error that ended the capture, if one did.

        Raises:
            CaptureValueEscaped: names the place. The value was taken out of it.
        """
        values = self._values(self._new_objects().of_types(_KINDS))
        suspects = _alive(values) if failure is not None else self._suspects(values, Counter(map(id, legitimate)))
        if not suspects:
            return
        search = _HolderSearch(suspects, self._new_objects())
        for template, leaf in search.in_templates():
            raise EscapedTensor(type(leaf), template.where)
        containers = {id(each.obj): each for each in self.containers()}
        found = [(search.described(*entry, containers), *entry) for entry in search.entries(self._recent())]
        for _, holder, child in found:
            _take_out(holder, child)
        for (place, value), holder, _ in found:
            if isinstance(holder, REMEMBERING) or _remembers(holder):
                continue  # the function computes its result again, outside the capture
            raise CaptureValueEscaped(step, place, type(value).__qualname__, _line_of(value), failure) from failure

    def _suspects(self, values: list[weakref.ref[Any]], held: Counter[int]) -> list[Any]:
        """The values that somebody but the graph holds: cycles of the step's own, which are nobody's, do not count.

        Garbage is collected only where somebody seems to hold a value. While another thread collects, a collection here
        does nothing and garbage still holds values. So they are counted again a little later. Older objects are not
        walked.
        """
        suspects = _held_by_others(values, held)
        pauses = _COUNTED_AFTER_S if threading.active_count() > 1 else (0.0,)
        for pause_s in pauses if suspects else ():
            suspects.clear()  # it would count as a holder
            time.sleep(pause_s)
            self.collect()
            suspects += _held_by_others(values, held)
            if not suspects:
                break
        return suspects

    def made(self, kind: type) -> set[int]:
        """The ids of the objects of a type that were made since :meth:`watching` began, and are still there."""
        return set(map(id, self._new_objects().of_types([kind])))

    def _new_objects(self) -> CollectorList:
        return CollectorList() if self._frozen else CollectorList([0, 1])

    def _recent(self) -> set[int]:
        """The ids of all objects made since :meth:`watching` began; from here on the older ones are listed too."""
        recent = self._new_objects().ids()
        gc.unfreeze()
        self._thawed = not self._frozen
        self._frozen = False
        return recent

    def _values(self, objects: list[Any]) -> list[weakref.ref[Any]]:
        """Weak references to the values of the capture among ``objects``."""
        return [weakref.ref(each) for each in objects if self._is_value(each)]

    def _is_value(self, value: Any) -> bool:
        """Whether a fake, a number or an array is of this capture; other threads may be tracing too."""
        if type(value) is HostArray:
            return any(value.weft_owner.is_of(mode) for mode in self.modes)
        if type(value) in (UnreadValue, HostList):
            return any(value.weft_mode is mode for mode in self.modes)
        if isinstance(value, FakeTensor):
            known = value.fake_mode in self.modes  # which are compared by identity
            return known and (not self.in_fake_world or was_tracked(value))
        return any(torch_adapter.shape_env_of_number(value) is mode.shape_env for mode in self.modes)


def _alive(values: list[weakref.ref[Any]]) -> list[Any]:
    return [value for value in [each() for each in values] if value is not None]


def _held_by_others(values: list[weakref.ref[Any]], held: Counter[int]) -> list[Any]:
    """Those values that have more references than ``held`` says, by id."""
    alive = _alive(values)
    return [alive[at] for at in range(len(alive)) if references(alive, at) > held[id(alive[at])]]


class _HolderSearch:
    """Who leads to ``values``, among the objects made during the capture and up to one step beyond.

    Args:
        values: the fakes and symbolic numbers in question; the list is emptied, so that it does not count as a holder.
        new: the objects made since the capture began.
    """

    def __init__(self, values: list[Any], new: CollectorList) -> None:
        wanted = [id(value) for value in values]
        values.clear()
        objects = {id(each): each for each in new.except_tuples()}
        tuples = new.tuples()
        holders: dict[int, list[int]] = {each: [] for each in itertools.chain(objects, tuples)}  # all by id
        referents = ((at, map(id, gc.get_referents(each))) for at, each in objects.items())
        for at, found in itertools.chain(referents, tuples.items()):
            for referent in found:
                if referent in holders:
                    holders[referent].append(at)
        # From each object that leads to a value, the next object on the way there.
        leads: dict[int, int | None] = dict.fromkeys(wanted)
        pending = deque(wanted)
        while pending:
            child = pending.popleft()
            for at in holders[child]:
                if at not in leads and (at in tuples or not _is_record(objects[at])):
                    leads[at] = child
                    pending.append(at)
        leading = [objects[at] for at in leads if at in objects] + new.tuples_with(leads)
        objects.clear()
        # The count of an object that only ``leading`` and other new objects hold is explained.
        explained = [references(leading, at) <= len(holders[id(leading[at])]) for at in range(len(leading))]
        self._entered = [each for each, known in zip(leading, explained, strict=True) if not known]
        by_id = {id(each): each for each in leading}
        self._next = {at: None if (to := leads[at]) is None else by_id.get(to) for at in by_id}
        self._templates = [each for each in leading if isinstance(each, Template)]

    def in_templates(self) -> Iterator[tuple[Template, Any]]:
        """Templates of what the step returned or stored, each with a constant that leads to a value."""
        for template in self._templates:
            yield from ((template, leaf) for leaf in template.constants if id(leaf) in self._next)

    def entries(self, recent: set[int]) -> Iterator[tuple[Any, Any]]:
        """(an object from before the capture, the new object that it holds and that leads to a value).

        ``recent`` are the ids of all objects made since the capture began, those of this search among them.
        """
        known = {id(each) for each in self._entered}
        for holder in self._old_holders(known):
            if id(holder) not in recent and not _is_record(holder) and not _is_own_dictionary(holder):
                for child in gc.get_referents(holder):
                    if id(child) in known:
                        yield holder, child

    def _old_holders(self, known: set[int]) -> Iterator[Any]:
        if len(known) <= _FEW:
            yield from gc.get_referrers(*self._entered) if known else ()  # compares each reference with each object
            return
        old = [each for each in CollectorList().except_tuples() if type(each) not in _UNCHANGEABLE]
        for start in range(0, len(old), _CHUNK):
            chunk = old[start : start + _CHUNK]
            if not known.isdisjoint(map(id, gc.get_referents(*chunk))):
                yield from chunk

    def described(self, holder: Any, child: Any, containers: dict[int, Container]) -> tuple[str, Any]:
        """The way from ``holder`` to the value, as the user would write it, and the value."""
        known = containers.get(id(holder))
        key = _key_of(holder, child)
        path = known.label(key) if known is not None else _name_of(holder, key)
        while (below := self._next[id(child)]) is not None and path.count("[") + path.count(".") < _LONGEST_PATH:
            inner = vars(child) if isinstance(vars_of := getattr(child, "__dict__", None), dict) else None
            if isinstance(child, dict):
                path += f"[{_shown(_key_of(child, below))}]"
            elif isinstance(child, (list, deque)):
                path += f"[{_key_of(child, below)}]"
            elif inner is not None and below is not vars_of and (name := _key_of(inner, below)) is not None:
                path += f".{name}"
            child = below
        while self._next[id(child)] is not None:
            child = self._next[id(child)]
        return path, child


def _remembers(holder: Any) -> bool:
    """Whether a dictionary is where a function with ``functools.lru_cache`` has its results."""
    owners = gc.get_referrers(holder) if type(holder) is dict else ()
    return any(isinstance(each, REMEMBERING) and vars(each) is not holder for each in owners)


def _line_of(value: Any) -> str:
    """The user's line that computed a fake tensor; empty where that is not known."""
    frames = made_at(value) if isinstance(value, FakeTensor) else ()
    return format_frame(frames[0]) if frames else ""


def _is_record(holder: Any) -> bool:
    if isinstance(holder, _RECORDS):
        return True
    kind = type(holder)
    return kind.__module__.startswith(_OWN_MODULES) and kind not in _KINDS and kind is not Template


def _is_own_dictionary(holder: Any) -> bool:
    """Whether an old object is bookkeeping of weft's or of torch's fakes: the names of a module or of a class."""
    return type(holder) is dict and str(holder.get("__name__", holder.get("__module__", ""))).startswith(_OWN_MODULES)


def _key_of(holder: Any, child: Any) -> Any:
    """The key, index or attribute under which ``holder`` has ``child``; None where it has none of these."""
    if isinstance(holder, dict):
        return next((key for key, value in holder.items() if value is child), None)
    if isinstance(holder, (list, deque)):
        return next((at for at, value in enumerate(holder) if value is child), None)
    if isinstance(holder, types.CellType):
        return 0
    names = [*getattr(holder, "__dict__", ()), *_slots(type(holder))]
    return next((name for name in names if _attribute(holder, name) is child), None)


def _attribute(holder: Any, name: str) -> Any:
    try:
        return object.__getattribute__(holder, name)
    except AttributeError:
        return None


def _slots(kind: type) -> list[str]:
    found = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    return [name for each in found for name in ([each] if isinstance(each, str) else each)]


def _name_of(holder: Any, key: Any) -> str:
    """How to write the entry ``key`` of an object that the walk does not know."""
    if isinstance(holder, dict):
        if isinstance(holder.get("__name__"), str) and "__builtins__" in holder:
            return f"{holder['__name__']}.{key}"
        for owner in gc.get_referrers(holder):
            if getattr(owner, "__dict__", None) is holder:
                return f"the attribute {key!r} of a {_kind(owner)}"
        return f"a {_kind(holder)} that the step's code does not name, at [{_shown(key)}]"
    if isinstance(holder, types.CellType):
        return "a variable that a function closes over"
    if isinstance(holder, (list, set, deque)):
        return f"a {_kind(holder)} that the step's code does not name"
    return f"the attribute {key!r} of a {_kind(holder)}" if key is not None else f"a {_kind(holder)}"


def _kind(obj: Any) -> str:
    kind = type(obj)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _shown(key: Any) -> str:
    return repr(key) if isinstance(key, (str, int)) else f"a {type(key).__qualname__}"


def _take_out(holder: Any, child: Any) -> None:
    """Remove ``child`` from an object: what is missing is noticed, a value of the capture would be computed with."""
    with contextlib.suppress(Exception):
        if isinstance(holder, dict):
            keep_entries(holder, lambda key, value: value is not child)
        elif isinstance(holder, (list, deque)):
            for at in reversed([at for at, value in enumerate(holder) if value is child]):
                del holder[at]
        elif isinstance(holder, set):
            holder.discard(child)
        elif isinstance(holder, types.CellType):
            del holder.cell_contents
        elif isinstance(holder, REMEMBERING):
            holder.cache_clear()
        else:
            delattr(holder, _key_of(holder, child))
