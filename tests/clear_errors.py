"""What a clear error message is, as code: a table of misuses is held to it.

A misuse is one line that a user could write. The error must be weft's own, and of the builtin kind that PyTorch raises
for the same mistake. Its message names the argument, shows the value given, says what to do, and is short and free of
internals.
"""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from weft.errors import WeftError

TORCH = Path(torch.__file__).parent
ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 8
MAX_CHARACTERS = 1200
MAX_SECONDS = 1.0  # of this process on a processor: other processes may keep it from running

# A remedy is an instruction: a sentence or a clause that begins with one of these verbs.
_VERBS = (
    "add allow ask build call change choose clone compile compute correct create do drop enter export give install"
    " initialize keep leave load make mark measure move name pass put raise read register remove return run save select"
    " set start step take unset use wait wrap write"
)
_REMEDY = re.compile(rf"(?:[.:;,)]|\bor|\band|\bthen)\s+(?:{'|'.join(_VERBS.split())})\b", re.IGNORECASE)

# Symbols of sizes and numbers, sympy's text, addresses, local names of functions, and texts of tracebacks.
INTERNALS = re.compile(
    r"\bz?[usf]+\d+\b|\bEq\(|\bNe\(|\bunhinted\b|\bat 0x[0-9a-f]+|<locals>|<lambda>|Traceback|AssertionError|_weft_"
    r"|\bNoneType\b|object has no attribute|FakeTensor|SymInt|SymNode|\bsympy\b"
)


@dataclass(frozen=True)
class Misuse:
    """One mistake.

    Attributes:
        source: an expression or statements that make the mistake.
        argument: what the message must name.
        given: the value, as the message must show it.
        kind: the builtin class that the error must also be an instance of.
        torch: the same mistake made with PyTorch. If that raises a ValueError, TypeError, NotImplementedError or
            IndexError, weft's error must be an instance of that class too.
    """

    source: str
    argument: str
    given: str
    kind: type[Exception] = RuntimeError
    torch: str = ""

    def __str__(self) -> str:
        return " ".join(self.source.split())


def outcome(source: str, names: Mapping[str, Any]) -> Exception | None:
    """What the statements raise."""
    try:
        exec(source, dict(names))
    except Exception as error:  # noqa: BLE001 - to be judged
        return error
    return None


def faults(misuse: Misuse, names: Mapping[str, Any], public: bool = True) -> list[str]:
    """Why the error of a misuse is not clear; nothing where it is.

    Args:
        public: whether public functions raise it, and so none of weft's own frames is shown.
    """
    start = time.process_time()
    error = outcome(misuse.source, names)
    seconds = time.process_time() - start
    if error is None:
        return ["accepted"]
    if not isinstance(error, WeftError):
        return [f"raw {type(error).__name__}: {str(error)[:300]}"]
    found = faults_of_message(str(error)) + [f"shows {frame}" for frame in frames_of_weft(error) if public]
    if not isinstance(error, misuse.kind):
        found.append(f"is a {type(error).__name__}, not a {misuse.kind.__name__}")
    found += [f"does not contain {word!r}" for word in (misuse.argument, misuse.given) if word not in str(error)]
    if seconds > MAX_SECONDS:
        found.append(f"took {seconds:.1f} s")
    if misuse.torch:
        theirs = outcome(misuse.torch, names)
        for kind in (ValueError, TypeError, NotImplementedError, IndexError):
            if type(theirs) is kind and not isinstance(error, kind):
                found.append(f"torch raises {kind.__name__}: {theirs}")
    return [f"{type(error).__name__}: {error}", *found] if found else []


def frames_of_weft(error: BaseException) -> list[str]:
    """The frames of weft's own files in the traceback of an error, which tell a user nothing. Those that torch calls
    stand below frames of torch anyway."""
    stack = traceback.extract_tb(error.__traceback__)
    frames = takewhile(lambda frame: TORCH not in Path(frame.filename).parents, stack)
    return [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames if _is_of_weft(Path(frame.filename))]


def _is_of_weft(file: Path) -> bool:
    file = file.resolve()
    return file.suffix == ".py" and file.is_relative_to(ROOT) and not file.is_relative_to(ROOT / "tests")


def faults_of_message(text: str) -> list[str]:
    """What is wrong with a message by itself."""
    found = []
    if (inner := INTERNALS.search(text)) is not None:
        found.append(f"speaks of {inner.group()!r}")
    if _REMEDY.search(text) is None:
        found.append("names no remedy")
    if len(text.splitlines()) > MAX_LINES or len(text) > MAX_CHARACTERS:
        found.append(f"has {len(text.splitlines())} lines, {len(text)} characters")
    return found
