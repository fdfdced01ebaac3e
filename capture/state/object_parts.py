"""What a Python object is made of, and how another object of its type is made of other parts.

An object of a class that is written in Python is its attributes and, where the class derives from one of Python's own
types that hold others, its items. Both are read and written by the methods of Python's own types: no ``__init__``,
``__setattr__`` or ``__setitem__`` of the class runs, because what it does has been done once, and may be no copying.
"""

from __future__ import annotations

import types
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any, NamedTuple

import torch

from weft import torch_adapter
from weft.capture.state.containers import holder_of, items_of
from weft.capture.state.contents import attributes_of

# Flags of a type in C: it is made at run time, cannot be made from Python, cannot be changed.
_HEAP_TYPE, _NO_INSTANCES, _IMMUTABLE = 1 << 9, 1 << 7, 1 << 8
# Python's own types whose objects are their items and attributes.
_BASES = frozenset({object, dict, OrderedDict, defaultdict, list, deque, set, frozenset, tuple, types.SimpleNamespace})
# Those whose objects have attributes: torch keeps versions of modules in one of a ``state_dict()``.
_WITH_NAMES = frozenset({OrderedDict, types.SimpleNamespace})
# Objects of these are referred to by hooks and handles outside of them: a copy would have none.
_WHOLE = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)


@dataclass(frozen=True)
class ObjectForm:
    """All that makes an object besides its parts.

    Attributes:
        kind: its type.
        base: Python's own type from which the type derives.
        names: of the attributes.
        slots: the descriptors of the attributes that are in slots.
        argument: the longest length of a deque, what makes the missing values of a ``defaultdict``.
        node: of a type that is registered with pytrees: what makes an object of its parts.
    """

    kind: type
    base: type
    names: tuple[str, ...] = ()
    slots: tuple[Any, ...] = ()
    argument: Any = None
    node: Any = None

    @property
    def is_fixed(self) -> bool:
        """Whether an object has its items from the beginning, and cannot be made before they are."""
        return self.node is not None or self.base in (tuple, frozenset)

    def empty(self) -> Any:
        """A new object without parts."""
        if self.base is deque:
            return _made(self.kind, deque, [], self.argument)
        new = self.base.__new__(self.kind)  # type: ignore[call-overload]
        if self.base is defaultdict:
            defaultdict.__init__(new, self.argument)
        return new

    def put(self, obj: Any, keys: list[Any], parts: list[Any]) -> None:
        """Give an empty object its parts, and a dictionary its keys, in the order of :func:`parts_of`."""
        at = len(parts) - len(self.names) - len(self.slots)
        items, attributes, slots = parts[:at], parts[at : at + len(self.names)], parts[at + len(self.names) :]
        self._put_attributes(obj, attributes, slots)
        if keys:
            put = holder_of(self.kind).__setitem__
            for key, item in zip(keys, items, strict=True):
                put(obj, key, item)
        elif self.base in (list, deque):
            self.base.extend(obj, items)  # type: ignore[attr-defined]
        elif self.base is set:
            set.update(obj, items)
        elif self.base is types.CellType and items:
            obj.cell_contents = items[0]

    def clear(self, obj: Any) -> None:
        """Take all parts out of an object, of a form that is not fixed."""
        if (holder := holder_of(self.kind)) is not None:
            holder.clear(obj)
        if hasattr(obj, "__dict__"):
            object.__getattribute__(obj, "__dict__").clear()
        for descriptor in _slots_of(self.kind, self.base):
            if _value(descriptor, obj) is not _UNSET:
                descriptor.__delete__(obj)

    def fixed(self, parts: list[Any]) -> Any:
        """A new object with its parts, of a form that is fixed."""
        if self.node is not None:
            return self.node(parts)
        at = len(parts) - len(self.names) - len(self.slots)
        new = _made(self.kind, self.base, parts[:at])
        self._put_attributes(new, parts[at : at + len(self.names)], parts[at + len(self.names) :])
        return new

    def _put_attributes(self, obj: Any, attributes: list[Any], slots: list[Any]) -> None:
        if self.names:
            object.__getattribute__(obj, "__dict__").update(zip(self.names, attributes, strict=True))
        for descriptor, value in zip(self.slots, slots, strict=True):
            descriptor.__set__(obj, value)


class ObjectParts(NamedTuple):
    """What one object is made of.

    Attributes:
        form: all that makes it besides its parts.
        keys: those of a dictionary, in order.
        parts: items, attributes, and attributes in slots.
    """

    form: ObjectForm
    keys: list[Any]
    parts: list[Any]


def slot_names(kind: type) -> frozenset[str]:
    """The names of the attributes in slots of a class that is written in Python."""
    return frozenset(each.__name__ for each in _slots_of(kind, _base_of(kind) or object))


def parts_of(obj: Any) -> ObjectParts | None:
    """What an object is made of; None of an object whose type is written in C, of a module, an optimizer, a function
    and a class: such an object is taken as a whole."""
    kind = type(obj)
    base = _base_of(kind)
    # The author of a type that is registered with pytrees has said what its objects are made of.
    by_author = base in (None, object) and not (is_dataclass(kind) or issubclass(kind, UserDict))
    if by_author and (registered := torch_adapter.registered_parts(obj)) is not None:
        parts, make = registered
        return ObjectParts(ObjectForm(kind, object, node=make), [], parts)
    return structure_of(obj)


def structure_of(obj: Any) -> ObjectParts | None:
    """:func:`parts_of` by attributes and items, whether the type is registered with pytrees or not."""
    kind = type(obj)
    base = _base_of(kind)
    if base is None or isinstance(obj, _WHOLE):
        return None
    keys: list[Any] = []
    items: list[Any] = []
    argument = None
    holder: Any = None if base is types.SimpleNamespace else holder_of(kind)
    if holder in (dict, OrderedDict):
        keys, items = list(holder.keys(obj)), list(holder.values(obj))
        argument = factory_of(obj)
    elif holder is not None:
        items = list(holder.__iter__(obj))
        argument = obj.maxlen if holder is deque else None
    attributes = attributes_of(obj) if kind not in _BASES or kind in _WITH_NAMES else {}
    slots = [(each, value) for each in _slots_of(kind, base) if (value := _value(each, obj)) is not _UNSET]
    form = ObjectForm(kind, base, tuple(attributes), tuple(each for each, _ in slots), argument)
    return ObjectParts(form, keys, [*items, *attributes.values(), *(value for _, value in slots)])


def objects_in(value: Any, parts: Callable[[Any], ObjectParts | None] = parts_of) -> Iterator[Any]:
    """An object and all objects in it, each once.

    Args:
        parts: gives what an object is made of; None of one whose parts are not wanted.
    """
    pending, seen = [value], set[int]()
    while pending:
        each = pending.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            if (taken := parts(each)) is not None:
                pending += (*taken.keys, *taken.parts)


def identity_of_parts(obj: Any) -> list[Any]:
    """Names and ids that tell whether the parts of an object were exchanged; empty for one that is taken as a whole."""
    taken = parts_of(obj)
    return [] if taken is None else [*taken.form.names, *map(id, (*taken.keys, *taken.parts))]


def closure_of(function: Any) -> list[Any]:
    """The values of the variables that a function closes over; none of an object that is no function."""
    cells = getattr(function, "__closure__", None) or ()
    return [cell.cell_contents for cell in cells if cell != _EMPTY_CELL]


_EMPTY_CELL = types.CellType()
# Python's own types of lists and dictionaries that a step may replace by others.
_REPLACED = frozenset({dict, list, defaultdict, OrderedDict})


def is_replaceable(obj: Any) -> bool:
    """Whether each call of a step may leave another object of the same type in the place of one: whether all that is in
    it can be followed by keys and names."""
    kind = type(obj)
    if (known := _replaceable.get(kind)) is None:
        base = _base_of(kind)
        has_names = base is types.SimpleNamespace or (kind not in _BASES and kind.__dictoffset__ != 0)
        by_keys = base in _REPLACED or base in (object, types.SimpleNamespace)
        is_own = has_names and by_keys and not _slots_of(kind, base or object) and not issubclass(kind, _WHOLE)
        known = _replaceable[kind] = kind in _REPLACED or is_own
    return known


def followed_items(value: Any) -> list[tuple[Any, Any]]:
    """(position or key, item) of a tuple, list or dictionary; after them ``vars`` and the attributes of an object."""
    items = [] if holder_of(type(value)) is None else items_of(value)
    has_names = type(value) not in _BASES or type(value) in _WITH_NAMES
    return [*items, (vars, vars(value))] if has_names and hasattr(value, "__dict__") else items


def factory_of(obj: Any) -> Any:
    """What makes the missing values of a ``defaultdict``; None of all else."""
    return obj.default_factory if isinstance(obj, defaultdict) else None


def _made(kind: type, base: type, items: list[Any], *argument: Any) -> Any:
    """An object of a type with these items, from the beginning."""
    if base is deque:
        new = deque.__new__(kind)
        deque.__init__(new, items, *argument)
        return new
    return kind(items) if _made_in_c(kind, base) else base.__new__(kind, items)  # type: ignore[call-arg, call-overload]


def _made_in_c(kind: type, base: type) -> bool:
    """Whether a type has a ``__new__`` of its own that is written in C, as torch's sizes and results have; that of
    named tuples is written in Python."""
    return type(kind.__new__) is types.BuiltinFunctionType and kind.__new__ is not base.__new__


_UNSET = object()
_replaceable: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()
_bases: weakref.WeakKeyDictionary[type, type | None] = weakref.WeakKeyDictionary()


def _base_of(kind: type) -> type | None:
    """Python's own type from which a class that is written in Python derives; None of all other types."""
    if kind not in _bases:
        _bases[kind] = _found_base(kind)
    return _bases[kind]


def _found_base(kind: type) -> type | None:
    if kind in _BASES:
        return None if kind is object else kind
    if kind.__module__.partition(".")[0] == "weft":
        return None
    for each in kind.__mro__:
        if each in _BASES:
            # One with a `__new__` may be the only object of its class, or a member of an enumeration.
            return each if each is tuple or is_dataclass(kind) or kind.__new__ is each.__new__ else None
        if not is_python_class(each) and not issubclass(each, tuple):
            return None
    return None


def is_python_class(kind: type) -> bool:
    """Whether a class is written in Python."""
    return kind.__flags__ & (_HEAP_TYPE | _NO_INSTANCES | _IMMUTABLE) == _HEAP_TYPE


def _slots_of(kind: type, base: type) -> list[Any]:
    if kind in _BASES or _made_in_c(kind, base):
        return []
    python = [each for each in kind.__mro__ if each not in _BASES and is_python_class(each)]
    return [each for base in python for each in vars(base).values() if type(each) is types.MemberDescriptorType]


def _value(descriptor: Any, obj: Any) -> Any:
    try:
        return descriptor.__get__(obj)
    except AttributeError:
        return _UNSET
