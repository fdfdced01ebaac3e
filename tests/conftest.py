"""What every test run has: fixed seeds, GPUs for those tests that need them, and the size of each room at the end."""

from __future__ import annotations

import importlib.util
import logging
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exploration import register_profiles

# Verifiers run after every pass and stage, and no failing pass is left out, in processes that tests start too. Set
# before weft reads its knobs.
os.environ.setdefault("WEFT_VERIFY_GRAPHS", "1")
os.environ.setdefault("WEFT_STRICT", "1")

ROOT = Path(__file__).parents[1]

# Some machines with GPUs have no hypothesis. Tests without it run there.
if importlib.util.find_spec("hypothesis") is not None:
    register_profiles()


def seed_generators() -> None:
    """Seed the global generators of torch, Python and numpy.

    The draws of a test then do not depend on which tests ran before it, nor on the time.
    """
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> None:
    if isinstance(collector, pytest.Module):  # test files draw tensors when they are imported
        seed_generators()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("property")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    seed_generators()  # again after the fixtures, of which some run once for many tests
    # pytest puts handlers on loggers that do not propagate. With one on this logger, torch writes a structured record,
    # with the stack, of every fake tensor: an eighth of the time of a capture.
    logging.getLogger("torch.__trace").handlers.clear()


def pytest_runtest_setup(item: pytest.Item) -> None:
    seed_generators()
    if (mark := item.get_closest_marker("gpu")) is not None:
        count = mark.args[0] if mark.args else 1
        if torch.cuda.device_count() < count:
            pytest.skip(f"needs {count} GPU(s)")


@pytest.fixture(autouse=True)
def _settings_of_torch_restored() -> Iterator[None]:
    """A test, or a script that it runs in this process, may set how torch computes: other tests must not see that."""
    cudnn: Any = torch.backends.cudnn
    dtype, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    convolution, benchmark = cudnn.conv.fp32_precision, cudnn.benchmark
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision)
    if (cudnn.conv.fp32_precision, cudnn.benchmark) != (convolution, benchmark):
        cudnn.conv.fp32_precision, cudnn.benchmark = convolution, benchmark


@pytest.fixture(params=["compiled", "joined", "through torch"])
def guard_checks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The ways in which guards compare objects: by the checks that weft compiles, one by one or joined as soon as
    nothing has changed since the call before, and by torch's."""
    from guard_library import compile_checks

    from weft import state_checks
    from weft.capture.guards import steady_checks

    monkeypatch.setattr(steady_checks, "_CALM", 1 if request.param == "joined" else sys.maxsize)
    if request.param == "through torch":
        importlib.import_module("torch._dynamo.guards")  # torch's optimizers load it
        monkeypatch.setattr(state_checks, "compiled", lambda: None)
    else:
        compile_checks()
    return request.param


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
