"""How often steps are captured over 20 calls in which something varies, and whether each call gives eager's bits.

    python bench/captures.py                    # every kind of step, on a CPU
    python bench/captures.py --only schedule    # those with this text in the group or the name
    python bench/captures.py --reasons          # with the reason of each capture

A kind is a step as training code has it. Between its calls vary sizes, schedules, arguments or Python state. Eager and
compiled run the same calls from the same seeds; what each call returned and all that the kind trains and counts is
compared bit for bit after each call. Prints a line a kind: captures, whether all 20 calls were equal, the kind. The
last line has the largest number of captures and how many kinds were refused or gave other bits.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import random
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.utils._pytree import tree_leaves

import weft

CALLS = 20
WIDTH = 8


@dataclasses.dataclass
class Steps:
    """One kind of step: what is called, with what, and what is compared."""

    step: Callable[..., Any]
    arguments: Callable[[int], tuple[Any, ...]]  # of the call with this number
    state: Callable[[], Any]
    between: Callable[[int], None] = lambda call: None  # what the program does after a call


KINDS: dict[tuple[str, str], Callable[[], Steps]] = {}


def kind(group: str, name: str) -> Callable[[Callable[[], Steps]], Callable[[], Steps]]:
    """Register a kind under its group and what varies."""

    def register(make: Callable[[], Steps]) -> Callable[[], Steps]:
        KINDS[group, name] = make
        return make

    return register


class Trainer:
    """A small model and optimizer, with the state that kinds compare."""

    def __init__(self, optimizer: Callable[..., Any] = torch.optim.AdamW, **options: Any) -> None:
        self.model: Any = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, WIDTH))
        self.optimizer = optimizer(self.model.parameters(), **{"lr": 1e-2, **options})
        self.seen: Any = None  # of kinds that count something

    def train(self, loss: torch.Tensor) -> torch.Tensor:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return (self.model(x) - x).square().mean()

    def state(self) -> Any:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        return [self.model.state_dict(), self.optimizer.state_dict()["state"], groups, self.seen]


def rows(call: int, *, least: int = 2, most: int = 12) -> int:
    """A number that looks random and is the same in both runs."""
    return least + (call * 7 + call * call) % (most - least + 1)


def batch(call: int, size: int = 4) -> torch.Tensor:
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(call))


def tokens(call: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 32, shape, generator=torch.Generator().manual_seed(call))


class Language(nn.Module):
    """Embedding, one attention block with a mask, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, ids: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.block(self.embed(ids), src_mask=causal, src_key_padding_mask=padding))


def language_trainer() -> Trainer:
    trainer = Trainer()
    trainer.model = Language()
    trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-2)
    return trainer


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


# ---- sizes


@kind("sizes", "number of rows")
def _() -> Steps:
    t = Trainer()
    return Steps(lambda x: t.train(t.loss(x)), lambda call: (batch(call, rows(call)),), t.state)


@kind("sizes", "number of rows, one among them")
def _() -> Steps:
    t = Trainer()
    return Steps(lambda x: t.train(t.loss(x)), lambda call: (batch(call, rows(call, least=1, most=5)),), t.state)


@kind("sizes", "the last batch of each epoch is smaller")
def _() -> Steps:
    t = Trainer()
    return Steps(lambda x: t.train(t.loss(x)), lambda call: (batch(call, 3 if call % 7 == 6 else 8),), t.state)


@kind("sizes", "sequence length, causal attention")
def _() -> Steps:
    t = language_trainer()

    def step(ids: torch.Tensor) -> torch.Tensor:
        return t.train(next_token_loss(t.model(ids), ids))

    return Steps(step, lambda call: (tokens(call, 4, rows(call, least=3)),), t.state)


@kind("sizes", "rows, length and a padding mask")
def _() -> Steps:
    t = language_trainer()

    def step(ids: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return t.train(next_token_loss(t.model(ids, padding), ids))

    def arguments(call: int) -> tuple[Any, ...]:
        count, length = rows(call, most=6), rows(call + 3, least=4)
        lengths = torch.randint(2, length + 1, (count, 1), generator=torch.Generator().manual_seed(call))
        return tokens(call, count, length), torch.arange(length) >= lengths

    return Steps(step, arguments, t.state)


@kind("sizes", "a mask that is there or None")
def _() -> Steps:
    t = language_trainer()

    def step(ids: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        return t.train(next_token_loss(t.model(ids, padding), ids))

    mask = torch.zeros(4, 6, dtype=torch.bool)
    return Steps(step, lambda call: (tokens(call, 4, 6), mask if call % 3 else None), t.state)


@kind("sizes", "height and width of images")
def _() -> Steps:
    t = Trainer()
    t.model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    t.optimizer = torch.optim.SGD(t.model.parameters(), lr=0.1, momentum=0.9)

    def arguments(call: int) -> tuple[Any, ...]:
        size = 8 + 2 * (rows(call) % 5), 8 + 2 * (rows(call + 1) % 4)
        return (torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(call)),)

    return Steps(lambda x: t.train(t.model(x).square().mean()), arguments, t.state)


@kind("sizes", "packed sequences of an LSTM")
def _() -> Steps:
    t = Trainer()
    t.model = nn.LSTM(WIDTH, WIDTH, batch_first=True)
    t.optimizer = torch.optim.Adam(t.model.parameters(), lr=1e-2)

    def step(packed: Any) -> torch.Tensor:
        return t.train(t.model(packed)[0].data.square().mean())

    def arguments(call: int) -> tuple[Any, ...]:
        parts = [batch(call * 10 + at, rows(call + at)) for at in range(rows(call, most=5))]
        return (nn.utils.rnn.pack_sequence(parts, enforce_sorted=False),)

    return Steps(step, arguments, t.state)


# ---- schedules


def scheduled(make: Callable[[Any], Any], inside: bool, optimizer: Any = torch.optim.AdamW, **options: Any) -> Steps:
    """A learning-rate scheduler that the step steps, or the program after it."""
    t = Trainer(optimizer, **options)
    scheduler = make(t.optimizer)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = t.train(t.loss(x))
        if inside:
            scheduler.step()
        return loss

    def between(call: int) -> None:
        if not inside:
            scheduler.step()

    return Steps(step, lambda call: (batch(call),), lambda: [t.state(), scheduler.state_dict()["_last_lr"]], between)


def cyclic(optimizer: Any) -> Any:
    return lr_scheduler.CyclicLR(optimizer, 1e-3, 1e-2, step_size_up=4, mode="exp_range", gamma=0.95)


def warm_up_then_cosine(optimizer: Any) -> Any:
    parts: list[lr_scheduler.LRScheduler] = [
        lr_scheduler.LinearLR(optimizer, total_iters=5),
        lr_scheduler.CosineAnnealingLR(optimizer, 15),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[5])


SCHEDULERS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "OneCycleLR, betas of AdamW": (lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=CALLS + 1), {}),
    "OneCycleLR, momentum of SGD": (
        lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=CALLS + 1, three_phase=True),
        {"optimizer": torch.optim.SGD, "momentum": 0.9},
    ),
    "CyclicLR, momentum of SGD": (cyclic, {"optimizer": torch.optim.SGD, "momentum": 0.9, "nesterov": True}),
    "LambdaLR": (lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch), {"fused": True}),
    "CosineAnnealingLR": (lambda o: lr_scheduler.CosineAnnealingLR(o, CALLS), {"foreach": True}),
    "CosineAnnealingWarmRestarts": (lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4, 2), {}),
    "StepLR": (lambda o: lr_scheduler.StepLR(o, 3, gamma=0.5), {"optimizer": torch.optim.RMSprop}),
    "SequentialLR, warm-up then cosine": (warm_up_then_cosine, {}),
}
for _name, (_make, _options) in SCHEDULERS.items():
    for _inside in (True, False):
        _where = "in the step" if _inside else "after it"
        KINDS["schedules", f"{_name}, stepped {_where}"] = lambda m=_make, i=_inside, o=_options: scheduled(m, i, **o)


@kind("schedules", "ReduceLROnPlateau, stepped after it")
def _() -> Steps:
    t = Trainer()
    scheduler = lr_scheduler.ReduceLROnPlateau(t.optimizer, factor=0.5, patience=1)
    step = lambda x: t.train(t.loss(x))
    return Steps(step, lambda call: (batch(call),), t.state, lambda call: scheduler.step(1.0 + call % 2))


@kind("schedules", "weight decay and learning rate, written by hand")
def _() -> Steps:
    t = Trainer()

    def between(call: int) -> None:
        for group in t.optimizer.param_groups:
            group["lr"], group["weight_decay"] = 1e-2 / (call + 1), 0.01 * (call + 1)

    return Steps(lambda x: t.train(t.loss(x)), lambda call: (batch(call),), t.state, between)


@kind("schedules", "betas, eps and momentum of BatchNorm, written by hand")
def _() -> Steps:
    t = Trainer()
    t.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    t.optimizer = torch.optim.AdamW(t.model.parameters(), lr=1e-2)

    def between(call: int) -> None:
        t.optimizer.param_groups[0]["betas"] = (0.9 - 0.01 * call, 0.999 - 0.001 * call)
        t.optimizer.param_groups[0]["eps"] = 1e-8 * (call + 1)
        t.model[1].momentum = 0.1 / (call + 1)

    return Steps(lambda x: t.train(t.loss(x)), lambda call: (batch(call),), t.state, between)


@kind("schedules", "dropout probability")
def _() -> Steps:
    t = Trainer()

    def between(call: int) -> None:
        t.model[2].p = 0.02 * call

    return Steps(lambda x: t.train(t.loss(x)), lambda call: (batch(call),), t.state, between)


@kind("schedules", "clipping norm, label smoothing and a loss weight, as attributes")
def _() -> Steps:
    t = Trainer()
    t.seen = {"clip": 1.0, "smoothing": 0.0, "weights": {"main": 1.0, "extra": 0.5}}

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        out = t.model(x)
        loss = t.seen["weights"]["main"] * F.cross_entropy(out, labels, label_smoothing=t.seen["smoothing"])
        (loss + t.seen["weights"]["extra"] * out.square().mean()).backward()
        nn.utils.clip_grad_norm_(t.model.parameters(), t.seen["clip"])
        t.optimizer.step()
        t.optimizer.zero_grad()
        return loss.detach()

    def between(call: int) -> None:
        t.seen.update(clip=1.0 / (call + 1), smoothing=0.01 * call)
        t.seen["weights"]["extra"] = 0.5 / (call + 1)

    return Steps(step, lambda call: (batch(call), tokens(call, 4) % WIDTH), t.state, between)


@kind("schedules", "loss scale of GradScaler")
def _() -> Steps:
    t = Trainer()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = t.loss(x)
        scaler.scale(loss).backward()
        scaler.step(t.optimizer)
        scaler.update()
        t.optimizer.zero_grad()
        return loss.detach()

    return Steps(step, lambda call: (batch(call),), lambda: [t.state(), scaler.state_dict()])


# ---- arguments


@kind("arguments", "epoch and batch_idx, logged every 5")
def _() -> Steps:
    t = Trainer()

    def step(epoch: int, batch_idx: int, x: torch.Tensor) -> Any:
        loss = t.train(t.loss(x))
        if batch_idx % 5 == 0:
            return {"epoch": epoch, "batch": batch_idx, "loss": loss.item()}
        return None

    return Steps(step, lambda call: (call // 7, call % 7, batch(call)), t.state)


@kind("arguments", "temperature and mixing weight, floats")
def _() -> Steps:
    t = Trainer()

    def step(x: torch.Tensor, temperature: float, weight: float) -> torch.Tensor:
        soft = F.softmax(t.model(x) / temperature, dim=-1)
        return t.train((weight * x + (1 - weight) * x.flip(0) - soft).square().mean())

    return Steps(step, lambda call: (batch(call), 1.0 / (call + 1), 0.03 * call), t.state)


@kind("arguments", "lengths, a list of ints of any number")
def _() -> Steps:
    t = Trainer()

    def step(x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        out = t.model(x)
        index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths), output_size=len(x))
        sums = torch.zeros(len(lengths), WIDTH).index_add(0, index, out)
        return t.train((sums / torch.tensor(lengths)[:, None]).square().mean())

    def arguments(call: int) -> tuple[Any, ...]:
        lengths = [1 + (call + at) % 4 for at in range(rows(call, most=6))]
        return batch(call, sum(lengths)), lengths

    return Steps(step, arguments, t.state)


@kind("arguments", "four lengths, split")
def _() -> Steps:
    t = Trainer()

    def step(x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        parts = t.model(x).split(lengths)
        return t.train(torch.stack([part.mean(0) for part in parts]).square().mean())

    def arguments(call: int) -> tuple[Any, ...]:
        lengths = [2 + rows(call + at) % 6 for at in range(4)]
        return batch(call, sum(lengths)), lengths

    return Steps(step, arguments, t.state)


@kind("arguments", "three tensors of any length in a list")
def _() -> Steps:
    t = Trainer()

    def step(parts: list[torch.Tensor]) -> torch.Tensor:
        padded = nn.utils.rnn.pad_sequence(parts, batch_first=True)
        return t.train(t.loss(padded))

    return Steps(step, lambda call: ([batch(call * 3 + at, rows(call + at)) for at in range(3)],), t.state)


@kind("arguments", "first and last position of a crop")
def _() -> Steps:
    t = Trainer()

    def step(x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return t.train(t.loss(x[start:stop]))

    return Steps(step, lambda call: (batch(call, 16), call % 5, 8 + call % 6), t.state)


@kind("arguments", "a name that chooses one of two heads")
def _() -> Steps:
    t = Trainer()
    heads = nn.ModuleDict({"a": nn.Linear(WIDTH, 2), "b": nn.Linear(WIDTH, 3)})
    t.optimizer.add_param_group({"params": list(heads.parameters())})

    def step(x: torch.Tensor, task: str) -> torch.Tensor:
        return t.train(heads[task](t.model(x)).square().mean())

    return Steps(step, lambda call: (batch(call), "ab"[call % 2]), lambda: [t.state(), heads.state_dict()])


@kind("arguments", "arrays of numpy of any length")
def _() -> Steps:
    t = Trainer()

    def step(x: np.ndarray) -> torch.Tensor:
        return t.train(t.loss(torch.from_numpy(x)))

    return Steps(step, lambda call: (batch(call, rows(call)).numpy(),), t.state)


@kind("arguments", "an iterator of batches of any size")
def _() -> Steps:
    t = Trainer()

    def step(batches: Iterator[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(())
        for _ in range(2):
            total = total + t.train(t.loss(next(batches)))
        return total

    return Steps(step, lambda call: (iter([batch(call, rows(call)), batch(call + 50, rows(call + 1))]),), t.state)


Example = namedtuple("Example", "ids labels")


@kind("arguments", "named tuples of any length")
def _() -> Steps:
    t = language_trainer()

    def step(example: Example) -> torch.Tensor:
        return t.train(F.cross_entropy(t.model(example.ids).flatten(0, 1), example.labels.flatten()))

    def arguments(call: int) -> tuple[Any, ...]:
        shape = 3, rows(call, least=3)
        return (Example(tokens(call, *shape), tokens(call + 50, *shape)),)

    return Steps(step, arguments, t.state)


@kind("arguments", "a UserDict of any length")
def _() -> Steps:
    t = language_trainer()

    def step(inputs: UserDict) -> torch.Tensor:
        return t.train(next_token_loss(t.model(**inputs), inputs["ids"]))

    return Steps(step, lambda call: (UserDict(ids=tokens(call, 3, rows(call, least=3))),), t.state)


@dataclasses.dataclass
class Sample:
    """A batch as a dataclass, with a number."""

    x: torch.Tensor
    weight: float


@kind("arguments", "a dataclass of any size with a float")
def _() -> Steps:
    t = Trainer()

    def step(sample: Sample) -> torch.Tensor:
        return t.train(t.loss(sample.x) * sample.weight)

    return Steps(step, lambda call: (Sample(batch(call, rows(call)), 0.1 * call),), t.state)


# ---- Python state


@kind("state", "counters of steps and samples")
def _() -> Steps:
    t = Trainer()
    t.seen = {"steps": 0, "samples": 0}

    def step(x: torch.Tensor) -> torch.Tensor:
        t.seen["steps"] += 1
        t.seen["samples"] += len(x)
        return t.train(t.loss(x))

    return Steps(step, lambda call: (batch(call, rows(call)),), t.state)


class AverageMeter:
    """As in PyTorch's ImageNet example."""

    def __init__(self) -> None:
        self.val = self.avg = self.sum = 0.0
        self.count = 0

    def update(self, val: float, n: int = 1) -> None:
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


@kind("state", "an average meter, batches of any size")
def _() -> Steps:
    t = Trainer()
    meter = AverageMeter()

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = t.train(t.loss(x))
        meter.update(loss.item(), x.size(0))
        return loss

    return Steps(step, lambda call: (batch(call, rows(call)),), lambda: [t.state(), vars(meter)])


@kind("state", "a list of losses that grows")
def _() -> Steps:
    t = Trainer()
    t.seen = []

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = t.train(t.loss(x))
        t.seen.append(loss.item())
        return loss

    return Steps(step, lambda call: (batch(call),), t.state)


@kind("state", "the mean of the last five losses")
def _() -> Steps:
    t = Trainer()
    t.seen = []

    def step(x: torch.Tensor) -> float:
        t.seen.append(t.train(t.loss(x)).item())
        return sum(t.seen[-5:]) / len(t.seen[-5:])

    return Steps(step, lambda call: (batch(call),), t.state)


@kind("state", "EMA of weights, its decay warms up")
def _() -> Steps:
    t = Trainer()
    average = copy.deepcopy(t.model)
    t.seen = {"updates": 0}

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = t.train(t.loss(x))
        t.seen["updates"] += 1
        decay = min(0.99, (1 + t.seen["updates"]) / (10 + t.seen["updates"]))
        with torch.no_grad():
            for kept, new in zip(average.parameters(), t.model.parameters(), strict=True):
                kept.mul_(decay).add_(new, alpha=1 - decay)
        return loss

    return Steps(step, lambda call: (batch(call),), lambda: [t.state(), average.state_dict()])


@kind("state", "AveragedModel and its schedule, SWA")
def _() -> Steps:
    t = Trainer()
    average = torch.optim.swa_utils.AveragedModel(t.model)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = t.train(t.loss(x))
        average.update_parameters(t.model)
        return loss

    return Steps(step, lambda call: (batch(call),), lambda: [t.state(), average.state_dict()])


@kind("state", "gradient accumulation over four calls")
def _() -> Steps:
    t = Trainer()
    t.seen = {"calls": 0}

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = t.loss(x) / 4
        loss.backward()
        t.seen["calls"] += 1
        if t.seen["calls"] % 4 == 0:
            t.optimizer.step()
            t.optimizer.zero_grad()
        return loss.detach()

    return Steps(step, lambda call: (batch(call),), t.state)


@kind("state", "microbatches, the last one smaller")
def _() -> Steps:
    t = Trainer()

    def step(x: torch.Tensor) -> torch.Tensor:
        parts = x.split(4)
        total = torch.zeros(())
        for part in parts:
            loss = t.loss(part) * (len(part) / len(x))
            loss.backward()
            total = total + loss.detach()
        t.optimizer.step()
        t.optimizer.zero_grad()
        return total

    return Steps(step, lambda call: (batch(call, 9 + call % 4),), t.state)


@kind("state", "the model is frozen for three calls, and evaluated every fifth")
def _() -> Steps:
    t = Trainer()

    def step(x: torch.Tensor, call: int) -> torch.Tensor:
        t.model[0].requires_grad_(call >= 3)
        if call % 5 == 4:
            t.model.eval()
            with torch.no_grad():
                return t.loss(x)
        t.model.train()
        return t.train(t.loss(x))

    return Steps(step, lambda call: (batch(call), call), t.state)


@kind("state", "skipped where the loss is not finite or large")
def _() -> Steps:
    t = Trainer()
    t.seen = {"skipped": 0}

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = t.loss(x)
        if not torch.isfinite(loss) or loss > 100:
            t.seen["skipped"] += 1
            t.optimizer.zero_grad()
            return loss.detach()
        return t.train(loss)

    return Steps(step, lambda call: (batch(call) * (1000 if call % 6 == 3 else 1),), t.state)


@kind("state", "mixup of numpy's beta, and a coin of random's")
def _() -> Steps:
    t = Trainer()

    def step(x: torch.Tensor) -> torch.Tensor:
        share = np.random.beta(0.4, 0.4)
        if random.random() < 0.5:
            x = x.flip(0)
        return t.train(t.loss(share * x + (1 - share) * x[torch.randperm(len(x))]))

    return Steps(step, lambda call: (batch(call),), t.state)


# ---- running


def copied(value: Any) -> list[Any]:
    """The leaves of a value; tensors and arrays as copies."""
    leaves = tree_leaves(value)
    return [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else copy.copy(leaf) for leaf in leaves]


def run(make: Callable[[], Steps], compiled: bool) -> tuple[list[list[Any]], list[str]]:
    """What each call returned and left, and the reason of each capture."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    steps = make()
    step = weft.compile(steps.step) if compiled else steps.step
    seen = []
    for call in range(CALLS):
        returned = copied(step(*steps.arguments(call)))
        steps.between(call)
        seen.append(returned + copied(steps.state()))
    return seen, step.captures if isinstance(step, weft.CompiledStep) else []


def same(one: Any, other: Any) -> bool:
    """Whether two leaves are the same in every bit."""
    if isinstance(one, torch.Tensor):
        equal = one.dtype == other.dtype and one.shape == other.shape
        return bool(equal and torch.equal(one.nan_to_num(12345), other.nan_to_num(12345)))
    return type(one) is type(other) and (one == other or one != one)


def measured(make: Callable[[], Steps]) -> tuple[list[str], str]:
    """The captures of a kind, and "equal" or what is wrong."""
    expected, _ = run(make, compiled=False)
    try:
        found, captures = run(make, compiled=True)
    except weft.WeftError as error:
        return [], f"refused: {type(error).__name__}"
    for call, (one, other) in enumerate(zip(expected, found, strict=True)):
        if len(one) != len(other) or not all(map(same, one, other)):
            return captures, f"other values at call {call}"
    return captures, "equal"


def main() -> None:
    """Print captures by kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="text in the group or the name of the kinds to run")
    parser.add_argument("--reasons", action="store_true")
    options = parser.parse_args()
    most, wrong, count = 0, 0, 0
    for (group, name), make in KINDS.items():
        if options.only not in f"{group}: {name}":
            continue
        captures, outcome = measured(make)
        print(f"{len(captures):3}  {outcome:6} {group}: {name}", flush=True)
        if options.reasons:
            print("".join(f"         {reason}\n" for reason in captures), end="")
        most, wrong, count = max(most, len(captures)), wrong + (outcome != "equal"), count + 1
    print(f"{count} kinds of {CALLS} calls: at most {most} captures, {wrong} refused or with other values")


if __name__ == "__main__":
    main()
