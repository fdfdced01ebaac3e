"""Sequence parallelism found between all-reduces, on real processes: training against the whole model in float64,
random steps against eager, and ranks that do not compute the same."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.tensor.parallel as torch_tp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import weft
from harness import run_ranks
from weft.inductor.fusion import kernel_stages
from weft.inductor.passes import sequence_parallel as module
from weft.inductor.passes.common_subexpressions import common_subexpressions
from weft.inductor.passes.decompose import decompose
from weft.inductor.passes.drop_noops import drop_noops
from weft.inductor.passes.join_all_reduces import join_all_reduces
from weft.inductor.passes.join_splits import join_splits
from weft.inductor.passes.pipeline import ATEN_PASSES
from weft.inductor.passes.sequence_parallel import sequence_parallel

VOCABULARY, WIDTH, HEADS, LENGTH = 16, 24, 6, 6


@contextlib.contextmanager
def sharding() -> Iterator[None]:
    """Inside, what runs on a CPU is compiled with the pass too, however small, and with those that it relies on."""
    passes = [*ATEN_PASSES]
    at = passes.index(join_splits) + 1
    passes[at:at] = [join_all_reduces, decompose, drop_noops, common_subexpressions, sequence_parallel]
    with mock.patch.object(kernel_stages, "ATEN_PASSES", passes), mock.patch.object(module, "pays", return_value=True):
        yield


# ---- training


class Norm(nn.Module):
    """RMS norm in float64, as Llama's is in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.double()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.weight


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_feed = Norm(), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.before_attention(x)
        heads = (
            each(inner).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        inner = self.before_feed(x)
        return x + self.down(F.silu(self.gate(inner)) * self.up(inner))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


STYLES: dict[str, Any] = {"torch": torch_tp, "weft": weft}


def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder().double()


def parallelize(model: nn.Module, mesh: Any, styles: str) -> nn.Module:
    by = STYLES[styles]
    plan = {f"layers.*.{name}": by.ColwiseParallel() for name in ("query", "key", "value", "gate", "up")}
    plan |= {f"layers.*.{name}": by.RowwiseParallel() for name in ("out", "down")}
    plan["embedding"] = by.RowwiseParallel(input_layouts=Replicate())
    plan["head"] = by.ColwiseParallel(output_layouts=Replicate())
    # weft's own function also makes DTensors of the norms' weights.
    return weft.parallelize(model, mesh, plan) if by is weft else by.parallelize_module(model, mesh, plan)


def training(model: nn.Module, clip: bool = False) -> Callable[[Tensor], Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)

    def step(ids: Tensor) -> Tensor:
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def whole(parameter: Tensor) -> Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()


def issued(compiled: Any) -> list[int]:
    """The all-reduces, reduce-scatters and all-gathers of the program."""
    (form,) = compiled.entries
    nodes = {node for node in form.program._lines if node is not None}
    return [sum(op in str(node.target) for node in nodes) for op in ("all_reduce", "reduce_scatter", "all_gather")]


def trained(rank: int, world: int, dp: int, styles: str, clip: bool) -> list[int]:
    """Training with the pass against training of the whole model, and of eager ranks."""
    mesh = init_device_mesh("cpu", (dp, world // dp), mesh_dim_names=("dp", "tp"))
    models = [decoder(), *(parallelize(decoder(), mesh["tp"], styles) for _ in range(2))]
    if dp > 1:
        for model in models[1:]:
            for layer in model.layers:  # type: ignore[union-attr]
                weft.fully_shard(layer, mesh=mesh["dp"])
            weft.fully_shard(model, mesh=mesh["dp"])
    steps = [training(model, clip) for model in models]
    steps[2] = compiled = weft.compile(steps[2])
    with sharding():
        for at in range(3):
            ids = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(at))
            losses = [step(ids) for step in steps]
            torch.testing.assert_close(losses[1:], losses[:1] * 2, rtol=1e-9, atol=1e-9)
    for others in zip(*(model.parameters() for model in models), strict=True):
        values = [whole(each) for each in others]
        torch.testing.assert_close(values[1:], values[:1] * 2, rtol=1e-7, atol=1e-9)
    for parameter in models[2].parameters():  # replicas stay replicas
        if isinstance(parameter, DTensor) and parameter.placements[-1].is_replicate():
            every = [torch.empty_like(parameter.to_local()) for _ in range(world // dp)]
            dist.all_gather(every, parameter.to_local().detach(), group=mesh["tp"].get_group())
            assert all(torch.equal(each, every[0]) for each in every)
    return issued(compiled)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("world", "dp", "styles", "clip", "calls"),
    [
        # Nine sums over rows (of norms 7, of biases 2), ten activations, the logits.
        (2, 1, "weft", True, [10, 10, 11]),
        (3, 1, "weft", False, [9, 10, 11]),
        # Weights of norms are plain tensors here, of which nobody says that ranks have the same.
        (2, 1, "torch", False, [5, 5, 6]),
        # FSDP adds a reduce-scatter and two all-gathers for each of three modules, but one for the root; packed.
        (4, 2, "weft", False, [9, 12, 16]),
    ],
)
def test_training_equals_the_whole_model(world: int, dp: int, styles: str, clip: bool, calls: list[int]) -> None:
    assert run_ranks(trained, world, dp, styles, clip, timeout=170) == [calls] * world


# ---- ranks that differ


def apart(rank: int, world: int, how: str) -> tuple[list[float], list[int]]:
    """Ranks that do not compute the same between two all-reduces: each must get what it computes."""
    group = dist.group.WORLD

    def step(x: Tensor) -> Tensor:
        y = funcol.all_reduce(x, "sum", group)
        factor = 2 + rank if how in ("constant", "scalar") else 2
        z = (y * (torch.full((), float(factor)) if how == "scalar" else factor)).exp()
        other = torch.sin(y)
        # Both have one size, and all ranks add up the rows of both.
        return (other if how == "reader" and rank else z) @ torch.ones(3, 1) + z.sum(0) + other.sum(0)

    x = torch.arange(12.0).reshape(4, 3) / 20 + rank
    compiled = weft.compile(step)
    with sharding():
        found = compiled(x)
    torch.testing.assert_close(found, step(x))
    return issued(compiled)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("how", "calls"),
    [("", [2, 1, 1]), ("constant", [1, 0, 0]), ("scalar", [1, 0, 0]), ("reader", [1, 0, 0])],
)
def test_ranks_that_compute_something_else_keep_their_collectives(how: str, calls: list[int]) -> None:
    assert run_ranks(apart, 2, how) == [calls] * 2


# ---- random steps


def random_step(draw: random.Random) -> Callable[..., list[Tensor]]:
    """A step of random operations by rows and of some that need all rows, on all-reduced values of shape [2, 6, 4]."""
    group = dist.group.WORLD
    kinds = draw.choices(range(18), [3] * 13 + [0.3] * 3 + [0.6, 2], k=draw.randint(6, 14))
    sequence = [(kind, draw.random() ** 0.3, draw.random()) for kind in kinds]

    def computed(kind: int, a: Tensor, b: Tensor, plain: Tensor, found: list[Tensor]) -> Tensor:
        weight = funcol.all_reduce(plain[0, 0], "avg", group)
        constant = torch.linspace(0.5, 1, 4, dtype=a.dtype)
        operations: list[Callable[[], Tensor]] = [
            lambda: a + b,
            lambda: torch.sin(a) * weight,
            lambda: a * torch.rsqrt(a.square().mean(-1, keepdim=True) + 1) * constant,
            lambda: F.layer_norm(a, (4,), weight, constant),
            lambda: a.view(12, 4).softmax(-1).view(2, 6, 4) - b,
            lambda: torch.where(a > 0, a, b * 0.5),
            lambda: (a * 2).add_(b).mul_(weight),
            lambda: a - a.sum(-1, keepdim=True).expand(2, 6, 4) / 4,
            lambda: a.reshape(2, 6, 2, 2).amax(-1).unsqueeze(-1).expand(2, 6, 2, 2).reshape(2, 6, 4) + b,
            lambda: funcol.all_reduce(torch.tanh(a) @ plain[0, :4] * 0.1, "sum", group),
            lambda: funcol.all_reduce(torch.cos(b) + plain, "avg", group),
            lambda: a + (b.float() * 2).double(),
            lambda: F.rms_norm(a, (4,), weight),
            # With all rows:
            lambda: a - b.mean(0, keepdim=True),
            lambda: a.flip(1) * b,
            lambda: found.append(a.sum((0, 1)) * 0.1) or a,
            lambda: found.append(torch.sin(a) @ plain[0, :4]) or b,
            lambda: found.append((a * 3).view(12, 4).sum(0)) or b * weight,
        ]
        return operations[kind]()

    def step(x: Tensor, plain: Tensor) -> list[Tensor]:
        values, found = [funcol.all_reduce(x * 0.5, "sum", group)], list[Tensor]()
        for kind, one, other in sequence:
            a, b = (values[int(at * len(values))] for at in (one, other))
            values.append(computed(kind, a, b, plain, found))
        return [*found, values[-1] @ plain[1, :4]]

    return step


def searched(rank: int, world: int, seeds: list[int]) -> int:
    """Random steps against eager, and how many reduce-scatters there were in all."""
    count = 0
    for seed in seeds:
        step = random_step(random.Random(seed))
        generator = torch.Generator().manual_seed(rank + 10 * seed)
        given = [torch.randn(2, 6, 4, generator=generator, dtype=torch.float64) for _ in range(2)]
        compiled = weft.compile(step)
        with sharding():
            found = compiled(*given)
        torch.testing.assert_close(
            found, step(*given), rtol=1e-6, atol=1e-6, msg=lambda text, seed=seed: f"{seed}: {text}"
        )
        count += issued(compiled)[1]
    return count


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, 3])
def test_random_steps_equal_eager(world: int) -> None:
    counts = run_ranks(searched, world, list(range(25 * world, 25 * world + 25)), timeout=170)
    assert counts == [counts[0]] * world
    assert counts[0] > 15
