"""Every pass keeps to its tier: one tier leaves every bit as it was, the other stays as close to float64.

Each pass runs on its own over a handful of steps, on the ATen executor. Passes over collectives are held to it on
several processes: test_passes.py, test_wire_dtype.py, test_split_all_reduce.py, test_shard_embedding.py.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pass_runs import BIT_KEEPING
from weft.capture.record.captured_step import CapturedStep
from weft.capture.record.tracer import capture_step
from weft.inductor.graph.pass_runner import Pass
from weft.inductor.passes.chunk_loss import ChunkLoss
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes
from weft.inductor.passes.rematerialise import Rematerialise
from weft.inductor.passes.write_in_place import write_in_place
from weft.inductor.runtime.aten import compile_aten

Loss = Callable[[nn.Module, Tensor], Tensor]


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class LanguageModel(nn.Module):
    """Embeddings, residual blocks, and a head of 4003 classes, an odd number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4003, 64)
        self.blocks = nn.Sequential(Residual(64), Residual(64))
        self.head = nn.Linear(64, 4003, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(ids)))


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.Conv2d(32, 32, 3), nn.GELU()
    )


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())


def under_autocast(loss: Loss) -> Loss:
    def cast(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss(model, x)

    return cast


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean() + model(x * 1)[..., :1].float().abs().mean()


def regrouped(model: nn.Module, x: Tensor) -> Tensor:
    """The rows in another order: as a gather along another dimension than the first brings them."""
    return squares(model, torch.cat(x.chunk(4), 1).view(x.shape))


@dataclass(frozen=True)
class Case:
    """A training step: of which model, which loss of what, and whether it clips and updates by fused AdamW or SGD."""

    model: Callable[[], nn.Module]
    loss: Loss
    batch: Callable[[], Tensor]
    fused: bool

    def step(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        """The step over ``model``, whose gradients stay so that they can be compared."""
        if self.fused:
            # As large as gradients are: with a small one the first update is lr times the sign of a gradient, whatever
            # its size, and rounding flips the sign of those near 0.
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, fused=True)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(model, x)
            loss.backward()
            if self.fused:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
            return loss.detach()

        return step


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def tokens() -> Tensor:
    return torch.randint(0, 4003, (4, 33), generator=torch.Generator().manual_seed(0))


CASES = {
    "language model": Case(LanguageModel, next_token, tokens, True),
    "autocast": Case(LanguageModel, under_autocast(next_token), tokens, True),
    "images": Case(images, squares, lambda: draw(2, 16, 8, 8), False),
    "dropout": Case(
        lambda: nn.Sequential(Residual(64), nn.Dropout(0.3), Residual(64)), regrouped, lambda: draw(8, 64), False
    ),
}


@functools.cache
def captured(name: str, dtype: torch.dtype = torch.float32) -> CapturedStep:
    """The step of a case, whose parameters have ``dtype``."""
    torch.manual_seed(0)
    case = CASES[name]
    model = case.model().to(dtype)
    batch = case.batch()
    return capture_step(case.step(model), (batch.to(dtype) if batch.is_floating_point() else batch,))


def outcome(step: CapturedStep, passes: list[Pass]) -> list[Tensor]:
    """What the step returns, and what it leaves in its inputs."""
    program = compile_aten(run_passes(step.graph, passes))
    values = [copy.deepcopy(place.get()) for place in step.places]
    torch.manual_seed(1)
    returned = program(*values)
    return [value.detach() for value in (*returned, *values) if isinstance(value, Tensor)]


@functools.cache
def plain(name: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return outcome(captured(name, dtype), [])


# ---- passes that keep bits

EXACT: dict[str, Pass] = {pass_.__name__: pass_ for pass_ in (*BIT_KEEPING, write_in_place)}
EXACT["rematerialise"] = Rematerialise(0, smallest_bytes=0)
# These change only graphs with collectives, the last one only their metadata.
OF_COLLECTIVES = {"drop_unused_gathers", "pack", "wire_casts", "number_collectives"}


@pytest.mark.parametrize("name", EXACT)
def test_a_pass_that_keeps_bits_changes_no_bit(name: str) -> None:
    changed = set()
    for case in CASES:
        step = captured(case)
        results = outcome(step, [EXACT[name]])
        assert len(results) == len(plain(case))
        assert all(torch.equal(a, b) for a, b in zip(results, plain(case), strict=True)), case
        before, after = run_passes(step.graph, []), run_passes(step.graph, [EXACT[name]])
        if str(before) != str(after) or compile_aten(before).source != compile_aten(after).source:
            changed.add(case)
    assert changed or name in OF_COLLECTIVES


def test_all_passes_that_keep_bits_change_no_bit_together() -> None:
    for case in CASES:
        results = outcome(captured(case), BIT_KEEPING)
        assert all(torch.equal(a, b) for a, b in zip(results, plain(case), strict=True)), case


# ---- passes that may change sums

CHANGING: dict[str, Pass] = {pass_.__name__: pass_ for pass_ in KERNEL_PASSES if pass_.numeric_effect}
CHANGING["chunk_loss"] = ChunkLoss(chunk_bytes=0, smallest_bytes=0, least_rows=16, multiple=1)
# All but the last change only graphs with collectives, the last one only graphs on a GPU.
ELSEWHERE = {"join_all_reduces", "sequence_parallel", "shard_embedding", "split_all_reduces", "shard_norms"}
ELSEWHERE |= {"scalars_to_memory"}
HALVES = torch.bfloat16


@pytest.mark.parametrize("name", CHANGING)
def test_a_pass_that_changes_sums_is_as_close_to_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.inductor.passes.pad_matmuls._LEAST_WORK", 0)
    changed = set()
    for case, dtype in [("language model", torch.float32), ("language model", HALVES), ("images", HALVES)]:
        step = captured(case, dtype)
        if str(run_passes(step.graph, [CHANGING[name]])) == str(run_passes(step.graph, [])):
            continue
        changed.add(case)
        exact = in_float64(case, dtype)
        results = outcome(step, [CHANGING[name]])
        for ours, theirs, reference in zip(results, plain(case, dtype), exact, strict=True):
            if ours.is_floating_point():
                bound = 1.5 * error(theirs, reference) + 4 * torch.finfo(ours.dtype).eps
                assert error(ours, reference) <= bound, (case, dtype)
    assert changed or name in ELSEWHERE


def error(value: Tensor, exact: Tensor) -> float:
    """Relative error in the 2-norm."""
    return float((value.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-30))


@functools.cache
def in_float64(name: str, dtype: torch.dtype) -> list[Tensor]:
    """The step from the same parameters in float64."""
    torch.manual_seed(0)
    case = CASES[name]
    model = case.model().to(dtype).double()
    batch = case.batch()
    batch = batch.to(dtype).double() if batch.is_floating_point() else batch
    return outcome(capture_step(case.step(model), (batch,)), [])
