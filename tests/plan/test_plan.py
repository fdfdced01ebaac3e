"""Predictions against formulas, against what ``weft.explain`` predicts, and against each other."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from llama_steps import llama_step
from torch import Tensor, nn

import weft
from weft import knobs
from weft.errors import BranchesOnInteger, UnknownOption
from weft.inductor.cost import collective_cost
from weft.inductor.fusion import fusion_group
from weft.inductor.loop_ir import axes, ir
from weft.plan.memory_roles import ACTIVATIONS, GATHERED, GRADIENTS, OPTIMIZER_STATE, PARAMETERS
from weft.plan.plan import StepPlanner
from weft.plan.prediction import Prediction

pytestmark = pytest.mark.fake

WORLD, WIDTH, LAYERS, ROWS, LENGTH, WORDS = 8, 1024, 2, 2, 1024, 8192


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = (*x.shape[:2], -1, 64)
        query, key, value = (each.reshape(heads).transpose(1, 2) for each in self.mixed(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten())


def training_step(checks: str = "") -> Any:
    with torch.device("meta"):
        model = Model()
    policy = weft.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        weft.fully_shard(block, mp_policy=policy)
    weft.fully_shard(model, mp_policy=policy)
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        loss = model(ids, labels)
        loss.backward()
        if checks == "finite" and not torch.isfinite(loss):
            raise RuntimeError("the loss is not finite")
        if checks == "count":
            for _ in range(int((ids > 3).sum())):
                loss = loss + 1
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long, device="cuda")
    return ids, torch.zeros_like(ids)


class Planned(NamedTuple):
    """A prediction, what ``weft.explain`` says of the same step, and a prediction for little memory."""

    found: Prediction
    explained: Any
    small: Prediction


@pytest.fixture(scope="module")
def planned() -> Planned:
    with weft.fake_world(WORLD):
        step = training_step()
        planner = StepPlanner(step, batch())
        explained = weft.explain(step, *batch()).scheduled("h200x8")
        return Planned(planner.predict("h200x8"), explained, planner.predict("h200x8", 0.01))


def test_the_prediction_is_that_of_explain(planned: Planned) -> None:
    found, explained, _ = planned
    simulation = explained.schedule.simulation
    assert found.step_seconds == simulation.seconds
    assert found.peak_bytes == simulation.peak
    assert sum(found.exposed_seconds.values()) == pytest.approx(simulation.exposed_seconds)
    assert [each.bytes for each in found.collectives] == [
        each.bytes for each in sorted(explained.schedule.reports, key=lambda bucket: bucket.began)
    ]


def test_parts_add_up_to_the_step_and_none_is_faster_than_its_limit(planned: Planned) -> None:
    found = planned.found
    assert sum(part.seconds for part in found.parts) == pytest.approx(found.step_seconds, rel=1e-9)
    for part in found.parts:
        if not part.name.startswith("exposed"):
            assert part.least_seconds <= part.seconds * (1 + 1e-9)


def test_roles_add_up_to_the_simulated_memory_and_the_peak_is_shown(planned: Planned) -> None:
    found = planned.found
    timeline = found.memory_timeline
    assert max(timeline.total) == found.peak_bytes
    for at, total in enumerate(timeline.total):
        assert sum(sizes[at] for sizes in timeline.roles.values()) == total
    assert all(one.bytes >= two.bytes for one, two in zip(found.top_tensors, found.top_tensors[1:], strict=False))
    assert any(tensor.role == ACTIVATIONS and "test_plan.py" in tensor.line for tensor in found.top_tensors)


def test_bytes_by_role_are_those_of_the_formula(planned: Planned) -> None:
    """Sharded over all ranks: four bytes a parameter, eight a parameter for AdamW. Every size divides by the ranks."""
    found = planned.found
    parameters = LAYERS * 12 * WIDTH * WIDTH + 2 * WORDS * WIDTH
    tensors = 4 * LAYERS + 2
    assert found.input_bytes["parameter"] == 4 * parameters // WORLD
    assert found.input_bytes["optimizer state"] == 8 * parameters // WORLD + 4 * tensors  # and a count for each tensor
    assert found.memory_timeline.roles[PARAMETERS][0] == 4 * parameters // WORLD
    assert found.memory_timeline.roles[OPTIMIZER_STATE][0] == 8 * parameters // WORLD + 512 * tensors
    assert GRADIENTS in found.memory_timeline.roles or GATHERED in found.memory_timeline.roles


def test_operations_and_mfu_are_those_of_the_formula(planned: Planned) -> None:
    found = planned.found
    weights = LAYERS * 12 * WIDTH * WIDTH + WORDS * WIDTH  # embeddings are looked up
    operations = ROWS * LENGTH * (6 * weights + 6 * LAYERS * WIDTH * LENGTH)
    assert found.model_operations == pytest.approx(operations, rel=0.02)
    assert found.mfu == pytest.approx(operations / found.step_seconds / 9.89e14, rel=0.02)
    assert found.tokens == ROWS * LENGTH
    assert found.tokens_per_second == pytest.approx(ROWS * LENGTH / found.step_seconds)


def test_keys_of_the_json_are_the_names_of_the_attributes(planned: Planned) -> None:
    found = planned.found
    data = json.loads(found.to_json())
    for name in ("step_seconds", "interval", "tokens_per_second", "mfu", "peak_bytes", "fits", "exposed_seconds"):
        value = getattr(found, name)
        assert data[name] == (list(value) if isinstance(value, tuple) else value)
    assert len(data["collectives"]) == len(found.collectives)
    assert data["memory_timeline"]["total"] == found.memory_timeline.total
    assert data["top_tensors"][0]["bytes"] == found.top_tensors[0].bytes
    trace = json.loads(found.to_trace())
    ends = [event["ts"] + event["dur"] for event in trace["traceEvents"] if event["ph"] == "X"]
    assert max(ends) == pytest.approx(found.step_seconds * 1e6, abs=1)
    for word in ("fits", "where the step goes", "communication", "assumptions"):
        assert word in str(found)


def test_lanes_do_not_overlap_and_cover_the_communication(planned: Planned) -> None:
    found = planned.found
    for lane in found.timeline:
        assert all(one.end <= two.start + 1e-12 for one, two in zip(lane.slices, lane.slices[1:], strict=False))
    streams = sum(each.end - each.start for lane in found.timeline[1:] for each in lane.slices)
    assert streams == pytest.approx(sum(each.took for each in found.collectives), rel=1e-6)


def test_equal_layers_share_work_and_get_what_each_would_get_alone(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective_cost, "_MOST_TRANSFERS", 0)  # every price is computed
    monkeypatch.setattr(ir, "_FEWEST_SWEPT", 1)  # nodes of loops are made again as soon as nothing holds them
    monkeypatch.setattr(ir._Interned, "_sweeps_at", 1)
    monkeypatch.setattr(axes, "substitute_stores", _rebuilt)
    monkeypatch.setattr(fusion_group, "substitute_stores", _rebuilt)
    with weft.fake_world(WORLD):
        alone = StepPlanner(training_step(), batch()).predict("h200x8")
    assert alone.to_json() == planned.found.to_json()


def _rebuilt(stores: Any, substitution: Any) -> Any:
    """The stores over other axes, made again where they stay as they are."""
    new = axes.substitute_values([value for store in stores for value in store.values()], substitution)
    return [ir.map_values(store, new, axes.substitute(store.index, substitution)) for store in stores]


def test_a_step_that_does_not_fit_is_planned_all_the_same(planned: Planned) -> None:
    small = planned.small
    assert not small.fits
    assert small.limit_bytes == int(0.01 * 2**30) < small.peak_bytes
    assert "does not fit" in str(small)
    assert any("memory_limit" in line for line in small.warnings)


def test_a_check_of_a_value_is_taken_to_be_false_and_a_count_is_refused() -> None:
    with weft.fake_world(1):
        model = nn.Linear(512, 512, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> None:
            loss = model(x).square().mean()
            loss.backward()
            if loss > 3:
                print(loss.sin())
            optimizer.step()
            optimizer.zero_grad()

        def counts(x: Tensor) -> Tensor:
            for _ in range(int((x > 3).sum())):
                x = x + 1
            return model(x)

        x = torch.zeros(64, 512, device="cuda")
        found = weft.plan(step, x)
        with pytest.raises(BranchesOnInteger, match=r"test_plan.py:\d+"):
            weft.plan(counts, x)
        with pytest.raises(UnknownOption, match="h200x8"):
            weft.plan(step, x, cluster="h300x8")
    assert found.collectives == []
    assert found.exposed_seconds == {}
    assert (found.tokens, found.samples, found.fits) == (None, 64, True)
    assert any("test_plan.py" in line for line in found.assumptions)
    assert next(part.calls for part in found.parts if part.name == "GEMM") == 2


@pytest.mark.timeout(600)
def test_throughput_from_8_to_128_gpus_falls_as_torchtitan_publishes() -> None:
    """Its table of Llama 3.1 8B (FSDP2, sequences of 8,192 tokens, H100) has 5,762 tokens a second and GPU on 8 and
    5,605 on 128: 97.3% are kept. Two points are allowed, because the network there is not published."""
    tokens = []
    for world in (8, 128):
        # Other tests verify plans. Here it would take more than half of the time.
        with knobs.override(verify_graphs=False), weft.fake_world(world):
            ids = torch.zeros(1, 8192, dtype=torch.long, device="cuda")
            tokens.append(weft.plan(llama_step(32, clip=True), ids, ids, cluster="h100x8").tokens_per_second)
    one, many = tokens
    assert one is not None
    assert many is not None
    assert many / one == pytest.approx(0.973, abs=0.02)
