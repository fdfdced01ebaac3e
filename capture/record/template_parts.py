"""The parts of templates, and how each call fills them in.

A template has a part for each object of a value that a step left: a slot for what the call computes, a constant, or an
object that the step made (:mod:`weft.capture.state.object_parts`). As in eager, each call makes its own objects, and
one object is at all places where the step put it.
"""

from __future__ import annotations

import copy
import random
import sys
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.capture.record.argument_containers import PassedObject
from weft.capture.record.array_calls import ArraySlot
from weft.capture.record.iterator_arguments import IteratorSlot
from weft.capture.record.late_text import LateTextSlot
from weft.capture.record.plain_numbers import numpy_float
from weft.capture.state.absent_graphs import mark_absent_graph, with_absent_graph
from weft.capture.state.containers import StatePlace, same_simple
from weft.capture.state.object_parts import ObjectForm, parts_of
from weft.tensor_subclasses import Shell


@dataclass(eq=False)
class OutputSlot:
    """Takes output number ``index``, or of a tensor subclass the outputs inside; ``grad`` is the slot of its ``.grad``,
    ``attributes`` the parts that the step put on it, ``is_parameter`` whether the step made it a parameter,
    ``computed_at`` where it is to the user if eager leaves it there with a grad_fn, ``of_numpy`` whether it is a number
    that numpy has made, ``number`` as that of a :class:`MadeObject`."""

    index: int | SubclassParts
    requires_grad: bool = False
    grad: Any = None
    attributes: tuple[tuple[str, Any], ...] = ()
    is_parameter: bool = False
    computed_at: str = ""
    of_numpy: bool = False
    number: int = 0

    def of_call(self, outputs: list[Any], made: dict[int, Any]) -> Any:
        """What it stands for in one call; see :func:`filled`."""
        if id(self) not in made:
            made[id(self)] = value = self._made(outputs, made)
            if self.number:
                made[self.number] = value
        return made[id(self)]

    def _made(self, outputs: list[Any], made: dict[int, Any]) -> Any:
        if self.of_numpy:
            return numpy_float(outputs[self.index])  # type: ignore[bad-index]
        value = self.index.of_call(outputs, made) if isinstance(self.index, SubclassParts) else outputs[self.index]
        kept = made.get(self.number) if self.number and not self.is_parameter else None
        if kept is not None:
            kept.data, value = value, kept
        if self.is_parameter and not isinstance(value, torch.nn.Parameter):
            value = torch.nn.Parameter(value, requires_grad=self.requires_grad)
        elif self.requires_grad:
            value.requires_grad_()
        elif self.computed_at and kept is not None:
            mark_absent_graph(value, self.computed_at)
        elif self.computed_at and not value.requires_grad:
            value = with_absent_graph(value, self.computed_at)
            if self.grad is not None:
                value.retain_grad()  # as in eager: only such a tensor has a gradient
        if self.grad is not None:
            value.grad = filled(self.grad, outputs, made)
        for name, part in self.attributes:
            setattr(value, name, filled(part, outputs, made))
        return value


@dataclass(frozen=True)
class SubclassParts:
    """Takes the plain tensors inside a subclass, each from its own template or as it is. Of one around a single tensor
    that is the number of an output: what the step did with the tensor is said by the slot of the whole."""

    shell: Shell
    parts: dict[tuple[str, ...], Any]

    def of_call(self, outputs: list[Any], made: dict[int, Any]) -> Any:
        """What it stands for in one call; see :func:`filled`."""
        return self.shell.around({at: self._part(part, outputs, made) for at, part in self.parts.items()})

    @staticmethod
    def _part(part: Any, outputs: list[Any], made: dict[int, Any]) -> Any:
        if isinstance(part, int):
            return outputs[part]
        if isinstance(part, OutputSlot):
            value: Any = part.of_call(outputs, made)
            # Results of one bucket lie in one storage. A subclass may want its tensors to begin at equal offsets.
            return value.clone() if value.storage_offset() else value
        return part.fill(outputs) if isinstance(part, StateReference) else part


@dataclass(frozen=True)
class StateReference:
    """Takes the object that is at ``place`` when a call begins."""

    place: StatePlace

    def fill(self, outputs: list[Any]) -> Any:
        """The object of the present call."""
        return self.place.outer()


class OwnObject:
    """Takes an object that each call finds at its place, in the arguments or where an earlier call left it."""

    def __init__(self, place: StatePlace | PassedObject) -> None:
        self._place = place

    def fill(self, outputs: list[Any]) -> Any:
        """The object of the present call."""
        return self._place.outer()


@dataclass(eq=False)
class MadeObject:
    """An object that the step made.

    Attributes:
        form: of the object.
        keys: parts for those of a dictionary, in order.
        parts: for what it is made of, in the order of the form.
        varies: whether something in it is computed by the call, or looked up.
        number: of an object that an opaque function got, too, by which a call finds the one that it kept; 0 of others.
    """

    form: ObjectForm
    keys: list[Any] = field(default_factory=list)
    parts: list[Any] = field(default_factory=list)
    varies: bool = False
    number: int = 0

    def of_call(self, outputs: list[Any], made: dict[int, Any]) -> Any:
        """What it stands for in one call; see :func:`filled`."""
        if id(self) in made:
            return made[id(self)]
        new = made.get(self.number) if self.number else None
        if self.form.is_fixed:
            parts = [filled(part, outputs, made) for part in self.parts]
            if new is None or not _is_made_of(new, parts):
                new = self.form.fixed(parts)
            made[id(self)] = new
            if self.number:
                made[self.number] = new
            return new
        new = self.form.empty() if new is None else new
        made[id(self)] = new  # before its parts, which may hold it
        if self.number:
            self.form.clear(new)
            made[self.number] = new
        keys = [filled(key, outputs, made) for key in self.keys]
        self.form.put(new, keys, [filled(part, outputs, made) for part in self.parts])
        return new


def _is_made_of(kept: Any, parts: list[Any]) -> bool:
    """Whether an object that a function kept, and that cannot be changed, has these parts still."""
    taken = parts_of(kept)
    if taken is None or len(taken.parts) != len(parts):
        return False
    return all(own is part or same_simple(own, part) for own, part in zip(taken.parts, parts, strict=True))


@dataclass(eq=False)
class CopiedObject:
    """An object of a type written in C that the step made and that can be changed: each call makes a copy."""

    original: Any

    def of_call(self, outputs: list[Any], made: dict[int, Any]) -> Any:
        """What it stands for in one call; see :func:`filled`."""
        if id(self) not in made:
            made[id(self)] = copy.deepcopy(self.original)
        return made[id(self)]


def copied_kinds() -> tuple[type, ...]:
    """Types written in C whose objects can be changed and hold no others."""
    numpy = sys.modules.get("numpy")
    of_numpy = () if numpy is None else (numpy.ndarray, numpy.random.Generator, numpy.random.RandomState)
    return bytearray, random.Random, *of_numpy


# What each call computes or looks up, and what it makes: once, for all places.
_LOOKED_UP = (StateReference, ArraySlot, LateTextSlot, OwnObject, IteratorSlot)
_MADE = (OutputSlot, MadeObject, CopiedObject)


def filled(part: Any, outputs: list[Any], made: dict[int, Any]) -> Any:
    """What a part stands for in one call.

    Args:
        outputs: of the graph.
        made: what the call made so far, by the ids of the parts, and by the numbers of those that have one.
    """
    if isinstance(part, _MADE):
        return part.of_call(outputs, made)
    return part.fill(outputs) if isinstance(part, _LOOKED_UP) else part


def is_constant(part: Any) -> bool:
    """Whether a part is the object itself, the same at each call."""
    return not isinstance(part, (*_MADE, *_LOOKED_UP))


@dataclass(frozen=True)
class Template:
    """One Python value, over the outputs of a graph.

    Attributes:
        part: for the value.
        where: it is, in words.
        constants: the objects in it that are the same at each call.
    """

    part: Any
    where: str
    constants: tuple[Any, ...]

    def fill(self, outputs: list[Any], made: dict[int, Any] | None = None) -> Any:
        """The value of one call, from the values of the graph's ``Create`` and ``Return`` outputs.

        Args:
            made: the objects that other templates of the same call made, by the ids of their parts; filled here.
        """
        return filled(self.part, outputs, {} if made is None else made)
