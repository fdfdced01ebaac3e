"""What every test run has: the size of each room at the end, for the reader to see it grow."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def lines_per_room() -> dict[str, int]:
    """Lines of Python in each top-level folder; files at the top level count as the room `weft`."""
    sizes: Counter[str] = Counter()
    for file in ROOT.rglob("*.py"):
        path = file.relative_to(ROOT)
        if not path.parts[0].startswith(".") and path.parts[0] not in {"build", "dist", "out"}:
            room = path.parts[0] if len(path.parts) > 1 else "weft"
            sizes[room] += len(file.read_text().splitlines())
    return dict(sizes)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rooms = sorted(lines_per_room().items())
    terminalreporter.write_line("lines: " + ", ".join(f"{room} {size:,}" for room, size in rooms))
