"""Casts before reduce-scatters become part of them, and change nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_ops import operations

import weft
from harness import run_ranks
from step_builder import StepBuilder
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import WAIT, group_of, is_collective
from weft.distributed.ops import pad_shard
from weft.inductor.graph.collectives import REDUCE_SCATTER, WIDENING_REDUCE_SCATTER, CollectiveOp, register
from weft.inductor.passes.pipeline import ATEN_PASSES, run_passes
from weft.inductor.passes.schedule_waits import schedule_waits
from weft.inductor.passes.wire_dtype import expand, wire_dtype
from weft.inductor.runtime.aten import compile_aten

PASSES = [pass_ for pass_ in ATEN_PASSES if pass_ is not schedule_waits]

_ops = torch.ops.weft_c10d
ROWS = 6


def reduced(values: torch.Tensor) -> torch.Tensor:
    out = values.new_empty(values.shape[0] // dist.get_world_size(), *values.shape[1:])
    dist.reduce_scatter_tensor(out, values)
    return out


def plain(step: Any, *inputs: torch.Tensor) -> StepGraph:
    with weft.fake_world(2):
        return run_passes(weft.capture(step, *inputs), PASSES)


def captured(step: Any, *inputs: torch.Tensor) -> StepGraph:
    return wire_dtype(plain(step, *inputs)).check()


def targets(graph: StepGraph) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


NARROW = torch.randn(ROWS, 4).bfloat16()


def test_a_cast_read_only_by_a_reduce_scatter_becomes_part_of_it() -> None:
    graph = captured(lambda x: reduced((x + 1).float()) * 2, NARROW)
    (start,) = graph.collectives()
    assert start.target is WIDENING_REDUCE_SCATTER.op
    assert start.args[0].meta["val"].dtype == torch.bfloat16  # type: ignore[union-attr]
    assert start.meta["val"].dtype == torch.float32
    assert start.args[1:] == ("sum", 2, "world", torch.float32)
    assert is_collective(start)
    assert group_of(start) == "world"
    assert not any("_to_copy" in target for target in targets(graph))


def test_a_cast_that_pads_becomes_part_of_the_reduce_scatter() -> None:
    """What pads an uneven gradient also casts it."""
    graph = captured(lambda x: reduced(pad_shard(x + 1, ROWS + 2, 1, torch.float32)), NARROW)
    (start,) = graph.collectives()
    assert start.target is WIDENING_REDUCE_SCATTER.op
    padded = start.args[0]
    assert str(padded.target) == "weft.pad_shard.default"  # type: ignore[union-attr]
    assert padded.args[1:] == (ROWS + 2, 1, torch.bfloat16)  # type: ignore[union-attr]
    assert padded.meta["val"].shape == (ROWS + 2, 4)  # type: ignore[union-attr]
    assert padded.meta["val"].dtype == torch.bfloat16  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("step", "inputs"),
    [
        (lambda x: reduced(x.bfloat16()), torch.randn(ROWS, 4)),  # loses something
        (lambda x: reduced(x + 1), NARROW),  # no cast
        (lambda x: (wide := (x + 1).float(), reduced(wide), wide.sum())[1:], NARROW),  # read by others
        (lambda x: reduced((x + 1).t().float()), torch.randn(4, ROWS).bfloat16()),  # another layout
        (lambda x: reduced((x > 0).float()), NARROW),  # no float, which kernels would not sum
    ],
    ids=["narrows", "plain", "shared", "transposed", "bool"],
)
def test_other_inputs_of_reduce_scatters_keep_their_casts(step: Any, inputs: torch.Tensor) -> None:
    (start,) = captured(step, inputs).collectives()
    assert str(start.target) == "_c10d_functional.reduce_scatter_tensor.default"


def test_expanding_restores_the_cast_and_the_reduce_scatter() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return reduced((x + 1).float()) * 2

    graph = captured(step, NARROW)
    (start,) = graph.collectives()
    made = expand(graph, start)
    assert graph.check().collectives() == [made]
    assert targets(graph) == targets(plain(step, NARROW))


@pytest.mark.parametrize("coalesced", [False, True])
def test_the_dtype_to_sum_in_is_where_the_row_says(coalesced: bool) -> None:
    """And not behind all other operands: a reduction with the dtype in front is expanded, and its casts have bytes."""
    signature = "ScalarType dtype, str reduce_op, int group_size, str group_name"
    one = lambda x, dtype, op, size, group: x.new_empty((x.shape[0] // size, *x.shape[1:]), dtype=dtype)
    with (
        operations(
            summed=(f"(Tensor input, {signature}) -> Tensor", one),
            all_summed=(f"(Tensor[] inputs, {signature}) -> Tensor[]", lambda xs, *how: [one(x, *how) for x in xs]),
        ) as ops,
        weft.fake_world(2),
    ):
        row = CollectiveOp(
            ops.summed.default,
            REDUCE_SCATTER.kind,
            coalesced=ops.all_summed.default,
            reduction=2,
            sum_dtype=1,
            library=REDUCE_SCATTER.op,
        )
        register(row)
        built = StepBuilder()
        shards = [built.input(torch.empty(1024, 4, dtype=torch.bfloat16)) for _ in range(2)]
        how = torch.float32, "sum", 2, "dp"
        results = built.pick(
            built.call(row.coalesced, shards, *how) if coalesced else built.call(row.op, shards[0], *how)
        )
        built.returns(*[built.call(WAIT, each) for each in (results if coalesced else [results])])
        step = built.build({"dp": dist.group.WORLD.group_name})
        (start,) = step.collectives()
        made = expand(step, start)
        assert made.target is (REDUCE_SCATTER.coalesced if coalesced else REDUCE_SCATTER.op)
        assert made.args[1:] == ("sum", 2, "dp")
        step.check()


def by_itself_and_expanded(rank: int, world: int) -> list[list[torch.Tensor]]:
    """Results of a step with the operation as it is, expanded, coalesced, coalesced and expanded, and of the step."""
    from weft.inductor.schedule.bucketing import bucketable_sequences, merge_buckets

    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = (x + 1).float(), (y * 3).float()
        return reduced(a) * 2, reduced(b) + 1

    generator = torch.Generator().manual_seed(rank)
    inputs = [torch.randn(8, 3, generator=generator).bfloat16(), torch.randn(4, 2, generator=generator).bfloat16()]
    found = [[*step(*inputs)]]
    for coalesces in (False, True):
        for expands in (False, True):
            graph = wire_dtype(run_passes(weft.capture(step, *inputs), PASSES))
            assert [node.target for node in graph.collectives()] == [WIDENING_REDUCE_SCATTER.op] * 2
            if coalesces:
                graph = merge_buckets(graph, bucketable_sequences(graph)) or graph
                assert [node.target for node in graph.collectives()] == [WIDENING_REDUCE_SCATTER.coalesced]
            for node in graph.collectives() if expands else []:
                expand(graph, node)
            program = compile_aten(graph.check())
            assert bool(re.search("weft_c10d", program.source)) is not expands
            found.append(program(*inputs))
    return found


def test_all_forms_give_the_same_bits() -> None:
    for eager, *others in run_ranks(by_itself_and_expanded, 2):
        for results in others:
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(eager, results, strict=True))


def checked(rank: int, world: int) -> None:
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    x = torch.randn(4, 3).bfloat16()
    checks = ("test_schema", "test_faketensor")
    single, several = WIDENING_REDUCE_SCATTER.op, WIDENING_REDUCE_SCATTER.coalesced
    torch.library.opcheck(single, (x, "sum", 2, group, torch.float32), test_utils=checks)
    torch.library.opcheck(several, ([x, x], "sum", 2, group, torch.float32), test_utils=checks)


def test_fakes_of_widening_collectives_match_their_results() -> None:
    run_ranks(checked, 2)
