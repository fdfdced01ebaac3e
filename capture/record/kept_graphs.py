"""Tensors in a step's state that keep their graph of autograd from one call to the next.

After ``self.hidden = self.hidden - self.weight`` the state holds a tensor with a grad_fn. In eager, the backward of the
next call goes through it to the operations of the calls before. A compiled step keeps no graph between calls, so that
its gradients would lack those parts.

Many steps leave such tensors and never go back through them, as with ``total = total + loss``. Whether a backward does,
the first attempt at a capture cannot see: no tensor of the state has a grad_fn yet. So the step is captured once more,
with these tensors as results of an operation whose backward raises. Arguments that were computed with gradients outside
of the step are results of such an operation from the start.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from weft import torch_adapter
from weft.capture.state.absent_graphs import AutogradRole, restore_absent_graph
from weft.capture.state.containers import StatePlace
from weft.capture.state.reachable_state import ReachableState
from weft.capture.state.tensor_memory import inner_tensor
from weft.capture.user_code import user_line
from weft.errors import GraphOutsideStep


class GraphsKept(Exception):
    """The step leaves tensors with a grad_fn where it read tensors without one.

    Attributes:
        tensors: those that it read, by the path of their place.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(sorted(tensors))
        self.tensors = tensors


class _FromOutside(torch.autograd.Function):
    """Gives a tensor a grad_fn, in place, that stands for what computed it outside of the call."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, anchor: torch.Tensor, path: str, remedy: str) -> torch.Tensor:
        ctx.path, ctx.remedy = path, remedy
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise GraphOutsideStep(ctx.path, f"the backward at {user_line()} would go through it {ctx.remedy}")


_STATE_REMEDY = "to an earlier call, of which nothing is kept. Store it detached, or compute it under torch.no_grad()"


class KeptGraphs:
    """The grad_fns of the tensors of a step's state and of its arguments, during one attempt at its capture.

    Args:
        state: the state of the step.
        earlier: tensors of the state that get a grad_fn for the calls before, by path; those that the attempt before
            found.

    Attributes:
        updated: the places of the tensors that the step wrote in place, and left with a graph.
    """

    def __init__(self, state: ReachableState, earlier: Mapping[str, torch.Tensor]) -> None:
        self._earlier = earlier
        self._state = state
        self._refused: list[torch.utils.hooks.RemovableHandle] = []
        self._known: list[_GraphBefore] = []
        for place in state.places_by_id.values():
            tensor = place.get()
            # A leaf that requires grad gets no grad_fn. Of a view, torch cannot take one away.
            if isinstance(tensor, torch.Tensor) and not (tensor.requires_grad and tensor.is_leaf):
                self._known.append(_GraphBefore(place, tensor, tensor.grad_fn, AutogradRole.of(tensor)))
        self._arguments: list[_GraphBefore] = []
        self._left: list[_GraphBefore] = []
        self.updated: list[StatePlace] = []

    def follow_arguments(self, passed: Iterable[tuple[StatePlace, torch.Tensor, torch.Tensor]]) -> None:
        """Give the fakes of arguments that have a grad_fn one too.

        Args:
            passed: (place, argument, what the step is given for it) of each tensor argument that is no leaf that
                requires grad.

        Raises:
            GraphOutsideStep: another argument is in the same memory, or has it inside.
        """
        passed = list(passed)
        computed = {id(fake): argument.requires_grad for _, argument, fake in passed}
        fakes = {id(fake): torch_adapter.storage_key(inner_tensor(fake)[0]) for _, _, fake in passed}
        times = Counter(fakes.values())
        for place, argument, fake in passed:
            shares = fake._is_view() or times[fakes[id(fake)]] > 1
            if argument.requires_grad is not computed[id(fake)] or (argument.requires_grad and shares):
                raise GraphOutsideStep(place.path)
            if argument.requires_grad and fake.grad_fn is None:
                remedy = f"to where it was computed. Pass {place.path}.detach(), or compute it inside the step"
                with torch.enable_grad():
                    _FromOutside.apply(fake, torch.zeros((), requires_grad=True), place.path, remedy)
            self._arguments.append(_GraphBefore(place, fake, fake.grad_fn, AutogradRole.of(argument)))

    def refuse_backward(self, tensor: torch.Tensor, path: str) -> None:
        """Have a backward raise that goes through a tensor to operations outside of the step.

        In eager it would give gradients to leaves that the step does not know, and often only once. That of a view of
        a leaf goes to the leaf, which is known.
        """
        if AutogradRole.of(tensor) is not AutogradRole.COMPUTED:
            return
        source = tensor if tensor._base is None else tensor._base
        if source.grad_fn is not None:
            remedy = "to where it was computed. Store it detached, or compute it inside the step"

            def refuse(gradients: Any) -> None:
                raise GraphOutsideStep(path, f"the backward at {user_line()} would go through it {remedy}")

            self._refused.append(source.grad_fn.register_prehook(refuse))

    @contextlib.contextmanager
    def followed(self, *modes: Any) -> Iterator[None]:
        """While the step runs on fakes. Afterwards the user's tensors have no grad_fn that is the capture's."""
        for each in self._state.objects:
            if issubclass(type(each), torch.Tensor) and each.requires_grad and not each.is_leaf:
                place = self._state.places_by_id.get(id(each))
                self.refuse_backward(each, "a tensor of the state" if place is None else place.path)
        with torch_adapter.only_mode(*modes), torch.enable_grad():
            for path, tensor in self._earlier.items():
                _FromOutside.apply(tensor, torch.zeros((), requires_grad=True), path, _STATE_REMEDY)
        started = [each._replace(before=each.tensor.grad_fn) for each in self._known]
        try:
            yield
        finally:
            for handle in self._refused:
                handle.remove()
            self._left = [each for each in self._known if each.is_left_with_graph()]
            started += self._arguments
            self.updated = [each.place for each in started if each.tensor.grad_fn is not each.before]
            written = [each for each in self._known if each.tensor.grad_fn is not each.before]
            with torch_adapter.only_mode(*modes):
                for each in sorted(written, key=lambda each: each.tensor._is_view()):
                    restore_absent_graph(each.tensor, each.before, each.place.path)

    def check(self, read: list[torch.Tensor]) -> None:
        """Raise where the step leaves graphs at places that it read, unless this attempt was to see them.

        Raises:
            GraphsKept: another attempt has to see whether a backward goes through them.
            GraphOutsideStep: the tensor had a grad_fn before the call, of which a backward would not see the write.
        """
        for each in self._arguments:
            if each.tensor.grad_fn is not each.before and each.role is AutogradRole.COMPUTED:
                raise GraphOutsideStep(each.place.path)
        self._arguments.clear()  # fakes, which nobody may hold after the capture
        inputs = set(map(id, read))
        found: dict[str, torch.Tensor] = {}
        for place, tensor, _, role in self._left:
            if id(tensor) not in inputs or place.path in self._earlier:
                continue
            if role is AutogradRole.COMPUTED:
                raise GraphOutsideStep(place.path)
            if role is AutogradRole.CONSTANT and not tensor._is_view():
                found[place.path] = tensor
        if found:
            raise GraphsKept({**self._earlier, **found})


class _GraphBefore(NamedTuple):
    """A tensor at its place before the step: its grad_fn, and its role in autograd (of an argument, the role that the
    user's tensor has, and not the fake)."""

    place: StatePlace
    tensor: torch.Tensor
    before: Any
    role: AutogradRole

    def is_left_with_graph(self) -> bool:
        """Whether the step wrote a result with a grad_fn into the tensor, or put one into its place."""
        now = self.place.get()
        if now is self.tensor:
            return self.tensor.grad_fn is not self.before
        return isinstance(now, torch.Tensor) and now.requires_grad and now.grad_fn is not None
