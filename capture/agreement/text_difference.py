"""A readable difference of two long texts: the first places where they differ.

A line may end with remarks, which are shown and not compared: the parameters that it is about, and the user's file and
line.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator

# Lines of each text that are compared, from the first difference on. Comparing two long graphs whole takes minutes.
WINDOW = 400
CONTEXT = 3
PARAMETERS = "  # of "
REMARK = "  # at "


def without_remarks(text: str) -> str:
    """What is compared of a text."""
    return "\n".join(map(_compared, text.splitlines()))


def without_lines(text: str) -> str:
    """The text without the user's files and lines; the parameters stay."""
    return "\n".join(map(_with_parameters, text.splitlines()))


def _compared(line: str) -> str:
    return _with_parameters(line).partition(PARAMETERS)[0]


def _with_parameters(line: str) -> str:
    return line.partition(REMARK)[0]


def difference(before: str, after: str, before_name: str, after_name: str, max_lines: int = 60) -> str:
    """A unified difference of two texts, trimmed to its first `max_lines` lines; empty where they are equal.

    Parameters count where nothing else differs. Each hunk is headed by the line numbers of both texts and has three
    lines of context.
    """
    a, b = before.splitlines(), after.splitlines()
    key = _compared if without_remarks(before) != without_remarks(after) else _with_parameters
    a_keys, b_keys = [*map(key, a)], [*map(key, b)]
    if a_keys == b_keys:
        return ""
    start = max(0, _common(a_keys, b_keys) - CONTEXT)
    end = max(0, _common(a_keys[start:][::-1], b_keys[start:][::-1]) - CONTEXT)
    a_part, b_part = a[start : len(a) - end], b[start : len(b) - end]
    lines = [f"--- {before_name}", f"+++ {after_name}", *_hunks(a_part[:WINDOW], b_part[:WINDOW], start, key)]
    if len(lines) > max_lines or max(len(a_part), len(b_part)) > WINDOW:
        lines[max_lines:] = [f"... (of {len(a)} and {len(b)} lines; later differences are not shown)"]
    return "\n".join(lines)


def _common(a: list[str], b: list[str]) -> int:
    """The number of equal lines at the beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _hunks(a: list[str], b: list[str], start: int, key: Callable[[str], str]) -> Iterator[str]:
    """The hunks of two lists of lines, both of which are cut from their texts after `start` lines."""
    matcher = difflib.SequenceMatcher(None, [*map(key, a)], [*map(key, b)], autojunk=False)
    for group in matcher.get_grouped_opcodes(CONTEXT):
        yield f"@@ line {start + group[0][1] + 1} | line {start + group[0][3] + 1} @@"
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                yield from (f"  {line}" for line in a[i1:i2])
            else:
                yield from (f"- {line}" for line in a[i1:i2])
                yield from (f"+ {line}" for line in b[j1:j2])
