"""Test runs draw from fixed seeds; explorations draw new ones and report what they find."""

from __future__ import annotations

import os
import re
from pathlib import Path

import exploration
import pytest
from hypothesis import settings

TESTS = Path(__file__).parent
# Draws that differ from run to run, whatever the seeds of the global generators.
UNSEEDED = re.compile(
    r"\b(?:random\.Random\(\)|SystemRandom\(|default_rng\(\)|RandomState\(\)|torch\.seed\(\)|random\.seed\(\)"
    r"|derandomize=False|use_true_random=True)"
)
PLANTED = """
from hypothesis import given, settings, strategies as st
from exploration import examples

@settings(max_examples=examples(ci=1, exploring=500))
@given(st.integers(0, 1 << 20))
def test_planted(number):
    assert number % 64 != 17

@given(st.integers())
def test_holds(number):
    assert number == number
"""


def test_examples_come_from_fixed_seeds_unless_exploring() -> None:
    exploring = settings.get_current_profile_name() == "explore"
    assert settings().derandomize is not exploring


def test_no_test_draws_from_an_unseeded_generator() -> None:
    files = [file for file in TESTS.rglob("*.py") if file.name not in {"exploration.py", "test_exploration.py"}]
    found = [
        f"{file.relative_to(TESTS)}: {match[0]}" for file in files for match in UNSEEDED.finditer(file.read_text())
    ]
    assert len(files) > 100
    assert not found


def test_an_exploration_reports_a_failing_example_and_how_to_repeat_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The planted error is met by one number in 64: not by the one example of a test run."""
    file = tmp_path / "test_planted.py"
    file.write_text(PLANTED)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.chdir(tmp_path)
    options = ["-c", str(TESTS.parent / "pyproject.toml"), "-p", "conftest"]
    assert exploration.explore(100.0, [file], options, most_rounds=1) == 1
    text = capsys.readouterr().out
    assert "number=17" in text
    assert re.search(
        r"repeat: python -m pytest --hypothesis-profile=explore --hypothesis-seed=\d+ '.*test_planted'", text
    )
    assert "1 rounds, 1 property tests failed" in text
