"""Make the text of a random program shorter while it still fails in the same way."""

from __future__ import annotations

import re
from collections.abc import Callable


def reduced(source: str, fails: Callable[[str], bool], most_tries: int = 300) -> str:
    """The program with every line and every call left out that the failure does not need.

    Args:
        fails: whether a text still fails in the same way.
        most_tries: calls of ``fails``; what is left then is returned.
    """
    tries = 0
    changed = True
    while changed:
        changed = False
        for candidate in _shorter(source):
            if tries == most_tries:
                return source
            tries += 1
            if fails(candidate):
                source, changed = candidate, True
                break
    return source


def _shorter(source: str) -> list[str]:
    """The text without one of its blocks, lines, calls or returned values, larger cuts first."""
    lines = source.splitlines(keepends=True)
    start = next((at for at, line in enumerate(lines) if line.startswith("class Scaled")), None)
    start = next(at for at, line in enumerate(lines) if line.startswith("ROWS")) if start is None else start
    found: list[str] = []
    for at in reversed(range(start, len(lines))):
        line = lines[at]
        indent = len(line) - len(line.lstrip())
        text = line.strip()
        if rows := re.fullmatch(r"ROWS = \[(.*)\]", text):
            entries = rows[1].split(", ")
            found += [
                _with(lines, at, at + 1, f"ROWS = [{', '.join(entries[:i] + entries[i + 1 :])}]\n")
                for i in range(len(entries))
                if len(entries) > 1
            ]
        if not text or (indent == 0 and not text.startswith("class ")):
            continue
        if text.startswith("return") and indent == 8 and text != "return None":
            found.append(_with(lines, at, at + 1, "        return None\n"))
        if text in ("pass", "s = State()", "return s, step") or text.startswith(("return", "n = ROWS")):
            continue
        if text.startswith("def step("):
            continue
        end = at + 1
        while end < len(lines) and (not lines[end].strip() or _indent(lines[end]) > indent) and text.endswith(":"):
            end += 1
        found.append(_with(lines, at, end, ""))
        found.append(_with(lines, at, end, " " * indent + "pass\n"))
        if text.endswith(":"):  # the lines of the block without its header
            inner = "".join(each[4:] if each.strip() else each for each in lines[at + 1 : end])
            found.append(_with(lines, at, end, inner))
    return sorted(set(found), key=len)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _with(lines: list[str], begin: int, end: int, text: str) -> str:
    return "".join(lines[:begin]) + text + "".join(lines[end:])
