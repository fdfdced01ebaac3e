"""Indices with integers that change from call to call: one capture serves them all, with eager's views and errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from twenty_calls import twenty_calls

import weft
from weft.errors import StepFailed

ROWS = 8


def base(at: int) -> torch.Tensor:
    return torch.randn(ROWS, 3, 4, generator=torch.Generator().manual_seed(at))


def row(at: int) -> int:
    """All rows, counted from the first and from the last."""
    return at * 3 % (2 * ROWS) - ROWS


def tensor_and_number(at: int) -> tuple[Any, ...]:
    return base(at), torch.tensor(row(at)), at % 3


MASK = torch.tensor([True, False, True])
READS: dict[str, Callable[..., Any]] = {
    "first": lambda c, i, n: c[i] * 2,
    "number": lambda c, i, n: c[:, n] * 2,
    "both": lambda c, i, n: c[i, n] * 2,
    "last": lambda c, i, n: c[..., n, :] * 2,
    "behind a new dimension": lambda c, i, n: c[None, i, :, None, n] * 2,
    "beside an advanced index": lambda c, i, n: c[i, [2, 0, 0]] * c[[0, 5, 1], n, torch.tensor([0, 1, 3])].sum(),
    "beside a mask": lambda c, i, n: c[i, MASK] + c[i, n, 2],
    "beside a mask of two dimensions": lambda c, i, n: c[torch.ones(ROWS, 3, dtype=torch.bool), n] + c[i, 0, 0],
    "between slices": lambda c, i, n: c[1:6:2, n, :3] * 2,
    "of an int32": lambda c, i, n: c[i.int()] * 2,
    "of an item": lambda c, i, n: c[i.item()] * c[int(i), n].sum(),
    "between two ellipses": lambda c, i, n: c[..., n, ...] * 2,
    "with a plain truth value": lambda c, i, n: c[True, i] + c[i, None, False].sum(),
    "of a found position": lambda c, i, n: c[c[:, 0, 0].argmax(), c[0, :, 0].argmin()] * 2,
}


@pytest.mark.parametrize("name", READS)
def test_parts_of_changing_integers_are_captured_once(name: str) -> None:
    twenty_calls(lambda: READS[name], tensor_and_number, 3)


def _written(c: torch.Tensor, i: torch.Tensor) -> Any:
    c[i : i + 3] = c[i : i + 3].sin()
    c[:, : i % 3] += 1
    return c * 2


SLICES: dict[str, Callable[..., Any]] = {
    "from": lambda c, i: c[i:] * 2,
    "up to": lambda c, i: c[:i] * 2,
    "both": lambda c, i: c[i : i + 3] * 2,
    "of one element": lambda c, i: c[i.view(1) : i.int() + 3] * 2,
    "of bytes": lambda c, i: c[: (i + ROWS).to(torch.uint8)] * 2,
    "with a step": lambda c, i: c[:: i + ROWS + 1] * 2,
    "from a truth value": lambda c, i: c[i > 0 :] * 2,
    "inside": lambda c, i: c[..., : i % 3, None, :] * 2,
    "beside an advanced index": lambda c, i: c[i:, [0, 2, 2]] * 2,
    "written": _written,
}


@pytest.mark.parametrize("name", SLICES)
def test_slices_between_tensors_are_captured_once(name: str) -> None:
    twenty_calls(lambda: SLICES[name], lambda at: tensor_and_number(at)[:2], 2)


def test_experts_of_sorted_tokens_are_captured_once() -> None:
    """Each expert multiplies a slice of the tokens, whose bounds are tensors."""

    def make() -> Callable[..., Any]:
        weight = nn.Parameter(torch.randn(4, 3, 5))

        def step(tokens: torch.Tensor, expert: torch.Tensor) -> Any:
            ends = torch.bincount(expert, minlength=4).cumsum(0)
            starts = torch.cat([ends.new_zeros(1), ends[:-1]])
            out = torch.zeros(len(tokens), 5)
            for at, (start, end) in enumerate(zip(starts, ends, strict=True)):
                out[start:end] = tokens[start:end] @ weight[at]
            return out.detach(), torch.autograd.grad(out.square().sum(), weight)

        return step

    def call(at: int) -> tuple[Any, ...]:
        return base(at)[:, :, 0], torch.randint(at % 4, 4, (ROWS,), generator=torch.Generator().manual_seed(at))

    twenty_calls(make, call, 1)


@pytest.mark.parametrize("bound", [torch.tensor(1.0), torch.tensor([1, 2])])
def test_bounds_that_are_no_integers_raise_as_in_eager(bound: torch.Tensor) -> None:
    step = lambda c, i: c[i:] * 2
    for run in (step, weft.compile(step)):
        with pytest.raises(TypeError):
            run(base(0), bound)


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8])
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_tensors_of_truth_values_and_bytes_are_masks(kind: torch.dtype) -> None:
    def step(c: torch.Tensor, i: torch.Tensor) -> Any:
        return c[i.to(kind)] * 2, c[0, i.to(kind)] * 3

    twenty_calls(lambda: step, lambda at: (base(at), torch.tensor(at % 2)), 4)


def _writes(c: torch.Tensor, i: torch.Tensor, n: int) -> Any:
    c[i] = 1.5
    c[i, n] += 1
    c[:, n, 2] = torch.arange(ROWS)
    c[i, [0, 2]] = c[0, 1, :1].clone()
    part = c[i]
    part.mul_(3)  # through the view
    seen = c.clone()
    part[n].add_(1)
    return seen, part.sum()


def test_parts_are_written_in_place() -> None:
    twenty_calls(lambda: _writes, tensor_and_number, 3)


def test_writes_follow_an_index_that_the_step_updates() -> None:
    def make() -> Callable[..., Any]:
        queue, place = torch.zeros(5, 6), torch.zeros((), dtype=torch.long)

        def step(x: torch.Tensor) -> Any:
            before = place.item()
            part = queue[place]
            queue[place] = x
            place.add_(1)
            place.remainder_(5)
            part.add_(1)  # the row of before
            queue[place] += 0.25
            return before, place.item(), queue.clone(), place.clone()

        return step

    twenty_calls(make, lambda at: (torch.full((6,), float(at)),), 2)


def test_a_part_that_is_returned_shares_the_memory_of_the_argument() -> None:
    step = weft.compile(lambda c, i, n: (c[i, ..., n], c[i, [0]]))
    for at in range(4):
        c, i, n = tensor_and_number(at)
        view, copied = step(c, i, n)
        assert view.storage_offset() == c[i, ..., n].storage_offset()
        view.fill_(7)
        assert torch.equal(c[i, :, n], torch.full((3,), 7.0))
        assert not torch.equal(copied[0, n], torch.tensor(7.0))
    assert len(step.captures) <= 3


def test_parts_are_written_through_views_of_other_dtypes() -> None:
    def step(c: torch.Tensor, i: torch.Tensor, n: int) -> Any:
        c[:, n].view(torch.int32).add_(1)
        c[i].unfold(0, 2, 1)[0].mul_(2)
        c[i].t().as_strided((2, 2), (1, 2)).add_(1)
        return c * 2

    twenty_calls(lambda: step, tensor_and_number, 3)


def test_gradients_reach_the_part() -> None:
    def make() -> Callable[..., Any]:
        table = nn.Parameter(torch.randn(ROWS, 4))

        def step(i: torch.Tensor, n: int) -> Any:
            table.grad = None
            rows = table * 2
            rows[i, n] = 3.0
            (rows[i] * rows[:, n].sum() + table[i]).sum().backward()
            return table.grad

        return step

    twenty_calls(make, lambda at: tensor_and_number(at)[1:], 4)


@pytest.mark.parametrize("at", [ROWS, -ROWS - 1])
@pytest.mark.parametrize("write", [False, True])
def test_an_integer_out_of_range_is_an_error(at: int, write: bool) -> None:
    def step(c: torch.Tensor, i: torch.Tensor) -> Any:
        if write:
            c[i] = 1.0
        return c[i] * 2

    compiled = weft.compile(step)
    compiled(base(0), torch.tensor(1))
    c = base(0)
    with pytest.raises(StepFailed, match="IndexError"):
        compiled(c, torch.tensor(at))
    assert torch.equal(c, base(0))
    numbered = weft.compile(lambda c, n: c[n] * 2)
    for n in (1, 2, 3):
        numbered(base(0), n)
    with pytest.raises(IndexError):
        numbered(base(0), at)


def test_torch_names_an_index_of_too_many_dimensions() -> None:
    step = lambda c, i: c[0, 0, 0, i]
    for run in (step, weft.compile(step)):
        with pytest.raises(IndexError, match="too many indices"):
            run(base(0), torch.tensor(1))


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_parts_of_sharded_tensors(alone: None) -> None:
    mesh = init_device_mesh("cpu", (1,))

    def step(c: DTensor, i: torch.Tensor) -> Any:
        return c[i].full_tensor() * 2, c[:i].full_tensor() * 3

    twenty_calls(lambda: step, lambda at: (distribute_tensor(base(at), mesh, [Shard(0)]), torch.tensor(at % 2)), 3)
