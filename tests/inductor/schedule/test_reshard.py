"""Values gathered once, or again: the same results, other memory."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_ops import gathered as extended
from collective_ops import operations
from sharded_steps import GROUPS, outcome, the_steps
from torch import nn

import weft
from harness import run_ranks
from step_builder import StepBuilder
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import WAIT
from weft.capture.step_interface import Role
from weft.inductor.graph.collectives import ALL_GATHER, KINDS, CollectiveOp, register
from weft.inductor.graph.liveness import liveness
from weft.inductor.passes.common_subexpressions import common_subexpressions
from weft.inductor.passes.drop_unused_gathers import drop_unused_gathers
from weft.inductor.passes.pipeline import run_passes
from weft.inductor.runtime.aten import compile_aten
from weft.inductor.schedule.reshard import Gap, Gathered, add_gathers, choose_gaps, gather_once

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
Node = torch.fx.Node


def gathered(b: StepBuilder, shard: Node, group: str = "dp") -> Node:
    start = b.call(ALL_GATHER.op, shard, 2, group)
    return b.call(WAIT, start, val=start.meta["val"])


def starts(step: StepGraph) -> list[Node]:
    return step.graph.find_nodes(op="call_function", target=ALL_GATHER.op)


def forward_and_backward(layers: int, reshard: bool) -> StepGraph:
    """x @ w1 @ w2 ..., then the same backwards through the transposed weights; each weight gathered for both where
    ``reshard``."""
    b = StepBuilder()
    x = b.input(torch.ones(4, 4), Role.BATCH)
    shards = [b.input(torch.ones(2, 4)) for _ in range(layers)]
    wholes = []
    for shard in shards:
        wholes.append(gathered(b, shard))
        x = b.call(aten.mm.default, x, b.call(aten.slice.Tensor, wholes[-1], 0, 0, 4))
    for shard, whole in zip(reversed(shards), reversed(wholes), strict=True):
        again = gathered(b, shard) if reshard else whole
        x = b.call(aten.mm.default, x, b.call(aten.t.default, b.call(aten.slice.Tensor, again, 0, 0, 4)))
    b.returns(x)
    return b.build({"dp": "0"})


def test_equal_gathers_become_one() -> None:
    step = forward_and_backward(3, reshard=True)
    values = gather_once(step)
    step.check()
    assert len(starts(step)) == len(values) == 3
    assert [len(value.uses) for value in values] == [2, 2, 2]
    assert len(step) == len(forward_and_backward(3, reshard=False))


def test_a_kept_value_is_gathered_again_before_its_next_use_and_views_follow() -> None:
    step = forward_and_backward(3, reshard=False)
    values = gather_once(step)
    first, second = add_gathers(step, values[0], [1])
    step.check()
    assert len(starts(step)) == 4
    assert second.start.args == first.start.args
    assert first.uses + second.uses == values[0].uses
    order = list(step.graph.nodes)
    (use,) = second.uses
    between = order[order.index(second.start) : order.index(use) + 1]
    expected = [ALL_GATHER.op, WAIT, aten.slice.Tensor, aten.t.default, aten.mm.default]
    assert [node.target for node in between] == expected
    assert [user for view in first.wait.users for user in view.users] == first.uses


def test_less_is_held_between_the_uses() -> None:
    kept, again = (forward_and_backward(6, reshard=False) for _ in range(2))
    gather_once(kept)
    for value in gather_once(again):
        add_gathers(again, value, [1])
    more, less = (liveness(step, rounded=False).peak for step in (kept, again.check()))
    # At the turn of forward to backward all weights are held, or one: 64 bytes each.
    assert more - less == 5 * 64


def test_every_gather_of_a_value_has_memory_of_its_own() -> None:
    step = forward_and_backward(1, reshard=False)
    parts = add_gathers(step, gather_once(step)[0], [1])
    keys = {part.start.meta["val"].untyped_storage()._cdata for part in parts}
    views = {part.uses[0].args[1].meta["val"].untyped_storage()._cdata for part in parts}  # type: ignore[union-attr]
    assert keys == views
    assert len(keys) == 2


def test_a_value_after_an_update_is_another() -> None:
    b = StepBuilder()
    shard, x = b.input(torch.ones(2, 4)), b.input(torch.ones(4, 4), Role.BATCH)
    x = b.call(aten.mm.default, x, gathered(b, shard))
    updated = b.write(aten.mul_.Tensor, shard, 0.5)
    x = b.call(aten.mm.default, x, gathered(b, updated))
    b.update(shard, updated)
    b.returns(x)
    step = b.build({"dp": "0"})
    assert len(gather_once(step)) == 2


def test_a_shard_that_was_overwritten_is_not_gathered_again() -> None:
    """The first gather is used after the update too: from the shard it can no longer be made."""
    b = StepBuilder()
    shard, x = b.input(torch.ones(2, 4)), b.input(torch.ones(4, 4), Role.BATCH)
    whole = gathered(b, shard)
    first = b.call(aten.mm.default, x, whole)
    second = b.call(aten.mm.default, first, whole)
    updated = b.write(aten.mul_.Tensor, shard, 0.5)
    third = b.call(aten.mm.default, second, whole)
    b.update(shard, updated)
    b.returns(third)
    (value,) = gather_once(b.build({"dp": "0"}))
    assert (len(value.uses), value.regatherable) == (3, 2)


def test_gathers_of_other_groups_and_sizes_are_others() -> None:
    b = StepBuilder()
    shard = b.input(torch.ones(2, 4))
    results = [gathered(b, shard, group) for group in ("dp", "other", "dp")]
    b.returns(*(b.call(aten.neg.default, result) for result in results))
    values = gather_once(b.build({"dp": "0", "other": "1"}))
    assert sorted(len(value.uses) for value in values) == [1, 2]


def test_gathers_that_escape_or_are_written_to_are_not_merged() -> None:
    b = StepBuilder()
    shard = b.input(torch.ones(2, 4))
    returned, written, read = (gathered(b, shard) for _ in range(3))
    new = b.write(aten.mul_.Tensor, written, 2)
    b.returns(returned, b.call(aten.neg.default, new), b.call(aten.exp.default, read))
    step = b.build({"dp": "0"})
    assert len(gather_once(step)) == 1
    assert len(starts(step)) == 3


def test_a_wait_that_stands_late_is_moved_to_the_first_use_of_all() -> None:
    b = StepBuilder()
    shard = b.input(torch.ones(2, 4))
    start = b.call(ALL_GATHER.op, shard, 2, "dp")
    early = b.call(aten.exp.default, gathered(b, shard))
    late = b.call(aten.neg.default, b.call(WAIT, start, val=start.meta["val"]))
    b.returns(early, late)
    step = b.build({"dp": "0"})
    (value,) = gather_once(step)
    step.check()
    assert value.start is start
    assert value.uses == [early, late]


# ---- which


def test_gaps_are_closed_where_the_peak_is_and_cheap_ones_first() -> None:
    gaps = [Gap(0, 1, 0, 10, 4, 1.0), Gap(1, 1, 2, 8, 4, 2.0), Gap(2, 1, 4, 6, 4, 3.0), Gap(3, 1, 8, 10, 100, 0.5)]
    memory = torch.tensor([4, 4, 8, 8, 12, 12, 8, 8, 4, 4])
    gaps.sort(key=lambda gap: gap.cost)
    assert choose_gaps(gaps, memory.clone(), 12) == []
    assert [gap.value for gap in choose_gaps(gaps, memory.clone(), 8)] == [0]
    assert [gap.value for gap in choose_gaps(gaps, memory.clone(), 4)] == [0, 1]
    assert [gap.value for gap in choose_gaps(gaps, memory.clone(), 0)] == [0, 1, 2]


@pytest.mark.parametrize("seed", range(20))
def test_closing_gaps_reaches_what_closing_all_reaches(seed: int) -> None:
    chance = random.Random(seed)
    gaps, memory = [], torch.full((20,), 5)
    for value in range(8):
        begin = chance.randrange(19)
        end = chance.randrange(begin + 1, 20)
        gaps.append(Gap(value, 1, begin, end, chance.randrange(1, 9), chance.random()))
        memory[begin:end] += gaps[-1].size
    gaps.sort(key=lambda gap: gap.cost)
    for target in range(5, int(memory.max()) + 1):
        left = memory.clone()
        chosen = choose_gaps(gaps, left, target)
        assert int(left.max()) <= target
        assert len({gap.value for gap in chosen}) == len(chosen)
    assert choose_gaps(gaps, memory.clone(), int(memory.max())) == []


# ---- whole steps


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def sharded(reshard: bool) -> StepGraph:
    with weft.fake_world(4):
        mesh = dist.init_device_mesh("cpu", (4,))
        model = Toy()
        policy = weft.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in model.layers:
            weft.fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        weft.fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return run_passes(weft.capture(step, torch.zeros(4, 6)), [drop_unused_gathers, common_subexpressions])


def test_a_shard_is_cast_once_for_forward_and_backward() -> None:
    step = sharded(reshard=True)
    given = Counter(start.all_input_nodes[0] for start in starts(step))
    assert len(given) == 12
    assert all("pad_shard" in str(shard.target) for shard in given)


def test_both_values_of_reshard_after_forward_give_the_same_graph() -> None:
    kept, again = sharded(reshard=False), sharded(reshard=True)
    assert len(starts(again)) > len(starts(kept)) == 12
    values = gather_once(again)
    assert len(starts(again.check())) == 12
    weights = [value for value in values if len(value.uses) > 1]
    for value in weights:
        add_gathers(again, value, [1])
    # Backward reads the two weights of a layer, but for that of the first layer that the batch meets.
    assert len(starts(again.check())) == 12 + len(weights) == 12 + 5
    assert len(gather_once(kept)) == 12


def on_ranks(rank: int, world: int, seeds: range) -> list[str]:
    """What goes wrong in random steps whose gathers are merged, and merged and repeated."""
    wrong = []
    groups = dict.fromkeys(GROUPS, dist.group.WORLD.group_name)
    for seed, (step, shapes) in zip(seeds, the_steps(seeds, world, groups), strict=True):
        expected = outcome(compile_aten(step.copy()), shapes, rank)
        once, again, chance = step.copy(), step.copy(), random.Random(seed)
        gather_once(once)
        for value in gather_once(again):
            add_gathers(again, value, _cuts(value, chance))
        for name, changed in (("once", once), ("again", again)):
            got = outcome(compile_aten(changed.check()), shapes, rank)
            if not all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)):
                wrong.append(f"{name}, seed {seed}")
    return wrong


def _cuts(value: Gathered, chance: random.Random) -> list[int]:
    return [at for at in range(1, value.regatherable) if chance.random() < 0.6]


@pytest.mark.gloo
def test_random_steps_keep_their_bits_on_two_processes() -> None:
    assert run_ranks(on_ranks, 2, range(40), timeout=120) == [[], []]


def test_random_steps_have_values_to_gather_again() -> None:
    """What the test above relies on."""
    cuts = 0
    for step, _ in the_steps(range(40), 2, dict.fromkeys(GROUPS, "0")):
        cuts += sum(max(value.regatherable - 1, 0) for value in gather_once(step))
    assert cuts > 40


def test_nothing_happens_without_gathers() -> None:
    b = StepBuilder()
    x: Any = b.input(torch.ones(4))
    b.returns(b.call(aten.exp.default, x))
    step = b.build()
    before = str(step)
    assert gather_once(step) == []
    assert str(step) == before


def test_gathers_of_an_operation_that_weft_does_not_have_become_one_too() -> None:
    """A row of the kind all_gather is all that it takes; gathers by different operations stay apart."""
    with operations(striped=("(Tensor input, int group_size, str group_name) -> Tensor", extended)) as ops:
        op = ops.striped.default
        register(CollectiveOp(op, KINDS["all_gather"]))
        b = StepBuilder()
        x, shard = b.input(torch.ones(4, 4), Role.BATCH), b.input(torch.ones(2, 4))
        for each in (op, op, ALL_GATHER.op):
            start = b.call(each, shard, 2, "dp")
            x = b.call(aten.mm.default, x, b.call(WAIT, start, val=start.meta["val"]))
        b.returns(x)
        step = b.build({"dp": "0"})
        assert [len(value.uses) for value in gather_once(step)] == [2, 1]
        assert [node.target for node in step.check().collectives()] == [op, ALL_GATHER.op]
