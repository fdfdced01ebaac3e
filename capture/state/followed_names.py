"""Which attributes of each object the walk of the Python state follows.

Code of a library model names thousands of attributes, and every one of its objects is followed by all of them, also by
those that it lacks. Most objects are of few classes, with the same attributes. So sets of names are made once and
shared: none is copied for an object.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from weft.capture.state.code_names import AttributeNames
from weft.capture.state.contents import attributes_of
from weft.capture.state.origin import is_user_class
from weft.capture.state.type_facts import FactsOfTypes, TypeFacts

_OF_MODULES = ("_parameters", "_buffers", "_modules")


class FollowedNames:
    """The names of one walk.

    Args:
        names: those in the code that the walk has met so far; more are added to them.
        kinds: the types that it has met.
    """

    def __init__(self, names: AttributeNames, kinds: FactsOfTypes) -> None:
        self._names = names
        self._kinds = kinds
        self._absences: dict[tuple[Any, ...], frozenset[str]] = {}
        self._unions: dict[tuple[frozenset[str], frozenset[str]], frozenset[str]] = {}
        self._differences: _Differences = {}

    def forget(self) -> None:
        """Drop the sets, and the types among their keys."""
        for known in (self._absences, self._unions, self._differences):
            known.clear()

    def none(self, known: frozenset[str] = frozenset()) -> FollowedByObject:
        """For an object that the walk meets first: ``known`` are not to be followed."""
        return FollowedByObject(self._differences, known)

    def named(self, obj: Any, attributes: Mapping[str, Any], kind: TypeFacts) -> tuple[frozenset[str], frozenset[str]]:
        """The attributes of an object that code can read, and those among them that it reads no value of."""
        names = self._names.frozen  # also those of attributes that the step may make
        if self._names.whole_dataclasses and dataclasses.is_dataclass(obj):
            fields = {field.name for field in dataclasses.fields(obj)}
            names = self.joined(names, frozenset(attributes.keys() & fields))
        return self.joined(names, frozenset(kind.holder)), self._names.only_called(attributes)

    def is_unknown(self, obj: Any, name: str, *, met: bool) -> bool:
        """Whether code that asks an object for an attribute by a text may find something that is not followed.

        Args:
            met: whether the walk has followed the attributes of the object.
        """
        kind = type(obj)
        of_class = next((base for base in kind.__mro__ if name in vars(base)), None)
        if of_class is not None and is_user_class(of_class):
            return name not in self._names
        if issubclass(kind, torch.Tensor):  # its class may have it
            return name not in self._names.looked_for
        if not met:
            return False
        if issubclass(kind, torch.nn.Module):
            held = name in vars(obj) or any(name in vars(obj)[each] for each in _OF_MODULES)
            return not held and name not in self._names.looked_for
        return name not in (self._names.read if name in attributes_of(obj) else self._names.looked_for)

    def absent(self, obj: Any, attributes: Mapping[str, Any]) -> frozenset[str]:
        """Attributes that code looks for in an object of the user's, which lacks them: the class or a default serves;
        for a class its bases do."""
        is_class = isinstance(obj, type)
        kind = obj if is_class else type(obj)
        key = kind, is_class, self._names.count, *attributes
        found = self._absences.get(key)
        if found is None:
            looked_for = self._looked_for(self._kinds[kind], is_class)
            found = self._absences[key] = looked_for.difference(attributes)
        return found

    def _looked_for(self, kind: TypeFacts, is_class: bool) -> frozenset[str]:
        """Attributes that code looks for in objects of a kind, or in the class itself."""
        if kind.is_walked:
            return kind.computed_once
        if not kind.looked_into:
            return frozenset()
        names = self._names
        if is_class:
            return frozenset(name for base in kind.own for name in vars(base) if name in names)
        found = names.looked_for | (kind.defaults & names) | (kind.defaults & {"forward"})
        return frozenset(found | names if kind.falls_back else found)

    def joined(self, names: frozenset[str], others: frozenset[str]) -> frozenset[str]:
        """Both sets as one."""
        if not others:
            return names
        found = self._unions.get((names, others))
        if found is None:
            found = self._unions[names, others] = names if others <= names else names | others
        return found


class Followed(NamedTuple):
    """Names by which an object is followed from now on, and was not before.

    Attributes:
        names: of attributes that the object has or may get, slots left aside.
        left_out: those among ``names`` that do not count.
        absent: of attributes whose absence counts.
        slots: of attributes in slots.
    """

    names: frozenset[str]
    left_out: frozenset[str]
    absent: frozenset[str]
    slots: frozenset[str]


_Differences = dict[tuple[frozenset[str], frozenset[str]], frozenset[str]]
_NONE: frozenset[str] = frozenset()


class FollowedByObject:
    """The names by which one object is followed.

    Args:
        differences: of the sets of names of a walk, as far as they are known.
        known: names that are not to be followed.
    """

    def __init__(self, differences: _Differences, known: frozenset[str]) -> None:
        self._differences = differences
        self._names = self._left_out = _NONE
        self._others: tuple[frozenset[str], ...] = (known,) if known else ()

    def __contains__(self, name: str) -> bool:
        return (name in self._names and name not in self._left_out) or any(name in each for each in self._others)

    def add(self, name: str) -> None:
        """Follow the object by ``name``."""
        self._others += (frozenset({name}),)

    def grow(
        self, names: frozenset[str], left_out: frozenset[str], absent: frozenset[str], slots: frozenset[str]
    ) -> Followed:
        """Follow the object by ``names`` but ``left_out``, by ``absent`` and ``slots``.

        ``names`` are all that code has. An object is asked for again where there are more of them: few more.
        """
        found, absent, slots = self._new(names), self._new(absent), self._new(slots)
        left_out &= found  # what the object was followed by before, it is followed by still
        self._names, self._left_out = names, left_out
        self._others += tuple(filter(None, (absent, slots)))
        return Followed(found, left_out, absent, slots)

    def _new(self, names: frozenset[str]) -> frozenset[str]:
        if names and self._names:
            found = self._differences.get((names, self._names))
            if found is None:
                found = self._differences[names, self._names] = names - self._names
            names = found | (names & self._left_out) if self._left_out else found
        return names.difference(*self._others) if names and self._others else names
