"""Templates of Python values: a value with slots for the tensors and numbers that each call computes.

The step returns a value, and it leaves values in the user's Python state. Both may hold tensors at any depth. A
template keeps the structure of such a value (as a pytree). Each leaf is a slot for an output of the graph, a reference
to one of the user's own tensors, or a constant. Filling the template after a call gives the value of that call.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft import torch_adapter
from weft.capture.record.array_calls import ArraySlot
from weft.capture.record.held_references import original_of
from weft.capture.record.host_arrays import HostArray
from weft.capture.record.host_lists import HostList
from weft.capture.record.iterator_arguments import IteratorSlot, with_iterator_slots
from weft.capture.record.late_text import LateTextSlot, is_late
from weft.capture.record.plain_keys import make_keys_plain
from weft.capture.record.plain_numbers import NumpyFloat, numpy_float
from weft.capture.record.recorder import OpRecorder
from weft.capture.record.shared_objects import OwnObject, SharedObjects, SharedSlot
from weft.capture.record.tracked_storages import is_tracked
from weft.capture.record.unread_arguments import UnreadValue, count_as_read
from weft.capture.state.absent_graphs import with_absent_graph
from weft.capture.state.containers import StatePlace
from weft.capture.state.tensor_memory import inner_tensor, own_attributes
from weft.errors import EscapedTensor
from weft.tensor_subclasses import Shell, plain_parts

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class _OutputSlot:
    """Takes output number ``index``, or of a tensor subclass the outputs inside; ``grad`` is the slot of its ``.grad``,
    ``attributes`` the templates of what the step put on it, ``is_parameter`` whether the step made it a parameter,
    ``computed_at`` where it is to the user if eager leaves it there with a grad_fn, ``of_numpy`` whether it is a number
    that numpy has made."""

    index: int | _Parts
    requires_grad: bool = False
    grad: Any = None
    attributes: tuple[tuple[str, Any], ...] = ()
    is_parameter: bool = False
    computed_at: str = ""
    of_numpy: bool = False

    def fill(self, outputs: list[Any]) -> Any:
        if self.of_numpy:
            return numpy_float(outputs[self.index])  # type: ignore[bad-index]
        value = self.index.of_call(outputs) if isinstance(self.index, _Parts) else outputs[self.index]
        if self.is_parameter and not isinstance(value, torch.nn.Parameter):
            value = torch.nn.Parameter(value, requires_grad=self.requires_grad)
            if isinstance(self.index, int):
                outputs[self.index] = value  # other templates put this object, too
        elif self.requires_grad:
            value.requires_grad_()
        elif self.computed_at and not value.requires_grad:
            value = with_absent_graph(value, self.computed_at)
            if self.grad is not None:
                value.retain_grad()  # as in eager: only such a tensor has a gradient
            if isinstance(self.index, int):
                outputs[self.index] = value
        if self.grad is not None:
            value.grad = self.grad.fill(outputs)
        for name, template in self.attributes:
            setattr(value, name, template.fill(outputs))
        return value


@dataclass(frozen=True)
class _Parts:
    """Takes the plain tensors inside a subclass, each from its own template or as it is. Of one around a single tensor
    that is the number of an output: what the step did with the tensor is said by the slot of the whole."""

    shell: Shell
    parts: dict[tuple[str, ...], Any]

    def of_call(self, outputs: list[Any]) -> Any:
        return self.shell.around({at: self._filled(part, outputs) for at, part in self.parts.items()})

    @staticmethod
    def _filled(part: Any, outputs: list[Any]) -> Any:
        if isinstance(part, int):
            return outputs[part]
        if isinstance(part, _OutputSlot):
            value: Any = part.fill(outputs)
            # Results of one bucket lie in one storage. A subclass may want its tensors to begin at equal offsets.
            return value.clone() if value.storage_offset() else value
        return part.fill(outputs) if isinstance(part, _StateReference) else part


@dataclass(frozen=True)
class _StateReference:
    """Takes the object that is at ``place`` when a call begins."""

    place: StatePlace

    def fill(self, outputs: list[Any]) -> Any:
        return self.place.outer()


@dataclass(frozen=True)
class Template:
    """The structure of one Python value, over the outputs of a graph; ``where`` it is, in words."""

    leaves: tuple[Any, ...]
    spec: Any
    where: str = ""

    @classmethod
    def of(
        cls,
        value: Any,
        recorder: OpRecorder,
        keep: Callable[[Any], int],
        where: str,
        *,
        places_by_id: Mapping[int, StatePlace] | None = None,
        slots: dict[int, int] | None = None,
        shared: SharedObjects | None = None,
    ) -> Template:
        """Make a template of ``value``, which the capture left at ``where``.

        Args:
            keep: makes a node an output of the graph and returns the output's number.
            places_by_id: the places of the user's own tensors, by id. The template refers to the place, because a
                later call may find another tensor there.
            slots: the number of the output that each tensor object of the capture takes, by id; filled here. Templates
                that are given the same one put one object in all places where the step put one.
            shared: the lists and dictionaries that must not be copied.

        Raises:
            EscapedTensor: a tensor of the capture sits inside an object that cannot be rebuilt.
        """
        places = places_by_id or {}
        slots = {} if slots is None else slots
        make_keys_plain(value, lambda each: shared is not None and shared.is_own(each))
        if shared is not None:

            def of_shared(value: Any) -> Template:
                inside = shared.inside(value, of_shared)
                return cls.of(inside, recorder, keep, where, places_by_id=places, slots=slots)

            value = shared.marked(value, of_shared)
        torch_adapter.register_dataclasses(value)
        value = with_iterator_slots(value)
        leaves, _ = torch_adapter.flatten(value)
        made = tuple(_leaf_template(leaf, recorder, keep, where, places, slots) for leaf in leaves)
        return cls(made, torch_adapter.exact_spec(value), where)

    def fill(self, outputs: list[Any], made: dict[int, Any] | None = None) -> Any:
        """The value of one call, from the values of the graph's ``Create`` and ``Return`` outputs.

        Args:
            made: the shared objects that other templates of the same call made; filled here.
        """
        made = {} if made is None else made
        leaves = [leaf.fill(outputs) if isinstance(leaf, _SLOTS) else leaf for leaf in self.leaves]
        leaves = [leaf.of_call(outputs, made) if isinstance(leaf, SharedSlot) else leaf for leaf in leaves]
        return torch_adapter.unflatten(leaves, self.spec)


_SLOTS = (_OutputSlot, _StateReference, ArraySlot, LateTextSlot, OwnObject, IteratorSlot)


def _leaf_template(
    leaf: Any,
    recorder: OpRecorder,
    keep: Callable[[Any], int],
    where: str,
    places_by_id: Mapping[int, StatePlace],
    slots: dict[int, int],
) -> Any:
    if type(leaf) is HostList:
        count_as_read([leaf])
    if type(leaf) is UnreadValue:
        return _StateReference(leaf.weft_place)
    if isinstance(leaf, torch.Tensor):
        inner, names = inner_tensor(leaf)
        if id(leaf) in places_by_id:
            # The graph lists an argument that is returned, too.
            if is_tracked(inner) and id(leaf) not in slots:
                slots[id(leaf)] = keep(recorder.current_value(inner))
            return _StateReference(places_by_id[id(leaf)])
        inside = plain_parts(leaf)
        if len(inside) > 1:
            parts = {at: _leaf_template(p, recorder, keep, where, places_by_id, slots) for at, p in inside.items()}
            if not any(isinstance(part, _SLOTS) for part in parts.values()):
                return leaf
            index: int | _Parts = _Parts(Shell.of(leaf), parts)
        elif not isinstance(inner, FakeTensor) or recorder.is_user_fake(inner):
            return leaf
        else:
            if id(leaf) not in slots:  # one object in several places is one output
                slots[id(leaf)] = keep(recorder.current_value(inner))
            index = _Parts(Shell.of(leaf), {names: slots[id(leaf)]}) if names else slots[id(leaf)]
        made = leaf.requires_grad and leaf.is_leaf
        grad = leaf.grad if made or leaf.retains_grad else None
        kept = None if grad is None else _leaf_template(grad, recorder, keep, f"{where}.grad", places_by_id, slots)
        attributes = tuple(
            (name, Template.of(value, recorder, keep, f"{where}.{name}", places_by_id=places_by_id, slots=slots))
            for name, value in own_attributes(leaf).items()
        )
        computed_at = where if leaf.requires_grad and not leaf.is_leaf else ""
        return _OutputSlot(index, made, kept, attributes, isinstance(leaf, torch.nn.Parameter), computed_at)
    if type(leaf) is HostArray:
        if id(leaf) in places_by_id:
            return _StateReference(places_by_id[id(leaf)])
        return leaf.weft_owner.slot(leaf, keep, slots)
    if isinstance(leaf, _NUMBERS):
        return _OutputSlot(keep(recorder.value(leaf)), of_numpy=type(leaf) is NumpyFloat)
    if isinstance(leaf, (OwnObject, SharedSlot, IteratorSlot)):
        return leaf
    if is_late(leaf):
        return LateTextSlot.of(leaf, recorder, keep)
    count_as_read(leaf)
    if not isinstance(leaf, (torch.nn.Module, torch.optim.Optimizer)) and any(map(is_tracked, _inside(leaf))):
        raise EscapedTensor(type(leaf), where)
    return original_of(leaf)


def _inside(leaf: Any) -> list[Any]:
    """The attributes of an object, and the variables that a function closes over."""
    cells = [cell.cell_contents for cell in getattr(leaf, "__closure__", None) or () if cell != _EMPTY_CELL]
    return [*getattr(leaf, "__dict__", {}).values(), *cells]


_EMPTY_CELL = types.CellType()
