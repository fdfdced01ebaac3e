"""docs/from_scratch.py does what it says, and its checks fail when the compiled step is wrong."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from harness import run_ranks, run_script

PAGE = Path(__file__).parents[2] / "docs" / "from_scratch.py"


def load_page() -> ModuleType:
    """The page as a module. Importing it runs no stage."""
    spec = importlib.util.spec_from_file_location("from_scratch", PAGE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["from_scratch"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.gloo
def test_the_page_runs_and_the_compiled_step_equals_eager_on_both_ranks() -> None:
    run = run_script(PAGE)
    assert run.returncode == 0, run.stdout + run.stderr
    for rank in range(2):
        assert f"rank {rank}: 35 tensors equal to eager" in run.stdout  # 16 parameters, 16 momenta, 3 losses
    before, after = map(int, re.search(r"== collectives: (\d+) -> (\d+)", run.stdout).groups())
    assert before == 32  # an all-gather and a reduce-scatter for each parameter
    assert after <= before / 2
    exposed, left = map(float, re.search(r"exposed communication: ([\d.]+) ms -> ([\d.]+) ms", run.stdout).groups())
    assert left < exposed / 10
    assert "@triton.jit" in run.stdout
    assert float(re.search(r"largest difference from ATen on cpu: (\S+)", run.stdout)[1]) < 1e-6


def scheduled_step(page: ModuleType, rank: int) -> torch.fx.Graph:
    return page.plan(page.capture(page.Training(rank), rank), page.Machine())[0]


def train_with_a_corrupted_graph(rank: int, ranks: int) -> str:
    """The optimizer reads the sum of one gradient instead of its mean."""
    page = load_page()
    graph = scheduled_step(page, rank)
    mean = next(n for n in graph.nodes if n.target is torch.ops.aten.mul.Tensor and n.args[1] == 1 / ranks)
    mean.args = (mean.args[0], 1.0)
    with pytest.raises(AssertionError, match="not equal to eager") as error:
        page.compare_with_eager(rank, page.program_text(page.verify(graph)))
    return str(error.value)


@pytest.mark.gloo
def test_the_comparison_names_the_tensors_that_a_corrupted_graph_changes() -> None:
    errors = run_ranks(train_with_a_corrupted_graph, 2, timeout=150)
    assert all("param_14_bias" in error and "loss_1" in error for error in errors), errors
    assert not any("loss_0" in error for error in errors), "the first forward comes before the wrong update"


def compare_programs(rank: int, ranks: int) -> str:
    """Rank 1 exchanges the order of its two first collectives."""
    page = load_page()
    graph = scheduled_step(page, rank)
    first, second = page.collectives(graph)[:2]
    if rank == 1:
        second.append(first)
        page.verify(graph)
    store = dist.distributed_c10d._get_default_store()
    with pytest.raises(RuntimeError, match="different programs") as error:
        page.agree(store, rank, page.program_text(graph))
    return str(error.value)


@pytest.mark.gloo
def test_ranks_refuse_programs_whose_collectives_are_in_another_order() -> None:
    errors = run_ranks(compare_programs, 2, timeout=150)
    assert all("# all_gather: 0_weight" in error for error in errors), errors


def test_the_verifier_finds_a_stale_shape_and_a_missing_wait() -> None:
    page = load_page()
    graph = page.capture(page.Training(0), 0)
    gather = page.collectives(graph)[0]
    (wait,) = gather.users
    (reader,) = wait.users
    reader.replace_input_with(wait, gather)
    with pytest.raises(AssertionError, match="one wait and no other reader"):
        page.verify(graph)
    reader.replace_input_with(gather, wait)
    page.verify(graph)
    wait.meta["val"] = wait.meta["val"].t()
    with pytest.raises(AssertionError, match="wait_tensor: recorded as"):
        page.verify(graph)


def test_a_write_through_a_view_of_a_parameter_is_refused() -> None:
    page = load_page()

    class WritesThroughView(page.Training):
        def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.state["param_0_weight"].view(-1).mul_(2.0)
            return super().step(x, y)

    with pytest.raises(NotImplementedError, match="through another view"):
        page.capture(WritesThroughView(0), 0)
