"""Functions with ``functools.lru_cache`` whose body runs while a step is captured.

The body runs once, and what it changes in the Python state belongs to the captured call alone. Each later call would
change it again. So where such a body ran and the state changed, the capture is made once more, and the changes are
compared before and after each run of a body.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from weft.capture.record.captured_step import CapturedStep
from weft.capture.state.containers import Container
from weft.capture.user_code import REMEMBERING
from weft.errors import RememberedFunctionWrites


class RememberingFunctions:
    """The functions that remember results, during one attempt at a capture.

    Attributes:
        watched: whether to compare the state before and after their bodies.
        changed: what the bodies changed, as the user would write it.
    """

    def __init__(self, *, watched: bool = False) -> None:
        self.watched = watched
        self.changed: set[str] = set()
        self._misses: list[tuple[Any, int]] = []

    def note(self, objects: Iterable[Any]) -> None:
        """Begin with those among ``objects``."""
        functions = [each for each in objects if isinstance(each, REMEMBERING)]
        self._misses = [(function, function.cache_info().misses) for function in functions]

    def ran(self) -> list[Any]:
        """Those whose body ran since."""
        return [function for function, misses in self._misses if function.cache_info().misses != misses]

    def forget(self) -> None:
        """Have those whose body ran run it again when they are called next: in another attempt, or in eager."""
        for function in self.ran():
            function.cache_clear()

    @contextlib.contextmanager
    def compared(self, changes: Callable[[], Iterable[tuple[Container, Any, Any, Any]]]) -> Iterator[None]:
        """While the step runs.

        Args:
            changes: of the Python state so far: (container, key, before, after).
        """
        if not self.watched:
            yield
            return
        codes = {getattr(function.__wrapped__, "__code__", None) for function, _ in self._misses}
        running: list[dict[tuple[int, Any, int], str] | None] = []

        def compare(frame: FrameType, event: str, argument: object) -> None:
            if frame.f_code in codes and event == "call":
                # A tensor that the step computes is a new argument at each call, so that the body runs at each call.
                running.append(None if _of_the_call(list(frame.f_locals.values())) else _labels(changes()))
            elif frame.f_code in codes and event == "return" and (before := running.pop()) is not None:
                self.changed |= {label for key, label in _labels(changes()).items() if key not in before}

        profile = sys.getprofile()
        sys.setprofile(compare)
        try:
            yield
        finally:
            sys.setprofile(profile)


def attempt_with_checked_bodies(
    attempt: Callable[..., CapturedStep], functions: RememberingFunctions, *args: Any, **how: Any
) -> CapturedStep:
    """Make one attempt at a capture, and another one where the body of a function ran that remembers its result.

    Raises:
        RememberedFunctionWrites: the body changes the Python state.
    """
    try:
        captured = attempt(*args, remembering=functions, **how)
    except BaseException:
        functions.forget()
        raise
    ran = functions.ran()
    if not captured.complete:
        functions.forget()  # the capture of the path to its end shall see what the bodies change
    if not ran or not captured.complete or not any(each.key != "grad" for each in captured.effects + captured.appends):
        return captured
    functions.forget()
    watched = RememberingFunctions(watched=True)
    captured = attempt(*args, remembering=watched, **how)
    if watched.changed:
        watched.forget()
        raise RememberedFunctionWrites([each.__qualname__ for each in ran], sorted(watched.changed))
    return captured


def _of_the_call(arguments: Any) -> bool:
    """Whether a tensor of the capture is among the arguments of a function, or in a tuple there."""
    return any(
        isinstance(each, FakeTensor) or (isinstance(each, (tuple, list)) and _of_the_call(each)) for each in arguments
    )


def _labels(changes: Iterable[tuple[Container, Any, Any, Any]]) -> dict[tuple[int, Any, int], str]:
    return {(id(container), _hashable(key), id(now)): container.label(key) for container, key, _, now in changes}


def _hashable(key: Any) -> Any:
    return key if isinstance(key, (str, int)) else id(key)
