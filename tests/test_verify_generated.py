"""Verification where generated kernels run: rounding differences pass, mistakes are named. The kernels run in triton's
interpreter."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft
from weft import torch_adapter
from weft.errors import RandomStepUnverified, VerifyFailed
from weft.inductor.compiler import make_kernels
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes
from weft.inductor.runtime.aten import compile_aten
from weft.inductor.runtime.multi_tensor import use_kernels
from weft.verify import verify_first_call

Tensor = torch.Tensor

# The interpreter divides what lies outside a mask, too.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in divide:RuntimeWarning")


class Net(nn.Module):
    """An embedding, attention (whose key bias has no gradient but rounding), batch norm with statistics, a head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.table, self.norm, self.qkv = nn.Embedding(20, 16), nn.LayerNorm(16), nn.Linear(16, 48)
        self.up, self.batch, self.head = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 20)
        self.dropout = dropout

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        q, k, v = self.qkv(self.norm(x)).view(*ids.shape, 3, 2, 8).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = F.dropout(F.relu(self.batch(self.up(x).flatten(0, 1))), self.dropout)
        return self.head(x)


class Training:
    """An AdamW step of a net, and the state it trains."""

    def __init__(self, *, autocast: bool = False, dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> None:
        torch.manual_seed(0)
        self.net = Net(dropout).to(dtype)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3, fused=True)
        self.autocast = autocast
        self.ids = torch.randint(0, 20, (4, 6))

    def step(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            logits = self.net(ids)
        loss = F.cross_entropy(logits.float(), ids.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss


Program = Callable[..., list[Any]]


def verified(training: Training, change: Callable[[Program], Program] = lambda program: program) -> Any:
    """Verify a step whose program of generated kernels, interpreted, is changed by ``change``."""
    compiled = weft.compile(training.step)
    entry = compiled.entry_for((training.ids,), {})
    program = compile_aten(use_kernels(make_kernels(run_passes(entry.captured.graph, KERNEL_PASSES))))
    assert program.operations["generated"] > 10
    entry.program = SimpleNamespace(boxed=lambda inputs: change(program)(*inputs))
    leaves, _ = torch_adapter.flatten(((training.ids,), {}))
    run = functools.partial(entry.run, leaves, (leaves, {}))
    return verify_first_call(training.step, entry.captured, (training.ids,), {}, run, generated=True)


KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "autocast": {"autocast": True},
    "bfloat16": {"dtype": torch.bfloat16},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_right_step_passes_and_trains(kind: str) -> None:
    training, eager = Training(**KINDS[kind]), Training(**KINDS[kind])
    loss = verified(training)
    wanted = eager.step(eager.ids)
    torch.testing.assert_close(loss, wanted, rtol=2e-2, atol=0)
    for ours, theirs in zip(training.net.parameters(), eager.net.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=4e-3)


def test_the_same_step_is_not_eager_to_the_bit() -> None:
    training = Training(autocast=True)
    compiled = weft.compile(training.step)
    entry = compiled.entry_for((training.ids,), {})
    entry.program = compile_aten(use_kernels(make_kernels(run_passes(entry.captured.graph, KERNEL_PASSES))))
    run = functools.partial(entry.run, [training.ids], ((training.ids,), {}))
    with pytest.raises(VerifyFailed, match="largest difference"):
        verify_first_call(training.step, entry.captured, (training.ids,), {}, run)


# ---- mistakes


def after(training: Training, mistake: Callable[[Training, list[Any]], None]) -> Callable[[Program], Program]:
    """A program that makes a mistake when it has run."""

    def change(program: Program) -> Program:
        def run(*inputs: Any) -> list[Any]:
            outputs = program(*inputs)
            with torch.no_grad():
                mistake(training, outputs)
            return outputs

        return run

    return change


def forget_an_update(training: Training, outputs: list[Any]) -> None:
    training.net.up.weight.copy_(Training(**vars_of(training)).net.up.weight)


def update_twice(training: Training, outputs: list[Any]) -> None:
    before = Training(**vars_of(training)).net.head.weight
    training.net.head.weight.add_(training.net.head.weight - before)


def vars_of(training: Training) -> dict[str, Any]:
    return {"autocast": training.autocast, "dtype": training.net.head.weight.dtype}


MISTAKES: dict[str, tuple[Callable[[Training, list[Any]], None], str]] = {
    "a wrong loss": (
        lambda t, out: [o.mul_(1.1) for o in out if o.dim() == 0] and None,
        r"return value\[0\]: off by 0.1",
    ),
    "an update forgotten": (forget_an_update, r"up\.weight: off by 1"),
    "an update twice": (update_twice, r"head\.weight: off by"),
    "an element of a parameter": (lambda t, out: t.net.qkv.weight[3, 4].add_(0.02), r"qkv\.weight: an element is off"),
    "a row of a state": (
        lambda t, out: t.optimizer.state[t.net.up.weight]["exp_avg"][5].zero_(),
        r"up\.weight.*exp_avg: .*off by",
    ),
    "an element of a state": (
        lambda t, out: t.optimizer.state[t.net.table.weight]["exp_avg"].view(-1)[7].add_(1e-2),
        r"table\.weight.*exp_avg: .*off by",
    ),
    "a step not counted": (
        lambda t, out: t.optimizer.state[t.net.up.bias]["step"].zero_(),
        r"up\.bias.*step.*: off by 1",
    ),
    "a buffer": (lambda t, out: t.net.batch.running_var.mul_(1.5), r"running_var: off by"),
    "a count": (lambda t, out: t.net.batch.num_batches_tracked.add_(1), r"num_batches_tracked: 1 elements differ"),
    "not a number": (lambda t, out: t.net.head.bias[2].fill_(torch.nan), r"head\.bias: NaN"),
}


@pytest.mark.parametrize("kind", ["float32", "autocast"])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_and_named(name: str, kind: str) -> None:
    training = Training(**KINDS[kind])
    mistake, said = MISTAKES[name]
    with pytest.raises(VerifyFailed, match=said) as caught:
        verified(training, after(training, mistake))
    assert "differs from the eager one in 1 tensors" in str(caught.value)


def test_the_worst_comes_first_with_both_errors() -> None:
    training = Training()

    def mistakes(training: Training, outputs: list[Any]) -> None:
        training.net.batch.running_var.mul_(1.01)
        training.net.batch.running_mean.mul_(1.5)

    with pytest.raises(VerifyFailed) as caught:
        verified(training, after(training, mistakes))
    lines = str(caught.value).splitlines()
    assert "running_mean: off by" in lines[1]
    assert "eager is off by" in lines[1]
    assert "running_var: off by" in lines[2]


def test_a_step_that_draws_is_refused_with_the_line() -> None:
    with pytest.raises(RandomStepUnverified, match=r"bernoulli.*test_verify_generated\.py:\d+.*bitwise"):
        verified(Training(dropout=0.5))
