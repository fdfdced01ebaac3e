"""``id()`` of objects that are others at each call: of arguments, and of what a step makes.

A step may tell objects apart by such a number. It cannot keep it: in a later call it would be that of an object of the
capture. While a step is captured, the user's modules have an ``id`` of their own, whose numbers are known again where
the step leaves them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft.capture.record.held_references import ORIGINAL
from weft.capture.user_code import user_line
from weft.errors import UncapturableDraw

# What a capture's own objects stand for.
_KINDS = {torch.Tensor: "tensor", list: "list", dict: "dict"}


class IdInCapture(int):
    """The ``id()`` of an object of the capture, with what it is, and the user's line that asked for it."""

    weft_kind: str
    weft_line: str


def id_followed(intercepts: Callable[[], bool], is_made: Callable[[Any], bool]) -> dict[str, Any]:
    """What the user's modules get, by the name of Python's own.

    Args:
        intercepts: whether the step runs now, in this thread.
        is_made: whether an object was made since the capture began.
    """

    def id_of(value: Any, /) -> int:
        if not intercepts() or not (isinstance(value, FakeTensor) or is_made(value)):
            return id(value)
        found = IdInCapture(id(value))
        kinds = (name for kind, name in _KINDS.items() if isinstance(value, kind))
        found.weft_kind = next(kinds, type(value).__qualname__)
        found.weft_line = user_line()
        return found

    setattr(id_of, ORIGINAL, id)
    return {"id": id_of}


def refuse_ids(*values: Any) -> None:
    """Refuse ids among what a step leaves.

    Raises:
        UncapturableDraw: names the line.
    """
    for value in values:
        if type(value) is IdInCapture:
            kind = value.weft_kind
            why = f"the step leaves it for later, and each call has another {kind}"
            raise UncapturableDraw(f"id() of a {kind}", value.weft_line, why, f"keep the {kind}, and compare with `is`")
