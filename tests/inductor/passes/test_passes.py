"""Passes keep the bits of every result and issue fewer collectives."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from harness import run_ranks
from weft.capture.graph import StepGraph
from weft.inductor.passes.drop_noops import drop_noops
from weft.inductor.passes.drop_unused_gathers import drop_unused_gathers
from weft.inductor.passes.pack import pack
from weft.inductor.passes.pipeline import run_passes
from weft.inductor.passes.schedule_waits import schedule_waits
from weft.inductor.runtime.aten import compile_aten


class Toy(nn.Module):
    """Three sharded layers of uneven width and an embedding, whose table backward never reads."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def step_over(world: int, device: str = "cpu") -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    mesh = dist.init_device_mesh(device, (world,))
    model = Toy().to(device)
    for layer in model.layers:
        weft.fully_shard(layer, mesh=mesh)
    weft.fully_shard(model, mesh=mesh, reshard_after_forward=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, model


def kinds(step: StepGraph) -> Counter[str]:
    return Counter(str(node.target).split(".")[1] for node in step.collectives())


def captured(world: int) -> StepGraph:
    with weft.fake_world(world):
        step, _ = step_over(world)
        return weft.capture(step, torch.zeros(5, dtype=torch.long))


def test_unused_gathers_are_dropped() -> None:
    graph = captured(4)
    before, after = kinds(graph), kinds(drop_unused_gathers(graph.copy()))
    # Backward reads the two weights of a layer, neither its biases nor the table: 7 gathers of 26 serve nothing.
    assert before["all_gather_into_tensor"] == 26
    assert after["all_gather_into_tensor"] == 19
    assert after["reduce_scatter_tensor"] == before["reduce_scatter_tensor"] == 13


@pytest.mark.parametrize(("world", "reduces"), [(2, 3), (4, 13)])
def test_adjacent_collectives_on_the_cpu_share_a_buffer(world: int, reduces: int) -> None:
    """One gather a layer and direction, and one of the table.

    Sums of more than two ranks depend on the place in a buffer, so reduce-scatters of four keep to themselves.
    """
    packed = kinds(pack(captured(world)).check())
    assert packed["all_gather_into_tensor"] == 7
    assert packed["reduce_scatter_tensor"] == reduces


def test_coalesced_collectives_between_others_are_not_merged() -> None:
    """A user's own coalesced all-reduce among the gathers of a sharded model."""
    with weft.fake_world(2):
        step, _ = step_over(2)
        group = dist.group.WORLD.group_name

        def with_sums(ids: torch.Tensor) -> torch.Tensor:
            sums = torch.ops._c10d_functional.all_reduce_coalesced([ids, ids + 1], "sum", group)
            parts = [torch.ops._c10d_functional.wait_tensor(each) for each in sums]
            return step(parts[0].remainder(11)) + parts[1].sum()

        graph = weft.capture(with_sums, torch.zeros(5, dtype=torch.long))
    count = kinds(run_passes(graph))
    assert count["all_reduce_coalesced"] == 1
    assert count["all_gather_into_tensor"] == 7


def targets(step: StepGraph) -> Counter[str]:
    return Counter(str(node.target) for node in step.graph.nodes if node.op == "call_function")


def test_padding_of_evenly_divided_shards_is_dropped() -> None:
    """Over 3 ranks widths 6 and 6x7 divide, 7 and 11 do not; the same on every rank."""
    seen = set()
    for rank in range(3):
        with weft.fake_world(3, rank):
            step, _ = step_over(3)
            graph = weft.capture(step, torch.zeros(5, dtype=torch.long))
        left = targets(drop_noops(graph.copy()).check())
        seen.add((left["weft.pad_shard.default"], left["weft.unpad_shard.default"]))
        assert targets(graph)["weft.pad_shard.default"] > left["weft.pad_shard.default"] > 0
    assert len(seen) == 1


def test_views_of_the_shape_a_tensor_has_are_dropped() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x[:].view(4, 3)[0:4, 0:3].expand(4, 3).permute(0, 1)
        return y.t() + y[1:3].sum() + x.unsqueeze(0).squeeze(0).view(3, 4)

    left = targets(drop_noops(weft.capture(step, torch.randn(4, 3))).check())
    assert left["aten.slice.Tensor"] == 1
    assert left["aten.view.default"] == 1
    assert left["aten.t.default"] == 1
    assert left["aten.expand.default"] == left["aten.permute.default"] == 0


def test_run_passes_does_not_change_its_argument() -> None:
    graph = captured(2)
    text = str(graph)
    assert len(run_passes(graph).collectives()) < len(graph.collectives())
    assert str(graph) == text


def with_and_without(rank: int, world: int, device: str = "cpu") -> list[list[torch.Tensor]]:
    """Losses and weights after four steps: eager, without passes, with passes."""
    ids = [torch.arange(5, device=device).add(rank + at).remainder(11) for at in range(4)]
    outcomes = []
    for passes in (
        None,
        [],
        [drop_noops],
        [drop_unused_gathers],
        [pack],
        [drop_noops, drop_unused_gathers, pack, schedule_waits],
    ):
        step, model = step_over(world, device)
        losses = []
        if passes is not None:
            graph = weft.capture(step, ids[0])
            program = compile_aten(run_passes(graph, passes))
        for batch in ids:
            if passes is None:
                losses.append(step(batch).detach())
                continue
            local = {name: p.to_local() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
            values = [
                batch if e.path == "args[0]" else 0.1 if "lr" in e.path else local[e.path.removeprefix("model.")]
                for e in graph.inputs
            ]
            losses.append(program(*values)[-1])
        outcomes.append([*(loss.cpu() for loss in losses), *(p.to_local().detach().cpu() for p in model.parameters())])  # type: ignore[attr-defined]
    return outcomes


@pytest.mark.parametrize("world", [2, 4])
def test_bits_are_kept(world: int) -> None:
    for eager, *others in run_ranks(with_and_without, world, timeout=120):
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(eager, other, strict=True))


@pytest.mark.gpu(2)
def test_bits_are_kept_on_gpus() -> None:
    for eager, *others in run_ranks(with_and_without_on_gpus, 2, timeout=120, backend="nccl"):
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(eager, other, strict=True))


def with_and_without_on_gpus(rank: int, world: int) -> list[list[torch.Tensor]]:
    return with_and_without(rank, world, "cuda")


def test_conjugate_and_negative_views_stay() -> None:
    """Conjugate and negative views have the sizes, strides and memory of what they are views of."""
    x = torch.randn(4, dtype=torch.complex64)

    step = lambda x: (x.conj() + 1, x.conj().imag * 2, torch.fft.ifft(x.real))
    torch.testing.assert_close(weft.compile(step)(x), step(x), rtol=0, atol=0)
