"""Steps written for libraries around PyTorch train compiled as they do eagerly; skipped where one is not installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft
from both_ways import assert_equal, detached, snapshot

Wrap = Callable[[Any], Any]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def _batches(count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 6, generator=draw), torch.randint(0, 4, (4,), generator=draw)) for _ in range(count)]


class WrappingOptimizer(torch.optim.Optimizer):
    """As accelerate's: an optimizer by its class, which holds another one and has no state of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.skips = False

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    def step(self, closure: Any = None) -> None:
        if not self.skips:
            self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


def with_a_wrapped_optimizer(wrap: Wrap) -> Any:
    model = _model()
    optimizer = WrappingOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step, losses = wrap(step), []
    for at, batch in enumerate(_batches(5)):
        optimizer.skips = at == 3
        losses.append(step(*batch))
    return losses, snapshot(model), detached(optimizer.optimizer.state_dict())


def with_accelerate(wrap: Wrap) -> Any:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = _model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

    step = wrap(step)
    return [step(*batch) for batch in _batches()], snapshot(model)


def with_fabric(wrap: Wrap) -> Any:
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    model = _model()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = wrap(step)
    return [step(*batch) for batch in _batches()], [p.detach().clone() for p in model.parameters()]


def with_metrics(wrap: Wrap) -> Any:
    torchmetrics = pytest.importorskip("torchmetrics")
    accuracy, mean = torchmetrics.Accuracy(task="multiclass", num_classes=4), torchmetrics.MeanMetric()
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean.update(loss.detach())
        return loss.detach(), accuracy(logits.detach(), y)

    step = wrap(step)
    return [step(*batch) for batch in _batches()], accuracy.compute(), mean.compute(), snapshot(model)


def _step(model: Any, optimizer: Any) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def with_low_rank_adapters(wrap: Wrap) -> Any:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(_model(), peft.LoraConfig(r=2, target_modules=["0", "2"], lora_dropout=0.5))
    trained = [each for each in model.parameters() if each.requires_grad]
    step = wrap(_step(model, torch.optim.AdamW(trained, lr=0.01)))
    torch.manual_seed(2)
    return [step(*batch) for batch in _batches()], snapshot(model)


LIBRARIES = [with_a_wrapped_optimizer, with_accelerate, with_fabric, with_metrics, with_low_rank_adapters]


@pytest.mark.parametrize("train", LIBRARIES)
def test_a_step_for_a_library_trains_as_in_eager(train: Callable[[Wrap], Any]) -> None:
    eager = train(lambda step: step)
    assert_equal(train(weft.compile), eager)


@pytest.mark.parametrize("name", ["adabelief", "adafactor", "adan", "lamb", "lion", "madgrad", "nadamw"])
def test_optimizers_of_timm_train_as_in_eager(name: str) -> None:
    """They count steps in Python numbers."""
    optimizers = pytest.importorskip("timm.optim")

    def train(wrap: Wrap) -> Any:
        model = _model()
        wrapped = wrap(_step(model, optimizers.create_optimizer_v2(model, opt=name, lr=0.01, weight_decay=0.01)))
        losses = [wrapped(*batch) for batch in _batches(8)]
        assert wrap is not weft.compile or len(wrapped.captures) <= 2
        return losses, snapshot(model)

    assert_equal(train(weft.compile), train(lambda step: step))
