"""Objects of `torch.utils.data` that a step reads: their attributes are guarded, and those of what they hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, SequentialSampler, Subset
from torch.utils.data import WeightedRandomSampler as Weighted

import weft


class Numbers(Dataset[float]):
    """Three numbers, multiplied."""

    def __init__(self) -> None:
        self.factor = 2.0

    def __getitem__(self, at: int) -> float:
        return at * self.factor

    def __len__(self) -> int:
        return 3


def numbers(at: int, numbers: Numbers) -> None:
    """Change what a data set computes."""
    numbers.factor = at + 7.0


CASES: list[tuple[Callable[[], Any], Callable[[Any], float], Callable[[int, Any], Any]]] = [
    (lambda: Subset(range(10), [1, 2]), lambda s: len(s.indices), lambda at, s: s.indices.append(at)),
    (lambda: Subset(range(10), [1, 2]), len, lambda at, s: s.indices.append(at)),
    (lambda: Subset(range(10), [1, 2]), lambda s: s[0], lambda at, s: setattr(s, "indices", [at])),
    (lambda: Subset(Numbers(), [1, 2]), lambda s: s[0], lambda at, s: numbers(at, s.dataset)),
    (lambda: Subset(Numbers(), [1, 2]), lambda s: s.dataset.factor, lambda at, s: numbers(at, s.dataset)),
    (lambda: Weighted([0.5], 3), lambda s: s.num_samples, lambda at, s: setattr(s, "num_samples", at)),
    (lambda: Weighted([0.5], 3), len, lambda at, s: setattr(s, "num_samples", at)),
    (
        lambda: BatchSampler(SequentialSampler(range(10)), 3, drop_last=False),
        len,
        lambda at, s: setattr(s, "batch_size", 2 + at),
    ),
    (
        lambda: ConcatDataset([Numbers(), Numbers()]),
        lambda s: len(s) + s[4],
        lambda at, s: numbers(at, s.datasets[1]),
    ),
    (lambda: DataLoader(Numbers()), lambda s: s.dataset.factor, lambda at, s: numbers(at, s.dataset)),
    (lambda: SequentialSampler([1]), len, lambda at, s: setattr(s, "data_source", range(at))),
]


@pytest.mark.parametrize(("make", "read", "change"), CASES)
def test_what_changes_between_calls_is_read_anew(
    make: Callable[[], Any], read: Callable[[Any], float], change: Callable[[int, Any], Any]
) -> None:
    held = make()
    step: Callable[[Tensor], Tensor] = weft.compile(lambda x: x * read(held))
    for at in range(4):
        assert step(torch.ones(())).item() == read(held)
        change(at, held)
