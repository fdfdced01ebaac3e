"""What Python would see at one moment of a step, for the functions that a capture does not look into.

A compiled step changes the user's objects at its end: gradients are assigned, attributes set. A function that
runs in the middle of it must find them as they were at that point of the eager step, and only for the time of
its call. What it can reach is walked as the step itself was (:mod:`weft.capture.state`): its arguments, its
closure, its globals.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft import torch_adapter
from weft.capture.recorder import Recorder
from weft.capture.state import MISSING, Container, Place, State, identity, plain
from weft.capture.values import Template

Keep = Callable[[Any], int]


@dataclass(frozen=True)
class _Entry:
    """``container[key]`` is ``template`` at that moment (None: is not there)."""

    container: Container
    key: Any
    template: Template | None


@dataclass(frozen=True)
class _Value:
    """The tensor at ``place`` holds value number ``index`` at that moment."""

    place: Place
    index: int


@dataclass(frozen=True)
class Moment:
    """How the state that one call can reach differs from what it is when the step begins."""

    entries: list[_Entry]
    values: list[_Value]

    @contextlib.contextmanager
    def restored(self, values: list[Any]) -> Iterator[None]:
        """Inside, the user's objects are as they were at this moment; ``values`` are the node's operands."""
        tensors = [(each.place.get(), values[each.index]) for each in self.values]
        entries = [
            (e.container, e.key, MISSING if e.template is None else e.template.fill(values)) for e in self.entries
        ]
        with contextlib.ExitStack() as stack:
            for tensor, value in tensors:
                if not _same_memory(tensor, value):
                    stack.callback(_set_data, tensor, tensor.data)
                    _set_data(tensor, value)
            for container, key, value in entries:
                stack.callback(_put, container, key, container.entries().get(key, MISSING))
                _put(container, key, value)
            yield


class Moments:
    """Finds the :class:`Moment` of a call while a step is captured.

    Args:
        recorder: of the capture.
        state: what the step can reach.
        gradients: the containers of the arguments' ``.grad``.
        arguments: where the arguments that are tensors stand, by their ids.
    """

    def __init__(
        self, recorder: Recorder, state: State, gradients: Iterable[Container], arguments: Mapping[int, Place]
    ) -> None:
        self._recorder = recorder
        self._state = state
        self._gradients = list(gradients)
        self._arguments = arguments

    @property
    def homes(self) -> dict[int, Place]:
        """Where the user's own tensors stand, by their ids."""
        return {**self._state.homes, **self._arguments}

    def of(self, roots: Iterable[Any], keep: Keep) -> Moment:
        """What now is, as far as ``roots`` lead to it; ``keep`` makes a node an operand."""
        homes = self.homes
        known: dict[int, list[Container]] = {}
        for container in [*self._state.containers, *self._gradients]:
            known.setdefault(id(container.obj), []).append(container)
        entries: list[_Entry] = []
        places: dict[tuple[Any, ...], Place] = {}
        for root in roots:
            if isinstance(root, torch.Tensor) and self._is_captured(root):
                continue
            with torch_adapter.only_mode():
                reached = State(root, with_hooks=False)
            for container in reached.containers:
                if id(container.obj) in known:
                    for mine in known.pop(id(container.obj)):
                        entries += self._changed(mine, homes, keep)
                else:
                    entries += self._made_inside(container, homes, keep)
            places.update(reached.places)
            if isinstance(root, torch.Tensor) and id(root) in homes:
                places[identity(plain(root)[0])] = homes[id(root)]
        return Moment(entries, [*self._values(places, keep)])

    def _changed(self, container: Container, homes: Mapping[int, Place], keep: Keep) -> Iterator[_Entry]:
        for key, _, new in container.changes():
            yield self._entry(container, key, new, homes, keep)

    def _made_inside(self, container: Container, homes: Mapping[int, Place], keep: Keep) -> Iterator[_Entry]:
        """Entries of a container that the step made (a cell of a function), if tensors are in them."""
        for key, value in container.before.items():
            tensors = [leaf for leaf in torch_adapter.flatten(value)[0] if isinstance(leaf, torch.Tensor)]
            if any(id(t) in self._arguments or self._is_captured(t) for t in tensors):
                yield self._entry(container, key, value, homes, keep)

    def _entry(self, container: Container, key: Any, value: Any, homes: Mapping[int, Place], keep: Keep) -> _Entry:
        if value is MISSING:
            return _Entry(container, key, None)
        return _Entry(container, key, Template.of(value, self._recorder, keep, container.label(key), homes=homes))

    def _is_captured(self, tensor: torch.Tensor) -> bool:
        inner = plain(tensor)[0]
        return isinstance(inner, FakeTensor) and not self._recorder.is_users(inner)

    def _values(self, places: Mapping[tuple[Any, ...], Place], keep: Keep) -> Iterator[_Value]:
        """The user's tensors that the step has written to."""
        for place in places.values():
            tensor = place.get()
            if isinstance(tensor, torch.Tensor) and self._recorder.known_input(tensor) is not None:
                node = self._recorder.current(tensor)
                if node.op != "placeholder":
                    yield _Value(place, keep(node))


def _same_memory(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    return tensor.data_ptr() == value.data_ptr() and tensor.shape == value.shape and tensor.stride() == value.stride()


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    tensor.data = value


def _put(container: Container, key: Any, value: Any) -> None:
    if value is MISSING:
        container.remove(key)
    else:
        container.set(key, value)
