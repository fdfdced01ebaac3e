"""Values followed in float64 beside a run, against the same model run in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from harness import run_ranks
from weft.capture.record.float64_shadow import Float64ShadowMode

Tensor = torch.Tensor


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.up(self.norm(x)).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.down(F.gelu(mixed))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "transformer": (lambda: nn.Sequential(Block(), Block()), (2, 5, 16)),
    "convnet": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(True), nn.MaxPool2d(2), nn.Flatten()),
        (4, 3, 8, 8),
    ),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
}


def trained(model: nn.Module, make: Callable[[Any], torch.optim.Optimizer], autocast: bool, x: Tensor) -> Tensor:
    optimizer = make(model.parameters())
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x).flatten(1).log_softmax(-1)[:, 0].square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return loss


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_shadows_are_the_values_of_a_run_in_float64(name: str, optimizer: str, autocast: bool) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, x = make(), torch.randn(shape)
    wide = copy.deepcopy(model).double()
    wanted = trained(wide, OPTIMIZERS[optimizer], False, x.double())
    with Float64ShadowMode() as exact:
        loss = trained(model, OPTIMIZERS[optimizer], autocast, x)
    torch.testing.assert_close(exact.value(loss), wanted.detach(), rtol=1e-6, atol=0)
    assert (loss - wanted).abs() > (1e-4 if autocast else 0) * wanted
    # A gradient that is zero but for rounding says nothing of the step that Adam makes of it.
    names = [n for n, p in wide.named_parameters() if p.grad is not None and p.grad.abs().max() > 1e-9]
    ours, theirs = dict(model.named_parameters()), dict(wide.named_parameters())
    for path in names:
        torch.testing.assert_close(exact.value(ours[path].grad), theirs[path].grad, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(exact.value(ours[path]), theirs[path].detach(), rtol=1e-4, atol=1e-6)
    for ours_, theirs_ in zip(model.buffers(), wide.buffers(), strict=True):
        torch.testing.assert_close(exact.value(ours_), theirs_, rtol=1e-6, atol=0)


def test_choices_are_made_by_exact_values() -> None:
    """In bfloat16 the two are equal, and the first is taken."""
    x = torch.tensor([1.0, 1 + 2**-12])
    with Float64ShadowMode() as exact:
        at = x.bfloat16().argmax()
        counts = torch.zeros(2, dtype=torch.int64).index_add_(0, at[None], torch.ones(1, dtype=torch.int64))
    assert (at.item(), exact.value(at).item()) == (0, 1)
    assert (counts.tolist(), exact.value(counts).tolist()) == ([1, 0], [0, 1])


def test_the_run_itself_is_what_it_is_without() -> None:
    make, shape = MODELS["transformer"]
    model, x = make(), torch.randn(shape)
    twin = copy.deepcopy(model)
    wanted = trained(twin, OPTIMIZERS["sgd"], False, x)
    with Float64ShadowMode():
        loss = trained(model, OPTIMIZERS["sgd"], False, x)
    assert torch.equal(loss, wanted)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_casts_round_nothing_and_views_share() -> None:
    x = torch.tensor([1 + 2**-20, 2.0, 3.0])
    with Float64ShadowMode() as exact:
        half = x.bfloat16()
        half[1:].mul_(3)
        back = half.view(3, 1).t().float() * 2
        x.data[0] = 7
    assert exact.value(back).tolist() == [[2 + 2**-19, 12.0, 18.0]]
    assert exact.value(half).tolist() == [1 + 2**-20, 6.0, 9.0]
    assert half[0] == 1
    assert exact.value(x).tolist() == [7.0, 2.0, 3.0]


def test_random_numbers_are_the_runs_own() -> None:
    x = torch.full((1000,), 1 / 3, dtype=torch.float16)
    torch.manual_seed(0)
    with Float64ShadowMode() as exact:
        drawn = torch.rand(5) + 1
        dropped, mask = torch.native_dropout(x, 0.25, True)
        found = F.dropout(x, 0.5)
    torch.manual_seed(0)
    assert torch.equal(exact.value(drawn), torch.rand(5).double() + 1)
    assert torch.equal(exact.value(dropped), x.double() * mask / 0.75)
    assert torch.equal(exact.value(found) != 0, found != 0)


def test_an_operation_without_a_float64_kernel_runs_in_fewer_digits() -> None:
    """A CPU has no float64 kernel of an LSTM's oneDNN layer."""
    model, x = nn.LSTM(4, 8), torch.randn(3, 2, 4)
    with torch.no_grad(), Float64ShadowMode() as exact:
        out, _ = model(x)
    wanted = copy.deepcopy(model).double()(x.double())[0]
    torch.testing.assert_close(exact.value(out), wanted.detach(), rtol=1e-5, atol=1e-6)


def test_memory_that_something_else_writes_is_read_again() -> None:
    x = torch.ones(4)
    with Float64ShadowMode() as exact:
        y = x / 3
        y.view(torch.int32).zero_()
        z = y + 1
    assert exact.value(z).tolist() == [1.0] * 4


def test_shadows_of_float64_are_memory_of_their_own() -> None:
    x = torch.ones(3, dtype=torch.float64)
    with Float64ShadowMode() as exact:
        x.add_(1).mul_(3)
    assert (x.tolist(), exact.value(x).tolist()) == ([6.0] * 3, [6.0] * 3)


def test_shadows_go_with_their_tensors() -> None:
    with Float64ShadowMode() as exact:
        x = torch.ones(8)
        for _ in range(5):
            x = x * 2
    assert len(exact._shadows) == 1


def _reduced(rank: int, world: int) -> list[float]:
    x = torch.full((4,), 1 / 3, dtype=torch.bfloat16) * (rank + 1)
    with Float64ShadowMode() as exact:
        y = x.float() / 3
        work = dist.all_reduce(y, async_op=True)
        assert work is not None
        work.wait()
        half = y.bfloat16()
        gathered = torch.empty(world * 4, dtype=torch.bfloat16)
        dist.all_gather_into_tensor(gathered, half)
    return exact.value(gathered).tolist()


def test_collectives_of_shadows_are_exact_too() -> None:
    third = float(torch.tensor(1 / 3, dtype=torch.bfloat16))
    for found in run_ranks(_reduced, 2):
        assert found == pytest.approx([(third + 2 * third) / 3] * 8, rel=1e-12)
