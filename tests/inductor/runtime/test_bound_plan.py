"""Kernels of multi-tensor calls: the one that fetches addresses, and when all are compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import weft
from weft.capture.graph import StepGraph
from weft.inductor import compiler
from weft.inductor.codegen.kernel_source import KernelSource
from weft.inductor.compiler import loading_passes
from weft.inductor.fusion.kernel_stages import kernel_graph
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes
from weft.inductor.runtime import kernels, multi_tensor
from weft.inductor.runtime.bound_plan import fetch_grid, fetch_source
from weft.inductor.runtime.kernels import compile_kernels

CPU = torch.device("cpu")


@pytest.mark.parametrize("words", [1, 7, 1024, 1025, 3000])
def test_one_kernel_copies_tables_of_any_length(words: int) -> None:
    (fetch,) = compile_kernels([fetch_source()], CPU)
    locked = torch.arange(words + 5, dtype=torch.int64) + 2**40
    table = torch.zeros(words + 5, dtype=torch.int64)
    fetch.launch(fetch_grid(words), 0, locked, table, words)
    assert table[:words].equal(locked[:words])
    assert not table[words:].any()


def adamw_step() -> StepGraph:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def train(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return kernel_graph(run_passes(weft.capture(train, torch.randn(4, 8)), KERNEL_PASSES))


def loaded(monkeypatch: pytest.MonkeyPatch, fails: Callable[[KernelSource], bool] = lambda _: False) -> list[list[str]]:
    """The names of the kernels that each call compiles anew, in a compilation of a step with an optimizer."""
    monkeypatch.setattr(kernels, "_kernels", {})
    calls: list[list[str]] = []

    def noted(sources: Sequence[KernelSource], device: torch.device) -> Any:
        new = [each for each in dict.fromkeys(sources) if (each, device) not in kernels._kernels]
        if any(map(fails, new)):
            raise RuntimeError("planted")
        calls.append([each.name for each in new])
        return compile_kernels(sources, device)

    monkeypatch.setattr(compiler, "compile_kernels", noted)
    monkeypatch.setattr(multi_tensor, "compile_kernels", noted)
    step = adamw_step()
    for pass_ in loading_passes():
        step = pass_(step)
    assert any(isinstance(node.meta.get("inplace"), multi_tensor.Launcher) for node in step.graph.nodes)
    return calls


def test_kernels_of_multi_tensor_calls_are_compiled_together_with_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *later = loaded(monkeypatch)
    assert "adamw" in first
    assert len(first) > 2
    assert not any(later)


def test_kernels_that_cannot_be_compiled_together_are_compiled_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter([True])
    calls = loaded(monkeypatch, lambda source: source.name == "adamw" and next(failures, False))
    by_kind = [names for names in calls if names]
    assert len(by_kind) == 2
    assert "adamw" not in by_kind[0]
    assert "adamw" in by_kind[1]
