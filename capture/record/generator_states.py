"""The states of all random generators that a step can reach, before and after a capture.

A capture draws nothing: draws are nodes. A generator whose state has moved all the same was used in a way that no
function of :mod:`weft.capture.record.host_draws` saw (from C code, through a name that was not found), or by a module
that was imported meanwhile. The states are put back, and the step is captured once more under :class:`MovingLine`. If
a line of the user's moves a generator again, its numbers would be frozen in the graph, and that is an error.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.record.host_draws import GLOBAL, is_numpy_generator, numpy_global
from weft.capture.state.type_facts import is_what_its_type_says
from weft.capture.user_code import Frame, format_frame
from weft.source_files import is_user_file


class GeneratorStates:
    """The states of generators at the time of construction.

    Args:
        objects: what the step can reach; the generators among them, and those that bound methods belong to, count.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        found: dict[int, tuple[Any, str]] = {id(GLOBAL): (GLOBAL, "Python's global generator (random)")}
        numpy = numpy_global()
        if numpy is not None:
            found[id(numpy)] = numpy, "numpy's global generator (numpy.random)"
        if threading.active_count() == 1:  # every operation may draw from it, in other threads too
            found[id(torch.default_generator)] = torch.default_generator, "torch's default generator"
        others: set[type] = set()
        for obj in objects:
            if type(obj) in others:
                continue
            each = obj.__self__ if isinstance(obj, (types.MethodType, types.BuiltinMethodType)) else obj
            if _is_generator(each):
                found.setdefault(id(each), (each, f"a generator of type {type(each).__name__}"))
            elif each is obj and is_what_its_type_says(type(obj)):
                others.add(type(obj))
        self._generators = list(found.values())
        self._states = [_state(generator) for generator, _ in self._generators]

    def moved(self, ignored: Collection[int] = ()) -> list[str]:
        """The generators whose state is another now, but for those with an id in ``ignored``."""
        pairs = zip(self._generators, self._states, strict=True)
        return [
            name
            for (generator, name), state in pairs
            if id(generator) not in ignored and not _same(_state(generator), state)
        ]

    def restore(self, ignored: Collection[int] = ()) -> None:
        """Put the states back, but for those with an id in ``ignored``."""
        for (generator, _), state in zip(self._generators, self._states, strict=True):
            if state is not None and id(generator) not in ignored and not _same(_state(generator), state):
                _set_state(generator, state)


class MovingLine:
    """Finds the user's line that moves a generator, by a look at all states after each line of user code.

    Attributes:
        found: the first such line, None while there is none.
    """

    def __init__(self, moved: Callable[[], list[str]]) -> None:
        self.found: str | None = None
        self._moved = moved
        self._last = "<no user code on the stack>"

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While active, functions that this thread enters are watched."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        return self._step if is_user_file(frame.f_code.co_filename) else None

    def _step(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        if self.found is None and self._moved():
            self.found = self._last
        self._last = format_frame(Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        return self._step


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """At the end the global generators are as they were: neither a compiler nor what it imports draws from them.

    Where other threads run, which may have drawn meanwhile, nothing is put back.
    """
    if threading.active_count() > 1:
        yield
        return
    states = GeneratorStates(())
    try:
        yield
    finally:
        states.restore()


def _is_generator(obj: Any) -> bool:
    return isinstance(obj, (random.Random, _TORCH)) or is_numpy_generator(obj)


_TORCH = type(torch.default_generator)  # inside a fake world, torch.Generator is a subclass
_get_python: Callable[[random.Random], Any] = random.Random.getstate
_set_python: Callable[[random.Random, Any], None] = random.Random.setstate


def _state(generator: Any) -> Any:
    """A copy of the state, None where there is none (``random.SystemRandom``)."""
    if isinstance(generator, random.SystemRandom):
        return None
    if isinstance(generator, random.Random):
        return _get_python(generator)
    if isinstance(generator, _TORCH):
        with torch_adapter.only_mode():
            return generator.get_state()
    return generator.get_state(legacy=False) if hasattr(generator, "get_state") else generator.bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        _set_python(generator, state)
    elif isinstance(generator, _TORCH):
        with torch_adapter.only_mode():
            generator.set_state(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def _same(now: Any, before: Any) -> bool:
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(_same(now[key], before[key]) for key in now)
    if isinstance(now, torch.Tensor):
        with torch_adapter.only_mode():
            return now.tolist() == before.tolist()  # without an operation: a kernel of a fake tensor may be running
    return now.tobytes() == before.tobytes() if hasattr(now, "tobytes") else now == before
