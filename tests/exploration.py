"""Property tests with new seeds, for as long as asked: ``make explore SECONDS=600``.

A property test is any test with ``@given`` of hypothesis. ``make test`` draws its examples from fixed seeds, so that a
change fails for what it changed. Exploration runs all property tests again and again, each round with another seed, and
prints the failing examples and the commands that repeat them. A test that failed is left out of later rounds.

A test that should look for longer while exploring says so with :func:`examples`:

    @settings(max_examples=examples(ci=300, exploring=5_000))
    @given(programs())
    def test_steps_equal_eager(program): ...
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).parent
# Seconds in which pytest has to print what it found after it was interrupted.
_GRACE = 60.0
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


def register_profiles() -> None:
    """Register the profiles ``ci`` (fixed seeds) and ``explore`` with hypothesis, and load ``ci``.

    ``tests/conftest.py`` calls this before test files are imported, because their ``settings`` inherit from the profile
    that is loaded then.
    """
    from hypothesis import settings

    settings.register_profile("ci", deadline=None, derandomize=True)
    settings.register_profile("explore", deadline=None, derandomize=False, print_blob=True)
    settings.load_profile("ci")


def examples(ci: int, exploring: int | None = None) -> int:
    """How many examples a property test tries: ``ci`` in a test run, ``exploring`` (default: 10 times ``ci``) in each
    round of an exploration."""
    from hypothesis import settings

    if settings.get_current_profile_name() != "explore":
        return ci
    return 10 * ci if exploring is None else exploring


def explore(seconds: float, files: Sequence[Path], arguments: Sequence[str] = (), most_rounds: float = math.inf) -> int:
    """Run the property tests of ``files`` until ``seconds`` or ``most_rounds`` are over. Returns how many failed.

    Args:
        arguments: more arguments for pytest.
    """
    until, rounds, failed = time.monotonic() + seconds, 0, list[str]()
    # The seeds come from the operating system: every exploration draws others.
    fresh = random.SystemRandom()
    while (left := until - time.monotonic()) > 0 and rounds < most_rounds:
        seed, rounds = fresh.randrange(1 << 32), rounds + 1
        # In another order each round: a short exploration does not end in the same file each time.
        shuffled = random.Random(seed).sample(files, len(files))
        options = ["-m", "property", "--hypothesis-profile=explore", f"--hypothesis-seed={seed}", *arguments]
        command = [sys.executable, "-m", "pytest", "-q", "--timeout=0", *options]
        print(f"round {rounds}, seed {seed}, {left:.0f} s left", flush=True)
        code, text = _output([*command, *(f"--deselect={test}" for test in failed), *map(str, shuffled)], left)
        new = [test for test in _FAILED.findall(text) if test not in failed]
        # 2: interrupted, 5: no tests
        print(text if new or code not in (0, 2, 5) else text.rstrip().rpartition("\n")[2])
        if code not in (0, 1, 2, 5):
            raise SystemExit(f"pytest ended with {code}")
        for test in new:
            print(f"repeat: python -m pytest --hypothesis-profile=explore --hypothesis-seed={seed} '{test}'")
        failed += new
    print(f"{rounds} rounds, {len(failed)} property tests failed", *failed, sep="\n")
    return len(failed)


def _output(command: list[str], seconds: float) -> tuple[int, str]:
    """Exit code and output of a run of pytest that is interrupted after ``seconds``."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        text, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # pytest then reports the tests that are over
        try:
            text, _ = process.communicate(timeout=_GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text, _ = process.communicate()
            return 2, text
    return process.returncode, text


def property_test_files() -> list[Path]:
    """The test files with a property test, in a fixed order."""
    return sorted(file for file in TESTS.rglob("test_*.py") if re.search(r"^@given\(", file.read_text(), re.MULTILINE))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Run all property tests with new seeds. More arguments go to pytest.")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long")
    known, more = parser.parse_known_args()
    sys.exit(min(explore(known.seconds, property_test_files(), more), 1))
