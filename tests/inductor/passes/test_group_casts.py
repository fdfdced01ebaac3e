"""Casts of parameters, grouped."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from both_ways import assert_equal
from step_builder import StepBuilder
from weft.capture.graph import StepGraph
from weft.capture.record.tracer import capture_step
from weft.capture.step_interface import Role
from weft.inductor.multi_tensor.cast import Cast
from weft.inductor.passes import group_casts as casts
from weft.inductor.passes.drop_noops import drop_noops
from weft.inductor.passes.group_casts import group_casts
from weft.inductor.runtime.aten import compile_aten

aten = torch.ops.aten
HALF = torch.bfloat16


def grouped(step: StepGraph) -> list[int]:
    """How many tensors each call casts."""
    return [len(node.meta["val"][0]) for node in step.graph.nodes if isinstance(node.target, Cast)]


def test_autocast_casts_all_parameters_at_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", HALF):
            loss = model(x).square().mean()
        loss.backward()
        return loss

    captured = capture_step(step, (torch.randn(4, 8),))
    inputs = [place.get() for place in captured.places]
    tail = group_casts(captured.graph.copy()).check()
    assert grouped(tail) == [4]
    assert_equal(compile_aten(tail)(*inputs), compile_aten(captured.graph)(*inputs))


def test_shards_are_cast_together_before_they_are_gathered() -> None:
    with weft.fake_world(2, target_device="cuda"):
        mesh = dist.init_device_mesh("cuda", (2,), mesh_dim_names=("data",))
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
        weft.fully_shard(model, mesh=mesh, mp_policy=weft.MixedPrecisionPolicy(param_dtype=HALF))
        graph = weft.capture(lambda x: model(x).sum().backward(), torch.randn(4, 8))
    assert grouped(group_casts(drop_noops(graph.copy())).check())[0] == 4


def test_a_group_of_casts_stays_within_the_byte_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casts, "BYTES_AT_A_TIME", 100)
    build = StepBuilder()
    params = [build.input(torch.randn(20)) for _ in range(5)]
    build.returns(*(build.call(aten._to_copy.default, param, dtype=HALF) for param in params))
    assert grouped(group_casts(build.build()).check()) == [2, 2]


def test_casts_of_non_parameters_and_other_copies_stay() -> None:
    build = StepBuilder()
    batch, spaced = build.input(torch.randn(6), Role.BATCH), build.input(torch.randn(6, 2)[:, 0])
    whole, other = build.input(torch.randn(6)), build.input(torch.randn(6))
    build.returns(
        build.call(aten._to_copy.default, batch, dtype=HALF),
        build.call(aten._to_copy.default, spaced, dtype=HALF),
        build.call(aten._to_copy.default, whole, dtype=torch.float64),
        build.call(aten._to_copy.default, other, dtype=HALF),
    )
    assert grouped(group_casts(build.build()).check()) == []
