"""Lists and deques to which a step appends: one capture for what it appends and for numbers that it asks of them, and
an error that names the list where it reads otherwise."""

from __future__ import annotations

import contextlib
import functools
import heapq
import operator
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import weft
from both_ways import assert_equal, batches
from weft.errors import PythonStateChanged


class Logs:
    def __init__(self) -> None:
        self.losses: list[Any] = []
        self.same = self.losses
        self.recent: deque[Any] = deque(maxlen=3)
        self.history: dict[str, list[Any]] = {"loss": [], "step": [0]}
        self.step = 0
        self.kept: Any = None
        self.seen: list[int] = []


def appends(logs: Logs, x: torch.Tensor) -> Any:
    loss = (x * 2).mean()
    logs.losses.append(loss.item())
    logs.recent.append(loss)
    logs.history["loss"] += [loss.item(), {"step": logs.step, "loss": loss}]
    logs.history["step"].extend(at + logs.step for at in range(2))
    logs.losses.append((isinstance(logs.losses, list), type(logs.recent) is deque))
    logs.step += 1
    return loss


def appends_in_a_branch(logs: Logs, x: torch.Tensor) -> Any:
    if x.sum() > 0:
        logs.losses.append(x.sum().item())
        return x
    logs.recent.append(logs.step)
    return -x


def fills_a_new_one(logs: Logs, x: torch.Tensor) -> Any:
    logs.losses = []
    for _ in range(2):
        logs.losses.append(x.sum().item())
    return x * 2


def asks_for_its_own(logs: Logs, x: torch.Tensor) -> Any:
    logs.losses.append({"loss": x.sum().item(), "step": logs.step})
    logs.losses[-1]["mean"] = x.mean()
    logs.recent.extend([x.sum(), logs.losses[-1]["loss"]])
    logs.losses.append(logs.recent[-2] * 2)
    logs.step += 1
    return logs.losses[-2], logs.recent[-1], logs.losses[-1]


def asks_for_one_of_before(logs: Logs, x: torch.Tensor) -> Any:
    logs.losses.append(x.sum().item())
    logs.step += 1
    return x * 2, logs.losses[-2 if logs.step > 1 else -1]


def reads_its_length(logs: Logs, x: torch.Tensor) -> Any:
    logs.losses.append(x.sum().item())
    return x / len(logs.losses)


def reads_its_items(logs: Logs, x: torch.Tensor) -> Any:
    logs.losses.append(x.sum())
    return torch.stack(logs.losses).mean()


def returns_it(logs: Logs, x: torch.Tensor) -> Any:
    logs.losses.append(x.sum().item())
    return logs.losses


def keeps_it(logs: Logs, x: torch.Tensor) -> Any:
    logs.losses.append(1)
    logs.kept = {"losses": logs.losses}
    return x * 2


def joins_it(logs: Logs, x: torch.Tensor) -> Any:
    logs.losses.append(1)
    return x * 2, [1, *([0] + logs.losses)]


def pushes_on_it(logs: Logs, x: torch.Tensor) -> Any:
    heapq.heappush(logs.losses, logs.step)
    return x * 2


def takes_from_it(logs: Logs, x: torch.Tensor) -> Any:
    logs.losses.append(1)
    logs.losses.append(2)
    return x * logs.losses.pop(0)


def shows_it_outside(logs: Logs, x: torch.Tensor) -> Any:
    logs.losses.append(1)
    weft.opaque(lambda: logs.seen.append(len(logs.losses)))()
    return x * 2


def has_it_twice(logs: Logs, x: torch.Tensor) -> Any:
    logs.losses.append(1)
    return x * len(logs.same)


def _run(
    step: Callable[..., Any], wrap: Callable[..., Any], calls: int = 8, seen: list[Any] | None = None
) -> tuple[list[Any], Any]:
    logs, seen = Logs(), [] if seen is None else seen
    wrapped = wrap(lambda x: step(logs, x))
    for at, (x,) in enumerate(batches(calls)):
        if at == 5:  # as at the end of an epoch
            logs.losses = []
            logs.history["loss"].clear()
        seen.append([_copy(wrapped(x)), _copy(vars(logs))])
    return seen, wrapped


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [type(value).__name__, *map(_copy, value)]
    return value if isinstance(value, torch.Tensor) else repr(value)


CAPTURES = [(appends, 1), (appends_in_a_branch, 4), (fills_a_new_one, 2), (asks_for_its_own, 1)]


@pytest.mark.parametrize(("step", "captures"), CAPTURES)
def test_what_a_step_appends_is_there_after_each_call(step: Callable[..., Any], captures: int) -> None:
    compiled, wrapped = _run(step, weft.compile)
    assert_equal(compiled, _run(step, lambda step: step)[0])
    assert len(wrapped.captures) <= captures, wrapped.captures


READING = [reads_its_length, reads_its_items, returns_it, keeps_it, joins_it, pushes_on_it, takes_from_it, has_it_twice]
READING += [shows_it_outside, asks_for_one_of_before]


@pytest.mark.parametrize("step", READING)
def test_a_step_that_reads_what_it_appended_equals_eager_until_it_is_refused(step: Callable[..., Any]) -> None:
    eager, _ = _run(step, lambda step: step, calls=4)
    compiled: list[Any] = []
    with contextlib.suppress(PythonStateChanged):
        _run(step, weft.compile, calls=4, seen=compiled)
    assert compiled
    assert_equal(compiled, eager[: len(compiled)])


def test_the_list_of_a_hook_gets_the_tensors_of_its_call() -> None:
    def run(wrap: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(0)
        model, outputs = nn.Linear(8, 8), []
        model.register_forward_hook(lambda module, args, output: outputs.append(output.detach()))
        step = wrap(lambda x: model(x).sum())
        return [[step(x) for (x,) in batches(4)], outputs]

    assert_equal(run(weft.compile), run(lambda step: step))


def test_a_list_that_the_step_reads_elsewhere_is_not_taken_for_the_one_it_appends_to() -> None:
    def run(wrap: Callable[..., Any]) -> list[Any]:
        logs, read, seen = Logs(), [1.0, 2.0], []

        def step(x: torch.Tensor) -> Any:
            logs.losses.append(3.0)
            return x * sum(read) * len(read)

        step = wrap(step)
        for at, (x,) in enumerate(batches(4)):
            if at == 3:
                logs.losses = read
            seen.append(step(x))
        return seen

    eager = run(lambda step: step)
    with pytest.raises(PythonStateChanged, match=r"losses|read"):
        assert_equal(run(weft.compile), eager)


Lists = dict[str, Any]


def _lists() -> Lists:
    return {"floats": [], "counts": [3], "recent": deque(maxlen=4), "short": deque([0.25], maxlen=2), "best": 9.0}


def _half(values: Any) -> Any:
    return sum(values) / 2 if values else 0.0


def _stops_early(lists: Lists, loss: float) -> Any:
    if len(lists["floats"]) > 3 and min(lists["floats"][-3:]) > lists["best"]:
        return "stopped"
    lists["best"] = min(lists["best"], loss)
    return len(lists["floats"]) % 5 == 0


# Each gets lists, after the step has appended a number to each of them.
READS: dict[str, tuple[Callable[[Lists, float], Any], int]] = {
    "mean": (lambda lists, loss: sum(lists["floats"]) / len(lists["floats"]), 1),
    "moving average": (lambda lists, loss: sum(lists["floats"][-3:]) / len(lists["floats"][-3:]), 1),
    "largest and smallest": (
        lambda lists, loss: (max(lists["floats"]), min(lists["floats"][-5:]), max(lists["counts"])),
        1,
    ),
    "mean of a deque": (lambda lists, loss: sum(lists["recent"]) / len(lists["recent"]), 1),
    "of integers": (lambda lists, loss: (sum(lists["counts"]), sum(lists["counts"][-2:]) / 2), 1),
    "numpy": (
        lambda lists, loss: (np.mean(lists["floats"]), np.std(lists["floats"][-4:]), np.median(lists["recent"])),
        1,
    ),
    "a percentile": (
        lambda lists, loss: (np.percentile(lists["floats"], 50), np.mean(lists["counts"], dtype="float32")),
        1,
    ),
    "how many": (lambda lists, loss: (len(lists["floats"]), len(lists["recent"]), len(lists["floats"][-3:])), 1),
    "one before": (lambda lists, loss: loss - lists["floats"][-2] if len(lists["floats"]) > 1 else loss, 2),
    "the first one": (lambda lists, loss: lists["floats"][0] - loss if len(lists["floats"]) > 1 else loss, 2),
    "each of the last few": (lambda lists, loss: sum(value * 2 for value in lists["floats"][-3:]), 4),
    "a tensor of the last few": (lambda lists, loss: torch.tensor([*lists["floats"][-2:], 1.0]), 3),
    "the last few without the last": (lambda lists, loss: (lists["floats"][-3:-1], max(lists["counts"][-2:-1])), 4),
    "one of the last few": (lambda lists, loss: (lists["floats"][-4:][0], lists["floats"][-2:][-1]), 5),
    "as truth": (lambda lists, loss: 1 if lists["floats"] else 2, 1),
    "given to a function": (lambda lists, loss: (_half(lists["floats"]), _half(lists["floats"][-2:])), 1),
    "with a default": (lambda lists, loss: max(lists["recent"], default=1.0), 1),
    "one call in four": (lambda lists, loss: sum(lists["floats"]) if len(lists["floats"]) % 4 == 0 else None, 2),
    "stops early": (_stops_early, 7),
}


def _read(name: str, wrap: Callable[..., Any], values: list[float]) -> tuple[list[Any], Any]:
    read, lists = READS[name][0], _lists()

    def step(x: torch.Tensor) -> Any:
        loss = x.sum().item()
        before = max(lists["floats"], default=0.5), sum(lists["short"])
        lists["floats"].append(loss)
        lists["counts"].append((x > 1).sum().item())
        lists["recent"].append(loss * 2)
        lists["short"].extend([loss, 1.0, loss * 3])
        return before, read(lists, loss), sum(lists["short"])

    wrapped, seen = wrap(step), []
    for at, value in enumerate(values):
        if at == 15:  # as at the end of an epoch
            lists["floats"], lists["recent"] = [0.5], deque([1.0, 2.0], maxlen=4)
        seen.append([_copy(wrapped(torch.full((2,), value))), _copy(lists)])
    return seen, wrapped


@pytest.mark.parametrize("name", READS)
def test_numbers_that_a_step_reads_from_a_list_that_grows_are_read_by_each_call(name: str) -> None:
    values = [((at * 7) % 11) / 3 for at in range(20)]
    compiled, step = _read(name, weft.compile, values)
    assert_equal(compiled, _read(name, lambda step: step, values)[0])
    assert len(step.captures) <= READS[name][1] + 1, step.captures  # of an empty list nothing can be read


def test_nan_in_a_list_that_grows() -> None:
    values = [1.0, float("nan"), 2.0, -0.0, float("inf"), 1.0]
    for name in ("mean", "largest and smallest", "numpy"):
        assert_equal(_read(name, weft.compile, values)[0], _read(name, lambda step: step, values)[0])


def test_a_list_that_grows_is_captured_anew_where_it_gets_other_things_than_numbers() -> None:
    def run(wrap: Callable[..., Any]) -> list[Any]:
        losses, seen = [0.5], []

        def step(x: torch.Tensor) -> Any:
            losses.append(x.sum().item())
            return sum(losses)

        step = wrap(step)
        for at in range(4):
            if at == 3:
                losses.append(True)
            seen.append(step(torch.full((2,), float(at))))
        return seen

    eager = run(lambda step: step)
    with pytest.raises(PythonStateChanged, match="losses"):
        assert_equal(run(weft.compile), eager)


@pytest.mark.parametrize("keeps", [True, False])
def test_the_last_entries_of_a_list_that_grows_are_no_value_that_a_step_can_keep(keeps: bool) -> None:
    losses, kept = [0.5, 1.5], list[Any]()

    def step(x: torch.Tensor) -> Any:
        losses.append(x.sum().item())
        if keeps:
            kept[:] = [losses[-2:]]
        return None if keeps else losses[-2:]

    with pytest.raises(PythonStateChanged, match="losses"):
        weft.compile(step)(torch.ones(2))
    assert losses == [0.5, 1.5]
    assert not kept


class Meter:
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.middle = 0.0


@weft.opaque
def note(meter: Meter, loss: float) -> None:
    meter.losses.append(loss)
    meter.middle = sorted(meter.losses)[len(meter.losses) // 2]


def test_a_list_that_grows_and_is_read_is_refused_with_a_remedy_that_works() -> None:
    def sorts(meter: Meter, loss: torch.Tensor) -> float:
        meter.losses.append(loss.item())
        return sorted([1.0, *meter.losses[:-1]])[len(meter.losses) // 2]

    def noted(meter: Meter, loss: torch.Tensor) -> None:
        note(meter, loss.item())

    losses = torch.linspace(1, 2, 10).unbind()
    meter = Meter()
    meter.losses.append(0.0)
    with pytest.raises(PythonStateChanged, match="the object that has the list"):
        weft.compile(functools.partial(sorts, meter))(losses[0])
    mine, eager = Meter(), Meter()
    compiled = weft.compile(functools.partial(noted, mine))
    for loss in losses:
        compiled(loss)
        noted(eager, loss)
        assert vars(mine) == vars(eager)
    assert len(compiled.captures) == 1


def test_a_deque_that_is_read_is_replaced_by_one_of_another_length() -> None:
    def run(compile_: Callable[..., Any]) -> list[Any]:
        logs = Logs()

        def step(x: torch.Tensor) -> Any:
            logs.recent.append(x.sum().item())
            return sum(logs.recent), max(logs.recent), len(logs.recent)

        step, seen = compile_(step), list[Any]()
        for at, (x,) in enumerate(batches(12)):
            if at in (4, 9):
                logs.recent = deque(logs.recent, maxlen=5 if at == 4 else 2)
            seen.append((step(x), list(logs.recent)))
        return seen

    assert run(weft.compile) == run(lambda step: step)


@pytest.mark.parametrize("read", [sum, len, operator.itemgetter(-1)])
def test_lists_that_are_read_and_become_one_are_refused(read: Callable[[Any], Any]) -> None:
    logs = {"first": [0.5], "second": [0.5]}

    def step(x: torch.Tensor) -> Any:
        logs["first"].append(x.sum().item())
        logs["second"].append(1.0)
        return read(logs["first"])

    compiled = weft.compile(step)
    for _ in range(3):
        compiled(torch.ones(2))
    logs["second"] = logs["first"]
    with pytest.raises(PythonStateChanged, match="first"):
        compiled(torch.ones(2))
    assert logs["first"] == [0.5, 2, 2, 2]


def test_lists_that_grow_become_one_list_and_two_again() -> None:
    def run(compile_: Callable[..., Any]) -> list[Any]:
        logs = {"first": list[float](), "second": list[float]()}

        def step(x: torch.Tensor) -> None:
            logs["first"].append(x.sum().item())
            logs["second"].append(1.0)

        step, seen = compile_(step), list[Any]()
        for at, (x,) in enumerate(batches(10)):
            if at in (4, 7):
                logs["second"] = logs["first"] if at == 4 else [0.5]
            step(x)
            seen.append([*map(list, logs.values())])
        return seen

    assert run(weft.compile) == run(lambda step: step)


@pytest.mark.parametrize("calls_another", [True, False])
def test_a_list_that_is_the_default_of_an_argument_grows(calls_another: bool) -> None:
    def run(wrap: Callable[..., Any]) -> tuple[list[Any], list[Any], list[Any]]:
        first: list[Any] = []

        def noted(x: torch.Tensor, scale: float = 2.0, seen: list[Any] = first, *, all: list[Any] = []) -> Any:  # noqa: B006
            seen.append((x * scale).sum().item())
            all.append(x.detach())
            return seen[-1], len(seen), max(seen)

        step = wrap((lambda x: noted(x * 3)) if calls_another else noted)
        found = [step(torch.full((2,), float(at))) for at in range(4)]
        other = [7.0]
        noted.__defaults__ = 3.0, other
        found += [step(torch.full((2,), float(at))) for at in range(2)]
        return found, [first, other], [noted.__defaults__[1] is other, noted.__kwdefaults__]

    compiled: list[Any] = []
    assert_equal(run(lambda step: compiled.append(weft.compile(step)) or compiled[0]), run(lambda step: step))
    assert len(compiled[0].captures) == 2  # another scale
