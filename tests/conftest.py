"""What every test run has: GPUs for those tests that need them, and the size of each room at the end."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if (mark := item.get_closest_marker("gpu")) is not None:
        count = mark.args[0] if mark.args else 1
        if torch.cuda.device_count() < count:
            pytest.skip(f"needs {count} GPU(s)")


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
