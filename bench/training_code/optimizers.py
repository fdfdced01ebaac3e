"""Optimizers, schedules and clipping around one small classifier."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from coverage_case import Trained
from torch import nn, optim
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from .pieces import adamw, features, mlp, piece, trained

OPTIMIZERS: list[tuple[str, Callable[[Any], optim.Optimizer]]] = [
    ("sgd", lambda p: optim.SGD(p, lr=0.1)),
    ("sgd momentum", lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-4)),
    ("sgd nesterov", lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)),
    ("sgd single tensor", lambda p: optim.SGD(p, lr=0.1, momentum=0.9, foreach=False)),
    ("adam", lambda p: optim.Adam(p, lr=1e-2)),
    ("adam amsgrad", lambda p: optim.Adam(p, lr=1e-2, amsgrad=True)),
    ("adam single tensor", lambda p: optim.Adam(p, lr=1e-2, foreach=False)),
    ("adam maximize", lambda p: optim.Adam(p, lr=1e-2, maximize=True)),
    ("adamw", lambda p: optim.AdamW(p, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)),
    ("adamw fused", lambda p: optim.AdamW(p, lr=1e-2, fused=True)),
    ("adamw tensor lr", lambda p: optim.AdamW(p, lr=torch.tensor(1e-2))),
    ("nadam", lambda p: optim.NAdam(p, lr=1e-2)),
    ("radam", lambda p: optim.RAdam(p, lr=1e-2)),
    ("adamax", lambda p: optim.Adamax(p, lr=1e-2)),
    ("adagrad", lambda p: optim.Adagrad(p, lr=1e-2)),
    ("adadelta", lambda p: optim.Adadelta(p)),
    ("rmsprop", lambda p: optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True)),
    ("rprop", lambda p: optim.Rprop(p, lr=1e-2)),
    ("asgd", lambda p: optim.ASGD(p, lr=1e-2)),
    ("adafactor", lambda p: optim.Adafactor(p, lr=1e-2)),
]


@piece(*OPTIMIZERS)
def optimizer(variant: tuple[str, Callable[[Any], optim.Optimizer]]) -> Trained:
    model = mlp(8, 16, 4)
    optimizer = variant[1](model.parameters())

    def train_step(batch: Any) -> torch.Tensor:
        x, y = batch
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return trained(train_step, features(), model, optimizer)


@piece()
def muon_for_matrices() -> Trained:
    model = mlp(8, 16, 4)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    muon, adam = optim.Muon(matrices, lr=1e-2), optim.AdamW([p for p in model.parameters() if p.dim() < 2], lr=1e-2)

    def train_step(batch: Any) -> float:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        for each in (muon, adam):
            each.step()
            each.zero_grad()
        return loss.item()

    return trained(train_step, features(), model, muon, adam)


@piece()
def lbfgs_with_closure() -> Trained:
    model = mlp(8, 8, 4)
    optimizer = optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def train_step(batch: Any) -> torch.Tensor:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            return loss

        return optimizer.step(closure)

    return trained(train_step, features(), model)


SCHEDULES: list[tuple[str, Callable[[optim.Optimizer], Any]]] = [
    ("step", lambda o: schedules.StepLR(o, 2)),
    ("multistep", lambda o: schedules.MultiStepLR(o, [1, 2])),
    ("lambda", lambda o: schedules.LambdaLR(o, lambda at: min(1.0, (at + 1) / 3))),
    ("cosine", lambda o: schedules.CosineAnnealingLR(o, 10)),
    ("warm restarts", lambda o: schedules.CosineAnnealingWarmRestarts(o, 2)),
    ("exponential", lambda o: schedules.ExponentialLR(o, 0.9)),
    ("linear", lambda o: schedules.LinearLR(o, total_iters=3)),
    ("one cycle", lambda o: schedules.OneCycleLR(o, 0.1, total_steps=10)),
    ("polynomial", lambda o: schedules.PolynomialLR(o, 5)),
    (
        "sequential",
        lambda o: schedules.SequentialLR(o, [schedules.LinearLR(o), schedules.CosineAnnealingLR(o, 5)], [1]),
    ),
]


@piece(*SCHEDULES)
def schedule_in_the_step(variant: tuple[str, Callable[[optim.Optimizer], Any]]) -> Trained:
    model = mlp(8, 16, 4)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = variant[1](optimizer)

    def train_step(batch: Any) -> tuple[torch.Tensor, float]:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.detach(), scheduler.get_last_lr()[0]

    return trained(train_step, features(), model, optimizer)


@piece()
def reduce_on_plateau_in_the_step() -> Trained:
    model = mlp(8, 16, 4)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scheduler = schedules.ReduceLROnPlateau(optimizer, patience=0)

    def train_step(batch: Any) -> float:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss.item())
        return optimizer.param_groups[0]["lr"]

    return trained(train_step, features(), model)


@piece()
def cosine_schedule_by_hand() -> Trained:
    """The schedule of many small language-model repositories: a function of the iteration, written to the groups."""
    model = mlp(8, 16, 4)
    optimizer = adamw(model)
    counter = {"it": 0}

    def get_lr(it: int) -> float:
        if it < 2:
            return 1e-2 * (it + 1) / 2
        ratio = (it - 2) / 8
        return 1e-3 + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (1e-2 - 1e-3)

    def train_step(batch: Any) -> torch.Tensor:
        lr = get_lr(counter["it"])
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        counter["it"] += 1
        return loss

    return trained(train_step, features(), model, optimizer, also=lambda: dict(counter))


@piece()
def weight_decay_schedule() -> Trained:
    model = mlp(8, 16, 4)
    optimizer = adamw(model)
    wd_schedule = [0.04 + 0.01 * at for at in range(10)]

    def train_step(batch: Any) -> torch.Tensor:
        x, y, it = batch
        for at, group in enumerate(optimizer.param_groups):
            if at == 0:
                group["weight_decay"] = wd_schedule[it]
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return trained(train_step, [(*batch, at) for at, batch in enumerate(features())], model)


@piece()
def groups_without_decay() -> Trained:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    optimizer = optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)

    def train_step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return trained(train_step, features(), model)


@piece("norm", "norm inf", "value", "nonfinite is an error", "norm is returned", "skipped when large", "by hand")
def clipping(kind: str) -> Trained:
    model = mlp(8, 16, 4)
    optimizer = adamw(model)

    def train_step(batch: Any) -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        norm: Any = None
        if kind == "norm":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        elif kind == "norm inf":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=float("inf"))
        elif kind == "value":
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        elif kind == "nonfinite is an error":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)
        elif kind == "norm is returned":
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()
        elif kind == "skipped when large":
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if norm > 100:
                optimizer.zero_grad()
                return loss
        else:
            norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters()))  # type: ignore[operator]
            for p in model.parameters():
                p.grad.mul_(torch.clamp(0.1 / (norm + 1e-6), max=1.0))  # type: ignore[union-attr]
        optimizer.step()
        return loss.detach(), norm

    return trained(train_step, features(), model)


@piece("enabled", "disabled")
def gradient_scaler(kind: str) -> Trained:
    model = mlp(8, 16, 4)
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", enabled=kind == "enabled")

    def train_step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(batch[0]), batch[1])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return trained(train_step, features(), model, scaler)


@piece("average", "ema", "multi")
def averaged_model(kind: str) -> Trained:
    model = mlp(8, 16, 4)
    optimizer = adamw(model)
    ema = lambda averaged, new, _: 0.9 * averaged + 0.1 * new
    if kind == "multi":
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    else:
        average = AveragedModel(model, avg_fn=ema if kind == "ema" else None)

    def train_step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        return loss

    return trained(train_step, features(), model, average)


@piece()
def swa_rate_in_the_step() -> Trained:
    model = mlp(8, 16, 4)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)

    def train_step(batch: Any) -> torch.Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    return trained(train_step, features(), model, optimizer)


class Lookahead:
    """Slow weights that follow the fast ones every k steps, as several optimizer collections have it."""

    def __init__(self, base: optim.Optimizer, k: int = 2, alpha: float = 0.5) -> None:
        self.base, self.k, self.alpha, self.count = base, k, alpha, 0
        self.slow = [p.detach().clone() for group in base.param_groups for p in group["params"]]

    def step(self) -> None:
        self.base.step()
        self.count += 1
        if self.count % self.k == 0:
            fast = [p for group in self.base.param_groups for p in group["params"]]
            for slow, p in zip(self.slow, fast, strict=True):
                slow.add_(p.detach() - slow, alpha=self.alpha)
                p.data.copy_(slow)


@piece()
def lookahead() -> Trained:
    model = mlp(8, 16, 4)
    optimizer = Lookahead(optim.SGD(model.parameters(), lr=0.1))

    def train_step(batch: Any) -> torch.Tensor:
        model.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    return trained(train_step, features(), model, also=lambda: (optimizer.count, list(optimizer.slow)))


class Lion(optim.Optimizer):
    """A published update rule written the way repositories write optimizers: state made at the first step."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), wd: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "wd": wd})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in filter(lambda p: p.grad is not None, group["params"]):
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                beta1, beta2 = group["betas"]
                p.data.mul_(1 - group["lr"] * group["wd"])
                update = state["exp_avg"].clone().mul_(beta1).add(p.grad, alpha=1 - beta1).sign_()
                p.add_(update, alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(p.grad, alpha=1 - beta2)
        return loss


class CountedAdam(optim.Optimizer):
    """Adam with a Python int as its step count, as many optimizers outside torch have it."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            correction1, correction2 = 1 - 0.9 ** group["step"], 1 - 0.999 ** group["step"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["m"], state["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                state["m"].lerp_(p.grad, 0.1)
                state["v"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                denominator = (state["v"].sqrt() / math.sqrt(correction2)).add_(1e-8)
                p.addcdiv_(state["m"], denominator, value=-group["lr"] / correction1)


class TrustRatio(optim.Optimizer):
    """A layer-wise learning rate with a branch on norms, as LARS is often written."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                weight_norm, grad_norm = torch.norm(p), torch.norm(p.grad)
                ratio = 1.0
                if weight_norm > 0 and grad_norm > 0:
                    ratio = 1e-3 * weight_norm / (grad_norm + 1e-9)
                p.add_(p.grad * ratio, alpha=-group["lr"])


@piece(Lion, CountedAdam, TrustRatio)
def written_by_hand(kind: type[optim.Optimizer]) -> Trained:
    model = mlp(8, 16, 4)
    optimizer = kind(model.parameters())

    def train_step(batch: Any) -> torch.Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return trained(train_step, features(), model, optimizer)


@piece("sam", "no optimizer", "two steps", "per parameter", "frozen backbone", "unfreezes later")
def other_updates(kind: str) -> Trained:
    model = mlp(8, 16, 4)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    each = {p: optim.Adam([p], lr=1e-2) for p in model.parameters()} if kind == "per parameter" else {}
    count = [0]
    if kind == "frozen backbone":
        model[0].requires_grad_(False)

    def loss_of(batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def train_step(batch: Any) -> torch.Tensor:
        if kind == "unfreezes later":
            for p in model[0].parameters():
                p.requires_grad = count[0] >= 1
            count[0] += 1
        model.zero_grad()
        loss = loss_of(batch)
        loss.backward()
        if kind == "sam":
            with torch.no_grad():
                norm = torch.norm(torch.stack([p.grad.norm() for p in model.parameters()]))  # type: ignore[union-attr]
                moves = [p.grad * (0.05 / (norm + 1e-12)) for p in model.parameters()]
                for p, move in zip(model.parameters(), moves, strict=True):
                    p.add_(move)
            model.zero_grad()
            loss_of(batch).backward()
            with torch.no_grad():
                for p, move in zip(model.parameters(), moves, strict=True):
                    p.sub_(move)
            optimizer.step()
        elif kind == "no optimizer":
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
        elif kind == "two steps":
            optimizer.step()
            optimizer.zero_grad()
            loss_of(batch).backward()
            optimizer.step()
        elif kind == "per parameter":
            for one in each.values():
                one.step()
        else:
            optimizer.step()
        return loss

    return trained(train_step, features(), model)
