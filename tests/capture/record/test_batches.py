"""Batches of every kind over twenty calls that change in value and in length: how often a step is captured, and that
it leaves what eager leaves."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from counted_captures import Cases, Encoding
from torch import nn
from torch.nn.utils import rnn

import weft
from both_ways import assert_equal, detached

CALLS = 20
Train = Callable[..., torch.Tensor]
Case = tuple[Callable[..., Any], Callable[[int], Any]]
CASES = Cases()
case = CASES.case


class Named(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor
    rows: int


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    y: torch.Tensor
    rows: int


def rows(at: int) -> int:
    return 3 + (5 * at) % 7


def batch(at: int, count: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(at)
    count = count or rows(at)
    return torch.randn(count, 6, generator=draw), torch.randint(0, 4, (count,), generator=draw)


def sequences(at: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(at)
    return [torch.randn(2 + (at * (each + 1)) % 5, 6, generator=draw) for each in range(3)]


def padded(at: int) -> dict[str, torch.Tensor]:
    """Tokens, a mask and labels whose length is that of the longest row of this batch."""
    draw = torch.Generator().manual_seed(at)
    length = 4 + (7 * at) % 11
    lengths = torch.randint(2, length, (3,), generator=draw)
    lengths[at % 3] = length
    ids = torch.randint(0, 16, (3, length), generator=draw)
    mask = (torch.arange(length) < lengths[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@case()
def user_dicts(train: Train) -> Case:
    return lambda b: train(b["x"], b.y, b.scale), lambda at: (
        Encoding(zip("xy", batch(at), strict=True), scale=at / 7),
    )


@case()
def user_dicts_that_are_moved(train: Train) -> Case:
    return lambda b: train(**b.to("cpu")), lambda at: (Encoding(zip("xy", batch(at), strict=True)),)


@case()
def named_tuples(train: Train) -> Case:
    return lambda b: train(b.x, b.y, 1 / b.rows), lambda at: (Named(*batch(at), rows(at)),)


@case()
def dataclasses_(train: Train) -> Case:
    return lambda b: train(b.x, b.y, 1 / b.rows), lambda at: (Record(*batch(at), rows(at)),)


@case()
def ordered_dicts(train: Train) -> Case:
    return lambda b: train(**b), lambda at: (collections.OrderedDict(zip("xy", batch(at), strict=True)),)


@case()
def lists_of_batches(train: Train) -> Case:
    return lambda batches: sum(train(*each) for each in batches), lambda at: ([batch(at + 5 * n) for n in range(3)],)


@case()
def lists_of_numbers(train: Train) -> Case:
    return (
        lambda x, y, weights: train(torch.tensor(x), torch.as_tensor(y), sum(weights) / len(weights)),
        lambda at: (*(each.tolist() for each in batch(at, 4)), [at / 3 + n for n in range(3)]),
    )


@case()
def arrays(train: Train) -> Case:
    step = lambda x, y, scale: train(torch.from_numpy(x), torch.as_tensor(y), scale)
    return step, lambda at: (*(each.numpy() for each in batch(at)), np.float64(at / 7))


@case()
def names_beside_tensors(train: Train) -> Case:
    step = lambda b: {"loss": train(b["x"], b["y"]), "names": b["names"]}
    return step, lambda at: (dict(zip(("x", "y", "names"), (*batch(at), [f"{at}.png", f"{at}.jpg"]), strict=True)),)


@case()
def lists_of_tokens(train: Train) -> Case:
    table = torch.arange(96.0).view(16, 6).cos()
    step = lambda ids: train(table[torch.tensor(ids)], torch.zeros(len(ids), dtype=torch.long))
    return step, lambda at: ([(at * 5 + each) % 16 for each in range(rows(at))],)


@case()
def lengths_in_a_list(train: Train) -> Case:
    def step(x: torch.Tensor, y: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        mask = torch.arange(len(x)) < torch.tensor(lengths)[:, None]
        return train(x * mask.float().mean(0)[:, None], y)

    return step, lambda at: (*batch(at), [1 + (at + n) % rows(at) for n in range(3)])


@case()
def counts_that_cut(train: Train) -> Case:
    return lambda x, y, count: train(x[:count], y[:count]), lambda at: (*batch(at, 12), rows(at))


@case(3)
def optional_weights(train: Train) -> Case:
    step = lambda x, y, weight=None: train(x, y, 1.0 if weight is None else weight.mean())
    return step, lambda at: (*batch(at), None if at % 2 else torch.linspace(0, 1, rows(at)))


@case()
def concatenated_lists(train: Train) -> Case:
    step = lambda xs: train(torch.cat(xs), torch.zeros(sum(len(x) for x in xs), dtype=torch.long))
    return step, lambda at: (sequences(at),)


def _padding(**options: Any) -> Callable[[Train], Case]:
    def make(train: Train) -> Case:
        scale = nn.Parameter(torch.ones(6))

        def step(xs: list[torch.Tensor]) -> Any:
            scale.grad = None
            x = rnn.pad_sequence([x * scale for x in xs], padding_value=0.5, **options)
            loss = train(x.flatten(0, 1), torch.zeros(x.shape[0] * x.shape[1], dtype=torch.long))
            return loss, scale.grad

        return step, lambda at: (sequences(at),)

    return make


for first in (True, False):
    for side in ("right", "left"):
        name = f"sequences_padded_{side}{'_batch_first' if first else ''}"
        CASES[name] = _padding(batch_first=first, padding_side=side), 2


@case()
def data_of_packed_sequences(train: Train) -> Case:
    step = lambda packed: train(packed.data, torch.zeros(len(packed.data), dtype=torch.long))
    return step, lambda at: (rnn.pack_sequence(sequences(at), enforce_sorted=False),)


class Attention(nn.Module):
    """What Hugging Face's Llama does with its arguments: positions, a causal mask, attention, and labels that it
    shifts."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.qkv, self.out = nn.Embedding(16, 8), nn.Linear(8, 24), nn.Linear(8, 16)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        count, length = input_ids.shape
        places = (attention_mask.cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)
        x = self.table(input_ids) + torch.sin(places[..., None] / 4)
        causal = torch.arange(length)[None, :] <= torch.arange(length)[:, None]
        mask = causal[None, None] & attention_mask[:, None, None, :].bool()
        bias = torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, torch.finfo(x.dtype).min)
        q, k, v = (part.view(count, length, 2, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).reshape(count, length, 8)
        shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        return F.cross_entropy(self.out(seen).view(-1, 16).float(), shifted.view(-1), ignore_index=-100)


def _masked(looks: bool) -> Callable[[Train], Case]:
    def make(train: Train) -> Case:
        model = Attention()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def step(b: dict[str, torch.Tensor]) -> Any:
            if looks and bool(b["attention_mask"].all()):
                b = {**b, "attention_mask": torch.ones_like(b["input_ids"])}
            loss = model(**b)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach(), model.out.weight.detach().clone()

        return step, lambda at: (padded(at),)

    return make


CASES["masks_of_other_lengths"] = _masked(False), 2
CASES["masks_that_the_step_looks_at"] = _masked(True), 2


@pytest.mark.parametrize("name", CASES)
def test_a_batch_is_captured_a_few_times_whatever_varies(name: str) -> None:
    make, limit = CASES[name]
    results = []
    for wrap in (lambda step: step, weft.compile):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train(
            x: torch.Tensor,
            y: torch.Tensor,
            scale: Any = 1.0,
            model: nn.Module = model,
            optimizer: torch.optim.Optimizer = optimizer,
        ) -> torch.Tensor:
            loss = F.cross_entropy(model(x), y) * scale
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step, call = make(train)
        step = wrap(step)
        results.append([detached(step(*call(at))) for at in range(CALLS)])
        results[-1].append(detached(list(model.parameters())))
    assert_equal(results[1], results[0])
    assert len(step.captures) <= limit, step.captures
