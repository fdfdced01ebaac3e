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
from weft.capture.record.tracer import capture_step
from weft.inductor.compiler import compile_graph, make_kernels
from weft.inductor.graph.repro import load
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes
from weft.inductor.runtime import compile_pool
from weft.inductor.runtime.aten import compile_aten


def halves(x: Tensor) -> Tensor:
    return torch.tanh(x + 1) @ x


def test_a_compilation_logs_one_line_at_info_and_details_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    step = run_passes(capture_step(halves, (torch.randn(4, 4),)).graph, KERNEL_PASSES)
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


def test_a_compilation_logs_its_passes_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "weft.inductor"):
        compile_graph(capture_step(halves, (torch.randn(4, 4),)).graph)
    assert any("nodes" in text and "common_subexpressions" in text for text in caplog.messages)


def test_compiling_no_kernels_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "weft.inductor"):
        compile_pool.build([], 90)
    assert not caplog.messages


def test_dump_dir_receives_the_graph_and_the_program(tmp_path: Path) -> None:
    x = torch.randn(4, 4)
    with knobs.override(dump_dir=str(tmp_path / "new")):
        compile_graph(capture_step(halves, (x,)).graph)
        weft.compile(halves)(x)
    graphs, programs = (sorted((tmp_path / "new").glob(f"step_*_{kind}.py")) for kind in ("graph", "program"))
    assert len(graphs) == len(programs) == 2
    assert torch.equal(compile_aten(load(graphs[0]))(x)[0], halves(x))
    assert "def run(inputs):" in programs[0].read_text()


def test_errors_name_the_minifier() -> None:
    for error in (errors.KernelCompilationFailed("k", "why", "text"), errors.VerifyFailed(["a"])):
        assert "WEFT_DUMP_DIR" in str(error)
        assert "weft.launch.minify" in str(error)


def test_running_the_package_prints_passes_loops_kernels_and_program() -> None:
    environment = {"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "weft.inductor"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    for part in ("generate_kernels", "loop nests of", "kernels after fusion", "@triton.jit", "def run(inputs):"):
        assert part in run.stdout
