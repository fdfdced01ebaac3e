"""Batches whose position survives a restart: each sample once an epoch, on any number of ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import weft
from harness import run_ranks
from weft.errors import CannotCheckpoint, InvalidArgument


def take(sampler: weft.ResumableSampler, count: int, **options: Any) -> list[list[int]]:
    """The indices of the next batches, through a loader whose dataset holds its own indices."""
    loader = DataLoader(range(sampler.length), batch_sampler=sampler, **options)  # type: ignore[arg-type]
    batches = sampler.batches(loader)
    return [next(batches).tolist() for _ in range(count)]


def test_every_epoch_has_each_sample_once_in_an_order_of_its_own() -> None:
    sampler = weft.ResumableSampler(37, 4, seed=3)
    assert len(sampler) == 9
    epochs = [[index for batch in take(sampler, 9) for index in batch] for _ in range(3)]
    for epoch in epochs:
        assert max(Counter(epoch).values()) == 1
        assert len(epoch) == 36  # the last sample fills no batch
        assert set(epoch) <= set(range(37))
    assert len(set(map(tuple, epochs))) == 3
    assert take(weft.ResumableSampler(8, 4, shuffle=False), 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_goes_on_with_the_next_batch_and_the_same_random_numbers(workers: int) -> None:
    """Workers hold batches ready that the run has not seen: those do not count."""
    whole = take(weft.ResumableSampler(40, 4, seed=1), 25)
    before = weft.ResumableSampler(40, 4, seed=1)
    assert take(before, 13, num_workers=workers) == whole[:13]
    after = weft.ResumableSampler(40, 4, seed=1)
    after.load_state_dict(before.state_dict())
    drawn = torch.get_rng_state()
    assert take(after, 12, num_workers=workers) == whole[13:]
    assert torch.equal(torch.get_rng_state(), drawn)


def take_ranks(rank: int, world: int, state: Any, count: int) -> Any:
    sampler = weft.ResumableSampler(64, 12, seed=5)
    if state is not None:
        sampler.load_state_dict(state)
    parts: list[Any] = [None] * world
    dist.all_gather_object(parts, take(sampler, count))
    return [[index for part in batch for index in part] for batch in zip(*parts, strict=True)], sampler.state_dict()


@pytest.mark.gloo
def test_another_number_of_ranks_goes_on_with_the_same_batches() -> None:
    whole = take(weft.ResumableSampler(64, 12, seed=5), 9)
    first, state = run_ranks(take_ranks, 3, None, 4)[1]
    second, _ = run_ranks(take_ranks, 2, state, 5)[0]
    assert first + second == whole


def test_what_cannot_be_resumed_is_refused() -> None:
    sampler = weft.ResumableSampler(40, 4)
    next(iter(DataLoader(range(40), batch_sampler=sampler)))  # type: ignore[arg-type]
    with pytest.raises(CannotCheckpoint, match=r"sampler\.batches\(loader\)"):
        sampler.state_dict()
    with pytest.raises(CannotCheckpoint, match="its seed was 0 and is 1"):
        weft.ResumableSampler(40, 4, seed=1).load_state_dict(weft.ResumableSampler(40, 4).state_dict())
    with pytest.raises(InvalidArgument, match="batch_size is 0"):
        weft.ResumableSampler(40, 0)
    with pytest.raises(InvalidArgument, match="length is 3, and must be at least 4"):
        weft.ResumableSampler(3, 4)
