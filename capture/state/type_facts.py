"""What the walk of the Python state must know of a type, found once for each type and walk."""

from __future__ import annotations

import dataclasses
import functools
import threading
import types
from collections import OrderedDict, deque
from typing import Any, NamedTuple

import torch
from torch.distributions.utils import lazy_property

from weft.capture.state.containers import SIMPLE
from weft.capture.state.contents import Access, access_to
from weft.capture.state.origin import held_by, is_own, is_user_class, is_walked

# Attributes of every nn.Module that do not change what its forward or backward does.
BOOKKEEPING = frozenset(
    {
        "_non_persistent_buffers_set",
        "_is_full_backward_hook",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_forward_pre_hooks_with_kwargs",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    }
)
# What counts of a function of the user's, of a dictionary that makes missing values, and of a logger.
OF_FUNCTIONS = frozenset({"__code__", "__defaults__", "__kwdefaults__"})
# What counts of them where the code of the step names it.
_NAMES_OF_FUNCTIONS = frozenset({"__name__", "__qualname__", "__doc__", "__module__"})
OF_DEFAULTDICTS = frozenset({"default_factory"})
OF_LOGGERS = frozenset({"level", "disabled", "parent"})
# What tells whether a lock is held.
ASK_LOCKS = frozenset({"acquire", "locked"})
# What reads which buffers of a module are saved.
ASK_STATE = frozenset({"state_dict", "_save_to_state_dict", "_non_persistent_buffers_set"})

SIMPLE_KINDS = frozenset(SIMPLE)
# Types that hold objects and have no attributes: most objects are of one of these.
PLAIN_HOLDERS = frozenset({dict, list, tuple, deque, OrderedDict})


# Of these code looks for attributes that others have put there: ``getattr(optimizer, "is_frozen", False)``.
_MARKED = (types.ModuleType, types.FunctionType, functools.partial, torch.optim.Optimizer)


class TypeFacts(NamedTuple):
    """One type.

    Attributes:
        is_user: whether its code is the user's or of a library that is walked.
        is_walked: whether it is weft's or torch's and its objects are walked as a whole.
        is_frozen: whether nobody assigns to attributes of its objects.
        has_attributes: whether its objects have attributes that code may name.
        slots: those of the attributes that are in slots; of functions what else code can assign.
        holder: the attributes that count whether code names them or not.
        own: those classes among it and its bases that are the user's own.
        defaults: names that these define, other than properties: an object's attribute of the same name takes the
            place of the value or method. Of every module ``forward``, which torch looks up.
        falls_back: whether a ``__getattr__`` of these serves where an object has no attribute of its own.
        computed_once: attributes that objects of a class that is walked get when code first reads them.
        looked_into: whether the absence of an attribute counts, too.
        access: how the content is read and written, where it is compared as one value.
    """

    is_user: bool
    is_walked: bool
    is_frozen: bool
    has_attributes: bool
    slots: frozenset[str]
    holder: tuple[str, ...]
    own: tuple[type, ...]
    defaults: frozenset[str]
    falls_back: bool
    computed_once: frozenset[str]
    looked_into: bool
    access: Access | None


class FactsOfTypes(dict[type, TypeFacts]):
    """The types that one walk has met."""

    def __missing__(self, kind: type) -> TypeFacts:
        user = [base for base in kind.__mro__ if is_user_class(base)]
        own = tuple(base for base in user if is_own(base))
        slots = frozenset(
            name
            for base in user
            if "__slots__" in vars(base)
            for name, value in vars(base).items()
            if isinstance(value, types.MemberDescriptorType)
        )
        if issubclass(kind, types.FunctionType):
            slots |= _NAMES_OF_FUNCTIONS
        values = {name for base in own for name, value in vars(base).items() if not hasattr(type(value), "__set__")}
        values = {name for name in values if not name.startswith("__")}
        if issubclass(kind, torch.nn.Module):
            values.add("forward")
        has_attributes = bool(slots) or any("__dict__" in vars(base) for base in kind.__mro__)
        is_user, holder, local = is_user_class(kind), held_by(kind), issubclass(kind, threading.local)
        walked = is_walked(kind)
        found = self[kind] = TypeFacts(
            is_user,
            walked,
            walked and _is_frozen(kind),
            holder is not None or local or (is_user and has_attributes),
            slots,
            holder or (),
            own,
            frozenset(values),
            any("__getattr__" in vars(base) for base in own),
            _computed_once(kind) if walked else frozenset(),
            bool(values or own) or local or holder is not None or issubclass(kind, _MARKED),
            access_to(kind),
        )
        return found


def is_what_its_type_says(kind: type) -> bool:
    """Whether ``isinstance`` answers by this type alone for all its objects: not so for proxies and mocks, which tell
    of another class."""
    return all(
        base in _TELL_NO_OTHER or (base.__flags__ & _MADE_BY_CLASS and _CLASS_TOLD_BY.isdisjoint(vars(base)))
        for base in kind.__mro__
    )


_CLASS_TOLD_BY = frozenset({"__class__", "__getattribute__"})
_MADE_BY_CLASS = 1 << 9  # Py_TPFLAGS_HEAPTYPE: of classes that Python code defines, among others
_TELL_NO_OTHER = frozenset(
    {
        *(object, type, dict, list, tuple, set, frozenset, OrderedDict, deque, *SIMPLE),
        *(types.FunctionType, types.ModuleType, types.CellType, torch.Tensor.__base__),
    }
)


def _computed_once(kind: type) -> frozenset[str]:
    """Names of descriptors that leave their value in the object (``lazy_property``, ``cached_property``)."""
    found = {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}
    return frozenset(
        name for name, value in found.items() if isinstance(value, (lazy_property, functools.cached_property))
    )


def _is_frozen(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
