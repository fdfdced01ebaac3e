"""All-reduces overwrite what nobody reads any more, and nothing else."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import weft
from harness import run_ranks


def both(rank: int, world: int) -> tuple[list[str], list[str]]:
    group = dist.group.WORLD

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        fresh = funcol.all_reduce(x * 2, "sum", group)
        users = funcol.all_reduce(x, "sum", group)
        needed = x * 3
        return [fresh + 1, users + 0, funcol.all_reduce(needed, "max", group) - needed]

    x = torch.arange(6.0) + rank
    before = x.clone()
    compiled = weft.compile(step)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), step(x), rtol=0, atol=0)
    assert torch.equal(x, before)
    source = compiled.entries[0].program.source
    return re.findall(r"all_reduce_\((\w+)", source), re.findall(r"all_reduce\((\w+)", source)


@pytest.mark.gloo
def test_an_all_reduce_of_a_temporary_runs_in_place() -> None:
    assert run_ranks(both, 2) == [(["mul"], ["args_0", "mul_1"])] * 2
