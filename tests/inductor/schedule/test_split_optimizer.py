"""Optimizer updates by bucket: which are split, that nothing is lost, and that training keeps its bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import peer_steps
import pytest
import torch
from llama_steps import sharded_llama
from peer_steps import model, over_peers, sharded, step_of, train

import weft
from harness import run_ranks
from weft.capture.graph import StepGraph
from weft.inductor.fusion.kernel_stages import kernel_graph
from weft.inductor.graph.retarget import retarget
from weft.inductor.multi_tensor.operation import MultiTensor
from weft.inductor.passes.fuse_optimizer import fuse_optimizer
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes
from weft.inductor.schedule.bucketing import bucketable_sequences, merge_buckets
from weft.inductor.schedule.split_optimizer import split_updates

LAYERS = 2


@pytest.fixture
def world() -> Iterator[None]:
    with weft.fake_world(8):
        yield


def merged(*, clip: bool, most: int = 9) -> StepGraph:
    """A step whose collectives go as calls of so many."""
    step = kernel_graph(run_passes(sharded_llama(LAYERS, 1024, clip=clip), KERNEL_PASSES))
    return merge_buckets(
        step, [of[at : at + most] for of in bucketable_sequences(step) for at in range(0, len(of), most)]
    )


def updates(step: StepGraph) -> list[torch.fx.Node]:
    return [node for node in step.graph.nodes if isinstance(node.target, MultiTensor) and node.target.updated]


def reductions(step: StepGraph) -> int:
    return sum("reduce_scatter" in str(node.target) for node in step.collectives())


@pytest.mark.usefixtures("world")
def test_each_bucket_has_an_update_of_its_own() -> None:
    step = merged(clip=False)
    (whole,) = updates(step)
    parameters, results = list(whole.args[0]), [value.name for value in step.results if hasattr(value, "name")]
    step = split_updates(step).check()
    parts = updates(step)
    assert len(parts) == reductions(step) > 2
    assert sorted(p.name for part in parts for p in part.args[0]) == sorted(p.name for p in parameters)
    assert all(len(part.args[0]) == len(vals) for part in parts for vals in part.meta["val"] if vals)
    assert [value.name for value in step.results if hasattr(value, "name")] == results


@pytest.mark.usefixtures("world")
def test_an_update_runs_before_later_gradients_are_reduced() -> None:
    step = split_updates(merged(clip=False))
    first = updates(step)[0]
    seen, todo = set(), [first]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += node.all_input_nodes
    waited = [node for node in step.collectives() if node in seen and "reduce_scatter" in str(node.target)]
    assert len(waited) == 1


@pytest.mark.usefixtures("world")
def test_an_update_that_waits_for_the_gradient_norm_stays_whole() -> None:
    step = merged(clip=True)
    before = len(step)
    assert len(split_updates(step)) == before
    assert len(updates(step)) == 1


class Decaying(torch.optim.Optimizer):
    """Plain steps, each tensor's smaller than the last one's."""

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self) -> None:
        params = self.param_groups[0]["params"]
        grads = [param.grad for param in params]
        torch._foreach_mul_(grads, [-0.01 * 0.9**at for at in range(len(params))])
        torch._foreach_add_(params, grads)


def stepped(make: Callable[[Iterator[torch.nn.Parameter]], torch.optim.Optimizer]) -> StepGraph:
    """The step of some linear layers, sharded, with that optimizer; two collectives a call."""
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    mesh = torch.distributed.init_device_mesh("cuda", (8,), mesh_dim_names=("dp",))
    for layer in (*model, model):
        weft.fully_shard(layer, mesh=mesh)
    model.to_empty(device="cuda")
    optimizer = make(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    graph = retarget(weft.capture(step, torch.zeros(16, 64, device="cuda")))
    graph = kernel_graph(run_passes(graph, KERNEL_PASSES))
    return merge_buckets(graph, [of[at : at + 2] for of in bucketable_sequences(graph) for at in range(0, len(of), 2)])


@pytest.mark.usefixtures("world")
def test_numbers_that_lie_in_one_tensor_keep_an_update_whole() -> None:
    """Those of a step that is recorded, one a parameter, as AdamW has them where its counters are on the CPU."""
    step = stepped(partial(torch.optim.AdamW, foreach=True))
    shared = [n for n in updates(step) if any(isinstance(a, torch.fx.Node) and a.meta["val"].ndim for a in n.args)]
    assert shared
    split = split_updates(step).check()
    assert all(update in split.graph.nodes for update in shared)


@pytest.mark.usefixtures("world")
def test_numbers_among_the_arguments_are_split_with_their_tensors() -> None:
    def rates(step: StepGraph) -> dict[str, float]:
        """By the first tensor that each number goes with."""
        rows = (row for update in updates(step) for row in zip(*update.args, strict=True))
        return {row[0].name: each for row in rows for each in row if isinstance(each, float)}

    step = stepped(Decaying)
    before, count = rates(step), len(updates(step))
    step = split_updates(step).check()
    assert rates(step) == before
    assert len(before) == 8
    assert len(updates(step)) > count


@pytest.mark.usefixtures("world")
def test_gradients_gathered_behind_the_norm_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replicated model: its norm follows from the shards."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(6)))
    model.to_empty(device="cuda")
    weft.replicate(model, mesh=torch.distributed.init_device_mesh("cuda", (8,), mesh_dim_names=("dp",)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    graph = retarget(weft.capture(step, torch.zeros(64, 4096, device="cuda")))
    graph = kernel_graph(run_passes(graph, KERNEL_PASSES))
    merge_buckets(graph, [of[at : at + 2] for of in bucketable_sequences(graph) for at in range(0, len(of), 2)])
    assert len(updates(split_updates(graph).check())) > 2


def trained(rank: int, world: int) -> int:
    """How many updates a step has that trains as eager does, bit for bit."""
    nets = [sharded(model(8, 16)) for _ in range(2)]
    fused = partial(torch.optim.AdamW, lr=0.01, fused=True)
    expected = train(step_of(nets[0], None, fused), nets[0], rank, 3)
    compiled = over_peers(step_of(nets[1], None, fused), ["gloo"], passes=[*peer_steps.PASSES, fuse_optimizer])
    torch.testing.assert_close(train(compiled, nets[1], rank, 3), expected, rtol=0, atol=0)
    return compiled.programs[0].source.count("= adam")


@pytest.mark.gloo
def test_a_step_with_split_updates_trains_as_eager_bit_for_bit() -> None:
    assert all(count > 1 for count in run_ranks(trained, 2, timeout=120))
