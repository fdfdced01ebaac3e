"""The file of a program, run by another Python with triton's own interpreter, leaves what the program leaves."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor, nn

from weft.capture.graph import StepGraph
from weft.capture.record.tracer import capture_step
from weft.capture.user_code import Frame
from weft.inductor.compiler import make_kernels
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes
from weft.inductor.runtime.aten import compile_aten
from weft.inductor.runtime.multi_tensor import Launcher, use_kernels
from weft.inductor.runtime.program_file import program_file
from weft.launch.minify import random_inputs
from weft.triton_adapter import without_packed_integers

_RUN = """
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("program", sys.argv[1])
program = importlib.util.module_from_spec(spec)
spec.loader.exec_module(program)
inputs = torch.load(sys.argv[2])
kept = list(inputs)
torch.save([program.run(inputs), kept], sys.argv[3])
"""


def trained() -> StepGraph:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return capture_step(step, (torch.randn(7, 6),)).graph


def named_like_the_file() -> StepGraph:
    """Over parameters that are called what the file calls things of its own."""
    out, part = (nn.Parameter(torch.ones(6, 6)) for _ in range(2))

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            return (out * x @ part).sum()

    return capture_step(step, (torch.randn(6, 6),)).graph


def test_triton_compiles_the_file_as_weft_compiles_the_step(tmp_path: Path) -> None:
    """ptxas compiles packed 16-bit integers wrongly: they are replaced in Triton's own stages too."""
    program = tmp_path / "program.py"
    program.write_text(program_file(make_kernels(run_passes(trained(), KERNEL_PASSES))))
    knobs = triton.knobs.runtime, triton.knobs.cache
    before = knobs[0].add_stages_inspection_hook, knobs[1].dir
    try:
        names = runpy.run_path(str(program))
        hook = knobs[0].add_stages_inspection_hook
        stages: dict[str, Any] = {"ptx": lambda source, metadata: f"\tadd.s16x2 %r1, %r2, {source};", "cubin": str}
        hook(None, stages, None, None, 90)  # as a backend of Triton calls it
        assert hook is names["replace_packed_integers"]
        assert all(type(part) is str for part in hook())
        assert stages["ptx"]("%r3", {}) == without_packed_integers("\tadd.s16x2 %r1, %r2, %r3;")
        assert "x2" not in stages["ptx"]("%r3", {})
        with pytest.raises(ValueError, match="packed"):
            stages["ptx"]("%r3, %r4", {})
        assert knobs[1].dir == f"{before[1]}/weft"
    finally:
        knobs[0].add_stages_inspection_hook, knobs[1].dir = before


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("captured", [trained, named_like_the_file])
def test_the_file_computes_what_the_program_computes(
    captured: Callable[[], StepGraph], planned: bool, tmp_path: Path
) -> None:
    step = use_kernels(make_kernels(run_passes(captured(), KERNEL_PASSES)))
    values = random_inputs(step)
    program, inputs, found = (tmp_path / name for name in ("program.py", "inputs", "found"))
    program.write_text(program_file(step, planned))
    torch.save(values, inputs)
    environment = {"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", _RUN, program, inputs, found]
    subprocess.run(command, env=environment, check=True, timeout=120)
    results, left = torch.load(found)
    torch.testing.assert_close(results, compile_aten(step)(*values))
    torch.testing.assert_close(left, values)


def test_a_training_step_writes_its_lists_in_place() -> None:
    step = use_kernels(make_kernels(run_passes(trained(), KERNEL_PASSES)))
    assert any(isinstance(node.meta.get("inplace"), Launcher) for node in step.graph.nodes)
    assert "in_place(" in program_file(step)


def test_each_kernel_says_which_lines_it_came_from() -> None:
    text = program_file(make_kernels(run_passes(trained(), KERNEL_PASSES)))
    assert f"{Path(__file__).name}:" in text


def code_of(text: str) -> str:
    """The syntax tree of a file without docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
    return ast.dump(tree)


@pytest.mark.parametrize(
    "name", ["f\nraise_", "f\rraise_", "f\u2028raise_", 'f"""\nraise_', 'f\\"""\nraise_', "f\\N{x}", "f\\", 'f"']
)
def test_names_of_users_functions_files_and_parameters_never_become_code(name: str) -> None:
    plain, step = trained(), trained()
    for node in step.graph.nodes:
        if frames := node.meta.get("frames"):
            node.meta["frames"] = (Frame(f"{name}.py", 1, name), *frames[1:])
    step.inputs[:] = [replace(entry, path=name) for entry in step.inputs]
    text, expected = (program_file(make_kernels(run_passes(graph, KERNEL_PASSES))) for graph in (step, plain))
    assert code_of(text) == code_of(expected)
    assert code_of(compile_aten(step).source) == code_of(compile_aten(plain).source)
    assert "1 in f" in text
