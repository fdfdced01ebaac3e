"""Lists, dictionaries and data objects that a step gets as arguments and changes: the caller's change as in eager."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from both_ways import assert_equal


@dataclass
class Batch:
    ids: Tensor
    mask: Any = None


def arguments(call: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    values = torch.arange(3.0) + call
    batch = {"ids": values, "labels": values * 2, "length": call, "nested": {"a": [values + 1]}}
    metrics = OrderedDict(first=torch.zeros(1), second=torch.ones(1))
    named = {"metrics": metrics, "seen": deque([1, 2, 3], maxlen=3)}
    return (batch, [values + 3, values + 4], Batch(values + 5)), named


def pops(batch: Any, parts: Any, data: Any, metrics: Any, seen: Any) -> Tensor:
    labels = batch.pop("labels")
    return (batch["ids"] - labels).sum()


def writes_entries(batch: Any, parts: Any, data: Any, metrics: Any, seen: Any) -> Tensor:
    loss = batch["ids"].sum()
    metrics["loss"] = loss
    metrics["number"] = loss.item()
    batch["nested"]["a"].append(loss + 1)
    batch["nested"]["b"] = {"new": [batch["ids"] * 2, "text"]}
    return loss


def counts(batch: Any, parts: Any, data: Any, metrics: Any, seen: Any) -> Tensor:
    batch["length"] += 2
    return batch["ids"] * batch["length"]


def puts_back(batch: Any, parts: Any, data: Any, metrics: Any, seen: Any) -> None:
    batch["ids"] = batch.pop("ids").double()
    metrics.move_to_end("first")


def changes_lists(batch: Any, parts: Any, data: Any, metrics: Any, seen: Any) -> Tensor:
    parts[0] = parts[0] * 2
    parts.append(parts[1] + 1)
    parts.append(parts[0])
    batch["nested"]["a"].clear()
    return parts.pop(1)


def empties(batch: Any, parts: Any, data: Any, metrics: Any, seen: Any) -> Tensor:
    total = parts.pop() + parts.pop()
    batch.clear()
    return total


def sets_attributes(batch: Any, parts: Any, data: Any, metrics: Any, seen: Any) -> None:
    data.mask = data.ids > 6
    data.ids.add_(1)
    data.ids = data.ids * 2


def shares(batch: Any, parts: Any, data: Any, metrics: Any, seen: Any) -> None:
    batch["again"] = batch["ids"]
    batch["ids"].mul_(2)


def in_a_branch(batch: Any, parts: Any, data: Any, metrics: Any, seen: Any) -> Tensor:
    if batch["ids"].sum() > 6:
        metrics["large"] = batch["ids"] * 3
        return batch.pop("labels")
    metrics.pop("first")
    return batch["ids"]


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(
    "step",
    [pops, writes_entries, counts, puts_back, changes_lists, empties, sets_attributes, shares, in_a_branch],
)
def test_the_callers_objects_change_as_in_eager(step: Callable[..., Any], verify: bool) -> None:
    def run(called: Callable[..., Any]) -> list[Any]:
        found = []
        for call in range(5):
            args, kwargs = arguments(call)
            batch, parts = args[0], args[1]
            found.append((called(*args, **kwargs), batch, parts, vars(args[2]), kwargs))
            assert args[0] is batch
            orders = [list(batch), list(kwargs["metrics"])]
            found.append((orders, [type(each).__name__ for each in (batch, parts, *kwargs.values())]))
        return found

    compiled = weft.compile(step, verify=verify)
    assert_equal(run(compiled), run(step))
    assert len(compiled.captures) <= (5 if step is in_a_branch else 3)


def test_missing_entries_of_a_default_dictionary() -> None:
    def step(x: Tensor, groups: defaultdict[str, list[Tensor]]) -> None:
        groups["a"].append(x * 2)
        groups["b"].append(x + 1)

    def run(called: Callable[..., Any]) -> list[Any]:
        groups: defaultdict[str, list[Tensor]] = defaultdict(list)
        for _ in range(3):
            called(torch.ones(2), groups)
        return [dict(groups), groups.default_factory is list]

    assert_equal(run(weft.compile(step)), run(step))


def test_tensors_that_share_memory_share_it_afterwards() -> None:
    batch = {"ids": torch.ones(3)}
    weft.compile(lambda batch: shares(batch, [], None, {}, None))(batch)
    assert batch["again"] is batch["ids"]
    assert batch["ids"].tolist() == [2.0, 2.0, 2.0]


def test_an_object_that_is_passed_twice_is_changed_once() -> None:
    entries: dict[str, Any] = {}
    weft.compile(lambda x, a, b: a.update(a=x * 2, n=len(b)))(torch.ones(2), entries, entries)
    assert (entries["a"].tolist(), entries["n"]) == ([2.0, 2.0], 0)
    other: dict[str, Any] = {}
    assert weft.compile(lambda x, a, b: x * len(a))(torch.ones(2), other, other).tolist() == [0.0, 0.0]
