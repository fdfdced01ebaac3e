"""Attributes by names that a step computes: ``getattr(callback, "on_" + event)``.

The walk of the Python state follows the attributes whose names stand in code. Other names are known when the step asks
for them. While a step is captured, the user's modules have functions of their own in the place of Python's, which tell
the walk each name before the attribute is read or written. Where it was a new one, the capture is made once more, with
the name known from the beginning.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from weft.capture.record.held_references import ORIGINAL
from weft.capture.state.contents import attributes_of
from weft.capture.state.object_parts import objects_in
from weft.capture.state.reachable_state import ReachableState

# What reads all attributes of an object, and whether also of those in it.
_READ_WHOLE: tuple[tuple[Any, str, bool], ...] = (
    (copy, "copy", False),
    (copy, "deepcopy", True),
    (dataclasses, "replace", False),
)
# The file whose functions stand between the user's code and an attribute.
ASKS = __file__


def computed_names_followed(state: ReachableState, intercepts: Callable[[], bool]) -> dict[str, Any]:
    """What the user's modules get, by the names of Python's own.

    Args:
        state: follows the names.
        intercepts: whether the step runs now, in this thread.
    """

    def following(original: Callable[..., Any]) -> Callable[..., Any]:
        # Wrong arguments are Python's to refuse, in its own words.
        def ask(*args: Any) -> Any:
            if len(args) > 1 and type(args[1]) is str and intercepts():
                state.follow_computed(args[0], args[1])
            return original(*args)

        return ask

    def variables(*obj: Any) -> Any:
        if not obj:
            return sys._getframe(1).f_locals
        if len(obj) == 1:
            _follow_all(state, obj[0], intercepts)
        return vars(*obj)

    replaced: dict[Any, Callable[..., Any]] = {each: following(each) for each in (getattr, hasattr, setattr, delattr)}
    replaced[vars] = variables
    for original, new in replaced.items():
        setattr(new, ORIGINAL, original)
    return {original.__name__: new for original, new in replaced.items()}


def whole_reads_followed(
    state: ReachableState, intercepts: Callable[[], bool]
) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """(owner, name, replacement) of the functions that read all attributes of an object."""

    def following(original: Callable[..., Any], deep: bool) -> Callable[..., Any]:
        @functools.wraps(original)
        def read(obj: Any, /, *args: Any, **kwargs: Any) -> Any:
            for each in objects_in(obj) if deep and intercepts() else [obj]:
                _follow_all(state, each, intercepts)
            return original(obj, *args, **kwargs)

        return read

    for owner, name, deep in _READ_WHOLE:
        yield owner, name, following(getattr(owner, name), deep)


def _follow_all(state: ReachableState, obj: Any, intercepts: Callable[[], bool]) -> None:
    if intercepts():
        for name in [each for each in attributes_of(obj) if type(each) is str]:
            state.follow_computed(obj, name)
