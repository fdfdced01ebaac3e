"""The Python state that an opaque call sees, as it is at one point of a step.

A compiled step changes the user's objects at its end: gradients are assigned, attributes set. A function marked
``@weft.opaque`` runs in the middle of the step and must find these objects as the eager step would show them at that
point, for the time of its call. While the step is captured, :class:`StateSnapshots` walks what such a function can
reach (its arguments, closure and globals, as :mod:`weft.capture.state.reachable_state` walks the step) and notes what
differs from the beginning of the step. At run time :class:`StateSnapshot` puts the differences in place and takes
them back.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft import torch_adapter
from weft.capture.record.arguments import CallArguments
from weft.capture.record.growing_lists import AppendedList
from weft.capture.record.made_for_opaque import MadeForOpaque
from weft.capture.record.own_objects import OwnObjects
from weft.capture.record.recorder import OpRecorder
from weft.capture.record.template_parts import OutputSlot, Template
from weft.capture.record.templates import Templates
from weft.capture.record.tracked_storages import is_tracked
from weft.capture.state.containers import MISSING, Container, StatePlace
from weft.capture.state.contents import attributes_of
from weft.capture.state.object_parts import objects_in
from weft.capture.state.reachable_state import ReachableState
from weft.capture.state.tensor_memory import inner_tensor, memory_key

AddOperand = Callable[[Any], int]


@dataclass(frozen=True)
class _ChangedEntry:
    """``container[key]`` is ``template`` at that point (None: there is no such entry)."""

    container: Container
    key: Any
    template: Template | None


@dataclass(frozen=True)
class _WrittenTensor:
    """The tensor at ``place`` has the value of operand number ``index`` at that point."""

    place: StatePlace
    index: int


@dataclass(frozen=True)
class StateSnapshot:
    """How the state that one call can reach differs from the state at the beginning of the step.

    Attributes:
        entries: those of containers.
        tensors: those that the step has written to.
        unwritten: the storages of all other tensors there, which the call reads from memory.
    """

    entries: list[_ChangedEntry]
    tensors: list[_WrittenTensor]
    unwritten: frozenset[int]

    @contextlib.contextmanager
    def restored(self, operands: list[Any], made: dict[int, Any]) -> Iterator[list[Any]]:
        """Inside, the user's objects are as they were at this point. Gives the objects of the step that are in them.

        Args:
            operands: the values of the node's operands.
            made: what the call made so far, see :func:`weft.capture.record.template_parts.filled`.
        """
        tensors = [(each.place.get(), operands[each.index]) for each in self.tensors]
        arguments = set(made)
        entries = [
            (e.container, e.key, MISSING if e.template is None else e.template.fill(operands, made))
            for e in self.entries
        ]
        with contextlib.ExitStack() as stack:
            for tensor, value in tensors:
                if not _same_memory(tensor, value):
                    stack.callback(_set_data, tensor, tensor.data)
                    _set_data(tensor, value)
            for container, key, value in entries:
                stack.callback(_put, container, key, container.entries().get(key, MISSING))
                _put(container, key, value)
            yield [each for key, each in made.items() if key not in arguments or key < 0]


class StateSnapshots:
    """Takes a :class:`StateSnapshot` for each opaque call while a step is captured.

    Args:
        recorder: of the capture.
        state: what the step can reach.
        arguments: of the call.
        met: ids of the objects that the call began with.
        made: tells the ids of the objects of a type that were made since the capture began.
    """

    def __init__(
        self,
        recorder: OpRecorder,
        state: ReachableState,
        arguments: CallArguments,
        met: Collection[int],
        made: Callable[[type], set[int]],
    ) -> None:
        self._recorder = recorder
        self._state = state
        self._passed = arguments
        self._arguments = {id(arguments.leaves[at]): place for at, place in arguments.tensors.items()}
        self._met, self._made = met, made
        self.given = MadeForOpaque()

    @property
    def places_by_id(self) -> dict[int, StatePlace]:
        """The place of each of the user's own tensor objects, and of what the step got in their place, by id."""
        return {**self._state.places_by_id, **self._arguments, **self._passed.fakes}

    @property
    def functions(self) -> list[types.FunctionType]:
        """The functions that the step can call."""
        return self._state.functions

    def templates(self) -> Templates:
        """Makes the templates of one call."""
        own = OwnObjects(self._met, self._state, self._made, self._passed.passed_objects, self.given)
        return Templates(self._recorder, self.places_by_id, own)

    def memory(self, templates: Templates) -> dict[int, tuple[StatePlace, int]]:
        """For each tensor of a template that lies in the memory of one of the user's, by number of the operand: the
        place of that one, and at which element."""
        found = {}
        for value, part in templates.made.values():
            if isinstance(part, OutputSlot) and type(part.index) is int and isinstance(value, FakeTensor):
                known = self._recorder.memory_of(value)
                if known is not None and type(known[1]) is int and id(known[0]) in self.places_by_id:
                    found[part.index] = self.places_by_id[id(known[0])], known[1]
        return found

    def containers_in(self, value: Any) -> list[Container]:
        """Those of the state that an object is or holds, or that have the attributes of such an object."""
        objects = list(objects_in(value))
        ids = {id(each) for each in (*objects, *map(attributes_of, objects))}
        return [each for each in self._state.containers if id(each.obj) in ids]

    def take(self, roots: Iterable[Any], add_operand: AddOperand) -> tuple[StateSnapshot, list[Container]]:
        """The snapshot of what ``roots`` lead to, now, and those containers there that the step's code names.

        Args:
            roots: the function and those of its arguments that are no plain values.
            add_operand: makes a node an operand of the call and returns its number.
        """
        places_by_id, templates = self.places_by_id, self.templates()
        known: dict[int, list[Container]] = {}
        gradients = [container for _, container in self._passed.gradients]
        for container in [*self._state.containers, *gradients, *self._passed.containers]:
            known.setdefault(id(container.obj), []).append(container)
        entries: list[_ChangedEntry] = []
        met: list[Container] = []
        places: dict[tuple[Any, ...], StatePlace] = {}
        for root in roots:
            if isinstance(root, torch.Tensor) and self._is_captured(root):
                continue
            with torch_adapter.only_mode():
                reached = ReachableState(root, with_hooks=False)
            for container in reached.containers:
                if isinstance(container.obj, AppendedList):
                    container.obj.read()
                if id(container.obj) in known:
                    for mine in known.pop(id(container.obj)):
                        met.append(mine)
                        entries += self._changed(mine, templates, add_operand)
                else:
                    entries += self._new_in_step(container, templates, add_operand)
            places.update(reached.places)
            if isinstance(root, torch.Tensor) and id(root) in places_by_id:
                places[memory_key(inner_tensor(root)[0])] = places_by_id[id(root)]
        written = [*self._written(places, add_operand), *self._written_arguments(add_operand)]
        for container in self._passed.containers:  # the function may have got the object that it is in
            if id(container.obj) in known:
                entries += self._changed(container, templates, add_operand)
        self.given.add(list(templates.made.values()))
        return StateSnapshot(entries, written, self._unwritten(places, written)), met

    def _changed(self, container: Container, templates: Templates, add_operand: AddOperand) -> Iterator[_ChangedEntry]:
        for key, _, new in container.changes():
            yield self._entry(container, key, new, templates, add_operand)

    def _new_in_step(
        self, container: Container, templates: Templates, add_operand: AddOperand
    ) -> Iterator[_ChangedEntry]:
        """Entries of a container that the step created (a cell of a function), if tensors or other objects that it
        made are in them."""
        for key, value in container.before.items():
            tensors = [leaf for leaf in torch_adapter.flatten(value)[0] if isinstance(leaf, torch.Tensor)]
            is_made = isinstance(container.obj, types.CellType) and templates.own.is_new(container.obj)
            is_made = is_made and value not in templates.own and templates.own.new_parts(value) is not None
            if is_made or any(id(t) in self._arguments or self._is_captured(t) for t in tensors):
                yield self._entry(container, key, value, templates, add_operand)

    @staticmethod
    def _entry(
        container: Container, key: Any, value: Any, templates: Templates, add_operand: AddOperand
    ) -> _ChangedEntry:
        template = None if value is MISSING else templates.of(value, add_operand, container.label(key))
        return _ChangedEntry(container, key, template)

    def _is_captured(self, tensor: torch.Tensor) -> bool:
        inner = inner_tensor(tensor)[0]
        return isinstance(inner, FakeTensor) and is_tracked(inner)

    def _written(
        self, places: Mapping[tuple[Any, ...], StatePlace], add_operand: AddOperand
    ) -> Iterator[_WrittenTensor]:
        """The user's tensors that the step has written to so far."""
        for place in places.values():
            tensor = place.get()
            if isinstance(tensor, torch.Tensor) and self._recorder.input_fake(tensor) is not None:
                node = self._recorder.current_value(tensor)
                if node.op != "placeholder":
                    yield _WrittenTensor(place, add_operand(node))

    def _written_arguments(self, add_operand: AddOperand) -> Iterator[_WrittenTensor]:
        """The tensors among the arguments that the step has written to so far."""
        for place, tensor in self._passed.captured():
            node = self._recorder.current_value(tensor)
            if node.op != "placeholder":
                yield _WrittenTensor(place, add_operand(node))

    def _unwritten(
        self, places: Mapping[tuple[Any, ...], StatePlace], written: Iterable[_WrittenTensor]
    ) -> frozenset[int]:
        """The storages of the tensors at ``places``, and of arguments, that the step has not written to so far."""
        changed = {id(each.place) for each in written}
        reached = [key for key, place in places.items() if id(place) not in changed]
        reached += [memory_key(tensor) for place, tensor in self._passed.captured() if id(place) not in changed]
        return frozenset(storage for storage, *_ in reached)


def _same_memory(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    return tensor.data_ptr() == value.data_ptr() and tensor.shape == value.shape and tensor.stride() == value.stride()


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    tensor.data = value


def _put(container: Container, key: Any, value: Any) -> None:
    if value is MISSING:
        container.remove(key)
    else:
        container.set(key, value)
