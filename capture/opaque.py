"""Functions that a capture does not look into: logging, metrics, anything Python."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.moment import Moment
from weft.capture.recorder import recording
from weft.capture.state import OPAQUE, SIMPLE, opaque_code
from weft.capture.values import Template

_silent = False


class OpaqueCall:
    """A node's target: calls ``function`` with the real tensors of this step.

    Args:
        function: the user's.
        arguments: what it is called with, over the first ``given`` of the node's operands.
        moment: what else it can see, over all operands, as it was at this point of the step.
    """

    def __init__(self, function: Callable[..., Any], arguments: Template, given: int, moment: Moment) -> None:
        self.function = function
        self.arguments = arguments
        self.given = given
        self.moment = moment
        self._grad_enabled = torch.is_grad_enabled()
        self.__name__ = self.__qualname__ = f"opaque_{getattr(function, '__name__', type(function).__name__)}"
        self.__module__ = __name__

    def __call__(self, *operands: Any) -> None:
        lent = [value.detach() if isinstance(value, torch.Tensor) else value for value in operands[: self.given]]
        args, kwargs = self.arguments.fill(lent)
        with self.moment.restored(list(operands)), torch.set_grad_enabled(self._grad_enabled):
            self.function(*args, **kwargs)
        del args, kwargs
        _give_what_was_kept(lent)


def _give_what_was_kept(lent: list[Any]) -> None:
    """Tensors that the function kept get memory of their own: the program may yet write in what it lent."""
    for at in range(len(lent)):
        if isinstance(lent[at], torch.Tensor) and _references(lent, at) > _LENT:
            lent[at].data = lent[at].clone()


def _references(items: list[Any], at: int) -> int:
    return sys.getrefcount(items[at])


# References to what nobody holds but a list.
_LENT = _references([object()], 0)


def opaque(function: Callable[..., Any]) -> Callable[..., None]:
    """Mark a function as one that runs every step with real tensors and is not captured.

    In a captured step the graph holds a call of it, where the step called it. The function sees its
    arguments, and everything else of the step's that it can reach through them, its closure and its globals
    (gradients, parameters, optimizer state), with the values of that moment. It may do anything Python can:
    print, append, compute metrics with ``.item()``. It must not change tensors of the step, and returns
    nothing. Uncompiled it is called as it is. Works as a hook of any kind. All ranks must call it, as any other
    part of the step: look at the rank inside of it, not around it.
    """
    code = getattr(function, "__code__", None)
    if code is not None:
        opaque_code.add(code)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> None:
        recorder = recording()
        if recorder is None:
            if not _silent:
                function(*args, **kwargs)
            return
        operands: list[Any] = []

        def keep(value: Any) -> int:
            operands.append(value)
            return len(operands) - 1

        moments = recorder.moments
        where = f"an argument of {getattr(function, '__qualname__', function)}"
        template = Template.of((args, kwargs), recorder, keep, where, homes=moments.homes)
        given = len(operands)
        roots = [leaf for leaf in torch_adapter.flatten((args, kwargs))[0] if not isinstance(leaf, SIMPLE)]
        moment = moments.of([function, *roots], keep)
        recorder.effect_on_nodes(OpaqueCall(function, template, given, moment), *operands)

    setattr(called, OPAQUE, True)
    return called


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Opaque functions do nothing inside: a step that runs a second time, to be compared, logs once."""
    global _silent
    before, _silent = _silent, True
    try:
        yield
    finally:
        _silent = before
