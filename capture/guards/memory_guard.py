"""Guard on the memory that tensors of the state and the arguments share.

A write to a tensor gives a new value to every tensor that overlaps it, and the graph says which these are. So a later
call must find the same tensors overlapping, at the same distance. It must not find two parameters apart that were
parts of one flat tensor, nor one gradient for two parameters that had one each. Shapes, strides and dtypes are guarded
elsewhere. Tensors that do not overlap may share a storage or not.

Kept tensors are those of the state that stay the same objects from call to call, nearly always: only their addresses
are compared. All others are new at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft import state_checks, torch_adapter
from weft.capture.guards.container_guard import ContainerGuard
from weft.capture.guards.steady_checks import Steady
from weft.capture.record.captured_step import CapturedStep
from weft.capture.state.absent_graphs import AutogradRole
from weft.capture.state.containers import Container, StatePlace, TensorLike, items_of
from weft.capture.state.object_parts import followed_items
from weft.capture.state.patterns import Pattern
from weft.capture.state.state_reader import PlaceReader
from weft.capture.state.tensor_memory import inner_tensor
from weft.capture.strided_overlap import overlapping


class MemoryGuard:
    """Guards which tensors overlap.

    Args:
        captured: the step.
        containers: of its state.
    """

    def __init__(self, captured: CapturedStep, containers: ContainerGuard) -> None:
        self._containers = containers
        entries, labels = containers.entries(), containers.labels()
        # A leaf is guarded to be the same object, so that it is found once, wherever else it is.
        leaves: dict[int, int] = {}
        self._at = [at for at, value in enumerate(entries) if _is_first(value, leaves, at)]
        self._nested = [at for at, value in enumerate(entries) if isinstance(value, tuple) and [*_tensors(value)]]
        self._by_value = [
            (each, key)
            for each in captured.state.containers
            if not each.frozen
            for key, pattern in each.by_value.items()
            if isinstance(pattern, Pattern) or (isinstance(pattern, TensorLike) and pattern.is_read)
        ]
        arguments = captured.arguments
        passed = [place for _, place in sorted(arguments.tensors.items())]
        self._arguments = PlaceReader(passed)
        self._gradients: list[Container] = [container for _, container in arguments.gradients]
        self._paths = [labels[at] for at in self._at]
        self._paths += [labels[at] for at in self._nested for _ in _tensors(entries[at])]
        self._paths += [place.path for place in passed]
        self._paths += [each.label("grad") for each in self._gradients if each.obj.grad is not None]
        self._paths += [
            each.label(key) for each, key in self._by_value for _ in _tensors(each.get(key), each.by_value[key])
        ]
        self._find()
        self._overlapping = self._compare()
        self._new_overlap = any(at >= len(self._tensors) for at in self._overlapping)
        self._held = True

    def kept(self) -> list[torch.Tensor]:
        """The kept tensors; for wrappers, those inside them. The guard on containers was asked before.

        Returns:
            The same list as long as the tensors are the same and their overlaps were not compared again.
        """
        if self._generation != self._containers.generation or not self._wrap_the_same():
            self._find()
        return self._tensors

    def kept_for_comparison(self) -> list[torch.Tensor]:
        """The list that :meth:`kept` returns once the next comparison of overlaps was made."""
        kept = self.kept()
        if self._is_compared:
            self._find()
            kept = self._tensors
        return kept

    def follows(self, place: StatePlace) -> bool:
        """Whether the tensor inside the wrapper at a place is one of :meth:`kept`, or the place has no wrapper."""
        outer = place.outer()
        return not place.inner or (place.inner == inner_tensor(outer)[1] and _has_memory(outer))

    def holds(self, in_place: bool) -> bool:
        """Whether tensors overlap as they did. The guard on containers was asked before.

        Args:
            in_place: whether those of the list :meth:`kept` are at the same addresses as when the guard last held.
        """
        return (in_place and self._new_are_apart()) or self.failure() is None

    def steady(self, others: PlaceReader, others_alike: Callable[..., bool]) -> Steady | None:
        """What holds only if overlaps are as they were, for tensors of :meth:`kept` that are where they were, and only
        if other tensors are alike.

        Args:
            others: reads them.
            others_alike: compares them.
        """
        if not self._new_are_apart():
            return None
        if others.places == self._arguments.places and not self._gradients and not self._by_value:
            read = self._arguments.read
            if (both := state_checks.new_tensors(read(), self._tensors)) is not None:
                return Steady([self._wrap_the_same], lambda: both(read()))
        rest = lambda: others_alike(*others.read()) and self._new_are_apart()
        return Steady([self._wrap_the_same], rest)

    def release(self) -> None:
        """Hold no tensor until the next check, which compares all overlaps."""
        self._tensors, self._wrap_the_same, self._generation, self._held = [], lambda: False, -1, False

    def failure(self) -> str | None:
        """Which tensors overlap that did not, or no longer do; None for none."""
        self.kept_for_comparison()
        now, before = self._compare(), self._overlapping
        self._held = now == before
        for at in sorted(now.keys() | before.keys()):
            if now.get(at) != before.get(at):
                other = self._paths[(now if at in now else before)[at][0]]
                how = "in another way" if at in now and at in before else "now" if at in now else "no more"
                return f"{self._paths[at]} shares memory with {other} {how}"
        return None

    def _new_are_apart(self) -> bool:
        """Whether the new tensors have storages of their own, as in the captured call, where the kept ones overlap as
        they did. False only means that overlaps must be compared."""
        if not self._held or self._new_overlap:
            return False
        new = list(map(torch_adapter.storage_key, self._new_tensors()))
        return len(set(new)) == len(new) and self._storages.isdisjoint(new)

    def _compare(self) -> dict[int, tuple[int, int]]:
        """Which tensors overlap now."""
        self._is_compared = True
        self._storages = set(map(torch_adapter.storage_key, self._tensors))
        return overlapping([*self._tensors, *self._new_tensors()])

    def _find(self) -> None:
        """Find the kept tensors. Nothing is known of their overlaps then."""
        self._held = self._is_compared = False
        entries = self._containers.entries()
        found = [entries[at] for at in self._at]
        found += [tensor for at in self._nested for tensor in _tensors(entries[at])]
        slots: list[tuple[Any, str, Any]] = []
        self._tensors = []
        for tensor in found:
            for name in inner_tensor(tensor)[1]:
                slots.append((tensor, name, getattr(tensor, name)))
                tensor = slots[-1][-1]
            self._tensors.append(tensor)
        self._wrap_the_same = state_checks.same_slots(slots)
        self._generation = self._containers.generation

    def _new_tensors(self) -> list[torch.Tensor]:
        """The tensors that are other objects at every call: the arguments, their gradients, and those in lists and
        dictionaries that each call replaces."""
        passed = self._arguments.read()
        if not self._gradients and not self._by_value:
            return passed
        found = [each.obj.grad for each in self._gradients if each.obj.grad is not None]
        found += [tensor for each, key in self._by_value for tensor in _tensors(each.get(key), each.by_value[key])]
        return [*passed, *(inner_tensor(tensor)[0] for tensor in found)]


def _is_first(value: Any, leaves: dict[int, int], at: int) -> bool:
    if not isinstance(value, torch.Tensor) or not _has_memory(value):
        return False
    return AutogradRole.of(value).replaceable or leaves.setdefault(id(value), at) == at


def _tensors(value: Any, pattern: Any = None) -> Iterator[torch.Tensor]:
    """The tensors in a tuple, list or dictionary and in those inside it; and in objects that each call replaces, for
    which there is a pattern."""
    if isinstance(value, torch.Tensor):
        if _has_memory(value):
            yield value
    elif isinstance(pattern, Pattern):
        for key, item in followed_items(value):
            yield from _tensors(item, pattern.items.get(key))
    elif isinstance(value, (tuple, list, dict)) and not isinstance(value, torch.Size):
        for _, item in items_of(value):
            yield from _tensors(item)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor has an address: not a fake one, one on the meta device, a sparse or a nested one."""
    inner = inner_tensor(tensor)[0]
    strided = inner.layout is torch.strided and not inner.is_nested
    return strided and inner.device.type != "meta" and not isinstance(inner, FakeTensor)
