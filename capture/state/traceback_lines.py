"""The lines of user code that an exception passed through, without its frames.

The frames of a capture hold fake tensors and all records of the capture. An exception that each call makes again gets a
traceback of frames without variables that show the same lines.
"""

from __future__ import annotations

import ast
import functools
import itertools
import types
from dataclasses import dataclass

from weft.source_files import is_user_file


@dataclass(frozen=True)
class PassedLine:
    """One entry of a traceback; ``position`` is (line, last line, column, last column) of the expression."""

    filename: str
    name: str
    qualname: str
    position: tuple[int, int, int, int]


def lines_of(traceback: types.TracebackType | None) -> tuple[PassedLine, ...]:
    """The entries of user code, outermost first."""
    found: list[PassedLine] = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if is_user_file(code.co_filename):
            at = next(itertools.islice(code.co_positions(), traceback.tb_lasti // 2, None), (None,) * 4)
            first, last, left, right = at
            # Without columns (`python -X no_debug_ranges`), the whole line.
            line = first or traceback.tb_lineno
            position = (line, last or line, left or 0, right or 0)
            found.append(PassedLine(code.co_filename, code.co_name, code.co_qualname, position))
        traceback = traceback.tb_next
    return tuple(found)


def traceback_of(lines: tuple[PassedLine, ...]) -> types.TracebackType | None:
    """A traceback that shows these lines."""
    traceback = None
    for line in reversed(lines):
        passed = _passed(line)
        traceback = types.TracebackType(traceback, passed.tb_frame, passed.tb_lasti, passed.tb_lineno)
    return traceback


class _Passing(Exception):
    """Raised on a line, for a frame there."""


def _passed(line: PassedLine) -> types.TracebackType:
    """The entry of a traceback for an exception that is raised on a line."""
    traceback: types.TracebackType | None = None
    try:
        exec(_code(line), {"error": _Passing}, {})
    except _Passing as error:
        traceback = error.__traceback__
    assert traceback is not None
    assert traceback.tb_next is not None
    return traceback.tb_next


@functools.lru_cache(256)
def _code(line: PassedLine) -> types.CodeType:
    first, last, left, right = line.position
    place = {"lineno": first, "end_lineno": last, "col_offset": left, "end_col_offset": right}
    statement = ast.Raise(ast.Name("error", ast.Load(), **place), None, **place)
    code = compile(ast.Module([statement], []), line.filename, "exec")
    return code.replace(co_name=line.name, co_qualname=line.qualname)
