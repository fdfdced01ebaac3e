"""A step keeps a bounded number of compiled forms: the one used longest ago goes, with its memory, and comes back when
it is needed, on all ranks alike."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import weft
from harness import run_ranks
from weft import knobs, torch_adapter
from weft.capture.guards.guards import Guards


def trained(rows: list[int], compiled: bool) -> tuple[list[torch.Tensor], Any]:
    """Losses of a training on batches of so many rows, the last parameters, and the step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        for parameter in model.parameters() if dist.is_initialized() else ():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = weft.compile(step, dynamic=False) if compiled else step
    generator = torch.Generator().manual_seed(1)
    losses = [run(torch.randn(count, 4, generator=generator)) for count in rows]
    return [*losses, *(parameter.detach() for parameter in model.parameters())], run


def test_the_form_used_longest_ago_goes_and_comes_back() -> None:
    rows = [1, 2, 1, 3, 1, 2, 3, 1]
    with knobs.override(form_limit=2):
        ours, step = trained(rows, compiled=True)
    expected, _ = trained(rows, compiled=False)
    assert all(map(torch.equal, ours, expected))
    assert len(step.entries) == 2
    assert [entry.captured.arguments.shapes[0][0] for entry in step.entries] == [1, 3]
    assert len(step.captures) == 6  # 1, 2, 3 in the place of 2, 2 in that of 3, 3 in that of 1, 1 in that of 2


def test_forms_that_went_leave_nothing() -> None:
    gc.collect()
    others = [each for each in gc.get_objects() if issubclass(type(each), FakeTensor)]  # of tests before this one
    known = set(map(id, others))
    with knobs.override(form_limit=2):
        _, step = trained([1, 2, 3, 4], compiled=True)
        gone = [weakref.ref(entry.program) for entry in step.entries]
        counts = []
        for first in (5, 8, 11):
            step(torch.randn(first, 4)), step(torch.randn(first + 1, 4)), step(torch.randn(first + 2, 4))
            gc.collect()
            fakes = [each for each in gc.get_objects() if issubclass(type(each), FakeTensor)]
            counts.append(sum(id(each) not in known for each in fakes))
            del fakes
    assert all(program() is None for program in gone)
    assert counts[0] == counts[1] == counts[2]


def test_torchs_cache_of_fake_results_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_adapter, "MAX_FAKE_RESULTS", 60)
    FakeTensorMode.cache_clear()
    sizes = []
    for count in range(20, 26):
        ours, _ = trained([count], compiled=True)
        expected, _ = trained([count], compiled=False)
        assert all(map(torch.equal, ours, expected))
        sizes.append(len(FakeTensorMode.cache))
    assert max(sizes) <= 60
    assert sizes[0] > 10  # so that without a bound there were more


def test_a_hit_asks_one_form_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Guards] = []
    unchanged = Guards.unchanged
    monkeypatch.setattr(Guards, "unchanged", lambda self, *call: asked.append(self) or unchanged(self, *call))
    rows = list(range(1, 9))
    _, step = trained(rows * 2, compiled=True)
    assert len(step.entries) == len(rows)
    for count in rows:
        asked.clear()
        step(torch.randn(count, 4))
        assert len(asked) == 1


def _on_a_rank(rank: int, world: int) -> tuple[bool, int, int]:
    rows = [1, 2, 3, 1, 2, 3, 3, 1]
    with knobs.override(form_limit=2):
        ours, step = trained(rows, compiled=True)
    expected, _ = trained(rows, compiled=False)
    return all(map(torch.equal, ours, expected)), len(step.entries), len(step.captures)


@pytest.mark.gloo
def test_ranks_drop_and_capture_the_same_forms() -> None:
    assert run_ranks(_on_a_rank, 2) == [(True, 2, 7)] * 2
