"""Functions that a capture does not look into: logging, metrics, anything Python."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


from weft.capture.recorder import recording
from weft.capture.values import Template


class OpaqueCall:
    """A node's target: calls ``function`` with the real tensors of this step."""

    def __init__(self, function: Callable[..., Any], arguments: Template) -> None:
        self.function = function
        self.arguments = arguments
        self.__name__ = self.__qualname__ = f"opaque_{getattr(function, '__name__', type(function).__name__)}"
        self.__module__ = __name__

    def __call__(self, *values: Any) -> None:
        args, kwargs = self.arguments.fill(list(values))
        self.function(*args, **kwargs)


def opaque(function: Callable[..., Any]) -> Callable[..., None]:
    """Mark a function as one that runs every step with real tensors and is not captured.

    In a captured step the graph holds a call of it, where the step called it, with the values of that moment. It may do
    anything Python can (print, append, compute metrics with ``.item()``), must not change its arguments, and returns
    nothing. Uncompiled it is called as it is. Works as a hook of any kind.
    """

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> None:
        recorder = recording()
        if recorder is None:
            function(*args, **kwargs)
            return
        values: list[Any] = []

        def keep(value: Any) -> int:
            values.append(value)
            return len(values) - 1

        arguments = Template.of((args, kwargs), recorder, keep, function.__qualname__, lift_users=True)
        recorder.effect_on_nodes(OpaqueCall(function, arguments), *values)

    return called


