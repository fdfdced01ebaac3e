"""The toy step is captured at any world size, and each package prints its result of it."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from weft.capture.toy import capture_toy


@pytest.mark.fake
def test_the_toy_graph_is_the_same_at_any_world_size() -> None:
    small, large = capture_toy(4), capture_toy(4096)
    assert len(small) == len(large)
    assert {entry.role.value for entry in small.inputs} == {"parameter", "batch", "scalar"}
    assert len(small.collectives()) == len(large.collectives()) > 0


@pytest.mark.fake
@pytest.mark.parametrize(("room", "function"), [("capture", "step"), ("inductor", "run")])
def test_python_m_prints_the_result_of_each_package(room: str, function: str) -> None:
    command = [sys.executable, "-m", f"weft.{room}"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    text = printed[printed.rindex(f"def {function}(") :]
    (definition,) = ast.parse(text).body
    assert isinstance(definition, ast.FunctionDef)
    assert definition.name == function
    assert "all_gather_into_tensor" in text
    assert "toy.py:" in text
