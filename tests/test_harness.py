"""The harness itself: results by rank, and a readable story when ranks raise, die or hang."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable

import growth
import pytest
import torch
import torch.distributed as dist

from harness import RanksFailed, RanksTimedOut, run_ranks

pytestmark = pytest.mark.gloo


def summed(rank: int, world: int, size: int) -> torch.Tensor:
    value = torch.full((size,), float(rank + 1))
    dist.all_reduce(value)
    return value


def raises_on_one(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("rank one says no")
    dist.barrier()


def dies_on_one(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(3)
    dist.barrier()


def sleeps_on_one(rank: int, world: int) -> None:
    if rank == 1:
        time.sleep(60)
    dist.barrier()


def leaves_a_mark(rank: int, world: int) -> bool:
    marked = hasattr(torch, "mark_of_a_test")
    torch.mark_of_a_test = True  # type: ignore[attr-defined]
    return marked


def state_at_its_start(rank: int, world: int, module: str) -> tuple[bool, str | None]:
    return module in sys.modules, os.environ.get("PYTHONPATH")


@pytest.mark.parametrize("world", [1, 2, 4])
def test_results_come_back_in_rank_order(world: int) -> None:
    total = world * (world + 1) / 2
    assert [r.tolist() for r in run_ranks(summed, world, 3)] == [[total] * 3] * world


def test_an_exception_comes_back_with_its_type_and_every_rank_s_traceback() -> None:
    with pytest.raises(RanksFailed, match="rank one says no") as caught:
        run_ranks(raises_on_one, 2)
    assert isinstance(caught.value.errors[1], ValueError)
    assert isinstance(caught.value.__cause__, ValueError)
    assert "--- rank 0 ---" in str(caught.value)


def test_a_rank_that_dies_is_reported_with_its_exit_code() -> None:
    with pytest.raises(RanksFailed, match="exit code 3"):
        run_ranks(dies_on_one, 2)


def test_a_hang_ends_in_time_and_shows_every_rank_s_stack() -> None:
    start = time.monotonic()
    with pytest.raises(RanksTimedOut) as caught:
        run_ranks(sleeps_on_one, 2, timeout=4)
    assert time.monotonic() - start < 15
    assert "in barrier" in str(caught.value)
    assert "in sleeps_on_one" in str(caught.value)


def test_each_call_starts_from_fresh_processes() -> None:
    assert run_ranks(leaves_a_mark, 2) == [False, False]
    assert run_ranks(leaves_a_mark, 2) == [False, False]


def test_ranks_find_modules_imported_and_the_path_of_any_process() -> None:
    assert run_ranks(state_at_its_start, 1, "torch._dynamo.guards") == [(True, os.environ.get("PYTHONPATH") or None)]


def test_a_quadratic_algorithm_is_found_by_its_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]  # the algorithms below set the time that they take: a busy machine does not change it
    monkeypatch.setattr(growth, "process_time", lambda: clock[0])

    def takes(seconds: Callable[[int], float]) -> Callable[[int], Callable[[], None]]:
        return lambda size: lambda: clock.__setitem__(0, clock[0] + seconds(size))

    with pytest.raises(AssertionError, match="4 times the size"):
        growth.assert_near_linear(takes(lambda size: size**2), 200)
    growth.assert_near_linear(takes(lambda size: size * math.log(size)), 200)
    growth.assert_growth(takes(lambda size: size**2), 200, 2)
