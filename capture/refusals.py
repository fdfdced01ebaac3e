"""From torch's errors about symbolic values to the user's line and a remedy."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from weft import torch_adapter
from weft.capture.user_code import Frame, format_frame, is_user_file
from weft.errors import CannotCapture, WeftError


@contextlib.contextmanager
def explained(step: Callable[..., Any]) -> Iterator[None]:
    """Turn what torch raises when Python needs a value that does not exist yet into :class:`CannotCapture`."""
    try:
        yield
    except WeftError:
        raise
    except torch_adapter.data_dependent_errors() as error:
        raise CannotCapture(_line_of(error, step), str(error).split("\n")[0]) from error
    except RuntimeError as error:
        if not torch_adapter.wants_fake_data(error):
            raise
        raise CannotCapture(_line_of(error, step), "torch read the numbers in a tensor") from error


def _line_of(error: BaseException, step: Callable[..., Any]) -> str:
    """The innermost line of user code that the error passed through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_file(frame.filename)]
    if frames:
        last = frames[-1]
        return f"{format_frame(Frame(last.filename, last.lineno or 0, last.name))}: `{last.line}`"
    return getattr(step, "__qualname__", repr(step))
