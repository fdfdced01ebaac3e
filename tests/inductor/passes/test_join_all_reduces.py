"""Sums of all-reduces: which become one, the values on real processes against float64, and which stay."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.tensor.parallel as torch_tp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from harness import run_ranks
from pass_runs import Run
from step_builder import StepBuilder
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import WAIT, is_collective
from weft.inductor.fusion import kernel_stages
from weft.inductor.passes.accumulate_matmuls import accumulate_matmuls
from weft.inductor.passes.join_all_reduces import join_all_reduces
from weft.inductor.passes.join_splits import join_splits
from weft.inductor.passes.pipeline import ATEN_PASSES, KERNEL_PASSES, run_passes

aten = torch.ops.aten
ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default


def all_reduces(step: StepGraph) -> list[torch.fx.Node]:
    return [node for node in step.collectives() if node.target is ALL_REDUCE]


# ---- values, on real processes


def summed(rank: int, world: int, op: str) -> tuple[int, int]:
    """Sums of all-reduces of many shapes and dtypes, also of symbols; how many all-reduces there were, and are."""
    group = dist.group.WORLD

    def step(*values: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for value in values:
            parts = [funcol.all_reduce(part, op, group) for part in (value * 2, value - 1, value.square())]
            found.append((parts[0] + parts[1]) + parts[2])
            shifted = funcol.all_reduce(value + 3, op, group)
            found.append(shifted + funcol.all_reduce(value * shifted.mean(), op, group))  # the first is read before
        return found

    generator = torch.Generator().manual_seed(rank)
    values = [torch.randn(5, 3, generator=generator).to(dtype) for dtype in (torch.bfloat16, torch.float32)]
    values += [torch.randn(shape, generator=generator).double() for shape in ((), (0, 4), (2, 6))]
    torch._dynamo.mark_dynamic(values[-1], 0)
    run = Run(step, values, [join_all_reduces])
    for value, both in zip(values, zip(run.outcome[::2], run.outcome[1::2], strict=False), strict=False):
        exact, plain = value.double(), step(value)
        bound = 8 * torch.finfo(value.dtype).eps * world
        terms = exact * 2 + exact - 1 + exact.square()
        dist.all_reduce(terms)
        torch.testing.assert_close(both[0].double(), terms / (world if op == "avg" else 1), rtol=bound, atol=bound)
        torch.testing.assert_close(list(both), plain, rtol=bound, atol=bound)
        every = [torch.empty_like(both[0]) for _ in range(world)]
        dist.all_gather(every, both[0].contiguous())
        assert all(torch.equal(each, both[0]) for each in every)  # replicas stay replicas
    return len(all_reduces(run.before)), len(all_reduces(run.graph))


@pytest.mark.gloo
def test_a_sum_of_all_reduces_is_the_all_reduce_of_the_sum() -> None:
    assert run_ranks(summed, 3, "sum") == [(25, 15)] * 3


class Layer(nn.Module):
    """Attention and feed-forward: five projections of activations, two that reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.gate, self.up = (nn.Linear(16, 16, bias=False) for _ in range(5))
        self.out, self.down = (nn.Linear(16, 16, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, length, 16]."""
        heads = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


PLANS: dict[str, Any] = {"torch": torch_tp, "weft": weft}


def layers(mesh: Any, styles: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer()).double()
    by = PLANS[styles]
    plan = {f"*.{name}": by.ColwiseParallel() for name in ("query", "key", "value", "gate", "up")}
    plan |= {f"*.{name}": by.RowwiseParallel() for name in ("out", "down")}
    by.parallelize_module(model, mesh, plan)
    return model


def training(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        loss = model(x * 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert x.grad is not None
        return loss.detach() + x.grad.sum()

    return step


@contextlib.contextmanager
def joining() -> Iterator[None]:
    """Inside, what runs on a CPU is compiled with the pass too."""
    passes = [*ATEN_PASSES]
    passes.insert(passes.index(join_splits) + 1, join_all_reduces)
    with mock.patch.object(kernel_stages, "ATEN_PASSES", passes):
        yield


def issued(compiled: Any) -> int:
    """The all-reduces of the program."""
    (form,) = compiled.entries
    return len({node for node in form.program._lines if node is not None and is_collective(node)})


def parallel(rank: int, world: int, styles: str) -> int:
    """Training by tensor parallelism against the whole model in float64."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    whole = training(nn.Sequential(Layer(), Layer()).double())
    compiled = weft.compile(training(layers(mesh, styles)))
    with joining():
        for at in range(3):
            x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(at), dtype=torch.float64)
            torch.testing.assert_close(compiled(x), whole(x), rtol=1e-9, atol=1e-9)
    return issued(compiled)


@pytest.mark.gloo
@pytest.mark.parametrize("styles", PLANS)
def test_tensor_parallel_training_equals_the_whole_model(styles: str) -> None:
    assert run_ranks(parallel, 2, styles) == [2 * 4] * 2


# ---- which are joined


@pytest.mark.parametrize("styles", PLANS)
@pytest.mark.parametrize("world", [2, 4])
def test_a_layer_reduces_two_activations_and_two_gradients(styles: str, world: int) -> None:
    with weft.fake_world(world):
        mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("tp",))
        step = training(layers(mesh, styles))
        captured = weft.capture(step, torch.randn(2, 6, 16, dtype=torch.float64))
        made = run_passes(captured, KERNEL_PASSES)
    # One of weft's styles hands its input to the next.
    assert len(all_reduces(captured)) == 2 * (7 if styles == "torch" else 4)
    assert len(all_reduces(made)) == 2 * 4


def test_the_sum_accumulates_in_the_products() -> None:
    b = StepBuilder()
    x, y = b.input(torch.zeros(4, 8)), b.input(torch.zeros(8, 4))
    starts = [b.call(ALL_REDUCE, b.call(aten.mm.default, x, y), "sum", "tp") for _ in range(3)]
    waits = [b.call(WAIT, start, val=start.meta["val"]) for start in starts]
    b.returns(b.call(aten.add.Tensor, b.call(aten.add.Tensor, waits[0], waits[1]), waits[2]))
    step = b.build({"tp": "0"})
    for at, start in enumerate(step.collectives()):
        start.meta["members"] = (at,)
    made = run_passes(step, [join_all_reduces, accumulate_matmuls])
    (start,) = all_reduces(made)
    assert start.meta["members"] == (0, 1, 2)
    assert [node.target for node in made.graph.nodes if node.op == "call_function"] == [
        aten.mm.default,
        aten.addmm.default,
        aten.addmm.default,
        ALL_REDUCE,
        WAIT,
    ]


def test_terms_of_a_longer_sum_and_of_several_groups() -> None:
    """Parallel attention and feed-forward: ``(x + reduced) + reduced``. What is read between stays."""
    b = StepBuilder()
    x = b.input(torch.zeros(4, 6))
    reduced = [b.call(ALL_REDUCE, b.call(aten.mul.Tensor, x, at), "sum", group) for at, group in enumerate("tdttd")]
    waits = [b.call(WAIT, start, val=start.meta["val"]) for start in reduced]
    total = x
    for at, wait in enumerate(waits):
        total = b.call(aten.add.Tensor, *((total, wait) if at % 2 else (wait, total)))
        if at == 2:
            middle = total
    b.returns(total, b.call(aten.exp.default, middle))
    made = run_passes(b.build({"t": "0", "d": "1"}), [join_all_reduces])
    assert [str(start.args[2]) for start in all_reduces(made)] == ["d", "t", "t", "d"]


def test_a_sum_of_a_thousand_reductions_is_one() -> None:
    b = StepBuilder()
    total = b.call(aten.neg.default, x := b.input(torch.zeros(2)))
    for _ in range(1200):
        start = b.call(ALL_REDUCE, x, "sum", "tp")
        total = b.call(aten.add.Tensor, total, b.call(WAIT, start, val=start.meta["val"]))
    b.returns(total)
    assert len(all_reduces(run_passes(b.build({"tp": "0"}), [join_all_reduces]))) == 1


# ---- which stay


def sum_of(
    *,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
    ops: tuple[str, str] = ("sum", "sum"),
    groups: tuple[str, str] = ("tp", "tp"),
    shapes: tuple[tuple[int, ...], tuple[int, ...]] = ((4, 6), (4, 6)),
    read: str = "",
    **kwargs: Any,
) -> StepGraph:
    """A step that adds two all-reduces; ``read`` is what else it returns."""
    b = StepBuilder()
    given = [b.input(torch.zeros(shape, dtype=dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)]
    starts = [b.call(ALL_REDUCE, x, op, group) for x, op, group in zip(given, ops, groups, strict=True)]
    waits = [b.call(WAIT, start, val=start.meta["val"]) for start in starts]
    result = b.call(aten.add.Tensor, *waits, **kwargs)
    if read == "difference":
        result = b.call(aten.sub.Tensor, *waits)
    b.returns(result, *([waits[0]] if read == "wait" else []), *([given[0]] if read == "operand" else []))
    return b.build({"tp": "0", "dp": "1"})


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"ops": ("avg", "avg")},
        {"dtypes": (torch.bfloat16, torch.bfloat16)},
        {"dtypes": (torch.float64, torch.float64)},
        {"read": "operand"},
    ],
    ids=str,
)
def test_joined(case: dict[str, Any]) -> None:
    made = run_passes(sum_of(**case), [join_all_reduces])
    (start,) = all_reduces(made)
    assert start.args[0].target is aten.add.Tensor  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "case",
    [
        {"ops": ("sum", "avg")},
        {"ops": ("max", "max")},
        {"groups": ("tp", "dp")},
        {"dtypes": (torch.float32, torch.bfloat16)},
        {"dtypes": (torch.float16, torch.float16)},  # a sum of two may overflow where the sum over the ranks does not
        {"dtypes": (torch.int64, torch.int64)},
        {"shapes": ((4, 6), (1, 6))},
        {"shapes": ((6,), (4, 6))},
        {"alpha": 2},
        {"read": "wait"},
        {"read": "difference"},
    ],
    ids=str,
)
def test_left_alone(case: dict[str, Any]) -> None:
    assert len(all_reduces(run_passes(sum_of(**case), [join_all_reduces]))) == 2


def alone(rank: int, world: int) -> tuple[list[float], int]:
    """One rank reads a reduction that the others only add: its graph keeps both, and all issue both."""
    group = dist.group.WORLD

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        one, other = funcol.all_reduce(x * 2, "sum", group), funcol.all_reduce(x + 1, "sum", group)
        return one + other, one * 1 if rank == 0 else x

    compiled = weft.compile(step)
    with joining():
        total, own = compiled(torch.full((3,), float(rank + 1)))
    return [total[0].item(), own[0].item()], issued(compiled)


@pytest.mark.gloo
def test_a_rank_that_reads_more_issues_what_the_others_do() -> None:
    assert run_ranks(alone, 2) == [([11.0, 6.0], 2), ([11.0, 2.0], 2)]
