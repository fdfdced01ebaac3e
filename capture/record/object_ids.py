"""``id()`` of tensors that are other objects at each call: of arguments, and of what a step makes.

A step may tell tensors apart by such a number. It cannot keep it: in a later call it would be that of a tensor of the
capture. While a step is captured, the user's modules have an ``id`` of their own, whose numbers are known again where
the step leaves them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from weft.capture.record.held_references import ORIGINAL
from weft.capture.user_code import user_line
from weft.errors import UncapturableDraw


class IdOfTensor(int):
    """The ``id()`` of a tensor of the capture, with the user's line that asked for it."""

    weft_line: str


def id_followed(intercepts: Callable[[], bool]) -> dict[str, Any]:
    """What the user's modules get, by the name of Python's own.

    Args:
        intercepts: whether the step runs now, in this thread.
    """

    def id_of(value: Any, /) -> int:
        if not (isinstance(value, FakeTensor) and intercepts()):
            return id(value)
        found = IdOfTensor(id(value))
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
        if type(value) is IdOfTensor:
            why = "the step leaves it for later, and each call has another tensor"
            raise UncapturableDraw("id() of a tensor", value.weft_line, why, "keep the tensor, and compare with `is`")
