"""Steps that are computed twice: corruption is found and named, and nothing else changes."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import weft
from harness import run_ranks
from weft.errors import InvalidArgument, ReplayDiffers

_spec = importlib.util.spec_from_file_location("bench_replay", Path(__file__).parents[1] / "bench" / "replay.py")
assert _spec is not None
assert _spec.loader is not None
bench = importlib.util.module_from_spec(_spec)
sys.modules["bench_replay"] = bench
_spec.loader.exec_module(bench)


def test_every_planted_corruption_of_one_value_is_found() -> None:
    assert bench.corrupt(40) == (40, [])


def dropout_step(**options: Any) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train_step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return weft.compile(train_step, **options)


def test_replayed_steps_have_the_bits_of_others_random_numbers_included() -> None:
    found = []
    for every in (None, 2):
        step = dropout_step(replay_every=every)
        torch.manual_seed(1)
        found.append([step(torch.randn(4, 6)).item() for _ in range(7)] + torch.get_rng_state().tolist())
    assert found[0] == found[1]


def test_only_every_nth_call_is_computed_twice() -> None:
    step, x = dropout_step(replay_every=3), torch.randn(4, 6)
    counts = []
    for _ in range(8):
        with bench.CorruptedOperation(-1, random.Random(0)) as counted:
            step(x)
        counts.append(counted.count)
    once = counts[3]
    assert [round(count / once) for count in counts[1:]] == [1, 2, 1, 1, 2, 1, 1]


def corrupt_one_rank(rank: int, world: int) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
    weft.fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    @weft.compile(replay_every=4)
    def train_step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        return loss

    class WrongGelu(bench.CorruptedOperation):
        """Wrong once, in the backward of rank 1."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.gelu_backward.default and not self.where and rank == 1:
                self.where = "gelu_backward"
                result[0, 0] += 1.0
            return result

    for _ in range(3):
        train_step(torch.randn(4, 6))
    try:
        with WrongGelu(-1, random.Random(0)):
            train_step(torch.randn(4, 6))
    except ReplayDiffers as error:
        return error.rank, str(error)
    return None


@pytest.mark.gloo
def test_all_ranks_name_the_rank_and_its_first_wrong_tensor() -> None:
    """The wrong gradient reaches both ranks by the reduction; what rank 1 sends into it is wrong before."""
    for rank, text in run_ranks(corrupt_one_rank, 2):
        assert rank == 1
        assert "the gradients of model (in backward, as reduce_scatter_tensor sends it)" in text


def test_steps_that_cannot_be_computed_twice_are_refused() -> None:
    seen: list[float] = []
    note = weft.opaque(lambda value: seen.append(float(value)))

    def notes(x: torch.Tensor) -> torch.Tensor:
        note(x.sum())
        return x * 2

    def branches(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x

    for step in (notes, branches):
        with pytest.raises(InvalidArgument, match=f"replay_every.*{step.__name__}"):
            weft.compile(step, replay_every=2)(torch.ones(3))
    assert not seen
    for value in (0, 1.5, True):
        with pytest.raises(InvalidArgument, match="replay_every"):
            weft.compile(branches, replay_every=value)  # type: ignore[call-overload]
