"""Steps as people write them: what compiles without a word equals the eager step to the bit."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import weft
from both_ways import assert_equal, batches, both_ways, detached, mlp, sgd, training


def _square_mean(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def test_a_plain_step_equals_eager() -> None:
    both_ways(training(_square_mean), batches())


# ---- what the Python in a step may do


def test_python_may_branch_on_shapes() -> None:
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        assert x.shape == (4, 8)
        if x.size(1) == 10:
            raise ValueError("never")
        return _square_mean(model, x) / math.sqrt(x.shape[-1])

    both_ways(training(forward), batches())


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    weights: dict[str, torch.Tensor]
    scale: float = 2.0


def test_dataclasses_and_dicts_are_batches() -> None:
    def forward(model: nn.Module, batch: Batch) -> torch.Tensor:
        return (model(batch.x) * batch.weights["w"] * batch.scale).square().mean()

    calls = [(Batch(x, {"w": x[0].abs()}),) for (x,) in batches()]
    both_ways(training(forward), calls)


def test_python_arguments_select_the_graph() -> None:
    model = mlp()

    def step(x: torch.Tensor, flag: bool = True, scale: float = 1.0) -> torch.Tensor:
        y = model(x) * scale
        return y.sum() if flag else y.mean()

    compiled = weft.compile(step)
    x = batches()[0][0]
    for kwargs in ({}, {"flag": False}, {"scale": 2.0}, {"flag": False}, {}):
        assert torch.equal(compiled(x, **kwargs), step(x, **kwargs))
    assert len(compiled.captures) == 3


def test_a_method_may_be_the_step() -> None:
    class Trainer:
        def __init__(self) -> None:
            torch.manual_seed(0)
            self.model = mlp()
            self.optimizer = sgd(self.model.parameters())
            self.count = 0
            self.scale = 2.0

        def loss(self, y: torch.Tensor) -> torch.Tensor:
            return y.square().mean() * self.scale

        def eager_step(self, x: torch.Tensor) -> torch.Tensor:
            loss = self.loss(self.model(x))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss

        step = weft.compile(eager_step)

    ours, theirs = Trainer(), Trainer()
    for at, (x,) in enumerate(batches(4)):
        for trainer in (ours, theirs):
            trainer.count += 1  # nothing the step looks at
            trainer.scale = 3.0 if at >= 2 else 2.0
        assert torch.equal(ours.step(x), theirs.eager_step(x))
    assert len(Trainer.step.captures) == 2
    assert "scale" in Trainer.step.captures[1]


@pytest.mark.parametrize("decorate", [weft.compile, functools.cache, functools.lru_cache(None)])
def test_a_decorated_function_inside_the_step(decorate: Any) -> None:
    def make() -> tuple[Any, list[Any]]:
        model, seen = mlp(), [torch.zeros(8)]

        @decorate
        def forward_and_note(x: torch.Tensor) -> torch.Tensor:
            y = model(x)
            seen[0] = seen[0] + y.detach().mean(0)
            return y

        def step(x: torch.Tensor) -> torch.Tensor:
            return forward_and_note(x).sum() + seen[0].sum()

        return step, [seen]

    both_ways(make, batches())


def test_micro_batches_in_a_loop() -> None:
    def make() -> tuple[Any, list[Any]]:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

        def step(x: torch.Tensor) -> torch.Tensor:
            total = torch.zeros(())
            for part in x.chunk(2):
                loss = _square_mean(model, part) / 2
                loss.backward()
                total = total + loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            return total

        return step, [model, optimizer]

    both_ways(make, batches())


def test_the_return_value_may_be_any_tree() -> None:
    def make() -> tuple[Any, list[Any]]:
        model = mlp()
        optimizer = sgd(model.parameters())

        def step(x: torch.Tensor) -> dict[str, Any]:
            logits = model(x)
            loss = logits.square().mean()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return {"loss": loss, "logits": [logits, (norm, 3)], "nothing": None, "text": "done"}

        return step, [model]

    both_ways(make, batches())


def test_a_step_that_returns_nothing() -> None:
    make = training(_square_mean)

    def silent() -> tuple[Any, list[Any]]:
        step, changed = make()

        def wrapped(x: torch.Tensor) -> None:
            step(x)

        return wrapped, changed

    both_ways(silent, batches())


# ---- autograd


def test_autograd_grad_and_a_hand_written_update() -> None:
    def make() -> tuple[Any, list[Any]]:
        model = mlp()

        def step(x: torch.Tensor) -> torch.Tensor:
            grads = torch.autograd.grad(_square_mean(model, x), list(model.parameters()))
            with torch.no_grad():
                for p, g in zip(model.parameters(), grads, strict=True):
                    p -= 0.1 * g
            return grads[0].norm()

        return step, [model]

    both_ways(make, batches())


def test_a_gradient_penalty_differentiates_twice() -> None:
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        y = model(x).square().sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        return grad.norm() + y

    both_ways(training(forward), batches())


def test_a_custom_autograd_function() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return grads[0] * 3 + x.sign()

    both_ways(training(lambda model, x: Double.apply(model(x)).square().mean()), batches())


def test_parameters_that_the_loss_does_not_reach() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    adamw = lambda parameters: torch.optim.AdamW(parameters, lr=0.1)
    both_ways(training(_square_mean, Half, adamw), batches())


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    def forward(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(model[1:], model[0](x), use_reentrant=reentrant).square().mean()

    both_ways(training(forward), batches())


def test_autocast_inside_the_step() -> None:
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    both_ways(training(forward), batches())


def test_autocast_around_the_step() -> None:
    results = []
    for wrap in (lambda step: step, weft.compile):
        torch.manual_seed(0)
        step, changed = training(lambda model, x: model(x).float().square().mean())()
        step = wrap(step)
        outputs = []
        for (x,), enabled in zip(batches(3), (True, True, False), strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                outputs.append(detached(step(x)))
        results.append((outputs, detached(changed[0].state_dict())))
    assert_equal(results[1], results[0])


# ---- models


def _images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5),
        nn.LayerNorm(5), nn.LogSoftmax(-1),
    )  # fmt: skip


def test_convolutions_and_batch_norm() -> None:
    labels = torch.tensor([1, 2])
    both_ways(training(lambda m, x: F.nll_loss(m(x), labels), _images), batches(3, (2, 3, 8, 8)))


def test_a_transformer_layer() -> None:
    model = lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    both_ways(training(_square_mean, model), batches(3, (2, 5, 8)))


def test_attention_with_a_causal_mask() -> None:
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        q = model(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).square().mean()

    both_ways(training(forward), batches(3, (2, 5, 8)))


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_recurrent_layers(kind: Any) -> None:
    model = lambda: kind(8, 8, batch_first=True)
    both_ways(training(lambda m, x: m(x)[0].square().mean(), model), batches(3, (2, 5, 8)))


def test_an_embedding() -> None:
    model = lambda: nn.Embedding(10, 4, padding_idx=0)
    ids = [(torch.tensor([0, 3, 3, 9, at, 0]),) for at in range(3)]
    both_ways(training(_square_mean, model), ids)


def test_weight_norm() -> None:
    model = lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    both_ways(training(_square_mean, model), batches())


def test_tied_weights() -> None:
    def tied() -> nn.Module:
        model = mlp()
        model[2].weight = model[0].weight
        return model

    both_ways(training(_square_mean, tied), batches())


def test_a_module_called_twice() -> None:
    both_ways(training(lambda model, x: model(model(x)).square().mean()), batches())


def test_sizes_that_only_the_data_decides() -> None:
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        positive = y[y > 0]
        return positive.sum() / (positive.numel() + 1)

    both_ways(training(forward), batches(4))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_module_compiled_by_torch_inside_the_step(backend: str) -> None:
    model = lambda: torch.compile(mlp(), backend=backend)
    both_ways(training(_square_mean, model), batches())


def test_ctc_of_lengths_in_tensors() -> None:
    def forward(model: nn.Module, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        logits = model(x).view(8, 2, -1)[..., :4].log_softmax(-1)
        targets = torch.tensor([[1, 2, 3], [2, 1, 3]])
        losses = F.ctc_loss(logits, targets, torch.tensor([8, 7]), lengths, reduction="none", zero_infinity=True)
        return losses.sum() + F.ctc_loss(logits, targets, torch.tensor([8, 8]), lengths)

    lengths = [torch.tensor(each) for each in ([3, 2], [1, 1], [2, 3])]
    both_ways(training(forward), [(x, each) for (x,), each in zip(batches(shape=(16, 8)), lengths, strict=True)])
