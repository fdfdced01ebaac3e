"""Makes templates of Python values: of what the step returns, and of what it leaves in the user's Python state.

Both may hold tensors at any depth, in containers and in objects of the user's classes.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft.capture.record.held_references import StandIn, original_of
from weft.capture.record.host_arrays import HostArray
from weft.capture.record.host_lists import HostList
from weft.capture.record.iterator_arguments import slot_of_iterator
from weft.capture.record.late_text import LateTextSlot, is_late
from weft.capture.record.left_addresses import LeftAddresses
from weft.capture.record.object_ids import IdInCapture, plain_ids
from weft.capture.record.own_objects import OwnObjects
from weft.capture.record.plain_keys import plain_key
from weft.capture.record.plain_numbers import NumpyFloat
from weft.capture.record.recorder import OpRecorder
from weft.capture.record.template_parts import (
    CopiedObject,
    MadeObject,
    OutputSlot,
    OwnObject,
    StateReference,
    SubclassParts,
    Template,
    copied_kinds,
    is_constant,
)
from weft.capture.record.tracked_storages import is_tracked
from weft.capture.record.unread_arguments import UnreadValue, count_as_read
from weft.capture.state.code_names import functions_in
from weft.capture.state.containers import StatePlace
from weft.capture.state.contents import attributes_of
from weft.capture.state.object_parts import ObjectParts, closure_of, objects_in, parts_of
from weft.capture.state.tensor_memory import inner_tensor, own_attributes
from weft.capture.state.type_facts import SIMPLE_KINDS
from weft.errors import EscapedTensor
from weft.tensor_subclasses import Shell, plain_parts

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_WEAKLY = "an object refers to it weakly (weakref), and each call makes another one"
_OF_CLASS = "it is made once, when the step is captured: define the class outside the step"


class Templates:
    """Makes the templates of one capture. They put one object in all places where the step put one.

    Args:
        recorder: of the capture.
        places_by_id: the places of the user's own tensors, by id. Templates refer to the place, because a later call
            may find another tensor there.
        own: the other objects that the call began with.
    """

    def __init__(self, recorder: OpRecorder, places_by_id: Mapping[int, StatePlace], own: OwnObjects) -> None:
        self.recorder = recorder
        self.places = places_by_id
        self.own = own
        self.outputs: dict[int, int] = {}  # number of the output of each tensor object of the capture, by id
        self.inference: dict[int, bool] = {}  # by number of the output: whether it is an inference tensor
        self.unfinished = set[int]()  # ids of the objects whose parts are being made
        self.addresses = LeftAddresses()
        self.weak: list[tuple[weakref.ref[Any], str]] = []  # weak references that the step left, and where
        self.made: dict[int, tuple[Any, Any]] = {}  # by id: an object, held so that no other one gets the id; its part

    def of(self, value: Any, keep: Callable[[Any], int], where: str) -> Template:
        """The template of a value that the capture left.

        Args:
            keep: makes a node an output of the graph and returns the output's number.
            where: the value is, in words.

        Raises:
            EscapedTensor: a tensor of the capture sits inside an object that cannot be made again.
        """
        making = _Making(self, keep, where)
        try:
            return Template(making.part(value), where, tuple(making.constants))
        except RecursionError:
            why = "the objects in it are nested too deeply: put them in a list"
            raise EscapedTensor(type(value), where, why) from None

    def of_memory(self, tensor: torch.Tensor, keep: Callable[[Any], int], where: str) -> Template:
        """The template of a tensor whose memory another one takes, be it the user's own or not."""
        making = _Making(self, keep, where)
        return Template(making.output(tensor, inner_tensor(tensor)[0], inner_tensor(tensor)[1]), where, ())

    def end(self) -> None:
        """Let go of what the step made, after the last template.

        Raises:
            EscapedTensor: the step leaves a weak reference to an object that it made, and the object too.
            UncapturableDraw: the step leaves the address of such an object.
        """
        self.addresses.check(value for value, part in self.made.values() if not is_constant(part))
        for reference, where in self.weak:
            value, part = self.made.get(id(reference()), (None, None))
            if value is not None and value is reference() and not is_constant(part):
                kind = torch.Tensor if isinstance(value, torch.Tensor) else type(value)
                raise EscapedTensor(kind, where, _WEAKLY)
        self.made.clear()


class _Making:
    """Makes one template."""

    def __init__(self, templates: Templates, keep: Callable[[Any], int], where: str) -> None:
        self._all = templates
        self._keep = keep
        self._where = where
        self.constants: list[Any] = []

    def part(self, value: Any) -> Any:
        """The part of a template for one object."""
        kind = type(value)
        if kind is str and is_late(value):
            return LateTextSlot.of(value, self._all.recorder, self._keep)
        if kind in SIMPLE_KINDS:
            self._all.addresses.note(value, self._where)
            return value
        if kind is IdInCapture:
            return plain_ids(value)
        if kind is UnreadValue:
            return StateReference(value.weft_place)
        if kind is HostList:
            count_as_read([value])
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if kind is HostArray:
            if id(value) in self._all.places:
                return StateReference(self._all.places[id(value)])
            return value.weft_owner.slot(value, self._keep, self._all.outputs)
        if isinstance(value, _NUMBERS):
            return OutputSlot(self._keep(self._all.recorder.value(value)), of_numpy=kind is NumpyFloat)
        if (iterator := slot_of_iterator(value)) is not None:
            return iterator
        if isinstance(value, StandIn) and value.weft_place is not None:
            return OwnObject(value.weft_place)
        return self._object(original_of(value))

    def _object(self, value: Any) -> Any:
        if value in self._all.own and not isinstance(value, tuple):  # a tuple may have another tensor at each call
            return self._all.own.slot(value)
        if id(value) in self._all.made:
            return self._all.made[id(value)][1]
        if (taken := self._all.own.new_parts(value)) is not None:
            return self._made(value, taken)
        count_as_read(value)
        if isinstance(value, weakref.ref):
            self._all.weak.append((value, self._where))
        if not isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
            self._refuse_tracked(value)
        if not isinstance(value, copied_kinds()):
            return self._constant(value)
        self._all.made[id(value)] = value, (copied := CopiedObject(value))
        return copied

    def _made(self, value: Any, taken: ObjectParts) -> Any:
        own, form = self._all.own, taken.form
        if own.is_new(form.kind):  # the calls share the class of the capture
            self._refuse_tracked(form.kind)
        made = MadeObject(form, number=own.given.number(value))
        self._all.made[id(value)] = value, made  # before its parts, which may hold it
        self._refuse_unfinished(taken)
        self._all.unfinished.add(id(value))
        made.keys += (self.part(plain_key(key)) for key in taken.keys)
        made.parts += map(self.part, taken.parts)
        self.part(form.argument)
        self._all.unfinished.discard(id(value))
        made.varies = any(map(_varies, (*made.keys, *made.parts)))
        if made.varies and weakref.getweakrefcount(value):
            raise EscapedTensor(type(value), self._where, _WEAKLY)
        # What something outside keeps is the same at each call, as a tuple is of which each call finds the same one.
        kept = id(value) in own.held and not made.varies
        if kept or (form.is_fixed and value in own and all(map(operator.is_, made.parts, taken.parts))):
            self._all.made[id(value)] = value, value
            return self._constant(value)
        return made

    def _refuse_tracked(self, value: Any) -> None:
        """Refuse an object that each call finds as it is, with what a call computes in it."""
        if any(is_tracked(each) or isinstance(each, _NUMBERS) for each in _inside(value)):
            raise EscapedTensor(type(value), self._where, _OF_CLASS if isinstance(value, type) else "")

    def _refuse_unfinished(self, taken: ObjectParts) -> None:
        """Refuse an object as a key of a dictionary, or in a set, that it holds itself: a call makes what an object
        holds before it has its attributes, and a hash of its own may need them."""
        hashed = taken.keys if taken.form.base is not set else taken.parts
        for each in (each for key in hashed if type(key) not in SIMPLE_KINDS for each in objects_in(key)):
            if id(each) in self._all.unfinished and type(each).__hash__ is not object.__hash__:
                why = "its class has a `__hash__` of its own, and it is a key of a dictionary, or in a set, that it "
                why += "holds: put it in a list"
                raise EscapedTensor(type(each), self._where, why)

    def _constant(self, value: Any) -> Any:
        self.constants.append(value)
        return value

    def _tensor(self, value: torch.Tensor) -> Any:
        inner, names = inner_tensor(value)
        recorder, outputs = self._all.recorder, self._all.outputs
        if id(value) in self._all.made:
            return self._all.made[id(value)][1]
        if id(value) in self._all.places:
            # The graph lists an argument that is returned, too.
            if is_tracked(inner) and id(value) not in outputs:
                outputs[id(value)] = self._keep(recorder.current_value(inner))
            return StateReference(self._all.places[id(value)])
        inside = plain_parts(value)
        if len(inside) > 1:
            parts = {at: self._tensor(part) for at, part in inside.items()}
            if all(map(is_constant, parts.values())):
                return self._constant(value)
            slot = self._slot(value, SubclassParts(Shell.of(value), parts))
        elif not isinstance(inner, FakeTensor) or not is_tracked(inner):
            return self._constant(value)
        else:
            slot = self.output(value, inner, names)
        self._all.made[id(value)] = value, slot
        return slot

    def output(self, value: torch.Tensor, inner: torch.Tensor, names: tuple[str, ...]) -> OutputSlot:
        """The slot of a tensor around a single plain one, ``inner``, which is its attribute of these names."""
        recorder, outputs = self._all.recorder, self._all.outputs
        if id(value) not in outputs:  # one object in several places is one output
            outputs[id(value)] = self._keep(recorder.current_value(inner))
            self._all.inference[outputs[id(value)]] = inner.is_inference()
        number = outputs[id(value)]
        return self._slot(value, SubclassParts(Shell.of(value), {names: number}) if names else number)

    def _slot(self, value: torch.Tensor, index: int | SubclassParts) -> OutputSlot:
        made = value.requires_grad and value.is_leaf
        grad = value.grad if made or value.retains_grad else None
        computed_at = self._where if value.requires_grad and not value.is_leaf else ""
        return OutputSlot(
            index,
            made,
            None if grad is None else self._under("grad").part(grad),
            tuple((name, self._under(name).part(each)) for name, each in own_attributes(value).items()),
            isinstance(value, torch.nn.Parameter),
            computed_at,
            number=self._all.own.given.number(value) if type(index) is int else 0,
        )

    def _under(self, name: str) -> _Making:
        inner = _Making(self._all, self._keep, f"{self._where}.{name}")
        inner.constants = self.constants
        return inner


def _varies(part: Any) -> bool:
    """Whether the call computes something in a part, or looks it up."""
    return part.varies if isinstance(part, MadeObject) else not (is_constant(part) or isinstance(part, CopiedObject))


def _inside(leaf: Any) -> list[Any]:
    """What an object is made of, and the variables that a function closes over; of a class those of its methods too."""
    if isinstance(leaf, type):
        methods = [each for member in vars(leaf).values() for each in functions_in(member)]
        return [*vars(leaf).values(), *(each for method in methods for each in closure_of(method))]
    taken = parts_of(leaf)
    parts = [*attributes_of(leaf).values()] if taken is None else taken.parts
    return [*parts, *closure_of(leaf)]
