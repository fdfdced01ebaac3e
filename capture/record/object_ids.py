"""``id()`` of objects that are others at each call: of arguments, and of what a step makes.

A step may tell objects apart by such a number. It cannot keep it: in a later call it would be that of an object of the
capture. While a step is captured, the user's modules have an ``id`` of their own, whose numbers are known again where
the step leaves them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

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

    def weft_like(self, number: int) -> IdInCapture:
        """A number that is computed from this one."""
        found = IdInCapture(number)
        found.weft_kind, found.weft_line = self.weft_kind, self.weft_line
        return found

    def weft_refuse(self, why: str) -> NoReturn:
        """Refuse the number.

        Raises:
            UncapturableDraw: names the line.
        """
        kind = self.weft_kind
        raise UncapturableDraw(f"id() of a {kind}", self.weft_line, why, f"keep the {kind}, and compare with `is`")

    def __format__(self, spec: str, /) -> str:
        self.weft_refuse("text is made of it")

    def __repr__(self) -> str:
        self.weft_refuse("text is made of it")

    __str__ = __repr__


def _computed(name: str) -> Callable[..., Any]:
    original = getattr(int, name)

    def compute(number: IdInCapture, other: Any) -> Any:
        result = original(number, other)
        return number.weft_like(result) if type(result) is int else result

    return compute


for _name in ("add", "sub", "mul", "floordiv", "mod", "lshift", "rshift", "and", "or", "xor"):
    for _method in (f"__{_name}__", f"__r{_name}__"):
        setattr(IdInCapture, _method, _computed(_method))


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
            value.weft_refuse(f"the step leaves it for later, and each call has another {value.weft_kind}")
