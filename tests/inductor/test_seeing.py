"""What a compilation says and leaves behind where it is asked to: log lines, files, the rooms' own demonstration."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import weft
from weft import errors, knobs
from weft.capture.tracer import capture_step
from weft.inductor.compiler import compile_graph, make_kernels
from weft.inductor.passes.pipeline import EVERY_PASS, run_passes
from weft.inductor.runtime import compile_pool
from weft.inductor.runtime.aten import compile_aten
from weft.inductor.saved import load


def halves(x: Tensor) -> Tensor:
    return torch.tanh(x + 1) @ x


def test_a_compilation_is_one_line_and_more_when_asked(caplog: pytest.LogCaptureFixture) -> None:
    step = run_passes(capture_step(halves, (torch.randn(4, 4),)).graph, EVERY_PASS)
    with caplog.at_level(logging.INFO, "weft.inductor"):
        make_kernels(step.copy())
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("1 kernels (1 different) of 2 operations; seconds: ")
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "weft.inductor"):
        make_kernels(step.copy())
    told = "\n".join(caplog.messages)
    assert "@triton.jit" in told
    assert f"tanh: {__file__}:" in told
    assert "not lowered: 1 x aten.mm.default" in told
    assert "loop nests not joined: none" in told


def test_nothing_is_said_of_no_kernels(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "weft.inductor"):
        compile_pool.build([], 90)
    assert not caplog.messages


def test_steps_are_written_where_a_knob_says(tmp_path: Path) -> None:
    x = torch.randn(4, 4)
    with knobs.override(dump_dir=str(tmp_path / "new")):
        compile_graph(capture_step(halves, (x,)).graph)
        weft.compile(halves)(x)
    graphs, programs = (sorted((tmp_path / "new").glob(f"step_*_{kind}.py")) for kind in ("graph", "program"))
    assert len(graphs) == len(programs) == 2
    assert torch.equal(compile_aten(load(graphs[0]))(x)[0], halves(x))
    assert "def run(inputs):" in programs[0].read_text()


def test_errors_say_how_to_reduce_a_step() -> None:
    for error in (errors.KernelCompilationFailed("k", "why", "text"), errors.VerifyFailed(["a"])):
        assert "WEFT_DUMP_DIR" in str(error)
        assert "weft.inductor.minify" in str(error)


def test_the_room_shows_what_becomes_of_a_toy_step() -> None:
    environment = {"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "weft.inductor"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    for part in ("loop nests of", "kernels after fusion", "@triton.jit", "def run(inputs):"):
        assert part in run.stdout
