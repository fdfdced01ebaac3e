"""What people write around the step: accumulation, precision, logging, checks, augmentation, odd batches, devices."""

from __future__ import annotations

import collections
import contextlib
import logging
import random
import time
from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from coverage_case import CALLS, Trained
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from .pieces import adamw, convnet, features, images, mlp, piece, tokens, trained

log = logging.getLogger("training")
Pair = namedtuple("Pair", "x y")


@piece("micro batches", "every second call", "no sync context", "mean of losses", "split tensor")
def accumulation(kind: str) -> Trained:
    model = mlp(8, 16, 4)
    optimizer = adamw(model)
    done = {"calls": 0}

    def train_step(batch: Any) -> torch.Tensor:
        x, y = batch
        if kind == "every second call":
            loss = F.cross_entropy(model(x), y) / 2
            loss.backward()
            done["calls"] += 1
            if done["calls"] % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()
        total = torch.zeros(())
        parts = x.split(4) if kind == "split tensor" else x.chunk(2)
        for at, (a, b) in enumerate(zip(parts, y.chunk(len(parts)), strict=True)):
            context = contextlib.nullcontext() if at else torch.enable_grad()
            with context if kind == "no sync context" else contextlib.nullcontext():
                loss = F.cross_entropy(model(a), b) / len(parts)
                loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=kind != "mean of losses")
        return total

    return trained(train_step, features(), model)


@piece("autocast bf16", "autocast backward outside", "bf16 parameters", "fp32 master", "double", "mixed dtypes")
def precision(kind: str) -> Trained:
    model = mlp(8, 16, 4)
    dtype = {"bf16 parameters": torch.bfloat16, "double": torch.float64}.get(kind, torch.float32)
    model = model.to(dtype)
    masters = [p.detach().clone().float() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters if kind == "fp32 master" else model.parameters(), lr=0.1)

    def train_step(batch: Any) -> torch.Tensor:
        x, y = batch[0].to(dtype), batch[1]
        if kind == "fp32 master":
            half = {name: m.bfloat16() for (name, _), m in zip(model.named_parameters(), masters, strict=True)}
            leaves = {name: each.requires_grad_() for name, each in half.items()}
            loss = F.cross_entropy(torch.func.functional_call(model, leaves, (x.bfloat16(),)).float(), y)
            grads = torch.autograd.grad(loss, list(leaves.values()))
            for master, grad in zip(masters, grads, strict=True):
                master.grad = grad.float()
            optimizer.step()
            return loss.detach()
        with torch.autocast("cpu", torch.bfloat16, enabled=kind.startswith("autocast")):
            logits = model(x)
            loss = F.cross_entropy(logits.float() if kind == "mixed dtypes" else logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return trained(train_step, features(), model, also=lambda: masters)


@piece(
    "print",
    "print every second",
    "logging",
    "f string",
    "dict of floats",
    "tqdm-like",
    "timed",
    "writer",
    "history list",
)
def reporting(kind: str) -> Trained:
    model = mlp(8, 16, 4)
    optimizer = adamw(model)
    state: dict[str, Any] = {"step": 0, "losses": [], "postfix": "", "rows": []}

    def train_step(batch: Any) -> Any:
        start = time.perf_counter()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["step"] += 1
        if kind == "print":
            print("loss", loss.item())
        elif kind == "print every second" and state["step"] % 2 == 0:
            print(f"step {state['step']}: loss {loss.item():.4f}")
        elif kind == "logging":
            log.info("loss %.3f", loss.item())
        elif kind == "f string":
            return f"{loss.item():.6f}"
        elif kind == "dict of floats":
            return {"loss": float(loss), "accuracy": (model(batch[0]).argmax(-1) == batch[1]).float().mean().item()}
        elif kind == "tqdm-like":
            state["postfix"] = f"loss={loss.item():.3f}"
        elif kind == "timed":
            return loss.detach(), time.perf_counter() - start >= 0
        elif kind == "writer":
            state["rows"].append({"step": state["step"], "loss": loss.item()})
        elif kind == "history list":
            state["losses"].append(loss.detach())
        return None

    return trained(train_step, features(), model, also=lambda: dict(state))


@piece("skip nan", "break on inf", "assert", "warn", "early exit", "rollback", "spike", "empty batch", "anomaly check")
def guards(kind: str) -> Trained:
    model = mlp(8, 16, 4)
    optimizer = adamw(model)
    best = {"loss": float("inf"), "skipped": 0, "average": 2.0}
    saved = {name: p.detach().clone() for name, p in model.named_parameters()}

    def train_step(batch: Any) -> Any:
        x, y = batch
        if kind == "empty batch" and x.shape[0] == 0:
            return None
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if kind == "skip nan" and not torch.isfinite(loss):
            best["skipped"] += 1
            return loss
        if kind == "break on inf" and torch.isinf(loss).item():
            raise RuntimeError("loss is infinite")
        if kind == "assert":
            assert not torch.isnan(loss).any()
        if kind == "spike" and loss.item() > 3 * best["average"]:
            best["skipped"] += 1
            return loss
        loss.backward()
        if kind == "anomaly check":
            for name, p in model.named_parameters():
                if p.grad is not None and torch.isnan(p.grad).any():
                    raise RuntimeError(f"nan in the gradient of {name}")
        optimizer.step()
        if kind == "warn" and loss > 10:
            log.warning("large loss")
        if kind == "early exit":
            if loss.item() < best["loss"]:
                best["loss"] = loss.item()
            else:
                best["skipped"] += 1
        if kind == "rollback" and loss.item() > 1e3:
            for name, p in model.named_parameters():
                p.data.copy_(saved[name])
        best["average"] = 0.9 * best["average"] + 0.1 * loss.item() if kind == "spike" else best["average"]
        return loss.detach()

    return trained(train_step, features(), model, also=lambda: dict(best))


@dataclass
class Sample:
    x: torch.Tensor
    y: torch.Tensor


class Encoding(UserDict):
    """A batch that is a mapping and lets its keys be read as attributes, like those of tokenizers."""

    def __getattr__(self, name: str) -> Any:
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


KINDS = [
    "tuple",
    "dict",
    "namedtuple",
    "dataclass",
    "user dict",
    "nested",
    "numpy",
    "lists",
    "ordered dict",
    "default dict",
]


@piece(*KINDS)
def batch_kinds(kind: str) -> Trained:
    model = mlp(8, 16, 4)
    optimizer = adamw(model)
    make: dict[str, Any] = {
        "tuple": lambda x, y: (x, y),
        "dict": lambda x, y: {"x": x, "y": y, "name": "train"},
        "namedtuple": Pair,
        "dataclass": Sample,
        "user dict": lambda x, y: Encoding({"x": x, "y": y}),
        "nested": lambda x, y: {"inputs": [x, {"extra": x * 2}], "y": (y,)},
        "numpy": lambda x, y: (x.numpy(), y.numpy()),
        "lists": lambda x, y: (x.tolist(), y.tolist()),
        "ordered dict": lambda x, y: collections.OrderedDict(x=x, y=y),
        "default dict": lambda x, y: collections.defaultdict(list, x=x, y=y),
    }

    def train_step(batch: Any) -> torch.Tensor:
        if kind in ("tuple", "namedtuple"):
            x, y = batch
        elif kind == "dataclass":
            x, y = batch.x, batch.y
        elif kind == "nested":
            x, y = batch["inputs"][0] + batch["inputs"][1]["extra"], batch["y"][0]
        elif kind == "numpy":
            x, y = torch.from_numpy(batch[0]), torch.from_numpy(batch[1])
        elif kind == "lists":
            x, y = torch.tensor(batch[0]), torch.tensor(batch[1])
        elif kind == "user dict":
            x, y = batch.x, batch["y"]
        else:
            x, y = batch["x"], batch["y"]
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return trained(train_step, [make[kind](*batch) for batch in features()], model)


@piece(
    "last batch short",
    "length varies",
    "list of tensors",
    "padded",
    "lengths",
    "mask from lengths",
    "bucketed",
    "epoch number",
)
def sizes(kind: str) -> Trained:
    embed, head = nn.Embedding(32, 8), nn.Linear(8, 32)
    optimizer = adamw(embed, head)
    draw = torch.Generator().manual_seed(7)
    rows = (4, 4, 3) if kind == "last batch short" else (4, 4, 4)
    lengths = (12, 9, 7) if kind in ("length varies", "bucketed") else (12, 12, 12)
    batches: list[Any] = [torch.randint(1, 32, (r, n), generator=draw) for r, n in zip(rows, lengths, strict=True)]
    if kind in ("list of tensors", "padded"):
        batches = [[each[: 12 - 2 * at] for at, each in enumerate(batch)] for batch in batches]
    elif kind in ("lengths", "mask from lengths"):
        batches = [(batch, torch.randint(3, 13, (4,), generator=draw)) for batch in batches]
    elif kind == "epoch number":
        batches = list(enumerate(batches))

    def loss_of(ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        loss = F.cross_entropy(head(embed(ids[:, :-1])).transpose(1, 2), ids[:, 1:], reduction="none")
        return loss.mean() if mask is None else (loss * mask[:, 1:]).sum() / mask[:, 1:].sum()

    def train_step(batch: Any) -> torch.Tensor:
        if kind == "list of tensors":
            loss = torch.stack([loss_of(each[None]) for each in batch]).mean()
        elif kind == "padded":
            ids = pad_sequence(batch, batch_first=True)
            loss = loss_of(ids, (ids != 0).float())
        elif kind == "lengths":
            loss = torch.stack([loss_of(ids[None, : max(2, int(n))]) for ids, n in zip(*batch, strict=True)]).mean()
        elif kind == "mask from lengths":
            ids, n = batch
            loss = loss_of(ids, (torch.arange(ids.shape[1])[None] < n[:, None]).float())
        elif kind == "epoch number":
            epoch, ids = batch
            loss = loss_of(ids) * (1.0 if epoch < 1 else 0.5 ** (epoch - 1))
        else:
            loss = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return trained(train_step, batches, embed, head)


def _rand_box(size: int, lam: float) -> tuple[int, int, int, int]:
    cut = int(size * np.sqrt(1.0 - lam))
    cx, cy = np.random.randint(size), np.random.randint(size)
    clip = lambda value: int(np.clip(value, 0, size))
    return clip(cx - cut // 2), clip(cy - cut // 2), clip(cx + cut // 2), clip(cy + cut // 2)


@piece(
    "mixup",
    "cutmix",
    "mixup tensor",
    "noise",
    "flip",
    "crop",
    "erase",
    "input dropout",
    "random layer",
    "teacher forcing",
)
def augmentation(kind: str) -> Trained:
    random.seed(0)
    np.random.seed(0)
    model = convnet()
    optimizer = adamw(model)

    def train_step(batch: Any) -> torch.Tensor:
        x, y = batch
        other, lam = y, 1.0
        if kind in ("mixup", "cutmix"):
            lam = np.random.beta(1.0, 1.0)
            index = torch.randperm(x.size(0))
            other = y[index]
            if kind == "mixup":
                x = lam * x + (1 - lam) * x[index]
            else:
                a, b, c, d = _rand_box(x.size(2), lam)
                x = x.clone()
                x[:, :, a:c, b:d] = x[index, :, a:c, b:d]
        elif kind == "mixup tensor":
            weight = torch.distributions.Beta(torch.tensor(1.0), torch.tensor(1.0)).sample((x.size(0), 1, 1, 1))
            x = weight * x + (1 - weight) * x.flip(0)
        elif kind == "noise":
            x = x + 0.1 * torch.randn_like(x)
        elif kind == "flip":
            x = torch.where(torch.rand(x.size(0), 1, 1, 1) < 0.5, x.flip(-1), x)
        elif kind == "crop":
            top, left = random.randint(0, 4), random.randint(0, 4)
            x = x[:, :, top : top + 12, left : left + 12]
        elif kind == "erase":
            x = x.masked_fill(torch.rand(x.size(0), 1, 16, 16) < 0.1, 0)
        elif kind == "input dropout":
            x = F.dropout2d(x, 0.2)
        elif kind == "random layer":
            x = model[0](x).mean(1, keepdim=True).repeat(1, 3, 2, 2) if random.random() < 0.5 else x
        elif kind == "teacher forcing":
            x = x * 0.5 if random.random() < 0.5 else x
        logits = model(x)
        loss = lam * F.cross_entropy(logits, y) + (1 - lam) * F.cross_entropy(logits, other)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return trained(train_step, images(), model)


@piece(
    "to device",
    "non blocking",
    "pin",
    "synchronize",
    "empty cache",
    "set to none",
    "train and eval",
    "no grad metrics",
    "inference mode",
)
def housekeeping(kind: str) -> Trained:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = mlp(8, 16, 4, dropout=0.1).to(device)
    optimizer = adamw(model)
    criterion = nn.CrossEntropyLoss().to(device)

    def train_step(batch: Any) -> Any:
        model.train()
        x, y = (each.to(device, non_blocking=kind == "non blocking") for each in batch)
        for p in model.parameters():
            p.grad = None
        output = model(x)
        loss = criterion(output, y)
        loss.backward()
        optimizer.step()
        accuracy: Any = None
        if kind == "synchronize" and torch.cuda.is_available():
            torch.cuda.synchronize()
        elif kind == "empty cache":
            del output
            torch.cuda.empty_cache()
        elif kind == "train and eval":
            model.eval()
            with torch.no_grad():
                accuracy = (model(x).argmax(1) == y).sum().item() / y.size(0)
        elif kind == "no grad metrics":
            with torch.no_grad():
                top = output.topk(2, 1, True, True)[1].t()
                correct = top.eq(y.view(1, -1).expand_as(top))
                accuracy = [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / len(y)) for k in (1, 2)]
        elif kind == "inference mode":
            with torch.inference_mode():
                accuracy = (model(x).argmax(1) == y).float().mean().clone()
        return loss.item(), accuracy

    return trained(train_step, features(), model)


@piece(
    "class with methods",
    "closure over config",
    "generator of batches",
    "global counter",
    "kwargs",
    "decorated",
    "several returns",
)
def shapes_of_code(kind: str) -> Trained:
    model = mlp(8, 16, 4)
    optimizer = adamw(model)
    config = {"scale": 1.0, "use_l2": True, "names": ["a", "b"]}

    class Trainer:
        def __init__(self) -> None:
            self.model, self.optimizer, self.global_step, self.epoch = model, optimizer, 0, 0
            self.metrics: dict[str, list[float]] = collections.defaultdict(list)

        def compute_loss(self, x: torch.Tensor, y: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
            loss = F.cross_entropy(self.model(x), y)
            return {"loss": loss * options.get("scale", 1.0), "unscaled": loss.detach()}

        def training_step(self, batch: Any, index: int = 0) -> dict[str, Any]:
            out = self.compute_loss(*batch, scale=config["scale"])
            self.optimizer.zero_grad()
            out["loss"].backward()
            self.optimizer.step()
            self.global_step += 1
            if kind == "class with methods":
                self.metrics["loss"].append(out["unscaled"].item())
            return {key: value.detach() for key, value in out.items()}

    trainer = Trainer()

    def decorated(inner: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = inner(*args, **kwargs)
            config["names"] = [*config["names"][-1:], f"call {trainer.global_step}"]  # type: ignore[misc]
            return result

        return wrapper

    step = decorated(trainer.training_step) if kind == "decorated" else trainer.training_step
    if kind == "kwargs":
        step = lambda batch: trainer.training_step(batch=batch, index=3)
    elif kind == "several returns":
        step = lambda batch: (*trainer.training_step(batch).values(), config, None, "done")
    elif kind == "generator of batches":
        step = lambda batch: [
            trainer.training_step(each) for each in ((x[None], y[None]) for x, y in zip(*batch, strict=True))
        ][-1]
    return trained(step, features(), model, also=lambda: (trainer.global_step, dict(trainer.metrics), config))


@piece(
    "vocabulary check",
    "python loop over tokens",
    "bucket by value",
    "sampled",
    "argmax decode",
    "beam",
    "while not converged",
)
def decisions(kind: str) -> Trained:
    embed, head = nn.Embedding(32, 8), nn.Linear(8, 32)
    optimizer = adamw(embed, head)

    def train_step(ids: torch.Tensor) -> torch.Tensor:
        x = ids[:, :-1]
        h = embed(x)
        logits = head(h)
        loss = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:])
        if kind == "vocabulary check" and ids.max().item() >= 32:
            raise ValueError("token out of range")
        if kind == "python loop over tokens":
            loss = sum(F.cross_entropy(logits[:, at], ids[:, at + 1]) for at in range(x.shape[1])) / x.shape[1]  # type: ignore[assignment]
        elif kind == "bucket by value":
            loss = loss + (0.1 if (ids > 16).sum() > ids.numel() // 2 else 0.2) * h.pow(2).mean()
        elif kind == "sampled":
            drawn = torch.multinomial(logits.softmax(-1).flatten(0, 1), 1).view_as(x)
            loss = loss + 0.1 * embed(drawn).pow(2).mean()
        elif kind == "argmax decode":
            with torch.no_grad():
                token = ids[:, 0]
                for _ in range(4):
                    token = head(embed(token)).argmax(-1)
            loss = loss + embed(token).pow(2).mean()
        elif kind == "beam":
            scores, index = head(h[:, 0]).log_softmax(-1).topk(3)
            loss = loss - 0.01 * scores.sum() + embed(index).mean()
        elif kind == "while not converged":
            value, count = h.detach().mean(), 0
            while value.abs() > 1e-3 and count < 5:
                value, count = value * 0.1, count + 1
            loss = loss + count * 0.01
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return trained(train_step, tokens(), embed, head)


assert CALLS == 3, "the batches above are written for three calls"
