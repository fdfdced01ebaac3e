"""Misuses of the command line: each ends with status 1 and a clear message, and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clear_errors import faults_of_message
from weft.inductor.transports.symmetric_memory import NO_MULTICAST
from weft.launch.cli import main
from weft.launch.minify import main as minify

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files that are no graphs. The environment is that without torchrun, and restored after the test."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", *NO_MULTICAST):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "raises.py").write_text("raise ValueError('not here')")
    (tmp_path / "exits.py").write_text("import sys; sys.exit(3)")
    (tmp_path / "binary.py").write_bytes(bytes(range(256)))
    return tmp_path


def ending(run: object) -> str:
    """The text that the process would end with."""
    with pytest.raises(SystemExit) as end:
        run()  # type: ignore[operator]
    assert isinstance(end.value.code, str), "the status must be 1, and the reason be said"
    assert end.value.code.startswith("weft: ")
    return end.value.code


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none.py", "none.py is no graph that weft saved: No such file"),
        ("empty.py", "defines no function build"),
        ("broken.py", "SyntaxError"),
        ("raises.py", "ValueError: not here"),
        ("exits.py", "SystemExit"),
        ("binary.py", "binary.py is no graph"),
        (".", "is no graph"),
    ],
)
def test_files_that_are_no_graphs_are_named(name: str, said: str) -> None:
    message = ending(lambda: minify(Path(name), device="cpu"))
    assert said in message
    assert not faults_of_message(message), message


@pytest.mark.parametrize("device", ["quantum", "gpu", "meta", "tpu:0", ""])
def test_devices_that_are_not_there_are_named(device: str) -> None:
    message = ending(lambda: minify(Path("empty.py"), device=device))
    assert f"device={device!r}" in message
    assert not faults_of_message(message), message


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "first"}, "RANK is 'first'"),
        ({"RANK": "0", "LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1'"),
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "MASTER_ADDR is not set"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}, "MASTER_PORT is not set"),
        ({"RANK": "0", "WORLD_SIZE": "two", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, "WORLD_SIZE is 'two'"),
    ],
)
def test_a_broken_environment_of_a_launcher_is_named(
    variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    message = ending(lambda: main(["calibrate", "--scale", "tiny"]))
    assert said in message
    assert not faults_of_message(message), message


def test_a_folder_is_no_file_to_calibrate_into(folder: Path) -> None:
    message = ending(lambda: main(["calibrate", "--out", str(folder)]))
    assert f"path is '{folder}'" in message
    assert not faults_of_message(message), message


@pytest.mark.parametrize("module", ["weft.launch", "weft.knobs"])
def test_a_mistake_in_a_knob_ends_programs_without_a_traceback(module: str) -> None:
    path = os.pathsep.join([str(ROOT / ".types"), *sys.path])
    environment = {**os.environ, "WEFT_BUCKET_MIB": "many", "PYTHONPATH": path}
    ended = subprocess.run(
        [sys.executable, "-m", module], capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert "WEFT_BUCKET_MIB = 'many'" in ended.stderr
    assert not faults_of_message(ended.stderr), ended.stderr
