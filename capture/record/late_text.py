"""Text that a step makes of values: made anew by each call, with the numbers of that call.

While a step is captured, ``f"loss {loss.item():.4f}"`` has no number to show. It gets a mark in its place, and the
template of what is printed, logged or returned (:mod:`weft.capture.record.templates`) makes the text at each call from
the value and the format that the mark stands for. Only a text that goes straight out is made like this
(:mod:`weft.capture.record.text_flow`): to compare, cut or parse it would show the mark.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from weft.capture.record.plain_numbers import PYTHON_TYPES
from weft.capture.record.recorder import OpRecorder
from weft.capture.record.shown_gradients import gradient_shown, with_gradient_shown
from weft.capture.record.text_flow import goes_straight_out
from weft.capture.state.containers import StatePlace
from weft.source_files import is_user_file

# Characters of Unicode's private use area, which no text of a step should have.
_BEGIN, _END = "\U0010f5e0", "\U0010f5e1"
_MARK = re.compile(f"{_BEGIN}([0-9]+){_END}")


@dataclass(frozen=True)
class LateText:
    """One place in a text.

    Attributes:
        value: a symbolic number, or a tensor of the capture; None for an argument that is only passed on.
        method: "__format__", "__repr__" or "__str__"; "%" for formatting by ``%``.
        arguments: of the method; of "%", the conversion ("%.4f").
        gradient: what the text says of autograd (:func:`gradient_shown`).
        place: of the argument.
        convert: makes what the text is of from the value of a call: an array, from the tensor in its memory.
    """

    value: Any
    method: str
    arguments: tuple[Any, ...]
    gradient: str | None = None
    place: StatePlace | None = None
    convert: Callable[[Any], Any] | None = None

    def of(self, value: Any) -> str:
        """The text for a value of one call."""
        if self.convert is not None:
            value = self.convert(value)
        return text_by(self.method, with_gradient_shown(value, self.gradient), self.arguments)


def text_by(method: str, value: Any, arguments: tuple[Any, ...]) -> str:
    """The text that a method of :class:`LateText` makes of a value."""
    return arguments[0] % (value,) if method == "%" else getattr(value, method)(*arguments)


def late_text(
    recorder: OpRecorder,
    frame: types.FrameType,
    value: Any,
    method: str,
    arguments: tuple[Any, ...],
    *,
    place: StatePlace | None = None,
    convert: Callable[[Any], Any] | None = None,
) -> str | None:
    """The mark for a text of ``value`` that the function running in ``frame`` makes; None where the text may be read.

    Args:
        value: a symbolic number, or a tensor of the capture.
        method: of the value, which makes the text.
        place, convert: see :class:`LateText`.
    """
    if is_late(arguments) or not is_user_file(frame.f_code.co_filename) or not goes_straight_out(frame):
        return None
    if (kind := PYTHON_TYPES.get(type(value))) is not None:
        text_by(method, kind(1), arguments)  # a format that no number of this type has is an error now
    gradient = gradient_shown(value)
    if isinstance(value, torch.Tensor):
        value = value.detach().clone()  # the text is that of the value as it is now
    return mark_of(recorder, LateText(value, method, arguments, gradient, place, convert))


def mark_of(recorder: OpRecorder, text: LateText) -> str:
    """A mark that stands for a text."""
    recorder.late_texts.append(text)
    return f"{_BEGIN}{len(recorder.late_texts) - 1}{_END}"


def is_late(text: Any) -> bool:
    """Whether a text, or one in a tuple, has marks in it."""
    if isinstance(text, tuple):
        return any(map(is_late, text))
    return isinstance(text, str) and _BEGIN in text


@dataclass(frozen=True)
class LateTextSlot:
    """A text with marks, in a template.

    Attributes:
        pieces: plain text and marks, in turn.
        indices: number of the output that each mark's value is, or the place of the argument.
    """

    pieces: tuple[str | LateText, ...]
    indices: tuple[int | StatePlace, ...]

    @classmethod
    def of(cls, text: str, recorder: OpRecorder, keep: Callable[[Any], int]) -> LateTextSlot:
        """The slot of a text; ``keep`` makes a node an output and returns its number."""
        pieces: list[str | LateText] = list(_MARK.split(text))
        pieces[1::2] = [recorder.late_texts[int(str(number))] for number in pieces[1::2]]
        marks = [piece for piece in pieces if isinstance(piece, LateText)]
        return cls(tuple(pieces), tuple(mark.place or keep(recorder.value(mark.value)) for mark in marks))

    def fill(self, outputs: list[Any]) -> str:
        """The text of one call."""
        values = iter([outputs[each] if isinstance(each, int) else each.outer() for each in self.indices])
        return "".join(piece if isinstance(piece, str) else piece.of(next(values)) for piece in self.pieces)
