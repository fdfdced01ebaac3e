"""What leaves a step shares memory with the same tensors as in eager: later updates reach it, or do not reach it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import weft
from both_ways import assert_equal, detached

STEPS: dict[str, Callable[[Any, torch.Tensor], Any]] = {}


def _step(function: Callable[[Any, torch.Tensor], Any]) -> None:
    STEPS[function.__name__] = function


@_step
def copies_of_what_is_updated(s: Any, x: torch.Tensor) -> Any:
    s.p.add_(1)
    made = [torch.empty_like(s.p), torch.empty(4), s.p.new_empty(4), s.p.new_zeros(4), torch.empty_strided((4,), (2,))]
    for each in made:
        each.copy_(s.p)
    made.append(torch.empty(4))
    made[-1][:] = s.p
    table = torch.empty(2, 2)
    table.copy_(s.p.view(2, 2))
    read_only = torch.empty(4).copy_(s.q)
    return made, table[0], table[:, 1], read_only, torch.empty(4).copy_(x), torch.empty(1, 4).copy_(s.q.expand(1, 4))


@_step
def copies_of_results(s: Any, x: torch.Tensor) -> Any:
    y = x * 2
    z = torch.empty(4).copy_(y)
    s.a, s.b = z, torch.empty(4).copy_(y)
    s.p.copy_(y)
    return y, z, torch.empty(4).copy_(s.p)


@_step
def stored_copies_are_written_by_the_next_call(s: Any, x: torch.Tensor) -> Any:
    s.b.add_(1)
    y = x * 2 + s.b
    s.a, s.b = y, torch.empty(4).copy_(y)
    return s.a.sum()


@_step
def views_of_what_is_overwritten(s: Any, x: torch.Tensor) -> Any:
    s.p.copy_(x * 2)
    s.q.copy_(x)
    return s.p[:2], s.p.view(2, 2), s.q[:2]


@_step
def views_of_an_input_that_takes_another(s: Any, x: torch.Tensor) -> Any:
    s.p.copy_(s.q)
    s.q.add_(1)
    return s.p[:2], s.q[2:]


@_step
def views_that_were_written(s: Any, x: torch.Tensor) -> Any:
    y = torch.stack([s.p, s.q])
    u, v = y.unbind()
    u.add_(1)
    head = s.p[:2]
    head.mul_(2)
    s.p.add_(1)
    x[:2].neg_()
    return u, v, y, head, x[1:]


@_step
def views_of_what_is_written_in_another_dtype(s: Any, x: torch.Tensor) -> Any:
    s.half.add_(x.double()).mul_(torch.tensor(2.0))
    torch.add(s.q, x, out=s.p)
    s.q[torch.tensor([0, 1])] = x[:2]
    return s.half[:2], s.p[:2], s.q[:2]


@_step
def memory_that_is_set(s: Any, x: torch.Tensor) -> Any:
    y, z = torch.empty(4), torch.empty(4)
    y.set_(s.p)
    z.data = s.q
    s.p.add_(1)
    z.mul_(2)
    return y * 1, y, z, s.p[:2], s.q[1:]


@_step
def swapped(s: Any, x: torch.Tensor) -> Any:
    before = torch.empty(4).copy_(s.p)
    s.p.copy_(s.q)
    s.q.copy_(before)
    return before


@_step
def numbers(s: Any, x: torch.Tensor) -> Any:
    y = torch.tensor([1.0, 2.0, 3.0, 4.0])
    z, w = torch.empty(4).copy_(y), torch.tensor([5.0, 6.0])
    y.add_(x)
    return y, z, w, w[:1], torch.zeros(4), torch.zeros(4), torch.mul(x, 2, out=torch.empty(4)), x * 2


@_step
def copies_before_branches(s: Any, x: torch.Tensor) -> Any:
    before = torch.empty(4).copy_(s.p)
    s.q.copy_(s.p)
    if x.sum() > 0:
        s.p.add_(1)
    if s.q.sum() > 1:
        s.p.add_(before)
    return before, s.p[:2], s.q[:2]


def _ran(step: Callable[[Any, torch.Tensor], Any], wrap: Callable[..., Any]) -> Any:
    s = SimpleNamespace(p=torch.ones(4), q=torch.arange(4.0), a=torch.zeros(4), b=torch.zeros(4))
    s.half = torch.ones(4, dtype=torch.bfloat16)
    run = wrap(lambda x: step(s, x))
    seen: list[torch.Tensor] = []
    for call in range(3):
        x = torch.full((4,), call + 1.0)
        seen += [x, *tree_leaves(run(x))]
        if call == 1:  # the caller writes to all that it has
            for at, tensor in enumerate([*seen, *vars(s).values()]):
                tensor.mul_(2).add_(at)
    seen += vars(s).values()
    first_with: dict[int, int] = {}
    shared = [first_with.setdefault(t.untyped_storage().data_ptr(), at) for at, t in enumerate(seen)]
    return detached(seen), shared


@pytest.mark.parametrize("name", STEPS)
def test_results_share_memory_as_in_eager(name: str) -> None:
    expected, shared = _ran(STEPS[name], lambda step: step)
    found, found_shared = _ran(STEPS[name], lambda step: weft.compile(step, mode="bitwise"))
    assert_equal(found, expected)
    assert found_shared == shared


def _late_views(x: torch.Tensor) -> Any:
    views = x.as_strided((2, 2), (1, 2)), x[2:].as_strided((2, 2), (1, 3)), x.view(2, 5).unfold(1, 2, 1)
    x.mul_(2)  # they are taken again from what x is then
    return [view + 1 for view in views]


# Steps over parts of one memory that begins somewhere inside its storage, and the slices that they are given.
INSIDE: list[tuple[Callable[..., Any], list[slice]]] = [
    (lambda x: x.as_strided((2, 2), (1, 2)) * 1, [slice(5, 15)]),
    (lambda x: x.as_strided((2, 2), (1, 2)), [slice(5, 15)]),
    (lambda x: x.as_strided((2, 2), (1, 2), 7).add_(100), [slice(5, 15)]),
    (lambda x: x[2:].as_strided((2, 2), (1, 3)).add_(100), [slice(5, 15)]),
    (_late_views, [slice(5, 15)]),
    (lambda x, part: x.sum() + part * 2, [slice(5, 15), slice(8, 10)]),
    (lambda x, part: (x.add_(1), part * 2)[1], [slice(5, 15), slice(8, 10)]),
    (lambda x, part: (part.add_(1), x * 2)[1], [slice(5, 15), slice(8, 14, 2)]),
]


@pytest.mark.parametrize("closed_over", [False, True])
@pytest.mark.parametrize(("step", "slices"), INSIDE)
def test_memory_may_begin_inside_its_storage(step: Callable[..., Any], slices: list[slice], closed_over: bool) -> None:
    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        found = []
        called = wrap(step)
        for call in range(3):
            base = torch.arange(40.0) * (call + 1)
            start = 0 if closed_over else call  # another call's slices may begin elsewhere
            parts = [base[part.start + start : part.stop + start : part.step] for part in slices]
            if closed_over:
                called = wrap(lambda x, parts=parts: (step(*parts), x)[0])
                parts = [torch.ones(1)]
            found.append((called(*parts), base))
        return found

    assert_equal(run(weft.compile), run(lambda step: step))
