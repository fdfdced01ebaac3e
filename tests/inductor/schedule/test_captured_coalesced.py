"""Coalesced collectives that the user wrote: they are scheduled as they are, whatever a bucket of weft's must be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

import weft
from harness import run_ranks
from step_builder import StepBuilder
from weft import errors, knobs
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import WAIT
from weft.capture.step_interface import Role
from weft.inductor.cache import graph_cache
from weft.inductor.compiler import schedule_of
from weft.inductor.cost.cluster import load_cluster
from weft.inductor.graph.retarget import retarget
from weft.inductor.schedule.agree_on_schedule import scheduled
from weft.inductor.schedule.planner import schedule
from weft.inductor.schedule.verify import ScheduleVerifier

H200 = load_cluster("h200x8")
c10d = torch.ops._c10d_functional
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def reduced(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    sums = [a * 2, b * 3]
    dist.all_reduce_coalesced(sums)
    return sums[0].sum() + sums[1].sum()


def in_a_manager(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    sums = [a * 2, b * 3]
    with _coalescing_manager():
        for each in sums:
            dist.all_reduce(each)
    return sums[0].sum() + sums[1].sum()


def gathered(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    found = c10d.all_gather_into_tensor_coalesced([a, b], dist.get_world_size(), dist.group.WORLD.group_name)
    return c10d.wait_tensor(found[0]).sum() + c10d.wait_tensor(found[1]).sum()


def partly_read(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    found = c10d.all_gather_into_tensor_coalesced([a, b], dist.get_world_size(), dist.group.WORLD.group_name)
    return c10d.wait_tensor(found[1]).sum()


def twice(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return gathered(a, a) + b.sum()


STEPS: list[Step] = [reduced, in_a_manager, gathered, partly_read, twice]


def inputs(dtype: torch.dtype, rank: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(64.0).reshape(8, 8) + rank, (torch.arange(64) * (rank + 1)).reshape(8, 8).to(dtype)


@pytest.mark.fake
@pytest.mark.parametrize("transports", ["nccl", "all"])
@pytest.mark.parametrize(
    ("step", "dtype"),
    # Torch reduces tensors of several dtypes by one call each.
    [*((step, torch.float32) for step in STEPS), *((step, torch.int64) for step in (gathered, partly_read, twice))],
)
def test_captured_coalesced_collectives_are_scheduled_and_read_again(
    step: Step, dtype: torch.dtype, transports: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with weft.fake_world(4), knobs.override(transports=transports, verify_graphs=True, cache_dir=str(tmp_path)):
        graph = retarget(weft.capture(step, *inputs(dtype)).copy(), "cuda:0")
        made, found = scheduled(graph, H200)
        assert found is not None
        (bucket,) = found.reports
        assert len(bucket.members) == 2
        assert "us less than one call each" in bucket.why
        path = graph_cache.entry_of(graph)
        assert path is not None
        graph_cache.write(path, made, graph, "a note")
        again = graph_cache.read(path, graph)
        assert again is not None
        assert (str(again[0]), again[1]) == (str(made), "a note")
    assert not caplog.records


@pytest.mark.fake
def test_a_captured_batch_of_sends_is_scheduled() -> None:
    if not hasattr(c10d, "batch_p2p_ops"):
        pytest.skip("torch has no such operation")
    with weft.fake_world(4):
        b = StepBuilder()
        sent = [b.input(torch.ones(8), Role.BATCH), b.input(torch.ones(4, dtype=torch.int64), Role.BATCH)]
        vals = [each.meta["val"] for each in sent]
        start = b.call(c10d.batch_p2p_ops.default, ["isend", "irecv"], [1, 3], [0, 0], sent, "dp", val=vals)
        received = b.pick(start)[1]
        b.returns(b.call(WAIT, received, val=received.meta["val"]))
        step = b.build({"dp": dist.group.WORLD.group_name})
        found = schedule(step, H200)
        assert [(bucket.kind, bucket.members) for bucket in found.reports] == [
            ("send_recv", ("batch_p2p_ops_default",) * 2)
        ]
        ScheduleVerifier(step).check(found.step, "scheduling")


@pytest.mark.fake
def test_parameters_of_a_captured_coalesced_gather_are_named_each() -> None:
    linear = torch.nn.Linear(8, 8)

    def step(x: torch.Tensor) -> torch.Tensor:
        weight, bias = (each.detach() for each in (linear.weight, linear.bias))
        found = c10d.all_gather_into_tensor_coalesced([weight, bias], 4, dist.group.WORLD.group_name)
        return x @ c10d.wait_tensor(found[0]).sum(0) + c10d.wait_tensor(found[1]).sum()

    with weft.fake_world(4):
        graph = retarget(weft.capture(step, torch.ones(2, 8)).copy(), "cuda:0")
        (bucket,) = schedule(graph, H200).reports
    assert [name.rpartition(".")[2] for name in bucket.members] == ["weight", "bias"]


@pytest.mark.fake
def test_a_bucket_of_weft_must_not_be_mixed_although_the_user_may_mix() -> None:
    """The same call, once captured and once made of two."""

    def step_of(coalesced: bool) -> StepGraph:
        b = StepBuilder()
        shards = [b.input(torch.ones(2)), b.input(torch.ones(2, dtype=torch.int64))]
        if coalesced:
            starts = b.pick(b.call(c10d.all_gather_into_tensor_coalesced.default, shards, 4, "dp"))
        else:
            starts = [b.call(c10d.all_gather_into_tensor.default, shard, 4, "dp") for shard in shards]
        b.returns(*[b.call(WAIT, start, val=start.meta["val"]) for start in starts])
        return b.build({"dp": dist.group.WORLD.group_name})

    with weft.fake_world(4):
        ScheduleVerifier(step_of(True)).check(step_of(True), "nothing")
        with pytest.raises(errors.MalformedSchedule, match="one call on tensors of several kinds"):
            ScheduleVerifier(step_of(False)).check(step_of(True), "merging")


# ---- on real processes


def runs_as_eager(rank: int, world: int, name: str, dtype: torch.dtype, cache: str) -> list[Any]:
    """Eager results, those of two compilations, the second with a warm cache, and whether both had a schedule."""
    step, args = globals()[name], inputs(dtype, rank)
    results: list[Any] = [step(*args)]
    with (
        knobs.override(cluster="h200x8", cache_dir=cache, verify_graphs=True),
        mock.patch("weft.inductor.compiler.device_kind", return_value="cuda"),
    ):
        for _ in range(2):
            compiled = weft.compile(step, mode="bitwise")
            results.append(compiled(*args))
            results.append(schedule_of(compiled.entries[0].program) is not None)
    return results


CASES = [
    *((step.__name__, torch.float32) for step in STEPS),
    # Gloo reduces tensors of one dtype only.
    *((step.__name__, torch.int64) for step in (gathered, partly_read)),
]


@pytest.mark.gloo
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_captured_coalesced_collectives_give_what_eager_gives(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    for eager, first, planned, second, planned_again in run_ranks(runs_as_eager, 2, name, dtype, str(tmp_path)):
        assert planned
        assert planned_again
        assert torch.equal(eager, first)
        assert torch.equal(eager, second)
