"""What is merged, and what must not be."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import weft
from pass_runs import BIT_KEEPING, Run, same_bits, targets
from weft.capture.node_kinds import is_collective
from weft.inductor.passes.common_subexpressions import common_subexpressions
from weft.inductor.passes.pipeline import run_passes


def merged(step, *args) -> Run:
    """The step after merging, which left its bits alone."""
    run = Run(step, args, [common_subexpressions])
    assert same_bits(run, Run(step, args, []))
    return run


def count(run: Run, target: str) -> tuple[int, int]:
    return targets(run.before)[target], targets(run.graph)[target]


def test_equal_operations_and_their_equal_users_are_merged() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x.view(-1) * 2).sum() + torch.exp(x.view(-1) * 2).mean()

    run = merged(step, torch.randn(2, 3))
    assert count(run, "aten.view.default") == count(run, "aten.mul.Tensor") == count(run, "aten.exp.default") == (2, 1)


@pytest.mark.parametrize("other", [1.0, True, 2])
def test_constants_of_different_types_are_not_merged(other: object) -> None:
    ints = torch.arange(4)
    run = merged(lambda x: (x * 1).sum() + (x * other).sum().int(), ints)
    assert count(run, "aten.mul.Tensor") == (2, 2)


def test_operations_on_zero_and_minus_zero_are_not_merged() -> None:
    run = merged(lambda x: (x * 0.0).signbit() | (x * -0.0).signbit(), torch.ones(2))
    assert count(run, "aten.mul.Tensor") == (2, 2)


def test_random_operations_are_never_merged() -> None:
    torch.manual_seed(0)
    run = Run(lambda x: torch.rand_like(x).sum() - torch.rand_like(x).sum(), [torch.ones(8)], [common_subexpressions])
    assert targets(run.graph)["aten.rand_like.default"] == 2
    assert run.outcome[0] != 0


def test_returned_tensors_do_not_share_memory() -> None:
    run = merged(lambda x: (x + 1, x + 1, (x + 1).sum()), torch.ones(3))
    assert count(run, "aten.add.Tensor") == (3, 3)
    a, b = run.outcome[:2]
    assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()


def test_a_write_to_one_of_two_equal_values_does_not_reach_the_other() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        a, b = torch.exp(x), torch.exp(x)
        a.add_(1)
        a.view(-1).mul_(b.view(-1))
        return a.sum() - b.sum() * 3

    run = merged(step, torch.randn(2, 2))
    assert count(run, "aten.exp.default") == (2, 1)
    assert torch.equal(run.outcome[0], step(run.outcome[1]))


def test_values_before_and_after_an_input_update_are_not_merged() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        before = torch.exp(x).sum()
        x.mul_(2)
        return torch.exp(x).sum() - before

    assert count(merged(step, torch.ones(3)), "aten.exp.default") == (2, 2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def test_activation_checkpointing_is_not_undone() -> None:
    layer = Layer()

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = checkpoint(layer, x, use_reentrant=False).sum()
        loss.backward()
        return loss.detach()

    run = merged(step, torch.randn(2, 4))
    assert count(run, "aten.tanh.default") == (2, 2)


def test_collectives_are_never_merged() -> None:
    with weft.fake_world(2):
        group = torch.distributed.group.WORLD.group_name

        def step(x: torch.Tensor) -> torch.Tensor:
            sums = [torch.ops._c10d_functional.all_reduce(x, "sum", group) for _ in range(2)]
            one, other = map(torch.ops._c10d_functional.wait_tensor, sums)
            return one.exp() + other.exp()

        graph = weft.capture(step, torch.zeros(3))
    left = run_passes(graph, [common_subexpressions])
    assert sum(map(is_collective, left.graph.nodes)) == 2


def test_dynamic_sizes_are_written_once() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        return (x.view(2 * n) * n).sum() + (x.view(2 * n) * n).mean()

    x = torch.randn(3, 2)
    weft.mark_dynamic(x, 0)
    run = Run(step, [x], [common_subexpressions], again=[torch.ones(5, 2)])
    assert count(run, "aten.view.default") == (2, 1)
    assert count(run, "aten.mul.Tensor") == (2, 1)
    assert torch.equal(run.outcome[0], step(torch.ones(5, 2)))


class Rotary(nn.Module):
    """Two layers that each make the same table of angles."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.arange(x.shape[-1], device=x.device).mul(0.5).cos()


def test_a_sharded_training_step_has_fewer_nodes() -> None:
    with weft.fake_world(2):
        model = nn.Sequential(Layer(), Rotary(), Layer(), Rotary())
        for layer in model:
            weft.fully_shard(layer, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        graph = weft.capture(step, torch.randn(2, 4))
    without = targets(run_passes(graph, [p for p in BIT_KEEPING if p is not common_subexpressions]))
    left = targets(run_passes(graph))
    assert (without["aten.arange.default"], left["aten.arange.default"]) == (2, 1)
    assert (without["aten.cos.default"], left["aten.cos.default"]) == (2, 1)
    assert {name: count for name, count in left.items() if "c10d" in name} == {
        name: count for name, count in without.items() if "c10d" in name
    }


def test_a_shard_on_its_way_to_two_gathers_is_one_value() -> None:
    """Forward and backward cast it alike; what is computed from a parameter otherwise stays apart."""
    with weft.fake_world(2):
        policy = weft.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        model = nn.Sequential(Layer(), Layer())
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        for layer in model:
            weft.fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        graph = weft.capture(step, torch.randn(2, 4))
    left = run_passes(graph, [common_subexpressions])
    shards = [node.all_input_nodes[0] for node in left.graph.nodes if "all_gather" in str(node.target)]
    assert len(shards) == 8
    assert len(set(shards)) == 4
