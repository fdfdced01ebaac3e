"""Positions that the data decides: kernels assert that the dimension has them, as eager's kernels do."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import weft
from weft.errors import StepFailed
from weft.inductor.compiler import make_kernels
from weft.inductor.fusion.kernel_stages import kernel_calls
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes
from weft.inductor.runtime.aten import compile_aten

TABLE, ROWS = torch.randn(10, 70), torch.randn(6, 40)

Step = Callable[..., Any]
CASES: dict[str, tuple[Step, tuple[torch.Tensor, ...], tuple[int, ...]]] = {
    # the step, its arguments, of which the last holds the positions, and positions that are out of range
    "embedding": (lambda w, i: F.embedding(i, w) * 2, (TABLE, torch.tensor([[1, 2, 9]])), (10, -1)),
    "embedding of numbers before": (lambda w, i: F.embedding(i - 1, w) * 2, (TABLE, torch.tensor([1, 10, 3])), (0, 11)),
    "gather": (lambda x, i: x.gather(1, i) + 1, (ROWS, torch.tensor([[0], [39], [5], [1], [2], [3]])), (40, -1)),
    "index_select": (lambda x, i: x.index_select(1, i) + 1, (ROWS, torch.tensor([39, 0, 7])), (40, -1)),
    "index": (lambda x, i: x[i] + 1, (ROWS, torch.tensor([5, -6, 0])), (6, -7)),
    "index of two": (lambda x, i: x[i, i] + 1, (ROWS, torch.tensor([5, -6, 0])), (6, -7)),
    "int32": (lambda x, i: x[i] + 1, (ROWS, torch.tensor([5, 0], dtype=torch.int32)), (6,)),
    "part of a concatenation": (
        lambda x, i: torch.cat([x, x[i - 1].exp()]) * 2,
        (ROWS, torch.tensor([6, 1, 2])),
        (7, -6),
    ),
    # The table is computed where it is read, and loads nothing.
    "rows of one-hot vectors": (lambda i: torch.eye(10)[i] * 2, (torch.tensor([0, 9, -10]),), (10, -11)),
    "an arange": (lambda i: torch.arange(5)[i] * 2, (torch.tensor([4, -5, 0]),), (5, -6)),
    "a lower triangle": (lambda i: torch.tril(torch.ones(5, 5))[i] * 2, (torch.tensor([4, 2]),), (5,)),
    "a concatenation": (lambda x, i: torch.cat([x, x * 2])[i] * 2, (ROWS, torch.tensor([11, -12])), (12, -13)),
    "a padded tensor": (lambda x, i: F.pad(x[0], (1, 1))[i] * 2, (ROWS, torch.tensor([41, -42])), (42, -43)),
    "positions that are a part": (
        lambda x, i: x[torch.cat([torch.arange(5)[i - 6], torch.arange(3)])] * 2,
        (ROWS, torch.tensor([6, 7, 10])),
        (11, 0),
    ),
    "positions that are padded": (
        lambda x, i: x[F.pad(torch.arange(5)[i - 6], (0, 3))] * 2,
        (ROWS, torch.tensor([6, 7, 10])),
        (11, 0),
    ),
    "scatter": (lambda x, i: x.scatter(1, i[:, None], 1.0) * 2, (ROWS, torch.tensor([0, 39, 5, 1, 2, 3])), (40, -1)),
    "index_put": (
        lambda x, i: x.index_put((torch.arange(6), i), torch.ones(6)) * 2,
        (ROWS, torch.tensor([0, 39, -40, 1, 2, 3])),
        (40, -41),
    ),
    "index_add": (
        lambda x, i: torch.zeros(3, 40).index_add(0, i, x) * 2,
        (ROWS, torch.tensor([0, 2, 1, 1, 0, 2])),
        (3,),
    ),
    "cross_entropy": (F.cross_entropy, (ROWS, torch.tensor([0, 39, -100, 4, 5, 6])), (40, -1)),
    "cross_entropy with weights": (
        lambda w, x, t: F.cross_entropy(x, t, w),
        (torch.rand(40), ROWS, torch.tensor([0, 39, -100, 4, 5, 6])),
        (40, -1),
    ),
    "row sums of what is picked": (lambda w, i: F.embedding(i, w).exp().sum(-1), (TABLE, torch.tensor([1, 9])), (10,)),
}


def in_kernels(step: Step, *args: torch.Tensor) -> list[torch.Tensor]:
    """What the kernels of a step compute."""
    graph = make_kernels(run_passes(weft.capture(step, *args), KERNEL_PASSES))
    assert kernel_calls(graph)
    given = [args[int(entry.path.removeprefix("args[").removesuffix("]"))] for entry in graph.inputs]
    return list(compile_aten(graph)(*given))


@pytest.mark.parametrize("name", CASES)
def test_positions_in_range_give_the_results_of_eager(name: str) -> None:
    step, args, _ = CASES[name]
    torch.testing.assert_close(in_kernels(step, *args)[0], step(*args))


@pytest.mark.parametrize("name", CASES)
def test_a_position_out_of_range_is_an_error_as_in_eager(name: str) -> None:
    step, (*others, positions), wrong = CASES[name]
    for position in wrong:
        changed = positions.clone()
        changed.view(-1)[-1] = position
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            step(*others, changed)
        with pytest.raises(StepFailed, match="index out of range"):
            in_kernels(step, *others, changed)


def test_positions_that_are_known_are_not_asserted() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x[torch.arange(6)] + x[torch.arange(5, -1, -1)]

    graph = make_kernels(run_passes(weft.capture(step, ROWS), KERNEL_PASSES))
    assert not any("device_assert" in call.generated.source.text for call in kernel_calls(graph))
    torch.testing.assert_close(in_kernels(step, ROWS)[0], step(ROWS))


@pytest.mark.gpu
def test_a_position_out_of_range_ends_a_step_on_a_gpu() -> None:
    """In a process of its own, since no kernel runs on a GPU after a failed assertion."""
    code = """
        import torch, weft
        import torch.nn.functional as F

        @weft.compile
        def step(table, ids, scores, labels):
            return F.embedding(ids, table).sum() + F.cross_entropy(scores, labels)

        def run(ids, labels):
            values = torch.ones(100, 16), torch.tensor(ids), torch.ones(4, 50), torch.tensor(labels)
            return step(*(value.cuda() for value in values)).item()

        for _ in range(3):
            print("in range", run([99, 0, 5], [49, 0, -100, 3]))
        print("out of range", run(IDS, LABELS))
    """
    for ids, labels in (("[100, 0, 5]", "[49, 0, 1, 3]"), ("[99, 0, 5]", "[49, 0, 50, 3]")):
        text = textwrap.dedent(code).replace("IDS", ids).replace("LABELS", labels)
        run = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300)
        assert run.stdout.count("in range") == 3, run.stderr
        assert "out of range" not in run.stdout
        assert run.returncode != 0
        assert "device-side assert" in run.stderr
        assert "index out of range of a dimension" in run.stderr
