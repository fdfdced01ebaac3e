"""Errors about values that do not exist during a capture, as ``CannotCapture`` with the user's line.

Fake tensors have no data. Where the step's Python needs some (``if loss > 1:``), torch raises errors of several kinds
that speak of symbols. They are turned into one error that names the line, the value that was asked for, and the remedy.
"""

from __future__ import annotations

import contextlib
import dis
import os
import re
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.record.met_exceptions import SYMBOLIC_TYPE
from weft.capture.record.symbols import Symbols
from weft.capture.user_code import Frame, format_frames, frames_of
from weft.errors import CannotCapture, DrawDecidesPython, UncapturableSubclass, WeftError
from weft.source_files import is_own_file, is_user_file

# Functions of torch that read data only to check it or to choose sizes, and the argument that makes them do without.
# By the file that the error passed through, from the folder of torch.
_WITHOUT_READING = {
    "distributions/": "Pass validate_args=False to the distribution, which then does not check its arguments by value",
    "nn/utils/clip_grad.py": "Pass error_if_nonfinite=False, and look at the norm that it returns outside the step",
    "amp/grad_scaler.py": "Train in bfloat16, which needs no GradScaler, or call scaler.step and scaler.update outside",
    "optim/lbfgs.py": "Call its step outside the step, with a compiled closure: the loss decides how often it runs",
}
_INDEX_REMEDY = "Index with a tensor: x[y.argmax()] without .item(), or x.index_select(0, positions)"

_PERCENT_REMEDY = "Write an f-string or use str.format, which each call fills in, where % wants the number at once"

_HIGHER_ORDER = re.compile(r"no rule registered for HigherOrderOperator (\w+)")
_OF_TRACERS = "`{}` takes functions as arguments, for tracers that see no Python"
_IN_PYTHON = "Write it in Python, with if, for or while: a compiled step branches on values"
# What kernels written in C++ say of a fake tensor whose numbers or sizes they want.
_NEEDS_NUMBERS = (
    *("its data is not allocated yet", "on tensor with symbolic sizes/strides"),
    "cannot be called on meta tensors",
)
# What torch says where a type of tensors of the user's is to be made of a fake tensor.
_CONVERTS_MODULE = "_apply(): Couldn't swap"
_GIVES_ARRAY = ".numpy() is not supported for tensor subclasses"
_MAKES_SUBCLASS = "Creating a new Tensor subclass"


_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@contextlib.contextmanager
def data_dependence_reported(step: Callable[..., Any], symbols: Symbols, drawn: Mapping[Any, str]) -> Iterator[None]:
    """Inside, errors of torch about missing data become :class:`CannotCapture`; other errors pass.

    Args:
        step: the step that runs inside.
        symbols: knows where the numbers that an error speaks of come from.
        drawn: what drew a symbol that is a random number or a time, and where.
    """
    try:
        yield
    except WeftError:
        raise
    except torch_adapter.data_dependent_errors() as error:
        frames = frames_of(error.__traceback__)
        asked = symbols.roots(getattr(getattr(error, "cond", None), "free_symbols", ()))
        sources = [drawn[symbol] for symbol in asked if symbol in drawn]
        if sources:
            raise DrawDecidesPython(_line(frames, step), sources) from error
        raise CannotCapture(_line(frames, step), _reason(error, symbols, frames), _remedy(error)) from error
    except NotImplementedError as error:
        found = _HIGHER_ORDER.search(str(error))
        if found is None:
            raise
        raise CannotCapture(
            _line(frames_of(error.__traceback__), step), _OF_TRACERS.format(found[1]), _IN_PYTHON
        ) from error
    except RuntimeError as error:
        if torch_adapter.lacks_fake(error):
            reason = "an operation has no fake implementation, which says the sizes of its results"
            remedy = "Register one with torch.library.register_fake"
            line = _line(frames_of(error.__traceback__), step)
            raise CannotCapture(line, reason, remedy) from error
        if _MAKES_SUBCLASS in str(error):
            raise UncapturableSubclass(_line(frames_of(error.__traceback__), step)) from error
        if _GIVES_ARRAY in str(error):
            reason = "an operation that calls other operations (CompositeImplicitAutograd) makes an array of a tensor"
            remedy = "Make it one operation: torch.library.custom_op, with register_fake"
            raise CannotCapture(_line(frames_of(error.__traceback__), step), reason, remedy) from error
        if _CONVERTS_MODULE in str(error):
            reason = "a module is converted to another dtype or device after the step has used it"
            remedy = "Convert it before the step, or compute in the other dtype under torch.autocast"
            raise CannotCapture(_line(frames_of(error.__traceback__), step), reason, remedy) from error
        if not any(text in str(error) for text in _NEEDS_NUMBERS):
            raise
        reason = "torch read the numbers in a tensor"
        raise CannotCapture(_line(frames_of(error.__traceback__), step), reason, _remedy(error)) from error
    except (IndexError, TypeError, ValueError) as error:
        # torch and Python refuse a number without a value where they want a plain one: in an index, in a format.
        if SYMBOLIC_TYPE.search(str(error)) is None and not _is_of_symbol_in_library(error):
            raise
        frames = frames_of(error.__traceback__)
        reason = "a number that only the data decides is used here where Python wants a plain one"
        remedy = _INDEX_REMEDY if isinstance(error, IndexError) else _remedy(error)
        raise CannotCapture(_line(frames, step), reason, remedy) from error


def _is_of_symbol_in_library(error: Exception) -> bool:
    """Whether a function of a library has refused the type of its arguments, and has a number of the data among them:
    as ``fractions.Fraction`` does, which asks for a ``numbers.Rational``."""
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    if innermost is None or not isinstance(error, TypeError) or is_own_file(innermost.tb_frame.f_code.co_filename):
        return False
    values = innermost.tb_frame.f_locals.values()
    return any(isinstance(each, _SYMBOLIC) and not each.node.has_hint() for each in values)


def _line(frames: list[Frame], step: Callable[..., Any]) -> str:
    """The innermost line of user code that the error passed through."""
    return format_frames(frames, source=True) if frames else getattr(step, "__qualname__", type(step).__qualname__)


def _reason(error: Exception, symbols: Symbols, frames: list[Frame]) -> str:
    """Which value was asked for."""
    condition = getattr(error, "cond", None)
    if condition is not None:
        line = frames[0] if frames else None
        asked = [symbols.described(symbol, line) for symbol in symbols.roots(condition.free_symbols)]
        return f"Python asked for the value of {' and '.join(dict.fromkeys(asked))}"
    operation = getattr(error, "func", None)
    name = str(operation).removesuffix(".default") if operation is not None else "an operation"
    return f"torch read the numbers in a tensor for {name}"


def _remedy(error: BaseException) -> str:
    """What to do where a function of torch is known to read data; "" elsewhere."""
    root = os.path.dirname(torch.__file__) + os.sep
    traceback: TracebackType | None = error.__traceback__
    found = ""
    while traceback is not None:
        if _formats_by_percent(traceback):
            return _PERCENT_REMEDY
        filename = traceback.tb_frame.f_code.co_filename
        if filename.startswith(root):
            inside = filename[len(root) :].replace(os.sep, "/")
            found = next((remedy for part, remedy in _WITHOUT_READING.items() if inside.startswith(part)), found)
        traceback = traceback.tb_next
    return found


def _formats_by_percent(traceback: TracebackType) -> bool:
    """Whether the innermost frame was at a ``%`` that asked for the value of a symbolic number: text was its left side.

    The remainder of a symbolic number is another one, and asks for nothing.
    """
    if traceback.tb_next is not None and is_user_file(traceback.tb_next.tb_frame.f_code.co_filename):
        return False
    if not is_user_file(traceback.tb_frame.f_code.co_filename):
        return False
    return any(
        each.offset == traceback.tb_lasti and each.opname == "BINARY_OP" and each.argrepr in ("%", "%=")
        for each in dis.get_instructions(traceback.tb_frame.f_code)
    )
