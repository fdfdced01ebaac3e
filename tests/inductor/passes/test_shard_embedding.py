"""Look-ups in shards: the rows of the gathered table, and gradients as close to float64 as those of the whole table."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from harness import run_ranks
from weft import knobs
from weft.capture.graph import StepGraph
from weft.capture.record.tracer import capture_step
from weft.errors import GraphMismatch
from weft.inductor.passes.drop_noops import drop_noops
from weft.inductor.passes.drop_unused_gathers import drop_unused_gathers
from weft.inductor.passes.pipeline import run_passes
from weft.inductor.passes.schedule_waits import schedule_waits
from weft.inductor.passes.shard_embedding import shard_embedding
from weft.inductor.runtime.aten import compile_aten

PASSES = [drop_noops, drop_unused_gathers, shard_embedding, schedule_waits]


def model_of(size: int, padding: int | None, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    policy = weft.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model = nn.Sequential(nn.Embedding(size, 8, padding_idx=padding), nn.Linear(8, 4))
    weft.fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)), mp_policy=policy)
    return model


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).float().square().sum(-1).mean()


def program_of(step: Any, *args: Any) -> tuple[Any, StepGraph]:
    captured = capture_step(step, args, {})
    graph = run_passes(captured.graph, PASSES)
    program = compile_aten(graph)
    captured.arguments.bind(list(args))
    return program(*[place.get() for place in captured.places]), graph


def targets(graph: StepGraph) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes]


def body(rank: int, world: int, size: int, padding: int | None, dtype: torch.dtype) -> dict[str, Any]:
    ids = torch.randint(0, size, (2, 3), generator=torch.Generator().manual_seed(rank))
    ids[0, 0] = 0 if padding is None else padding

    def step(ids: torch.Tensor) -> Any:
        loss = loss_of(model, ids)
        loss.backward()
        table = model[0].weight.grad.to_local()
        model.zero_grad()
        return loss.detach(), table

    found: dict[str, Any] = {}
    for even in (False, True):
        model = model_of(size, padding, dtype)
        with knobs.override(even_batches=even):
            results, graph = program_of(step, ids)
        found["even" if even else "whole"] = [result.clone() for result in results]
        found["targets" if even else "targets before"] = targets(graph)
    found["ids"] = ids
    # All ranks' batches on one, in float64.
    plain = nn.Sequential(nn.Embedding(size, 8, padding_idx=padding), nn.Linear(8, 4)).double()
    full = {name: p.full_tensor().double() for name, p in model.named_parameters()}
    plain.load_state_dict({name: value.to(dtype).double() for name, value in full.items()})
    gathered = [torch.empty_like(ids) for _ in range(world)]
    torch.distributed.all_gather(gathered, ids)
    torch.stack([loss_of(plain, other) for other in gathered]).mean().backward()
    rows = -(-size // world)
    found["exact"] = plain[0].weight.grad[rank * rows : (rank + 1) * rows]
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("size", "padding"), [(64, None), (101, None), (97, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_looked_up_rows_equal_the_table_and_gradients_are_as_exact(
    world: int, size: int, padding: int | None, dtype: torch.dtype
) -> None:
    for found in run_ranks(body, world, size, padding, dtype):
        assert "_c10d_functional.all_gather_into_tensor.default" in found["targets"]
        whole = [name for name in found["targets before"] if "gather" in name or "reduce" in name]
        assert whole != [name for name in found["targets"] if "gather" in name or "reduce" in name]
        torch.testing.assert_close(found["even"][0], found["whole"][0], rtol=0, atol=0)
        exact = found["exact"]
        errors = [(found[kind][1].double() - exact).abs().max().item() for kind in ("even", "whole")]
        assert errors[0] <= errors[1] + 1e-7 * exact.abs().max().item()
        torch.testing.assert_close(found["even"][1].double(), exact, rtol=2e-2, atol=2e-2 * exact.abs().max().item())


def beyond_body(rank: int, world: int) -> str:
    model = model_of(64, None, torch.float32)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, ids)
        loss.backward()
        model.zero_grad()
        return loss.detach()

    with knobs.override(even_batches=True), pytest.raises(RuntimeError, match="beyond an embedding") as caught:
        program_of(step, torch.tensor([[1, 64 + rank]]))
    return "".join([str(caught.value), *caught.value.__notes__])


@pytest.mark.gloo
def test_an_id_outside_the_table_raises() -> None:
    for text in run_ranks(beyond_body, 2):
        assert "an id beyond an embedding of 64" in text
        assert "test_shard_embedding.py" in text


def captured_fake(size: int, even: bool, tied: bool = False) -> list[str]:
    with weft.fake_world(8), knobs.override(even_batches=even):
        mesh = init_device_mesh("cuda", (8,))
        embedding, head = nn.Embedding(size, 8), nn.Linear(8, size, bias=False)
        if tied:
            head.weight = embedding.weight
        model = nn.Sequential(embedding, head)
        weft.fully_shard(model, mesh=mesh)

        def step(ids: torch.Tensor) -> torch.Tensor:
            loss = loss_of(model, ids)
            loss.backward()
            model.zero_grad()
            return loss.detach()

        graph = weft.capture(step, torch.zeros(1, 4, dtype=torch.long))
        return targets(run_passes(graph, PASSES))


@pytest.mark.parametrize(
    ("size", "even", "tied", "rewritten"),
    [(128, True, False, True), (128, False, False, False), (40, True, False, False), (128, True, True, False)],
    ids=["pays", "batches may differ", "more tokens than rows", "the head reads the table too"],
)
def test_tables_are_sharded_only_where_that_moves_fewer_bytes(
    size: int, even: bool, tied: bool, rewritten: bool
) -> None:
    found = captured_fake(size, even, tied)
    assert (found.count("aten._assert_async.msg") == 1) is rewritten
    with contextlib.suppress(ValueError):
        assert (found.index("aten.embedding.default") > found.index("aten._assert_async.msg")) is rewritten


def replicated(rank: int, world: int, size: int, padding: int | None) -> dict[str, Any]:
    """The gradient of a table that every rank has, by rows and as a whole, and its sum in float64."""
    ids = torch.randint(0, size, (2, 3), generator=torch.Generator().manual_seed(rank))
    ids[0, 0] = 0 if padding is None else padding
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(size, 8, padding_idx=padding), nn.Linear(8, 4))
    exact = copy.deepcopy(model).double()
    weft.replicate(model)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss_of(model, ids).backward()
        table = model[0].weight.grad
        model.zero_grad()
        return table

    found: dict[str, Any] = {}
    for even in (False, True):
        with knobs.override(even_batches=even):
            (table,), graph = program_of(step, ids)
        found[f"{even}"], found[f"targets {even}"] = table.clone(), targets(graph)
    gathered = [torch.empty_like(ids) for _ in range(world)]
    torch.distributed.all_gather(gathered, ids)
    torch.stack([loss_of(exact, other) for other in gathered]).mean().backward()
    found["exact"] = exact[0].weight.grad
    return found


@pytest.mark.gloo
@pytest.mark.parametrize(("world", "size", "padding"), [(2, 64, None), (3, 101, 5)])
def test_the_gradient_of_a_replicated_table_is_summed_from_rows(world: int, size: int, padding: int | None) -> None:
    each = run_ranks(replicated, world, size, padding)
    for found in each:
        assert torch.equal(found["True"], each[0]["True"])  # replicas stay replicas
        reduced, rows = (
            found[f"targets {even}"].count("_c10d_functional.all_reduce.default") for even in (False, True)
        )
        assert reduced == rows + 1
        assert found["targets True"].count("_c10d_functional.all_gather_into_tensor.default") == 2
        wrong = {even: (found[even].double() - found["exact"]).abs().max() for even in ("False", "True")}
        assert wrong["True"] <= wrong["False"] + 1e-7
        torch.testing.assert_close(found["True"].double(), found["exact"], rtol=1e-6, atol=1e-6)


def captured_replica(size: int, even: bool, op: str, scaled: bool = False) -> list[str]:
    with weft.fake_world(8), knobs.override(even_batches=even):
        table = nn.Embedding(size, 8)

        def step(ids: torch.Tensor) -> torch.Tensor:
            table(ids).sum().backward()
            local = table.weight.grad
            table.zero_grad()
            return funcol.all_reduce(local.exp() if scaled else local * 0.125, op, dist.group.WORLD)

        return targets(run_passes(weft.capture(step, torch.zeros(1, 4, dtype=torch.long)), PASSES))


@pytest.mark.parametrize(
    ("size", "even", "op", "scaled", "rewritten"),
    [
        (128, True, "sum", False, True),
        (128, True, "avg", False, True),
        (128, True, "max", False, False),
        (128, True, "sum", True, False),
        (128, False, "sum", False, False),
        (40, True, "sum", False, False),
    ],
)
def test_gradients_are_summed_from_rows_only_where_that_moves_fewer_bytes(
    size: int, even: bool, op: str, scaled: bool, rewritten: bool
) -> None:
    found = captured_replica(size, even, op, scaled)
    assert ("_c10d_functional.all_reduce.default" not in found) is rewritten


def uneven_body(rank: int, world: int) -> str:
    model = model_of(64, None, torch.float32)

    @weft.compile
    def step(ids: torch.Tensor) -> torch.Tensor:
        return loss_of(model, ids).detach()

    with knobs.override(even_batches=True), pytest.raises(GraphMismatch) as caught:
        step(torch.zeros(1, 2 + rank, dtype=torch.long))
    return str(caught.value)


@pytest.mark.gloo
def test_uneven_batches_raise_if_even_batches_is_set() -> None:
    for text in run_ranks(uneven_body, 2):
        assert "[1, 3]" in text
