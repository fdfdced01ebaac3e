"""Guard on which arguments are the same object, and which are objects of the Python state.

A step may ask ``a is b`` or ``batch is self.last``, and what it changes of one is changed in the other. Tensors that
share no memory are no same object, which other guards see to: only those that did, and those without elements, are
compared here.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from weft.capture.record.captured_step import CapturedStep
from weft.capture.record.number_lists import NumberList
from weft.capture.record.shared_arguments import Steps, at_steps, numbers_of
from weft.capture.state.containers import ANY, Container, StatePlace
from weft.capture.state.tensor_memory import inner_tensor, memory_key
from weft.capture.state.type_facts import SIMPLE_KINDS
from weft.capture.step_interface import Role

_EMPTY = ()  # the key of a tensor without elements


class SharingGuard:
    """Guards which arguments are one object.

    Args:
        captured: the step.
    """

    def __init__(self, captured: CapturedStep) -> None:
        arguments = captured.arguments
        self._steps: list[Steps] = [steps for steps, _ in arguments.objects_in_call]
        leaves = arguments.passed.obj
        keys = [memory_key(inner_tensor(arguments.leaves[at])[0]) for at in arguments.tensors]
        times = Counter(keys)
        others = {*arguments.arrays, *arguments.unread}
        self._leaves = [
            at
            for at, key in zip(arguments.tensors, keys, strict=True)
            if times[key] > 1 and isinstance(leaves[at], torch.Tensor)
        ]
        self._compared = [*self._leaves, *sorted(others)]
        ids = [*self._ids(leaves), *(known for _, known in arguments.objects_in_call)]
        self._numbers = numbers_of(ids)
        self._all_differ = len(set(self._numbers)) == len(self._numbers)
        self._nothing = not ids
        # The objects of the state: those that are compared by identity, and those that may be others at each call.
        self._kept: dict[int, weakref.ref[Any] | None] = {}
        self._places: list[StatePlace] = []
        self._by_value: list[tuple[Container, Any]] = []
        if others or self._steps:
            self._find_state(captured)
        self._in_state = self._state_numbers(ids)
        self._tensors = list(self._tensors_in_state(captured)) if arguments.tensors else []

    def failure(self, leaves: list[Any]) -> str | None:
        """Why a call shares otherwise; None where it does not. Its arguments have the structure of the capture."""
        for at, place, outcome, path in self._tensors:
            if (leaves[at] is place.outer()) is not outcome:
                return f"{path} is {'no longer' if outcome else 'now'} the tensor {place.path}"
        if self._nothing:
            return None
        ids = self._ids(leaves)
        if self._steps:
            call = leaves.call  # type: ignore[attr-defined]
            ids += [id(at_steps(call, steps)) for steps in self._steps]
        if (self._all_differ and len(set(ids)) != len(ids)) or (
            not self._all_differ and numbers_of(ids) != self._numbers
        ):
            return "other arguments than before are the same object"
        if self._state_numbers(ids) != self._in_state:
            return "other arguments than before are objects of the Python state"
        return None

    def _ids(self, leaves: list[Any]) -> list[int]:
        found = map(leaves.__getitem__, self._compared)
        return [id(each.items if type(each) is NumberList else each) for each in found]

    def _find_state(self, captured: CapturedStep) -> None:
        state = captured.state
        for obj, _ in state.with_attributes:
            try:
                self._kept[id(obj)] = weakref.ref(obj)
            except TypeError:
                continue
        for each in state.containers:
            if each.outer is not None:
                continue
            self._kept[id(each.obj)] = None
            by_value = each.by_value
            for key, value in each.before.items():
                if key not in by_value and type(value) not in SIMPLE_KINDS and not isinstance(value, torch.Tensor):
                    self._kept[id(value)] = None
            self._by_value += [(each, key) for key, pattern in by_value.items() if pattern is not ANY]
        self._places = [place for place, _ in state.replaced_places]

    def _state_numbers(self, ids: list[int]) -> list[tuple[int, Any]]:
        """(number of an argument, which object of the state it is)."""
        varying = [*(id(place.outer()) for place in self._places), *(id(each.get(key)) for each, key in self._by_value)]
        found: list[tuple[int, Any]] = []
        if not self._kept.keys().isdisjoint(ids):
            found += [(at, each) for at, each in enumerate(ids) if each in self._kept and self._is_alive(each)]
        if varying and not set(varying).isdisjoint(ids):
            found += [(at, -1 - varying.index(each)) for at, each in enumerate(ids) if each in varying]
        return found

    def _is_alive(self, known: int) -> bool:
        """Whether an object is still there, of which only the id is held otherwise."""
        ref = self._kept[known]
        return ref is None or ref() is not None

    @staticmethod
    def _tensors_in_state(captured: CapturedStep) -> Iterator[tuple[int, StatePlace, bool, str]]:
        """(number of an argument, place of a tensor of the state that shares its memory, whether it is that tensor, how
        the user would write the argument). Tensors without elements have no memory that could be compared: an
        argument without any is compared with each of them."""
        arguments, state = captured.arguments, captured.state
        shared: dict[tuple[Any, ...], list[int]] = {}
        for at in arguments.tensors:
            inner = inner_tensor(arguments.leaves[at])[0]
            if at not in arguments.arrays and (0 in inner.shape or memory_key(inner)[0] in state.in_memory):
                shared.setdefault(_key(inner), []).append(at)
        if not shared:
            return
        # The walk notes one place of each tensor. At the others there may be another one without elements later.
        others = (
            each.place_of(key, Role.BUFFER)
            for each in (state.containers if _EMPTY in shared else ())
            for key, value in each.before.items()
            if isinstance(value, torch.Tensor) and 0 in value.shape
        )
        for place in (*state.places_by_id.values(), *others):
            outer = place.outer()
            if isinstance(outer, torch.Tensor) and place.container is not arguments.container:
                for at in shared.get(_key(inner_tensor(outer)[0]), ()):
                    yield at, place, arguments.leaves[at] is outer, arguments.paths[at]


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    return _EMPTY if 0 in tensor.shape else memory_key(tensor)
