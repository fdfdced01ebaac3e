"""Functions with ``functools.lru_cache`` whose body runs while a step is captured.

The body runs once, and what it changes in the Python state belongs to the captured call alone. Each later call would
change it again. So where such a body ran and the state changed, the capture is made once more, and the changes are
compared before and after each run of a body.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft.capture.node_kinds import is_ordered, is_random
from weft.capture.record.captured_step import CapturedStep
from weft.capture.record.held_references import StandIn
from weft.capture.record.host_draws import GeneratorDraw, draw_numpy, draw_python
from weft.capture.record.plain_keys import keep_entries, plain_key
from weft.capture.record.recorder import check, recording
from weft.capture.state.containers import Container
from weft.capture.user_code import REMEMBERING, cache_of
from weft.errors import RememberedFunctionWrites


class RememberingFunction(StandIn):
    """Stands in for a function that remembers results. It hands on numbers of the captured call for symbolic ones: the
    function hashes them, which makes them guards by their values, and knows its results by these.

    Args:
        original: the function.
        noted: called with it before each call of the step.
    """

    def __init__(self, original: Any, noted: Callable[[Any], object]) -> None:
        super().__init__(original)
        self.weft_noted = noted

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if recording() is not None:
            self.weft_noted(self.weft_original)
            args, kwargs = tuple(map(plain_key, args)), {name: plain_key(value) for name, value in kwargs.items()}
        return self.weft_original(*args, **kwargs)

    def __get__(self, obj: Any, kind: Any = None) -> Any:
        return self if obj is None else types.MethodType(self, obj)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.weft_original, name)


class RememberingFunctions:
    """The functions that remember results, during one attempt at a capture.

    Args:
        known: functions that may not be among the objects that the step reaches: static methods.

    Attributes:
        watched: whether to compare the state before and after their bodies.
        changed: what the bodies changed, as the user would write it.
    """

    def __init__(self, *, watched: bool = False, known: Iterable[Any] = ()) -> None:
        self.watched = watched
        self._known = list(known)
        self.changed: set[str] = set()
        self._misses: list[tuple[Any, int]] = []
        self._remembered: dict[int, list[Any]] = {}  # arguments, by function, where the number of results has no limit

    def note(self, objects: Iterable[Any]) -> None:
        """Begin with those among ``objects``."""
        self._misses.clear()
        self._remembered.clear()
        for each in (*objects, *self._known):
            if isinstance(each, REMEMBERING):
                self.add(each)

    def add(self, function: Any) -> None:
        """Begin with one that the step is about to call."""
        if any(function is known for known, _ in self._misses):
            return
        self._misses.append((function, function.cache_info().misses))
        if function.cache_parameters()["maxsize"] is None:
            self._remembered[id(function)] = list(cache_of(function) or ())

    def ran(self) -> list[Any]:
        """Those whose body ran since."""
        return [function for function, misses in self._misses if function.cache_info().misses != misses]

    def forget(self) -> None:
        """Have those whose body ran run it again when they are called next: in another attempt, or in eager.

        Of a function with a limit, Python can only take away all results.
        """
        for function in self.ran():
            known = self._remembered.get(id(function))
            if known is None:
                function.cache_clear()
                continue
            ids = set(map(id, known))
            keep_entries(cache_of(function) or {}, lambda key, value, ids=ids: id(key) in ids)

    @contextlib.contextmanager
    def compared(
        self, changes: Callable[[], Iterable[tuple[Container, Any, Any, Any]]], graph: torch.fx.Graph
    ) -> Iterator[None]:
        """While the step runs.

        Args:
            changes: of the Python state so far: (container, key, before, after).
            graph: of the operations so far.
        """
        if not self.watched:
            yield
            return
        bodies = [function.__wrapped__ for function, _ in self._misses]
        codes = {each.__code__ for each in bodies if hasattr(each, "__code__")}
        in_c = {id(each) for each in bodies if not hasattr(each, "__code__")}
        running: list[dict[tuple[int, Any, int], str] | None] = []
        seen = lambda: _labels(changes()) | {(id(node), 0, 0): label for node, label in _actions(graph)}

        def compare(frame: FrameType, event: str, argument: object) -> None:
            if event.startswith("c_") and id(argument) in in_c:
                if event == "c_call":
                    running.append(seen())
                elif (before := running.pop()) is not None:
                    self.changed |= {label for key, label in seen().items() if key not in before}
            elif frame.f_code in codes and event == "call":
                # A tensor that the step computes is a new argument at each call, so that the body runs at each call.
                running.append(None if _of_the_call(list(frame.f_locals.values())) else seen())
            elif frame.f_code in codes and event == "return" and (before := running.pop()) is not None:
                self.changed |= {label for key, label in seen().items() if key not in before}

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
    changes = any(each.key != "grad" for each in captured.effects + captured.appends)
    if not ran or not captured.complete or not (changes or any(_actions(captured.graph.graph))):
        return captured
    functions.forget()
    watched = RememberingFunctions(watched=True, known=ran)
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


def _actions(graph: torch.fx.Graph) -> Iterator[tuple[torch.fx.Node, str]]:
    """The operations that do more than compute their result, with what they change as the user would write it."""
    for node in graph.nodes:
        if is_random(node) or isinstance(node.target, GeneratorDraw) or node.target in (draw_python, draw_numpy):
            yield node, "the state of the random generator"
        elif is_ordered(node) and node.op == "call_function" and not _only_computes(node.target):
            yield node, f"what `{getattr(node.target, '__name__', node.target)}` does"


def _only_computes(target: Any) -> bool:
    return target is check or getattr(target, "is_pure", False)


def _hashable(key: Any) -> Any:
    return key if isinstance(key, (str, int)) else id(key)
