"""Calls of a step, as it is and compiled, with other arguments at every call: the same to the bit."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import weft
from both_ways import assert_equal

CALLS = 20
Call = Callable[[int], tuple[Any, ...]]


def twenty_calls(make: Callable[[], Callable[..., Any]], call: Call, captures: int) -> Any:
    """:func:`compared_calls`, twenty of them."""
    return compared_calls(CALLS, make, call, captures)


def compared_calls(count: int, make: Callable[[], Callable[..., Any]], call: Call, captures: int) -> Any:
    """Make the step twice and call each ``count`` times, with ``call(at)`` as arguments. Compared are what each call
    returns, what it prints, and its arguments afterwards. Returns the compiled step."""
    found = []
    for wrap in (lambda step: step, weft.compile):
        torch.manual_seed(0)
        step = wrap(make())
        printed = io.StringIO()
        results = []
        with contextlib.redirect_stdout(printed):
            for at in range(count):
                args = call(at)
                results.append(comparable((step(*args), args)))
        found.append([results, printed.getvalue()])
    assert_equal(found[1], found[0])
    assert len(step.captures) <= captures, (len(step.captures), step.captures)
    return step


def comparable(value: Any) -> Any:
    """A copy with all that two arrays, numbers or tensors may differ in."""
    if isinstance(value, (np.ndarray, np.generic)):
        content = str(value.tolist()) if value.dtype.hasobject else value.tobytes()
        return type(value).__name__, str(value.dtype), value.shape, content
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(comparable, value)]
    if isinstance(value, dict):
        return {key: comparable(each) for key, each in value.items()}
    return type(value).__name__, copy.deepcopy(value)
