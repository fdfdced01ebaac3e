"""The lines of the user's code that are running now, for the metadata of nodes and for error messages.

Every node of a graph carries them, so finding them is cheap: a few microseconds, one dictionary look-up per frame.
"""

from __future__ import annotations

import ast
import functools
import gc
import itertools
import linecache
import sys
from collections.abc import Sequence
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

from weft.source_files import KIND_OF_FILE, LIBRARY, is_library_file, is_user_file

# The type of functions with `functools.lru_cache`.
REMEMBERING = type(functools.lru_cache(lambda: None))
# Packages that look at files, processes and threads for ends of their own, whoever calls them.
_ASK_FOR_THEMSELVES = frozenset(
    {"logging", "warnings", "linecache", "inspect", "tokenize", "importlib", "zipimport", "sympy", "mpmath", "triton"}
)
# Its functions stand for those of Python that take a name as text.
_COMPUTED_NAMES = "weft.capture.record.computed_names"
_FORMATS = "weft.capture.record.percent_formats"
# Methods of torch's objects that make text for whoever calls them, and the functions that comprehensions run in.
_TEXTS = frozenset({"__repr__", "__str__", "__format__", "extra_repr"})
_COMPREHENSIONS = frozenset({"<listcomp>", "<genexpr>", "<dictcomp>"})
# Where the step is called.
_TRACER = "weft.capture.record.tracer"


class Frame(NamedTuple):
    """One line of user code: file, line number from 1, and the name of the function."""

    filename: str
    lineno: int
    name: str


class RunningCall(NamedTuple):
    """A call that is running in user code, kept as code and position: its text is read only where it is shown."""

    code: CodeType
    instruction: int
    lineno: int

    def text(self) -> str:
        """Its source, such as ``labels.max().item()``; the whole line, or "", where Python knows no more."""
        line = linecache.getline(self.code.co_filename, self.lineno)
        positions = next(itertools.islice(self.code.co_positions(), self.instruction // 2, None), (None,) * 4)
        first, last, start, end = positions
        if line and first == last == self.lineno and start is not None and end is not None:
            line = line.encode()[start:end].decode(errors="replace")
        return line.strip()


def user_frames(limit: int = 8) -> tuple[Frame, ...]:
    """The innermost `limit` frames of the calling thread that are the user's code, innermost first.

    Frames of torch, the standard library, generated code and weft itself are left out. Installed packages, and weft's
    tests, examples and benchmarks, are user code. Where all of these frames are in installed packages, the last one is
    replaced by the innermost frame outside them: a line of a library alone does not tell the user where to look.
    Empty where no user code is running, for example in a thread that torch started.
    """
    found: list[Frame] = []
    own = limit < 2  # whether a line outside installed packages is among them
    frame = sys._getframe(1)
    kind_of_file = KIND_OF_FILE
    while frame is not None and (len(found) < limit or not own):
        code = frame.f_code
        filename = code.co_filename
        known = kind_of_file[filename]
        if known:
            installed = known == LIBRARY
            if len(found) < limit:
                found.append(Frame(filename, frame.f_lineno, code.co_name))
            elif not installed:
                found[-1] = Frame(filename, frame.f_lineno, code.co_name)
            own = own or not installed
        frame = frame.f_back
    return tuple(found)


def running_call() -> RunningCall | None:
    """What the innermost frame of user code is doing; None where no user code is running."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return RunningCall(frame.f_code, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    return None


def frames_of(traceback: TracebackType | None) -> list[Frame]:
    """The frames of user code that an error passed through, innermost first."""
    found: list[Frame] = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if is_user_file(code.co_filename):
            found.append(Frame(code.co_filename, traceback.tb_lineno, code.co_name))
        traceback = traceback.tb_next
    return found[::-1]


def format_frame(frame: Frame) -> str:
    """`train.py:12 in train_step`, with the path as Python knows it."""
    return f"{shown_file(frame.filename)}:{frame.lineno} in {frame.name}"


def shown_file(filename: str) -> str:
    """The name of a file for readers: ``Cell In[3]`` for a cell of a notebook, whose file is a temporary one."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    name_cell = getattr(getattr(shell, "compile", None), "format_code_name", lambda name: None)
    cell = name_cell(filename)
    return " ".join(cell) if cell else filename


def format_frames(frames: Sequence[Frame], *, source: bool = False) -> str:
    """The innermost frame, and where that is in an installed package also the innermost outside of it.

    Args:
        frames: innermost first, at least one.
        source: whether the text of the first line follows.
    """
    first = frames[0]
    text = format_frame(first)
    if source and (line := linecache.getline(first.filename, first.lineno).strip()):
        text += f": `{line}`"
    caller = next((frame for frame in frames if not is_library_file(frame.filename)), None)
    return text if caller is None or caller is first else f"{text}, called from {format_frame(caller)}"


def printable(text: str) -> str:
    """``text`` with every unprintable character as a Python escape sequence.

    File names, function names and parameter names are the user's: a line feed in one of them, written into a comment
    of generated code, would end the comment and make the rest a statement.
    """
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def user_line() -> str:
    """The innermost user frame, formatted, and where that is a library's the user's line that led to it;
    `<no user code on the stack>` when there is none."""
    frames = user_frames(2)
    return format_frames(frames) if frames else "<no user code on the stack>"


def in_raise_statement() -> bool:
    """Whether the innermost user frame is in a ``raise`` or ``assert`` statement."""
    frames = user_frames(2)
    if not frames:
        return False
    try:
        tree = ast.parse("".join(linecache.getlines(frames[0].filename)))
    except SyntaxError:  # a notebook's cell, a file that has changed
        return False
    line = frames[0].lineno
    statements = (node for node in ast.walk(tree) if isinstance(node, (ast.Raise, ast.Assert)))
    return any(node.lineno <= line <= (node.end_lineno or node.lineno) for node in statements)


def nearest_package(*skipped: str) -> str:
    """The top-level package of the innermost running code that is in none of ``skipped``, modules and packages."""
    frame = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        package = name.split(".")[0]
        if name not in skipped and package not in skipped:
            return package
        frame = frame.f_back
    return ""


def called_by_user(*skipped: str) -> bool:
    """Whether the code that called the caller of this function is the user's, not counting files that end like
    ``skipped``. The standard library reads clocks and the environment for its own ends."""
    frame = _asking(sys._getframe(2))
    while frame is not None and skipped and frame.f_code.co_filename.endswith(skipped):
        frame = frame.f_back
    return frame is not None and is_user_file(frame.f_code.co_filename)


def _asking(frame: FrameType | None) -> FrameType | None:
    """The frame that calls ``getattr`` and the like, where what stands for that runs in ``frame``."""
    while frame is not None and frame.f_globals.get("__name__") == _COMPUTED_NAMES:
        frame = frame.f_back
    return frame


def cache_of(function: Any) -> dict[Any, Any] | None:
    """The dictionary from arguments to results of a function with ``functools.lru_cache``; with a limited size, to
    links that hold the results. None where nothing was ever remembered."""
    attributes = vars(function)
    return next((each for each in gc.get_referents(function) if type(each) is dict and each is not attributes), None)


def called_for_user(*skipped: str) -> bool:
    """Whether the user's code, that of installed packages included, made the call that runs now, itself or through the
    standard library, and would make it at every call of the step.

    Not so for what runs once in eager too: a module that is imported now, a function that remembers its results. Nor
    for what logging and the like ask for ends of their own.

    Args:
        skipped: modules that work for their caller.
    """
    frame = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        package = module.split(".")[0]
        if package in _ASK_FOR_THEMSELVES:
            return False
        if module in (_COMPUTED_NAMES, _FORMATS) or (package == "torch" and _makes_text(frame)):
            frame = frame.f_back
            continue
        if module == "__main__" or not (package in sys.stdlib_module_names or module in skipped):
            return is_user_file(frame.f_code.co_filename) and not _runs_once(frame)
        frame = frame.f_back
    return False


def _makes_text(frame: FrameType | None) -> bool:
    """Whether a method runs in the frame that makes text of an object for whoever calls it."""
    while frame is not None and frame.f_code.co_name in _COMPREHENSIONS:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name in _TEXTS


def _runs_once(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_globals.get("__name__") != _TRACER:
        if frame.f_code.co_name == "<module>" or is_remembered(frame):
            return True
        frame = frame.f_back
    return False


def is_remembered(frame: FrameType) -> bool:
    """Whether a function with ``functools.lru_cache`` is running in the frame."""
    found: Any = frame.f_globals.get(frame.f_code.co_name)
    found = getattr(found, "weft_original", found)
    return isinstance(found, REMEMBERING) and getattr(found.__wrapped__, "__code__", None) is frame.f_code


def formatting_frame(frame: FrameType) -> FrameType:
    """The frame that makes a text, of those from ``frame`` outwards: not that of a constant on the left of ``%``
    (:mod:`weft.capture.record.percent_formats`), which stands for code in C."""
    while frame.f_globals.get("__name__") == _FORMATS and frame.f_back is not None:
        frame = frame.f_back
    return frame
