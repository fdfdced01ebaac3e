"""The state that an optimizer makes in its first step on parameters.

By default real tensors are allocated during the capture, before ``optimizer.step()`` goes on. The graph reads them as
inputs, so one graph serves the first call and all later ones. That is wrong where the first call differs:

- code outside of ``optimizer.step()`` reads ``optimizer.state`` before the state exists, and finds it empty;
- the step drops the state (``optimizer.state.clear()``), or makes the optimizer itself: each call allocates it anew.

In these cases the graph allocates the state, and its guards admit only calls that begin without state.

The state of an optimizer that a step does not read is no guard: a compiled closure that only calls
``optimizer.zero_grad()`` serves all calls of an LBFGS whose state gets longer outside of it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from weft import torch_adapter
from weft.capture.record.recorder import OpRecorder
from weft.capture.record.tracked_storages import was_tracked
from weft.capture.state.containers import StatePlace
from weft.capture.state.optimizer_parts import containers_of_state
from weft.capture.state.reachable_state import ReachableState
from weft.capture.state.tensor_memory import inner_tensor
from weft.capture.user_code import called_by_user

Entry = tuple[torch.optim.Optimizer, torch.Tensor]


class OptimizerStateRead(Exception):
    """The step reads or drops optimizer state for which this attempt at its capture has allocated real tensors.

    Attributes:
        optimizers: those whose state the graph has to allocate.
    """

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        super().__init__()
        self.optimizers = optimizers


class OptimizerStates:
    """The state that optimizers make during one attempt at a capture.

    Args:
        recorder: of the step.
        state: what the step can reach.
        modes: those of a fake world.
        in_graph: optimizers whose state the graph allocates.
    """

    def __init__(
        self,
        recorder: OpRecorder,
        state: ReachableState,
        modes: tuple[FakeTensorMode, ...],
        in_graph: list[torch.optim.Optimizer],
    ) -> None:
        self._recorder, self._state, self._modes = recorder, state, modes
        # By id: optimizers whose state the graph allocates.
        self._in_graph = {id(optimizer): optimizer for optimizer in in_graph}
        self._made: list[tuple[torch.optim.Optimizer, torch.Tensor, Any]] = []
        self._read_too_early: dict[int, torch.optim.Optimizer] = {}
        self._read: set[int] = set()  # ids of the optimizers whose state any code has read
        self._is_stepping = False  # inside `optimizer.step()`, whose own code may read its state
        self._is_preparing = False  # inside weft's own code

    @contextlib.contextmanager
    def reads_noted(self) -> Iterator[None]:
        """Inside, accesses to ``optimizer.state`` by code outside of ``optimizer.step()`` are recorded."""

        def read(optimizer: torch.optim.Optimizer) -> Any:
            self._note_read(optimizer, by_user=called_by_user())
            try:
                return vars(optimizer)["state"]
            except KeyError:
                raise AttributeError(
                    f"{type(optimizer).__name__!r} object has no attribute 'state'", name="state", obj=optimizer
                ) from None

        def write(optimizer: torch.optim.Optimizer, value: Any) -> None:
            if "state" in vars(optimizer):  # not of an optimizer that is being made
                self._note_read(optimizer, by_user=called_by_user())
            vars(optimizer)["state"] = value

        def delete(optimizer: torch.optim.Optimizer) -> None:
            read(optimizer)
            del vars(optimizer)["state"]

        setattr(torch.optim.Optimizer, "state", property(read, write, delete))  # noqa: B010
        try:
            yield
        finally:
            delattr(torch.optim.Optimizer, "state")

    def _note_read(self, optimizer: torch.optim.Optimizer, *, by_user: bool) -> None:
        if self._is_preparing:
            return
        self._read.add(id(optimizer))
        if self._is_stepping and not by_user:
            return
        if not any(optimizer is known for known, *_ in self._made):
            self._in_graph.setdefault(id(optimizer), optimizer)
        elif self._is_stepping:  # a hook before the step, where eager has no state yet
            self._read_too_early.setdefault(id(optimizer), optimizer)

    def begin_step(self, optimizer: torch.optim.Optimizer, follow: Callable[[], None]) -> None:
        """Allocate the state that the optimizer lacks, unless the graph has to.

        Args:
            follow: adds an optimizer to the known Python state.
        """
        self._is_stepping = self._is_preparing = True
        self._read.add(id(optimizer))
        try:
            follow()
            self._prepare(optimizer)
        finally:
            self._is_preparing = False

    def make_in_graph(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the graph allocate the state of an optimizer that the step constructs: each call has a new one."""
        self._in_graph[id(optimizer)] = optimizer

    def release_unread(self, places: Iterable[StatePlace]) -> None:
        """Ask for no guards on state that the step did not read: neither through the optimizer, nor as one of its
        inputs, which are at ``places``."""
        read = {id(place.container) for place in places}
        for optimizer, _ in self._state.optimizers:
            if id(optimizer) not in self._read:
                found = containers_of_state(optimizer, self._state.containers)
                if read.isdisjoint(map(id, found)):
                    for container in found:
                        container.frozen = True

    def end_step(self) -> None:
        """The optimizer's step has ended."""
        self._is_stepping = False

    def _prepare(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        missing = [p for p in parameters if p.grad is not None and p not in optimizer.state]
        dropped = {id(p) for known, p, _ in self._made if known is optimizer}
        if not missing or id(optimizer) in self._in_graph or not dropped.isdisjoint(map(id, missing)):
            return
        with self._recorder.paused(*self._modes):
            made = torch_adapter.init_optimizer_state(optimizer)
            _make_momentum(optimizer, missing)
        states = [value for p in missing for value in optimizer.state.get(p, {}).values()]
        if made and any(map(self._is_of_the_capture, states)):
            # Made from gradients, which are fakes here: it is made again in the step, and recorded there.
            for p in missing:
                optimizer.state.pop(p, None)
        elif made:
            self._made += [(optimizer, p, optimizer.state.get(p)) for p in missing]
            self._state.extend_optimizer_state(optimizer)

    def check(self) -> None:
        """Raise OptimizerStateRead where the graph has to allocate state that this attempt has allocated itself."""
        found = dict(self._read_too_early)
        for optimizer, parameter, entry in self._made:
            if optimizer.state.get(parameter) is not entry:
                found[id(optimizer)] = optimizer
        if found:
            raise OptimizerStateRead(list(found.values()))

    @property
    def created(self) -> list[Entry]:
        """The state that this attempt has allocated."""
        return [(optimizer, parameter) for optimizer, parameter, _ in self._made]

    def _is_of_the_capture(self, value: object) -> bool:
        """Whether a value of an optimizer's state means nothing outside the capture."""
        if not isinstance(value, torch.Tensor):
            return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
        inner = inner_tensor(value)[0]
        return isinstance(inner, FakeTensor) and (not self._modes or was_tracked(inner))


def _make_momentum(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
    """Allocate the momentum of torch's SGD, with values that its first step and its later ones take alike.

    The first step copies the gradient; later ones compute ``momentum * buffer + (1 - dampening) * gradient``. Without
    dampening that is the gradient in every bit, the signs of zeros among them, where the buffer holds -0.0. Complex
    zeros have two signs, and torch's fused kernel on a CPU computes something else in half precision (torch 2.13):
    there the graph makes the momentum. Torch's fused step refuses parameters of which some have momentum.
    """
    methods = [(kind.step, getattr(kind, "_init_group", None)) for kind in (type(optimizer), torch.optim.SGD)]
    if methods[0] != methods[1]:
        return
    for group in optimizer.param_groups:
        momentum, dampening = group["momentum"], group["dampening"]
        plain = type(dampening) in (int, float) and not group["differentiable"]
        if not plain or dampening != 0 or not 0 < momentum < math.inf:
            continue
        missing = set(map(id, parameters))
        stepped = [p for p in group["params"] if p.grad is not None]
        made = [p for p in stepped if id(p) in missing and not p.is_complex() and _is_laid_out_like(p, p.grad)]
        if group["fused"]:
            computed = all(p.device.type != "cpu" or p.dtype.itemsize >= 4 for p in made)
            made = made if computed and len(made) == len(stepped) else []
        for p in made:
            optimizer.state[p]["momentum_buffer"] = torch.full_like(p, -0.0, requires_grad=False)


def _is_laid_out_like(parameter: torch.Tensor, gradient: torch.Tensor | None) -> bool:
    """Whether a copy of a gradient has the type, dtype, device and strides of a dense copy of its parameter."""
    own, other = inner_tensor(parameter)[0], inner_tensor(gradient)[0] if gradient is not None else None
    if other is None or other.layout is not torch.strided or own.layout is not torch.strided:
        return False
    facts = ((each.dtype, each.device, each.shape, torch.empty_like(each).stride()) for each in (own, other))
    return next(facts) == next(facts)


def remove(created: list[Entry]) -> None:
    """Remove the state that a failed or discarded attempt has allocated."""
    for optimizer, parameter in created:
        optimizer.state.pop(parameter, None)
