"""Numbers among the arguments: symbols as soon as one of them changes, where no operation uses them."""

from __future__ import annotations

import datetime
import fractions
import json
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import weft
from both_ways import assert_equal, detached

COUNTS = [0, 1, 2, 3, 10, -1, 4]
RATES = [0.5, 1.0, 0.25, 0.0, 2.5, -1.5]
Run = Callable[[torch.Tensor, Any], Any]


class Kept:
    """What steps write to, and objects that they use."""

    def __init__(self) -> None:
        self.last: Any = None
        self.seen: list[Any] = []
        self.by_name: dict[Any, Any] = {}
        self.table = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1]
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(11))


def noted(kept: Kept, x: torch.Tensor, n: Any) -> Any:
    kept.last = n
    kept.seen.append(n)
    kept.by_name["n"] = n
    return x + 1


def raised(kept: Kept, x: torch.Tensor, n: Any) -> Any:
    if n == 0:
        raise ValueError(f"no steps: {n}, {n!r}, {n:>4}")
    return x + 1


def logged(kept: Kept, x: torch.Tensor, n: Any) -> Any:
    loss = x.sum()
    return {"n": n, "loss": loss.item()} if n % 5 == 0 else None


def seeded(kept: Kept, x: torch.Tensor, n: Any) -> Any:
    torch.manual_seed(abs(n))
    return torch.rand(3) + x.sum()


# The number of captures over all values of `COUNTS`, None where each value may be one.
WITH_COUNTS: dict[str, tuple[Callable[[Kept, torch.Tensor, Any], Any], int | None]] = {
    "not used": (lambda k, x, n: x + 1, 2),
    "returned": (lambda k, x, n: (x + 1, n, {"n": n + 1}), 2),
    "noted": (noted, 2),  # there was none before
    "in a text": (lambda k, x, n: (x + 1, f"step {n} {n:03d} {n!r}", "%d" % n, str(n)), 2),  # noqa: UP031
    "logged": (logged, 3),
    "compared": (lambda k, x, n: x + 1 if n > 2 else x * 2, 3),
    "of a kind": (lambda k, x, n: (x + 1, isinstance(n, int), isinstance(n, bool), type(n) is int), 2),
    "raised": (raised, 3),
    "added": (lambda k, x, n: x + n, 2),
    "a power": (lambda k, x, n: x.abs() ** n, None),
    "a size": (lambda k, x, n: x.new_ones(abs(n) + 2) * 2, None),
    "a slice": (lambda k, x, n: x[: abs(n) + 1].sum(), None),
    "a dimension": (lambda k, x, n: x.sum(n % 2), None),
    "a range": (lambda k, x, n: sum(x * i for i in range(abs(n) + 1)), None),
    "a position": (lambda k, x, n: x * k.table[n], None),
    "a layer": (lambda k, x, n: k.layers[n](x), None),
    "a key": (lambda k, x, n: k.by_name.setdefault(n, 1.0) * x, None),
    "in a set": (lambda k, x, n: x * 2 if n in {1, 3} else x, None),
    "hashed": (lambda k, x, n: x * (hash(n) % 5), None),
    "in json": (lambda k, x, n: (x + 1, json.dumps({"n": n})), None),
    "a fraction": (lambda k, x, n: x * float(fractions.Fraction(n, 3)), None),
    "a root": (lambda k, x, n: x * math.sqrt(abs(n)), None),
    "bits": (lambda k, x, n: (x + 1, n.bit_length(), n & 1, n << 2), None),
    "of numpy": (lambda k, x, n: (x + 1, np.int64(n) * 2), None),
    "a tensor": (lambda k, x, n: x * torch.tensor(n), None),
    "a tensor beside": (lambda k, x, n: (x + 1, torch.tensor([n, n + 1])), None),
    "a seed": (seeded, None),
    "a generator": (lambda k, x, n: x * random.Random(n).random(), None),
    "a time": (lambda k, x, n: (x + 1, str(datetime.timedelta(seconds=n))), None),
    "of a tensor": (lambda k, x, n: x.sum().item() > n, None),
}
WITH_RATES: dict[str, tuple[Callable[[Kept, torch.Tensor, Any], Any], int | None]] = {
    "returned": (lambda k, x, n: (x + 1, n, n * 2), 2),
    "noted": (noted, 2),  # there was none before
    "in a text": (lambda k, x, n: (x + 1, f"{n:.3f} {n}", str(n)), 2),
    "compared": (lambda k, x, n: x + 1 if n > 0.3 else x * 2, 3),
    "a factor": (lambda k, x, n: x * n, 2),
    "dropped out": (lambda k, x, n: nn.functional.dropout(x, abs(n) / 4), None),
    "rounded": (lambda k, x, n: (x + 1, round(n, 1), int(n)), None),
    "a warm-up": (lambda k, x, n: x * min(1.0, n / 2), None),
}


def same(function: Callable[[Kept, torch.Tensor, Any], Any], values: list[Any]) -> list[str]:
    """The step does as in eager in all calls; the reasons of its captures."""
    found: list[Any] = []
    captures: list[str] = []
    for wrap in (weft.compile, lambda step: step):
        torch.manual_seed(0)
        random.seed(0)
        kept = Kept()
        step = wrap(lambda x, n, kept=kept: function(kept, x, n))
        ran: list[Any] = []
        for value in values:
            try:
                result = detached(step(torch.arange(12.0).view(3, 4), value))
            except (ValueError, IndexError, KeyError, RuntimeError, OverflowError) as error:
                result = type(error), str(error)
            ran.append([result, kept.last, list(kept.seen), list(kept.by_name.items())])
        found.append(ran)
        captures = captures or step.captures  # type: ignore[union-attr]
    assert_equal(*found)
    return captures


@pytest.mark.parametrize("name", WITH_COUNTS)
def test_a_count_among_the_arguments(name: str) -> None:
    function, most = WITH_COUNTS[name]
    captures = same(function, COUNTS)
    assert most is None or len(captures) <= most, captures


@pytest.mark.parametrize("name", WITH_RATES)
def test_a_rate_among_the_arguments(name: str) -> None:
    function, most = WITH_RATES[name]
    captures = same(function, RATES)
    assert most is None or len(captures) <= most, captures


def test_values_that_no_symbol_stands_for() -> None:
    values = [3, True, 2**70, 4, 0.5, float("nan"), float("inf"), -0.0, 0.0, None, np.float64(2.0), "text", 5]
    same(lambda k, x, n: (x + 1, repr(n)), values)
    same(lambda k, x, n: (x + 1, n), [each for each in values if each == each])
    same(lambda k, x, n: (x + 1, type(n).__name__, n is True), values)


def test_a_number_that_an_operation_uses_is_a_constant_until_it_changes() -> None:
    def step(x: torch.Tensor, heads: int, scale: float, epoch: int) -> Any:
        return x.view(-1, heads) * scale, epoch

    compiled = weft.compile(step)
    for epoch in range(4):
        compiled(torch.ones(4, 6), 3, 0.5, epoch)
    assert len(compiled.captures) == 2, compiled.captures
    graph = compiled.entries[0].captured.graph
    assert sorted(entry.path for entry in graph.inputs) == ["args[0]", "args[3]"]
    view = next(node for node in graph.graph.nodes if "view" in str(node.target))
    assert all(type(size) is int for size in view.meta["val"].shape)
    compiled(torch.ones(4, 6), 3, 0.25, 0)
    compiled(torch.ones(4, 6), 3, 0.125, 7)
    assert len(compiled.captures) == 3, compiled.captures


def test_a_number_beside_one_that_changes_is_tried() -> None:
    def step(x: torch.Tensor, epoch: int, batch: int, *, rate: float = 0.5) -> Any:
        return {"epoch": epoch, "rate": rate, "loss": x.sum()} if batch % 2 == 0 else None

    compiled = weft.compile(step)
    for call in range(12):
        x = torch.randn(3)
        arguments = (x, call // 4, call % 4)
        assert compiled(*arguments, rate=call / 8) == step(*arguments, rate=call / 8)
    assert len(compiled.captures) == 3, compiled.captures


def test_what_code_catches_is_what_numbers_raise() -> None:
    """A number that does not change, beside one that does."""

    def divided(n: Any) -> Any:
        try:
            return 100 // (n - 4)
        except ZeroDivisionError:
            return "nothing"

    def written(n: Any) -> Any:
        try:
            return json.dumps({"n": n})
        except TypeError:
            return "not written"

    def found(n: Any) -> Any:
        try:
            return fractions.Fraction(n, 3), n.to_bytes(2, "big"), pow(n, 3, 5)
        except (TypeError, AttributeError):
            return None

    def told(n: Any) -> Any:
        try:
            return n + "text"
        except TypeError as error:
            return str(error)

    for function in (divided, written, found, told):
        compiled = weft.compile(lambda x, n, epoch, function=function: (x * epoch, function(n)))
        for epoch in range(4):
            result = compiled(torch.ones(2), 4, epoch)[1]
            assert result == function(4), function.__name__


def test_a_number_used_behind_a_branch_on_data() -> None:
    def step(k: Kept, x: torch.Tensor, n: Any) -> Any:
        return x * n if x.sum() > 100 else (x + 1, n)

    def both(k: Kept, x: torch.Tensor, n: Any) -> Any:
        return step(k, x * (3 if n % 2 else 1), n)

    assert len(same(step, COUNTS)) <= 3
    same(both, COUNTS)
