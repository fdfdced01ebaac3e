"""Mutable Python objects that hold others, and the places in them where tensors and numbers are found.

The capture looks at the user's Python state as a set of containers: dictionaries, lists, the cells of closures, and
tensors, whose one entry is ``.grad``. A :class:`Container` remembers the entries that it was found with (a shallow
copy). So the capture can say what a step changed, undo it, and repeat it in each later call. A :class:`StatePlace` is
one entry of a container; it finds the present value of an input of the graph when the step is called.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import repeat
from operator import is_
from typing import Any

import torch

from weft.capture.state.absent_graphs import AutogradRole
from weft.capture.state.key_order import moved_keys
from weft.capture.step_interface import Role

# Values that are compared by equality; all other objects are compared by identity.
SIMPLE = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.memory_format,
    torch.layout,
)
# Stands for an entry that a container does not have.
MISSING = object()
# Stands for any number in a pattern of a value.
ANY = object()


# The methods that give the parts of a sparse matrix in coordinates, be it coalesced or not.
SPARSE_PARTS = ("_indices", "_values")


class BuiltinLike(type):
    """Of classes that stand for one of Python's own in the globals of modules while a step is captured."""


@dataclass(frozen=True)
class TensorLike:
    """What a gradient must be like. It stands for a tensor, which would keep its memory.

    Attributes:
        shape, dtype: of the tensor.
        role: of the tensor, one of those that another tensor can take.
        is_read: whether the step reads the gradient.
    """

    shape: torch.Size
    dtype: torch.dtype
    role: AutogradRole
    is_read: bool = True

    @classmethod
    def of(cls, tensor: torch.Tensor, *, is_read: bool = True) -> TensorLike:
        """What a tensor is like now."""
        return cls(tensor.shape, tensor.dtype, AutogradRole.of(tensor), is_read)

    @classmethod
    def of_gradient(cls, container: Container, *, is_read: bool = True) -> TensorLike | None:
        """What the gradient is like that was found on a tensor; None where there is none."""
        found = container.before.get("grad") if isinstance(container.obj, torch.Tensor) else None
        if not isinstance(found, torch.Tensor) or not AutogradRole.of(found).replaceable:
            return None
        return cls.of(found, is_read=is_read)


# Types of lists to which a step may append without reading them.
GROWING_KINDS = (list, deque)
# Types whose entries have their positions as keys.
_BY_POSITION = frozenset({list, tuple, deque, set, frozenset})
# Types whose objects are what their methods in C say.
_PLAIN = frozenset({dict, OrderedDict, list, deque, tuple})
# Python's own types that hold others, those that derive from another one first.
_HOLDERS: tuple[Any, ...] = (OrderedDict, dict, list, deque, tuple, frozenset, set)


def holder_of(kind: type) -> Any:
    """Python's own type among the bases of a type that holds others, None where there is none.

    Its methods read and write objects of the type without running code of the user's, who may have overridden them.
    """
    return kind if kind in _HOLDERS else next((each for each in _HOLDERS if issubclass(kind, each)), None)


class _WithoutOverrides:
    """An object that holds others, as the methods of Python's own type show it."""

    def __init__(self, obj: Any) -> None:
        self._obj, self._holder = obj, holder_of(type(obj))

    def __len__(self) -> int:
        return self._holder.__len__(self._obj)

    def __iter__(self) -> Iterator[Any]:
        return self._holder.__iter__(self._obj)

    def __getitem__(self, key: Any) -> Any:
        return self._holder.__getitem__(self._obj, key)


def without_overrides(obj: Any) -> Any:
    """A dictionary, list, deque or tuple for ``len``, iteration and look-ups that run no code of the user's: itself,
    which is fastest, where its type is Python's own."""
    return obj if type(obj) in _HOLDERS else _WithoutOverrides(obj)


class AllBut:
    """The keys of a dictionary other than ``names``, those that it gets later included."""

    def __init__(self, *names: str) -> None:
        self._names = frozenset(names)

    def __contains__(self, key: Any) -> bool:
        return key not in self._names


class Container:
    """A mutable Python object that holds others.

    Args:
        obj: a dictionary (also the ``vars`` of an object), list, deque, set or tuple, closure cell, or a tensor.
        path: how the user would write it.
        keys: the entries that count, None for all.
        label: how the user would write the entry of a key; ``path[key]`` if not given.
        absent: keys that the step looks for; where there is no such entry, that counts too.
        left_out: those of ``keys`` that do not count: many containers share one large set of keys.

    Attributes:
        before: the entries as they were found; MISSING for an absent key.
        frozen: whether no guard is needed: nobody assigns to it (attributes of weft's own frozen dataclasses), or
            another container guards what the step reads of it.
        holds_rates: whether its numbers are learning rates, which are inputs of every graph.
        stand_ins: what the capture put in the place of entries, by key: no change that the step made.
        by_value: what an entry must be made of, by key, where a call need not find the same object: :data:`ANY` for a
            number that is an input of the graph, a :class:`Pattern` for a tuple, list or dictionary,
            :class:`Growing` for a list to which the step appends, :class:`OfType` for a number of numpy's that changes,
            :class:`TensorLike` for a gradient that the step replaces.
        outer: its own place, where the step leaves another object there: what is in it is found through that place.
    """

    def __init__(
        self,
        obj: Any,
        path: str,
        keys: frozenset[str] | AllBut | None = None,
        label: Callable[[Any], str] | None = None,
        absent: frozenset[str] = frozenset(),
        left_out: frozenset[str] = frozenset(),
    ) -> None:
        self.obj = obj
        self.path = path
        self.keys = keys
        self.absent = absent
        self.left_out = left_out
        self.frozen = False
        self.holds_rates = False
        self.stand_ins: dict[Any, Any] = {}
        self.by_value: dict[Any, Any] = {}
        self.outer: StatePlace | None = None
        self.label = label or (lambda key: f"{path}[{key!r}]")
        self.before: dict[Any, Any] = {}
        self.refresh()

    @property
    def _holder(self) -> Any:
        return holder_of(type(self.obj))

    def entries(self) -> dict[Any, Any]:
        """The entries that count, as they are now; an empty cell has none."""
        obj = self.obj
        if isinstance(obj, types.CellType):
            try:
                return {0: obj.cell_contents}
            except ValueError:
                return {}
        if isinstance(obj, dict):
            keys, left_out = self.keys, self.left_out
            found = {k: v for k, v in self._holder.items(obj) if keys is None or (k in keys and k not in left_out)}
            return found | missing_among(self.absent, obj) if self.absent else found
        if isinstance(obj, torch.Tensor):
            return {"grad": obj.grad if obj.is_leaf or obj.retains_grad else None}
        return dict(enumerate(self._holder.__iter__(obj)))

    def refresh(self) -> None:
        """Compare with what is there now from here on."""
        self.before = self.entries()
        self._lacked_all = isinstance(self.obj, dict) and self.absent.isdisjoint(dict.keys(self.obj))
        self._requires_grad = isinstance(self.obj, torch.Tensor) and self.obj.requires_grad

    def guarded(self) -> dict[Any, Any]:
        """The entries that a call must find as they were found, but for those that count by value."""
        return {k: v for k, v in self.before.items() if k not in self.by_value} if self.by_value else self.before

    def get(self, key: Any) -> Any:
        """One entry as it is now, MISSING where there is none."""
        if isinstance(self.obj, dict):
            return dict.get(self.obj, key, MISSING)
        if isinstance(self.obj, (list, deque)):
            return self._holder.__getitem__(self.obj, key) if key < len(without_overrides(self.obj)) else MISSING
        return self.entries().get(key, MISSING)

    def set(self, key: Any, value: Any) -> None:
        """Assign an entry; a key one past the end of a list appends."""
        obj = self.obj
        if isinstance(obj, types.CellType):
            obj.cell_contents = value
        elif isinstance(obj, torch.Tensor):
            if key == "grad":
                obj.grad = value
            elif obj.is_leaf:  # of no other tensor can it be changed
                obj.requires_grad = value
        elif isinstance(obj, (list, deque)) and key == len(without_overrides(obj)):
            self._holder.append(obj, value)
        elif isinstance(obj, (dict, list, deque)):
            self._holder.__setitem__(obj, key, value)

    def place_of(self, key: Any, role: Role) -> StatePlace:
        """The place of an entry."""
        if self.outer is None:
            return StatePlace(self, key, self.label(key), role)
        return self.outer.inside(key, role)

    def stand_in(self, key: Any, value: Any) -> None:
        """Put ``value`` in the place of an entry for the time of the capture."""
        self.stand_ins[key] = value
        self.set(key, value)

    def remove(self, key: Any) -> None:
        """Delete an entry of a dictionary, list or deque."""
        if isinstance(self.obj, dict):
            self._holder.pop(self.obj, key, None)
        elif isinstance(self.obj, (list, deque)):
            self._holder.__delitem__(self.obj, key)

    def restore(self) -> None:
        """Put the entries back as they were found, in their order."""
        self.stand_ins.clear()
        if self._is_as_found():
            return
        if changed := list(self.changes()):
            for key, old, _ in reversed(changed):
                if old is MISSING:
                    self.remove(key)
            for key, old, _ in list(self.changes()):
                if old is not MISSING:
                    self.set(key, old)
        # Keys may be tensors, which have no truth value to compare by.
        if isinstance(self.obj, dict) and self.keys is None and not all(map(is_, self.entries(), self.before)):
            self.move_to_end(self.before)  # hooks run in the order of their dictionary

    def moved(self) -> list[Any]:
        """The keys that have to be moved to the end of a dictionary, one by one, after removed keys were removed and
        new ones were added, so that all keys come in the order that they have now."""
        if not isinstance(self.obj, dict) or self.keys is not None:
            return []
        return moved_keys(list(self.before), list(self.entries()))

    def move_to_end(self, keys: Iterable[Any]) -> None:
        """Move entries of a dictionary to its end, in the order of ``keys``."""
        for key in keys:
            self._holder.__setitem__(self.obj, key, self._holder.pop(self.obj, key))

    def grew(self) -> bool:
        """Whether a list kept its entries and got more of them, as it then would at every call."""
        now = self.entries()
        longer = isinstance(self.obj, GROWING_KINDS) and len(now) > len(self.before)
        return longer and all(now[key] is old for key, old in self.before.items())

    def grows_forever(self) -> bool:
        """Whether a list gets longer at each call. One that was empty may have been cleared in this step, and the next
        call may clear it again."""
        bounded = self.outer is not None or (isinstance(self.obj, deque) and self.obj.maxlen is not None)
        return bool(self.before) and not bounded and self.grew()

    def may_be_appended_to(self) -> bool:
        """Whether it is a list that got longer, or a deque whose entries moved on."""
        if type(self.obj) is deque:
            return self.obj.maxlen is not None or self.grew()
        return type(self.obj) is list and self.grew()

    def _is_as_found(self) -> bool:
        """Whether it has the very entries that it was found with, in their order: most containers have, most times.

        False, too, where only :meth:`entries` can tell.
        """
        obj, before = self.obj, self.before
        if type(self) is not Container or type(obj) not in _PLAIN:
            return False
        if not isinstance(obj, dict):
            return len(obj) == len(before) and all(map(is_, obj, before.values()))
        absent, keys, left_out = self.absent, self.keys, self.left_out
        if keys is None and not absent:
            same = len(obj) == len(before) and all(map(is_, obj, before))
            return same and all(map(is_, obj.values(), before.values()))
        if keys is None or (absent and not (self._lacked_all and absent.isdisjoint(dict.keys(obj)))):
            return False
        count = len(before) - len(absent)
        for key, value in obj.items():
            if key in keys and key not in left_out:
                if before.get(key, MISSING) is not value:
                    return False
                count -= 1
        return count == 0

    def changes(self) -> Iterator[tuple[Any, Any, Any]]:
        """(key, before, after) of each entry that is not as it was found; MISSING for an absent entry.

        Of a tensor, ``requires_grad`` too, which is no entry: :class:`Guards` reads it faster than entries.
        """
        if self._is_as_found():
            return
        before, now = self.before, self.entries()
        same_keys = len(before) == len(now) and (type(self.obj) in _BY_POSITION or all(map(is_, before, now)))
        if not (same_keys and all(map(is_, before.values(), now.values()))):  # most containers are as they were
            # New entries in the order in which the step added them; those that were looked for have none before.
            for key in {**{key: old for key, old in before.items() if old is not MISSING}, **now}:
                old, new = before.get(key, MISSING), now.get(key, MISSING)
                stands_in = key in self.stand_ins and new is self.stand_ins[key]
                if old is not new and not stands_in and not same_simple(old, new):
                    yield key, old, new
        tensor = self.obj
        if isinstance(tensor, torch.Tensor) and tensor.is_leaf and tensor.requires_grad is not self._requires_grad:
            yield "requires_grad", self._requires_grad, tensor.requires_grad


class Attributes(Container):
    """Attributes of an object that are in no dictionary of its own: slots, those of one thread (``threading.local``),
    of a function, of a class.

    Args:
        obj: the object; of a class, the attributes that the class itself defines.
        keys: names of the attributes.
        absent: those names among them whose absence counts too.
        left_out: those names among them that do not count.
    """

    def __init__(
        self,
        obj: Any,
        path: str,
        keys: frozenset[str],
        label: Callable[[Any], str],
        absent: frozenset[str] = frozenset(),
        left_out: frozenset[str] = frozenset(),
    ) -> None:
        self._names = keys
        super().__init__(obj, path, keys, label, absent, left_out)

    def entries(self) -> dict[Any, Any]:
        """The attributes that there are now, and MISSING for those whose absence counts."""
        if isinstance(self.obj, type):  # it has fewer attributes than the names that count
            names, left_out = self._names, self.left_out
            found = {name: value for name, value in vars(self.obj).items() if name in names and name not in left_out}
            return found | {name: MISSING for name in self.absent if name not in found}
        found = {name: getattr(self.obj, name, MISSING) for name in self._names - self.left_out}
        return {name: value for name, value in found.items() if value is not MISSING or name in self.absent}

    def get(self, key: Any) -> Any:
        """One attribute as it is now, MISSING where there is none."""
        return super().get(key) if isinstance(self.obj, type) else getattr(self.obj, key, MISSING)

    def _is_as_found(self) -> bool:
        obj, before = self.obj, self.before
        if type(obj) is not types.FunctionType or len(before) != len(self._names):
            return False
        return all(map(is_, map(getattr, repeat(obj), before, repeat(MISSING)), before.values()))

    def set(self, key: Any, value: Any) -> None:
        """Assign an attribute. No ``__setattr__`` of the user's runs: what it does has been done once."""
        if isinstance(self.obj, type):
            type.__setattr__(self.obj, key, value)
        elif (slot := self._slot(key)) is not None:
            slot.__set__(self.obj, value)
        else:
            setattr(self.obj, key, value)

    def remove(self, key: Any) -> None:
        """Delete an attribute, in the same way."""
        if self.get(key) is MISSING:
            return
        if isinstance(self.obj, type):
            type.__delattr__(self.obj, key)
        elif (slot := self._slot(key)) is not None:
            slot.__delete__(self.obj)
        else:
            delattr(self.obj, key)

    def _slot(self, key: Any) -> types.MemberDescriptorType | None:
        found = next((vars(base)[key] for base in type(self.obj).__mro__ if key in vars(base)), None)
        return found if isinstance(found, types.MemberDescriptorType) else None


class LoadedModules(Container):
    """Those entries of ``sys.modules`` that code asks for by name. What a step imports stays imported.

    Args:
        names: of the modules.
    """

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(sys.modules, "sys.modules", names, absent=names)

    def changes(self) -> Iterator[tuple[Any, Any, Any]]:
        """None: an import is no change that each call repeats."""
        return iter(())


class TensorData(Container):
    """The memory of a tensor, which ``tensor.data = ...`` replaces."""

    def set(self, key: Any, value: Any) -> None:
        """Give the tensor the memory of another one."""
        self.obj.data = value


class Content(Container):
    """What an object holds that is no container of Python objects to look into, as one value: the bytes of an array,
    the elements of a set, the value of a context variable.

    Args:
        read: the content of the object now, as a plain value or a tuple of such.
        write: gives the object a content that ``read`` returned.
    """

    KEY = "content"

    def __init__(self, obj: Any, path: str, read: Callable[[Any], Any], write: Callable[[Any, Any], None]) -> None:
        self.read, self._write = read, write
        super().__init__(obj, path, label=lambda _: f"the content of {path}")

    def entries(self) -> dict[Any, Any]:
        """The content now, as the one entry."""
        return {self.KEY: self.read(self.obj)}

    def set(self, key: Any, value: Any) -> None:
        """Give the object another content."""
        self._write(self.obj, value)

    def changes(self) -> Iterator[tuple[Any, Any, Any]]:
        """The entry, the content before and the one after, if they differ."""
        old, new = self.before[self.KEY], self.read(self.obj)
        same = (
            len(old) == len(new) and all(map(_same, old, new)) if type(old) is type(new) is tuple else _same(old, new)
        )
        if not same:
            yield self.KEY, old, new


def missing_among(names: frozenset[str], entries: dict[Any, Any]) -> dict[str, Any]:
    """MISSING for each of ``names`` that a dictionary does not have.

    Objects of one class lack the same hundreds of names: most often all of those that are asked for.
    """
    if len(names) > len(entries) and names.isdisjoint(dict.keys(entries)):
        return _all_missing(names)
    return {name: MISSING for name in names if not dict.__contains__(entries, name)}


@functools.lru_cache(maxsize=256)
def _all_missing(names: frozenset[str]) -> dict[str, Any]:
    return dict.fromkeys(names, MISSING)


def _same(old: Any, new: Any) -> bool:
    return old is new or same_simple(new, old)


@dataclass(frozen=True)
class StatePlace:
    """The place of one tensor or number: an entry of a container.

    Attributes:
        container, key: the entry.
        path: how the user would write it.
        role: of the value in training.
        inner: attributes that lead from a tensor subclass (DTensor) at the place to the plain tensor inside, or the
            part of a sparse matrix.
        items: positions and keys that lead from the entry to the value: ``(1, 0)`` for ``entry[1][0]``; ``vars`` leads
            to the attributes of an object, ``len`` to the number of entries.
    """

    container: Container
    key: Any
    path: str
    role: Role
    inner: tuple[str, ...] = ()
    items: tuple[Any, ...] = ()

    def inside(self, key: Any, role: Role | None = None) -> StatePlace:
        """The place of an item of the tuple, list or dictionary at this place, or of the attributes of the object."""
        is_attribute = self.items[-1:] == (vars,)
        path = self.path if key is vars else f"{self.path}.{key}" if is_attribute else f"{self.path}[{key!r}]"
        path = f"len({self.path})" if key is len else path
        return replace(self, path=path, items=(*self.items, key), role=role or self.role)

    def outer(self) -> Any:
        """The object at this place now, MISSING where there is none."""
        value = self.container.get(self.key)
        for at in self.items:
            value = item_of(value, at)
        return value

    def get(self) -> Any:
        """The plain tensor or number at this place now, MISSING where there is none."""
        value = self.outer()
        for name in self.inner:
            value = part_of(value, name)
        return value


def part_of(value: Any, name: str) -> Any:
    """The tensor inside another one, by the name of an attribute or one of ``SPARSE_PARTS``; MISSING where there is
    none."""
    if name not in SPARSE_PARTS:
        return getattr(value, name, MISSING)
    is_sparse = isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo
    return getattr(value, name)() if is_sparse else MISSING


def item_of(value: Any, at: Any) -> Any:
    """The item of a tuple, list, deque or dictionary at a position or key, or the attributes of an object; MISSING
    where there is none."""
    if at is vars:
        return getattr(value, "__dict__", MISSING)
    if isinstance(value, dict):
        return dict.get(value, at, MISSING)
    if not isinstance(value, (tuple, list, deque)):
        return MISSING
    count = len(without_overrides(value))
    return count if at is len else holder_of(type(value)).__getitem__(value, at) if -count <= at < count else MISSING


def items_of(value: Any) -> list[tuple[Any, Any]]:
    """(position or key, item) of a tuple, list or dictionary."""
    holder = holder_of(type(value))
    return list(holder.items(value)) if isinstance(value, dict) else list(enumerate(holder.__iter__(value)))


def same_simple(value: Any, expected: Any) -> bool:
    """Whether two plain values of one type are the same to a program: NaN is NaN, and -0.0 is not 0.0."""
    if type(value) is not type(expected) or not isinstance(expected, SIMPLE):
        return False
    if value == expected:
        return not isinstance(expected, (float, complex)) or bool(expected) or repr(value) == repr(expected)
    return value != value and expected != expected


def label_of(path: str) -> Callable[[Any], str]:
    """How the user would write the attributes of the object at ``path``."""
    prefix = f"{path}." if path else ""
    return lambda key: f"{prefix}{key}"


def role_of(value: Any) -> Role:
    """The role of a tensor in training, as far as its type tells."""
    # Asked of every object that the walk meets, and whether something is a parameter is asked in Python.
    is_parameter = isinstance(value, torch.Tensor) and isinstance(value, torch.nn.Parameter)
    return Role.PARAMETER if is_parameter else Role.BUFFER
