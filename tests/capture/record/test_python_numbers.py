"""Python numbers that change: counters and meters of the step's own, schedules, arguments."""

from __future__ import annotations

import collections
import enum
import json
import math
import numbers
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import weft
from both_ways import assert_equal, batches, mlp, snapshot

CALLS = 8


class Meter:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.value = self.sum = self.mean = 0.0
        self.count = 0

    def update(self, value: float, count: int = 1) -> None:
        self.value = value
        self.sum += value * count
        self.count += count
        self.mean = self.sum / self.count


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Trainer:
    """Numbers of all kinds that a step may change, and a model."""

    def __init__(
        self, optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.1)
    ) -> None:
        torch.manual_seed(0)
        self.model = mlp()
        self.optimizer = optimizer(self.model.parameters())
        self.step = self.updates = 0
        self.total = 0.0
        self.last: Any = None
        self.level: int = Level.LOW
        self.pair = 0, 1.5
        self.logs: dict[str, Any] = {}
        self.recent: list[Any] = [0.0, 0]
        self.meter = Meter()
        self.numbers = {"count": 0, True: 0, 2: 0}

    def train(self, x: torch.Tensor, scale: Any = 1.0) -> torch.Tensor:
        loss = self.model(x).square().mean() * scale
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def left(self) -> list[Any]:
        plain = {name: value for name, value in vars(self).items() if name not in ("model", "optimizer", "meter")}
        return [snapshot(self.model), snapshot(self.optimizer), _exact(plain), _exact(vars(self.meter))]


def _exact(value: Any) -> Any:
    """A copy with the type and all bits of every number."""
    if isinstance(value, dict):
        return {repr(key): _exact(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_exact(item) for item in value]
    return value.clone() if isinstance(value, torch.Tensor) else f"{type(value).__name__} {value!r}"


# ---- what the step itself changes


def counts(t: Trainer, x: torch.Tensor) -> Any:
    t.step += 1
    t.numbers["count"] += 2
    t.numbers[True] -= 1
    t.numbers[2] += t.step
    return t.train(x) * t.step, t.step, t.step - 1


def averages(t: Trainer, x: torch.Tensor) -> Any:
    loss = t.train(x)
    t.meter.update(loss.item(), x.size(0))
    t.total += loss.item()
    return loss


def remembers(t: Trainer, x: torch.Tensor) -> Any:
    loss = t.train(x)
    t.last = loss.item()
    t.pair = t.pair[0] + 1, t.pair[1] * 0.5
    return loss, t.pair


def replaces_containers(t: Trainer, x: torch.Tensor) -> Any:
    loss = t.train(x)
    t.step += 1
    t.logs = {"loss": loss, "step": t.step, "before": t.recent[1]}
    t.recent = [loss.item(), t.recent[1] + 1]
    return loss


def logs_each_third(t: Trainer, x: torch.Tensor) -> Any:
    t.step += 1
    if t.step % 3 == 0:
        t.updates += 1
        return t.train(x) * 2
    return t.train(x)


def warms_up(t: Trainer, x: torch.Tensor) -> Any:
    t.step += 1
    for group in t.optimizer.param_groups:
        group["lr"] = 0.1 * min(1.0, t.step / 4)
    return t.train(x)


def branches_on_types(t: Trainer, x: torch.Tensor) -> Any:
    t.step += 1
    t.total += 0.5
    answers = [isinstance(t.step, int), isinstance(t.step, (str, numbers.Number)), isinstance(t.step, bool)]
    answers += [isinstance(t.total, float), type(t.step) is int, type(t.total) is float, isinstance(t.total, int)]
    return x * t.step, answers


def uses_the_value(t: Trainer, x: torch.Tensor) -> Any:
    t.step += 1
    table = {1: 2.0, 0: 3.0}
    return x * table[t.step % 2], f"{t.step % 2}", x[: t.step % 2 + 1], [x] * (t.step % 2), t.step % 2 in {0}


def changes_other_kinds(t: Trainer, x: torch.Tensor) -> Any:
    t.level = Level.HIGH if t.level == Level.LOW else Level.LOW
    t.last = np.float64(0.5) if t.last is None else t.last * np.float64(-1.0)
    return x * int(t.level)


@pytest.mark.parametrize(
    ("step", "captures"),
    [
        (counts, 1),
        (averages, 1),
        (remembers, 2),
        (replaces_containers, 2),
        (logs_each_third, 3),
        (warms_up, 2),
        (branches_on_types, 1),
        (uses_the_value, 2),
        (changes_other_kinds, 4),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_numbers_that_the_step_changes(step: Callable[..., Any], captures: int) -> None:
    compiled = _compare(lambda t: lambda x: step(t, x), [(x,) for (x,) in batches(CALLS)])
    assert len(compiled.captures) <= captures, compiled.captures


def test_a_counter_that_is_set_from_outside_goes_on_from_there() -> None:
    def between(t: Trainer, at: int) -> None:
        if at % 3 == 2:
            t.meter.reset()
            t.step = 100 * at

    compiled = _compare(lambda t: lambda x: (averages(t, x), counts(t, x)), batches(CALLS), between)
    assert len(compiled.captures) == 1


def test_an_exception_leaves_the_numbers_as_eager_leaves_them() -> None:
    def make(t: Trainer) -> Callable[..., Any]:
        def step(x: torch.Tensor) -> Any:
            t.step += 1
            if t.step == 4:
                raise ValueError("four")
            return x * t.step

        return step

    trainer = Trainer()
    compiled = weft.compile(make(trainer))
    for _ in range(3):
        compiled(torch.ones(2))
    with pytest.raises(ValueError, match="four"):
        compiled(torch.ones(2))
    assert trainer.step == 4
    trainer.step = 5
    assert compiled(torch.ones(2)).tolist() == [6, 6]


def test_a_number_of_a_hook_and_of_a_module() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.calls, self.alpha = mlp(), 0, 0.25

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.net(x) * self.alpha

    def run(wrap: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(0)
        model, fired = Counting(), {"hooks": 0}
        model.net.register_forward_hook(lambda *args: fired.update(hooks=fired["hooks"] + 1))
        step, seen = wrap(lambda x: model(x).sum()), []
        for (x,) in batches(CALLS):
            seen.append(step(x).detach())
            model.alpha *= 1.5
        return [seen, model.calls, model.alpha, fired]

    steps: list[Any] = []
    assert_equal(run(lambda f: steps.append(weft.compile(f)) or steps[0]), run(lambda f: f))
    assert len(steps[0].captures) == 2


def test_containers_that_the_step_replaces_keep_what_others_see_of_them() -> None:
    """The old object may be held elsewhere, where the step changes it, or reads it."""

    class Holder:
        def __init__(self) -> None:
            self.logs = self.first = {"a": 1.5}
            self.recent = self.other = [1.5, torch.ones(1)]

    def run(wrap: Callable[..., Any]) -> list[Any]:
        held = Holder()
        first, recent = held.first, held.recent

        def step(x: torch.Tensor) -> torch.Tensor:
            result = x * held.other[0] * held.other[1]
            held.logs["b"] = 2
            held.logs = {"a": held.logs["a"] + 1}
            held.recent = [held.recent[0] * 0.5, x * 7]
            return result

        step, seen = wrap(step), []
        for at, (x,) in enumerate(batches(5)):
            seen += [step(x), _exact(vars(held)), _exact(first), _exact(recent)]
            held.other[0] = 0.25 * at
        return seen

    assert_equal(run(weft.compile), run(lambda step: step))


def test_a_list_that_the_step_stores_at_two_places_is_one_object() -> None:
    class Holder:
        def __init__(self) -> None:
            self.rates, self.shown, self.before = [1.0, 2.0], [0.0], [0.0]

    def run(wrap: Callable[..., Any]) -> list[Any]:
        held = Holder()

        def step(x: torch.Tensor) -> torch.Tensor:
            held.before = held.rates
            held.rates = [rate * 0.5 for rate in held.rates]
            held.shown = held.rates
            return x * held.rates[0]

        step, seen = wrap(step), []
        for at, (x,) in enumerate(batches(CALLS)):
            rates = held.rates
            seen += [step(x), held.shown is held.rates, held.before is rates, _exact(vars(held))]
            held.rates[0] += 0.25
            seen.append(_exact(vars(held)))
            if at == 5:
                held.shown = list(held.rates)  # apart until the step stores it again
        return seen

    compiled: list[Any] = []
    ours = run(lambda step: compiled.append(weft.compile(step)) or compiled[0])
    assert_equal(ours, run(lambda step: step))
    assert len(compiled[0].captures) <= 3, compiled[0].captures


def test_a_list_at_one_place_only_is_not_taken_for_one_at_two() -> None:
    class Holder:
        def __init__(self) -> None:
            self.a = self.b = [1.0]

    def run(wrap: Callable[..., Any]) -> list[Any]:
        held = Holder()

        def step(x: torch.Tensor) -> torch.Tensor:
            held.a[0] += 1
            result = x * held.b[0]
            held.a, held.b = list(held.a), list(held.b)
            return result

        step, seen = wrap(step), []
        for at, (x,) in enumerate(batches(CALLS)):
            if at == 4:
                held.a = held.b
            seen += [step(x), _exact(vars(held))]
        return seen

    assert_equal(run(weft.compile), run(lambda step: step))


# ---- what changes outside


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_schedules_of_betas_and_weight_decay_are_two_captures(options: dict[str, bool]) -> None:
    def between(t: Trainer, at: int) -> None:
        for group in t.optimizer.param_groups:
            group["betas"] = 0.8 - 0.01 * at, group["betas"][1]
            group["weight_decay"] = 0.01 * (at + 2)
            group["lr"] *= 0.9

    adamw = lambda parameters: torch.optim.AdamW(parameters, lr=0.1, **options)
    compiled = _compare(lambda t: t.train, batches(CALLS), between, optimizer=adamw)
    assert len(compiled.captures) == 2


def test_an_integer_learning_rate_is_no_constant() -> None:
    def between(t: Trainer, at: int) -> None:
        t.optimizer.param_groups[0]["lr"] = at + 2

    _compare(lambda t: t.train, batches(3), between, optimizer=lambda p: torch.optim.SGD(p, lr=1))


@pytest.mark.parametrize(
    ("step", "numbers", "captures"),
    [
        (lambda x, n: x + 1, range(CALLS), 2),
        (lambda x, t: x / t, [1.0 - 0.1 * at for at in range(CALLS)], 2),
        (lambda x, n: (x * n, n * 2, n / 3, n // 2, n % 3, -n), range(3, 3 + CALLS), 2),
        (lambda x, n: x * 2 if n < 4 else x * n, range(CALLS), 4),
        (lambda x, n: x * n if isinstance(n, (int, float)) else x - n, range(2, 2 + CALLS), 2),
        (lambda x, n: x * n if type(n) is int else x - n, range(2, 2 + CALLS), 2),
        (lambda x, n: x[:n].sum(), range(1, 4), 3),
    ],
)
def test_arguments(step: Callable[..., Any], numbers: Any, captures: int) -> None:
    (x,) = batches(1)[0]
    compiled = _compare(lambda t: step, [(x, number) for number in numbers])
    assert len(compiled.captures) <= captures, compiled.captures


def test_values_that_behave_unlike_their_neighbours_are_told_apart() -> None:
    values = [0.5, 1.5, -0.0, 0.0, math.inf, -math.inf, math.nan, 2.5, 2, True, 1, False, 0, 2**63, -(2**70), 5e-324]
    step = lambda x, n: (x * (n == n), n, n + 1, -n, n * 2, n == math.inf, math.copysign(1.0, n))
    _compare(lambda t: step, [(torch.ones(2), value) for value in values * 2])


def test_a_number_that_torch_needs_as_a_plain_one_is_a_guard() -> None:
    step = lambda x, p: torch.quantile(x, p)
    (x,) = batches(1)[0]
    compiled = _compare(lambda t: step, [(x, 0.1 * at) for at in (1, 2, 3, 1, 2)])
    assert len(compiled.captures) == 3


def test_an_opaque_function_sees_the_number_of_its_step() -> None:
    def run(wrap: Callable[..., Any]) -> list[Any]:
        trainer, seen = Trainer(), []
        note = weft.opaque(lambda: seen.append(trainer.step))

        def step(x: torch.Tensor) -> torch.Tensor:
            note()
            trainer.step += 1
            note()
            return x * trainer.step

        step = wrap(step)
        return [[step(x) for (x,) in batches(4)], seen, trainer.step]

    assert_equal(run(weft.compile), run(lambda step: step))


# ---- in steps that branch on values


def guards_against_nan(t: Trainer, x: torch.Tensor, scale: Any) -> Any:
    t.step += 1
    loss = t.model(x).square().mean() * scale
    if not math.isfinite(loss.item()):
        t.numbers["count"] += 1
        return None
    loss.backward()
    t.optimizer.step()
    t.optimizer.zero_grad()
    t.updates += 1
    t.total += loss.item()
    return loss.detach() * t.updates, t.total / t.updates


def needs_the_value_after_a_branch(t: Trainer, x: torch.Tensor, scale: Any) -> Any:
    y = x * scale
    return (y, json.dumps({"scale": scale})) if y.sum() > 0 else -y


@pytest.mark.parametrize(("step", "captures"), [(guards_against_nan, 6), (needs_the_value_after_a_branch, 15)])
def test_numbers_in_steps_with_branches(step: Callable[..., Any], captures: int) -> None:
    calls = [(x.clone(), 2 + at // 3) for at, (x,) in enumerate(batches(12))]
    for at in (2, 5, 6):
        calls[at][0][0, 0] = math.nan
    compiled = _compare(lambda t: lambda *args: step(t, *args), calls)
    assert len(compiled.captures) <= captures, compiled.captures


# ---- what Python and torch ask of numbers and of their types


def uses_types_as_values(t: Trainer, x: torch.Tensor) -> Any:
    t.step += 1
    t.last = collections.defaultdict(int)
    t.last["a"] += 1
    match t.step:
        case int(n):
            x = x * n
    kept = t.last.default_factory is int, [kind(1.5) for kind in (int, float)]
    return x.to(float) + torch.zeros(1, dtype=int), kept


def asks_math(t: Trainer, x: torch.Tensor, f: float) -> Any:
    mean = x.mean()
    asked = math.isclose(f, 0.75, rel_tol=0.1), math.isinf(f), math.isnan(mean), math.isfinite(mean.item())
    return asked, math.exp(mean), math.sqrt(f), math.hypot(f, mean.item())


def test_types_stay_types_where_they_are_values() -> None:
    compiled = _compare(lambda t: lambda x: uses_types_as_values(t, x), batches(4))
    assert compiled.captures


def test_questions_of_math_about_numbers() -> None:
    _compare(lambda t: lambda x, f: asks_math(t, x, f), [(x, 0.5 + at / 8) for at, (x,) in enumerate(batches(5))])


def _compare(
    make: Callable[[Trainer], Callable[..., Any]],
    calls: list[Any],
    between: Callable[[Trainer, int], None] = lambda t, at: None,
    **options: Any,
) -> Any:
    """Run the step of a new trainer as it is and compiled; what both return and leave must be equal to the bit."""

    def run(wrap: Callable[..., Any]) -> list[Any]:
        trainer, seen = Trainer(**options), []
        step = wrap(make(trainer))
        for at, args in enumerate(calls):
            seen += [_exact(step(*args)), trainer.left()]
            between(trainer, at)
        return seen

    steps: list[Any] = []
    compiled = run(lambda step: steps.append(weft.compile(step)) or steps[0])
    assert_equal(compiled, run(lambda step: step))
    return steps[0]
