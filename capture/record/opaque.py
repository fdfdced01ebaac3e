"""``weft.opaque``: functions that run in every step but are not captured, such as logging and metrics.

In a captured step an opaque function is one node with an effect (:class:`OpaqueCall`). Its operands are the tensors
among its arguments and those of the tensors it can reach that the step has written (a
:class:`~weft.capture.record.state_snapshot.StateSnapshot`). At run time the node puts the user's Python state as it
was at that point, calls the function with real tensors, and takes the state back.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec

import torch

from weft import torch_adapter
from weft.argument_checks import ArgumentChecks
from weft.capture.record.made_for_opaque import kept_in_call, note_kept
from weft.capture.record.opaque_changes import (
    OpaqueChanges,
    held_elsewhere,
    made_in_closure,
    names_in,
    names_in_texts,
    names_read_later,
)
from weft.capture.record.recorder import recording
from weft.capture.record.shown_gradients import Showing
from weft.capture.record.state_snapshot import StateSnapshot
from weft.capture.record.template_parts import MadeObject, Template
from weft.capture.state.code_names import OPAQUE, mark_opaque
from weft.capture.state.containers import SIMPLE, StatePlace
from weft.short_tracebacks import shortens_tracebacks

P = ParamSpec("P")


class _SilenceOfThread(threading.local):
    """Whether opaque functions do nothing in the running thread."""

    silent = False


_mine = _SilenceOfThread()


class OpaqueCall:
    """The target of a node that calls ``function`` with the real tensors of this step.

    Args:
        function: the user's function.
        arguments: its arguments, over the first ``argument_count`` of the node's operands.
        argument_count: how many operands are arguments. Behind those of the snapshot are inputs that are only to be
            written later, see :mod:`weft.capture.record.finished_graph`.
        held: objects that the step made and still holds: the part in the template, what is the same at each call.
        snapshot: the other state that it can reach at this point of the step, over all operands.
        changes: checks what the function changes.
        memory: for operands in the memory of a tensor of the user's, by number: its place, and at which element.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Template,
        argument_count: int,
        held: list[tuple[Any, Any]],
        snapshot: StateSnapshot,
        changes: OpaqueChanges,
        memory: Mapping[int, tuple[StatePlace, int]],
    ) -> None:
        self.function = function
        self.arguments = arguments
        self.argument_count = argument_count
        self.held = held
        self.snapshot = snapshot
        self.changes = changes
        self.memory = memory
        self._grad_enabled = torch.is_grad_enabled()
        self.__name__ = self.__qualname__ = f"opaque_{getattr(function, '__name__', type(function).__name__)}"
        self.__module__ = __name__

    def __call__(self, *operands: Any) -> None:
        passed = operands[: self.argument_count]
        passed = [value.detach() if isinstance(value, torch.Tensor) else value for value in passed]
        made = dict(kept_in_call())
        args, kwargs = self.arguments.fill(passed, made)
        held = [made.get(id(part), same) for part, same in self.held]
        with (
            self.snapshot.restored(list(operands), made) as left,
            torch.set_grad_enabled(self._grad_enabled),
            self.changes.checked([*held, *left]),
        ):
            self.function(*args, **kwargs)
        del args, kwargs, held, left
        kept = note_kept(made, passed)
        del made
        numbers = {id(each): at for at, each in enumerate(passed)}
        for each in kept:
            self._keep(each, numbers.get(id(each), -1))
        known = set(map(id, kept))
        for at in range(len(passed)):
            is_kept = isinstance(passed[at], torch.Tensor) and _references(passed, at) > _UNSHARED
            if is_kept and id(passed[at]) not in known:
                self._keep(passed[at], at)

    def _keep(self, tensor: torch.Tensor, at: int) -> None:
        """Give operand number ``at``, which the function kept, the memory that it has in eager: that of a tensor of the
        user's, or memory of its own, as the program may reuse the buffer."""
        if at in self.memory:
            place, element = self.memory[at]
            whole = place.get().detach()
            tensor.data = whole.as_strided(tensor.shape, tensor.stride(), whole.storage_offset() + element)
        else:
            tensor.data = tensor.clone()


def _references(items: list[Any], at: int) -> int:
    return sys.getrefcount(items[at])


# The reference count of an object that only a list holds.
_UNSHARED = _references([object()], 0)


@shortens_tracebacks
def opaque(function: Callable[P, object]) -> Callable[P, None]:
    """Mark a function as one that runs every step with real tensors and is not captured.

    The graph has a node that calls it, at the point where the step called it. The function sees the tensors of the
    step with the values they have at that point: its arguments, and what it can reach through its closure and its
    globals (gradients, parameters, optimizer state). It may do anything that Python can: print, append to a list,
    compute metrics with ``.item()``. It must not change tensors of the step, and it returns nothing. In a step that
    is not compiled it is an ordinary function. It may be a hook of any kind. All ranks must call it, as they must any
    part of the step: test for the rank inside the function, not around the call.

    Raises:
        InvalidArgumentType: ``function`` cannot be called, or calling it would run nothing (a generator, a coroutine).
    """
    checks = ArgumentChecks("weft.opaque")
    checks.function_or_callable("function", function, "Write @weft.opaque above a function")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        remedy = "Call it to its end in an ordinary function, and mark that"
        raise checks.wrong_type("function", function, "a function that runs when it is called", remedy)
    code = getattr(function, "__code__", None)
    if code is not None:
        mark_opaque(code)

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> None:
        recorder = recording()
        if recorder is None:
            if not _mine.silent:
                function(*args, **kwargs)
            return
        operands: list[Any] = []

        def add_operand(value: Any) -> int:
            operands.append(value)
            return len(operands) - 1

        snapshots = recorder.snapshots
        name = getattr(function, "__qualname__", str(function))
        templates = snapshots.templates()
        templates.own.note_passed(args, kwargs)
        own = templates.own.inside((args, kwargs))
        both = args, kwargs
        template = templates.of(both, add_operand, f"an argument of {name}")
        shows = isinstance(function, Showing)
        found = held_elsewhere(templates.made, templates.own.given.ids, both, sys._getframe(1))
        templates.own.given.add(found)
        held = [(part, None if type(part) is MadeObject else value) for value, part in found]
        del found
        held += [] if shows else [(None, each) for each in made_in_closure(function, templates.own)]
        argument_count = len(operands)
        memory = snapshots.memory(templates)
        roots = [leaf for leaf in torch_adapter.flatten((args, kwargs))[0] if not isinstance(leaf, SIMPLE)]
        snapshot, reached = snapshots.take([function, *own, *roots], add_operand)
        names = names_in_texts(both) if shows else names_in(function)
        reached += snapshots.containers_in(both) if shows and names else []
        if reached and names:
            names &= names_read_later(sys._getframe(1), snapshots.functions)
        changes = OpaqueChanges(name, reached, names, shows=shows)
        target = OpaqueCall(function, template, argument_count, held, snapshot, changes, memory)
        recorder.emit_effect(target, *operands)

    setattr(called, OPAQUE, True)
    return called


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Inside, opaque functions do nothing in this thread: a step that runs a second time, for a comparison, must not
    log twice."""
    before, _mine.silent = _mine.silent, True
    try:
        yield
    finally:
        _mine.silent = before
