"""Python state that a step changes: counters, meters, averages, buffers of the past, caches, metrics."""

from __future__ import annotations

import collections
from typing import Any

import torch
import torch.nn.functional as F
from coverage_case import Trained
from torch import nn

from .pieces import adamw, features, mlp, piece, trained


class AverageMeter:
    """The meter of the ImageNet example, as copied everywhere."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reset()

    def reset(self) -> None:
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val: Any, n: int = 1) -> None:
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


class Smoothed:
    """A window of values with median and average, as detection repositories have it."""

    def __init__(self, size: int = 2) -> None:
        self.deque: collections.deque[float] = collections.deque(maxlen=size)
        self.total, self.count = 0.0, 0

    def update(self, value: float, n: int = 1) -> None:
        self.deque.append(value)
        self.count += n
        self.total += value * n

    @property
    def average(self) -> float:
        return self.total / self.count


class Ema:
    """Shadow weights in a dict, with a decay that warms up by a count."""

    def __init__(self, model: nn.Module, decay: float = 0.99) -> None:
        self.decay, self.updates = decay, 0
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        with torch.no_grad():
            for name, p in model.named_parameters():
                self.shadow[name].mul_(decay).add_(p.detach(), alpha=1 - decay)


class Accuracy:
    """A metric with tensor state, in the manner of torchmetrics."""

    def __init__(self) -> None:
        self.correct, self.total = torch.tensor(0), torch.tensor(0)

    def update(self, logits: torch.Tensor, target: torch.Tensor) -> None:
        self.correct += (logits.argmax(-1) == target).sum()
        self.total += target.numel()

    def compute(self) -> torch.Tensor:
        return self.correct.float() / self.total


class Early:
    def __init__(self) -> None:
        self.best: float | None = None
        self.counter, self.stop = 0, False

    def __call__(self, loss: float) -> bool:
        if self.best is None or loss < self.best:
            self.best, self.counter = loss, 0
        else:
            self.counter += 1
            self.stop = self.counter >= 2
        return self.stop


KINDS = [
    *("counter", "nonlocal", "module attribute", "meter of floats", "meter of tensors", "smoothed", "ema", "metric"),
    *(
        "running dict",
        "list of floats",
        "list of tensors",
        "deque",
        "counter of classes",
        "set of seen",
        "early stopping",
    ),
    *(
        "running loss tensor",
        "running loss float",
        "loss balancing",
        "curriculum",
        "beta annealing",
        "confusion matrix",
    ),
    *(
        "moving statistics",
        "nested objects",
        "tuple state",
        "history of dicts",
        "best so far",
        "string state",
        "warm up flag",
    ),
]


@piece(*KINDS)
def kept(kind: str) -> Trained:
    model = mlp(8, 16, 4)
    optimizer = adamw(model)
    meter, smoothed, ema, metric, early = AverageMeter("loss"), Smoothed(), Ema(model), Accuracy(), Early()
    matrix, mean, variance = torch.zeros(4, 4), torch.zeros(8), torch.ones(8)
    running = torch.zeros(())
    state: dict[str, Any] = {"step": 0, "loss": 0.0, "items": [], "seen": set(), "queue": collections.deque(maxlen=2)}
    state |= {"classes": collections.Counter(), "weight": 1.0, "nested": {"a": [0, {"b": 1.5}]}, "pair": (0, 0.0)}
    state |= {"text": "start", "first": True, "best": float("inf")}
    count = 0
    model.calls = 0  # type: ignore[assignment]

    def train_step(batch: Any) -> Any:
        nonlocal count
        x, y = batch
        if kind == "moving statistics":
            mean.lerp_(x.mean(0), 0.1)
            variance.lerp_(x.var(0), 0.1)
            x = (x - mean) / (variance.sqrt() + 1e-5)
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        if kind == "loss balancing":
            loss = loss * state["weight"]
            state["weight"] *= 0.9
        elif kind == "curriculum":
            loss = loss + (0.0 if state["step"] < 1 else logits.pow(2).mean())
        elif kind == "beta annealing":
            loss = loss + min(1.0, state["step"] / 10) * logits.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        returned: Any = loss.detach()
        state["step"] += 1
        if kind == "nonlocal":
            count += 1
        elif kind == "module attribute":
            model.calls += 1  # type: ignore[assignment, operator]
        elif kind == "meter of floats":
            meter.update(loss.item(), x.size(0))
            returned = meter.avg
        elif kind == "meter of tensors":
            meter.update(loss.detach(), x.size(0))
        elif kind == "smoothed":
            smoothed.update(loss.item())
            returned = smoothed.average
        elif kind == "ema":
            ema.update(model)
        elif kind == "metric":
            metric.update(logits.detach(), y)
            returned = metric.compute()
        elif kind == "running dict":
            state["loss"] += loss.item() * x.size(0)
        elif kind == "list of floats":
            state["items"].append(loss.item())
        elif kind == "list of tensors":
            state["items"].append(loss.detach())
            state["items"] = state["items"][-2:]
        elif kind == "deque":
            state["queue"].append(logits.detach().mean(0))
            returned = torch.stack(list(state["queue"])).mean(0)
        elif kind == "counter of classes":
            state["classes"].update(y.tolist())
        elif kind == "set of seen":
            state["seen"].add(state["step"])
        elif kind == "early stopping":
            returned = early(loss.item())
        elif kind == "running loss tensor":
            running.add_(loss.detach())
            returned = (running / state["step"]).item()
        elif kind == "running loss float":
            state["loss"] = 0.9 * state["loss"] + 0.1 * float(loss.detach())
        elif kind == "confusion matrix":
            matrix.index_put_((y, logits.argmax(-1)), torch.ones(len(y)), accumulate=True)
        elif kind == "nested objects":
            state["nested"]["a"][0] += 1
            state["nested"]["a"][1]["b"] *= 0.5
        elif kind == "tuple state":
            at, value = state["pair"]
            state["pair"] = (at + 1, value + loss.item())
        elif kind == "history of dicts":
            state["items"].append({"step": state["step"], "loss": loss.item(), "lr": optimizer.param_groups[0]["lr"]})
        elif kind == "best so far":
            state["best"] = min(state["best"], loss.item())
        elif kind == "string state":
            state["text"] = f"step {state['step']}"
        elif kind == "warm up flag":
            if state["first"]:
                loss = loss * 0
            state["first"] = False
            returned = loss.detach()
        return returned

    def also() -> Any:
        objects = [dict(vars(each)) for each in (meter, smoothed, ema, metric, early)]
        return {**state, "seen": sorted(state["seen"])}, objects, matrix, mean, variance, running, count, model.calls

    return trained(train_step, features(), model, also=also)


@piece(
    "memory bank",
    "moco queue",
    "replay buffer",
    "target network",
    "teacher",
    "momentum encoder",
    "running norm",
    "gradient store",
)
def remembered(kind: str) -> Trained:
    model, other = mlp(8, 16, 4), mlp(8, 16, 4)
    other.load_state_dict(model.state_dict())
    for p in other.parameters():
        p.requires_grad_(False)
    optimizer = adamw(model)
    bank, queue, pointer = torch.zeros(16, 4), F.normalize(torch.randn(4, 16), dim=0), torch.zeros(1, dtype=torch.long)
    replay = torch.zeros(32, 8)
    state: dict[str, Any] = {"position": 0, "filled": 0, "step": 0, "grads": {}}

    def train_step(batch: Any) -> torch.Tensor:
        x, y = batch
        z = model(x)
        loss = F.cross_entropy(z, y)
        if kind == "memory bank":
            loss = loss + 0.1 * (z - bank[y]).pow(2).mean()
            bank[y] = 0.5 * bank[y] + 0.5 * z.detach()
        elif kind == "moco queue":
            q, k = F.normalize(z, dim=1), F.normalize(other(x), dim=1)
            logits = torch.cat(
                [torch.einsum("nc,nc->n", q, k)[:, None], torch.einsum("nc,ck->nk", q, queue.clone())], 1
            )
            loss = F.cross_entropy(logits / 0.07, torch.zeros(len(x), dtype=torch.long))
            at = int(pointer)
            queue[:, at : at + len(x)] = k.T
            pointer[0] = (at + len(x)) % 16
        elif kind == "replay buffer":
            start = state["position"]
            replay[start : start + len(x)] = x
            state["position"] = (start + len(x)) % 32
            state["filled"] = min(32, state["filled"] + len(x))
            past = replay[torch.randint(0, state["filled"], (4,))]
            loss = loss + 0.1 * model(past).pow(2).mean()
        elif kind in ("teacher", "target network"):
            with torch.no_grad():
                target = other(x)
            loss = loss + F.mse_loss(z, target)
        elif kind == "running norm":
            state["step"] += 1
            loss = loss / (1.0 + 0.1 * state["step"])
        optimizer.zero_grad()
        loss.backward()
        if kind == "gradient store":
            for name, p in model.named_parameters():
                held = state["grads"].get(name)
                state["grads"][name] = p.grad.clone() if held is None else held * 0.5 + p.grad
                p.grad = state["grads"][name].clone()
        optimizer.step()
        if kind in ("momentum encoder", "moco queue", "teacher"):
            for target, source in zip(other.parameters(), model.parameters(), strict=True):
                target.data = target.data * 0.99 + source.data * 0.01
        elif kind == "target network":
            state["step"] += 1
            if state["step"] % 2 == 0:
                other.load_state_dict(model.state_dict())
        return loss.detach()

    return trained(train_step, features(), model, other, also=lambda: (bank, queue, pointer, replay, dict(state)))
