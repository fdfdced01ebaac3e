"""Decisions are positions in a graph: they are valid for graphs whose collectives at these positions are alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from collective_ops import operations

import weft
from step_builder import StepBuilder
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import WAIT
from weft.errors import MalformedSchedule
from weft.inductor.graph.collectives import ALL_GATHER, ALL_REDUCE, KINDS, CollectiveOp, register
from weft.inductor.schedule.agree_on_collectives import _line
from weft.inductor.schedule.decisions import MergeBuckets, structure
from weft.inductor.schedule.value_numbers import ValueNumbering
from weft.inductor.transports.peer_calls import PeerReduceScatter, use_transport

pytestmark = pytest.mark.fake


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with weft.fake_world(4):
        yield


def step_of(*collectives: tuple[Any, ...], dtype: torch.dtype = torch.float32) -> StepGraph:
    """A collective for each operation and its operands, each of an input of its own."""
    b = StepBuilder()
    shards = [b.input(torch.ones(4, dtype=dtype)) for _ in collectives]
    starts = [b.call(op, shard, *how) for shard, (op, *how) in zip(shards, collectives, strict=True)]
    b.returns(*[b.call(WAIT, start, val=start.meta["val"]) for start in starts])
    return b.build({"dp": "0", "tp": "0"})


SUM = ALL_REDUCE.op, "sum", "dp"
OTHERS: dict[str, dict[str, Any]] = {
    "group": {"collective": (ALL_REDUCE.op, "sum", "tp")},
    "reduction": {"collective": (ALL_REDUCE.op, "max", "dp")},
    "kind": {"collective": (ALL_GATHER.op, 4, "dp")},
    "dtype": {"collective": SUM, "dtype": torch.float64},
}


@pytest.mark.parametrize("what", OTHERS)
def test_graphs_whose_collectives_differ_have_other_structures(what: str) -> None:
    fields = dict(OTHERS[what])
    assert structure(step_of(SUM)) == structure(step_of(SUM))
    assert structure(step_of(fields.pop("collective"), **fields)) != structure(step_of(SUM))


def test_parts_that_differ_between_ranks_leave_the_structure() -> None:
    exchange = torch.ops._c10d_functional.all_to_all_single.default
    steps = [step_of((exchange, sizes, sizes, "dp")) for sizes in ([1, 1, 1, 1], [2, 0, 2, 0])]
    assert structure(steps[0]) == structure(steps[1])


@pytest.mark.parametrize("what", ["group", "reduction", "kind"])
def test_a_bucket_of_collectives_that_differ_is_refused(what: str) -> None:
    """A merged call takes the group and the reduction of its first member."""
    step = step_of(SUM, OTHERS[what]["collective"])
    bucket = [at for at, node in enumerate(step.graph.nodes) if node in step.collectives()]
    with pytest.raises(MalformedSchedule, match="cannot share a call"):
        MergeBuckets([bucket])(step)
    same = step_of(SUM, SUM)
    MergeBuckets([bucket])(same)
    assert [node.target for node in same.collectives()] == [ALL_REDUCE.coalesced]


def test_a_bucket_of_what_is_no_collective_is_refused() -> None:
    with pytest.raises(MalformedSchedule, match="cannot share a call"):
        MergeBuckets([[0, 2]])(step_of(SUM))


def test_an_operand_of_one_operation_alone_is_part_of_what_it_computes() -> None:
    """Who owns the sum: of a row with a coalesced form, too, of which the operands beside that are not looked at."""
    one = lambda x, *how: torch.empty_like(x)
    with operations(
        reduce_to=("(Tensor input, str reduce_op, int owner, str group_name) -> Tensor", one),
        reduce_all_to=(
            "(Tensor[] inputs, str reduce_op, int owner, str group_name) -> Tensor[]",
            lambda xs, *how: [one(x) for x in xs],
        ),
    ) as ops:
        op, several = ops.reduce_to.default, ops.reduce_all_to.default
        register(CollectiveOp(op, KINDS["all_reduce"], coalesced=several, reduction=1))
        steps = [step_of((op, "sum", owner, "dp")) for owner in (0, 1, 0)]
        numbering = ValueNumbering()
        outputs = [numbering.values(step).outputs for step in steps]
        assert outputs[0] == outputs[2] != outputs[1]
        assert structure(steps[0]) == structure(steps[2]) != structure(steps[1])
        lines = [_line(step.collectives()[0]) for step in steps]
        assert lines[0] == lines[2] != lines[1]

        merged = step_of((op, "sum", 0, "dp"), (op, "sum", 0, "dp"))
        before = numbering.values(merged).outputs
        MergeBuckets([[2, 3]])(merged)
        assert [node.target for node in merged.collectives()] == [several]
        assert numbering.values(merged).outputs == before


def test_a_transport_carries_the_same_value_as_an_operation_without_a_coalesced_form() -> None:
    """The verifier of schedules compares a step before and after its transports are applied."""
    part = lambda x, op, size, group: x.new_empty(x.shape[0] // size)
    schema = "(Tensor input, str reduce_op, int group_size, str group_name) -> Tensor"
    with operations(lone_sum=(schema, part)) as ops:
        register(CollectiveOp(ops.lone_sum.default, KINDS["reduce_scatter"], reduction=1))
        step = step_of((ops.lone_sum.default, "sum", 4, "dp"))
        numbering = ValueNumbering()
        before = numbering.values(step).outputs
        use_transport(step, step.collectives()[0], "pull")
        assert isinstance(step.collectives()[0].target, PeerReduceScatter)
        assert numbering.values(step).outputs == before


def test_sums_whose_size_the_data_says_are_numbered_by_it() -> None:
    def step(x: torch.Tensor) -> list[torch.Tensor]:
        several = x[x > 0], x[x > 0], x[x > 1]
        return [funcol.all_reduce(each, "sum", dist.group.WORLD) for each in several]

    graph = weft.capture(step, torch.randn(8))
    values = ValueNumbering().values(graph)
    assert len({values.of[start] for start in graph.collectives()}) == 3
    assert ValueNumbering().values(graph.copy()).counted == values.counted
