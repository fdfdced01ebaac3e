"""Each stream of a group gets a communicator of its own, once. NCCL is played by gloo."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import weft
from harness import run_ranks
from step_builder import StepBuilder
from weft import torch_adapter
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import WAIT, group_of
from weft.inductor.runtime.aten import compile_aten
from weft.inductor.schedule.communicators import assign_communicators, communicator

c10d = torch.ops._c10d_functional


@contextlib.contextmanager
def as_nccl() -> Iterator[list[dict[str, Any]]]:
    """Groups that are asked for over NCCL are made over gloo; yields what was asked."""
    asked: list[dict[str, Any]] = []
    new_group = dist.new_group

    def make(ranks: list[int], **how: Any) -> Any:
        asked.append(how)
        how = {key: value for key, value in how.items() if key not in ("backend", "pg_options")}
        return new_group(ranks, backend="gloo", **how)

    with (
        mock.patch("weft.torch_adapter.backend_of_group", return_value="nccl"),
        mock.patch.object(dist, "new_group", make),
        mock.patch.object(dist, "ProcessGroupNCCL", mock.Mock(), create=True),
    ):
        yield asked


def step_over(group: str, world: int) -> StepGraph:
    """Gathers, sums and reduces one shard."""
    b = StepBuilder()
    shard = b.input(torch.ones(2, 4))
    results = []
    for target, given in (
        (c10d.all_gather_into_tensor.default, (shard, world, "dp")),
        (c10d.all_reduce.default, (shard, "sum", "dp")),
        (c10d.reduce_scatter_tensor.default, (shard, "sum", world, "dp")),
        (c10d.all_gather_into_tensor.default, (shard, world, "dp")),
    ):
        start = b.call(target, *given)
        results.append(b.call(WAIT, start, val=start.meta["val"]))
    b.returns(*results)
    return b.build({"dp": group})


def lanes_of_halves(rank: int, world: int) -> list[Any]:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    group = mesh["shards"].get_group()
    with as_nccl() as asked:
        steps = [assign_communicators(step_over(group.group_name, 2)).check() for _ in range(2)]
    streams = [group_of(node) for node in steps[0].collectives()]
    names = [steps[0].groups[stream] for stream in streams]
    same = steps[0].groups == steps[1].groups
    (gathered, summed, reduced, _) = compile_aten(steps[0])(torch.full((2, 4), float(rank)))
    values = [gathered[:, 0].tolist(), summed[:, 0].tolist(), reduced[:, 0].tolist()]
    return [streams, names[0] == names[3] != names[1] == names[2], group.group_name in names, same, len(asked), values]


@pytest.mark.gloo
def test_communicators_of_a_mesh_axis_have_the_ranks_of_its_group() -> None:
    found = run_ranks(lanes_of_halves, 4)
    for rank, (streams, apart, parents, same, made, values) in enumerate(found):
        assert streams == ["dp/gather", "dp/reduce", "dp/reduce", "dp/gather"]
        assert (apart, parents, same, made) == (True, False, True, 2)
        first = rank // 2 * 2
        assert values == [[first, first, first + 1, first + 1], [2 * first + 1.0] * 2, [2 * first + 1.0]]


def before_and_after(rank: int, world: int) -> list[int]:
    """How many communicators are made for a group, and for the group of the same name of another life."""
    counts = []
    for life in range(2):
        if life:
            store: Any = torch_adapter.default_store()
            while isinstance(store, dist.PrefixStore):
                store = store.underlying_store
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=world)
        name = dist.group.WORLD.group_name
        with as_nccl() as asked:
            streams = {communicator(name, "gather") for _ in range(3)}
        counts += [len(asked), len(streams)]
    return counts


@pytest.mark.gloo
def test_a_new_group_gets_new_communicators_after_an_old_one_was_destroyed() -> None:
    assert run_ranks(before_and_after, 2) == [[1, 1, 1, 1]] * 2


def without_nccl(rank: int, world: int) -> bool:
    name = dist.group.WORLD.group_name
    return communicator(name, "gather") == name


@pytest.mark.gloo
def test_other_backends_keep_their_one_group() -> None:
    assert run_ranks(without_nccl, 2) == [True, True]


def test_nothing_is_made_in_a_fake_world() -> None:
    with weft.fake_world(4), as_nccl() as asked:
        name = dist.group.WORLD.group_name
        assert communicator(name, "reduce") == name
    assert asked == []


@pytest.mark.fake
def test_a_group_may_have_the_name_of_a_reduction() -> None:
    """A dimension of a mesh that is called "max", and a group that is given by name."""
    with weft.fake_world(4):
        b = StepBuilder()
        shard = b.input(torch.ones(2, 4))
        starts = [
            b.call(c10d.all_reduce.default, shard, "max", "max"),
            b.call(c10d.all_reduce.default, shard, "max", group_name="max"),
        ]
        b.returns(*[b.call(WAIT, start, val=start.meta["val"]) for start in starts])
        step = assign_communicators(b.build({"max": dist.group.WORLD.group_name}))
        assert [(node.args[1], group_of(node)) for node in step.collectives()] == [("max", "max/reduce")] * 2
