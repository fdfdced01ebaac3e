"""Type checkers see the types of the public names, those of the user's own functions and models among them."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import weft

ROOT = Path(__file__).parents[1]
CASES = ROOT / "tests" / "typing" / "public_names.py"


def check(checker: str, file: Path) -> subprocess.CompletedProcess[str]:
    """mypy's cache lies beside the folders of all tests: most of its time is spent on torch."""
    package = str(ROOT / ".types")
    python = sys.executable
    if checker == "pyrefly":
        command = [shutil.which("pyrefly", path=f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}") or ""]
        command += ["check", "-c", str(ROOT / "pyproject.toml"), "--python-interpreter-path", python]
        command += ["--output-format", "min-text", str(file)]
        found = bool(command[0])
    else:
        command = [python, "-m", "mypy", "--follow-imports=silent", "--ignore-missing-imports", str(file)]
        command += ["--warn-unused-ignores", "--cache-dir", str(file.parents[1] / ".mypy_cache")]
        found = importlib.util.find_spec("mypy") is not None
    if not found:
        pytest.skip(f"{checker} is not installed")
    return subprocess.run(
        command, capture_output=True, text=True, cwd=file.parent, env={**os.environ, "MYPYPATH": package}
    )


# Torch's own function, without annotations there.
OF_TORCH = {"loss_parallel"}
# What ``...`` of a callable is printed as, and modules that are public as a whole.
NO_ANY = re.compile(r"\(\*Any, \*\*Any\)")
MODULES = {"errors", "knobs"}


@pytest.mark.parametrize("checker", ["pyrefly", "mypy"])
def test_no_public_name_is_any(checker: str, tmp_path: Path) -> None:
    file = tmp_path / "reveals.py"
    file.write_text(
        "from typing import reveal_type\nimport weft\n" + "".join(f"reveal_type(weft.{n})\n" for n in weft.__all__)
    )
    output = check(checker, file).stdout
    found = dict(re.findall(r"reveals\.py:(\d+)\b.*[Rr]evealed type(?: is)?:? ?(.*)", output))
    types = {name: NO_ANY.sub("(...)", found[str(at)]) for at, name in enumerate(weft.__all__, 3)}
    assert {name for name, text in types.items() if re.search(r"\b(Any|Unknown)\b", text)} <= OF_TORCH, types
    assert {name for name, text in types.items() if "ModuleType" in text or text.startswith("Module[")} <= MODULES, (
        types
    )


@pytest.mark.parametrize("checker", ["pyrefly", "mypy"])
def test_public_names_have_types(checker: str, tmp_path: Path) -> None:
    file = tmp_path / "public_names.py"
    file.write_text(CASES.read_text())
    result = check(checker, file)
    assert result.returncode == 0, result.stdout + result.stderr
    # Each mistake is found: without its comment it is an error.
    text = CASES.read_text()
    file.write_text(text.replace("  # type: ignore", ""))
    result = check(checker, file)
    lines = [at for at, line in enumerate(text.splitlines(), 1) if "# type: ignore" in line]
    assert lines
    assert not [at for at in lines if f"public_names.py:{at}:" not in result.stdout], result.stdout
