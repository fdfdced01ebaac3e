"""No fake tensor and no symbolic number of a capture stays with the user, wherever the step stored it."""

from __future__ import annotations

import functools
import gc
import math
import queue
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

import weft
from both_ways import batches, both_ways, mlp, snapshot
from weft.capture.record.escapes import EscapeCheck
from weft.capture.record.tracer import capture_step
from weft.errors import CannotCapture, CaptureValueEscaped, EscapedTensor, WeftError

LOST: Any = types.SimpleNamespace(items=[], box=queue.Queue())  # reached through a dictionary of a library only
sys._xoptions["lost"] = LOST


def _alive() -> list[Any]:
    gc.collect()
    kinds = (FakeTensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    return [each for each in gc.get_objects() if type(each) in kinds]


@pytest.fixture(autouse=True, scope="module")
def values_of_other_tests() -> Iterator[None]:
    """Keep what other tests left in the process, such as torch's own caches, out of the count of these."""
    _of_others[:] = _alive()
    yield
    _of_others.clear()


_of_others: list[Any] = []


def _values_of_captures() -> int:
    """How many values of captures of these tests are alive, wherever they are."""
    others = set(map(id, _of_others))
    return sum(id(each) not in others for each in _alive())


class Slots:
    """Keeps a tensor where there is no ``__dict__``."""

    __slots__ = ("inside",)

    def __init__(self, inside: Any) -> None:
        self.inside = inside


class Pair(NamedTuple):
    first: Any
    second: Any


def _numbered(x: torch.Tensor) -> Iterator[torch.Tensor]:
    for at in range(3):
        yield x * at


async def _later(x: torch.Tensor) -> torch.Tensor:
    return x


RETURNED: dict[str, Callable[[torch.Tensor], Any]] = {
    "generator": lambda x: _numbered(x * 1.0),
    "generator deep inside": lambda x: {"a": [(x, _numbered(x * 1.0))]},
    "map": lambda x: [map(torch.neg, [x * 2])],
    "zip": lambda x: zip([x * 2], [1], strict=True),
    "filter": lambda x: filter(None, [x.sum().item()]),
    "list iterator": lambda x: iter([x * 2]),
    "reversed": lambda x: reversed([x * 2]),
    "bound method": lambda x: [x * 2].append,
}


@pytest.mark.parametrize("name", RETURNED)
def test_what_cannot_be_rebuilt_is_not_returned(name: str) -> None:
    with pytest.raises(EscapedTensor, match="the step's return value holds a"):
        weft.compile(RETURNED[name])(torch.ones(2))
    assert _values_of_captures() == 0


@pytest.mark.filterwarnings("ignore:coroutine")
def test_coroutines_are_not_returned() -> None:
    with pytest.raises(EscapedTensor, match=r"coroutine.*after the step has ended"):
        weft.compile(lambda x: _later(x * 2))(torch.ones(2))


STORED: dict[str, Callable[[torch.Tensor], Any]] = {
    "in a list": lambda x: sys._xoptions["lost"].items.append(x * 2),
    "in a list in a list": lambda x: sys._xoptions["lost"].items.append([{"a": x * 2}]),
    "in a queue": lambda x: sys._xoptions["lost"].box.queue.append(x * 2),
    "as a number": lambda x: sys._xoptions["lost"].items.append(x.sum().item()),
    "as an attribute": lambda x: setattr(sys._xoptions["lost"], "new" + "name", x * 2),
    "in a generator": lambda x: sys._xoptions["lost"].items.append(_numbered(x * 2)),
}


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("failing", [False, True])
def test_a_value_in_an_object_that_is_not_followed_is_named_and_taken_out(name: str, failing: bool) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        STORED[name](x)
        return x * math.fsum([x.sum()]) if failing else x * 3

    for options in ({}, {"fallback": "eager"}) if failing else ({},):
        with pytest.raises(CaptureValueEscaped, match=r"step stored a .* of the capture") as caught:
            weft.compile(step, **options)(torch.ones(2))
        assert isinstance(caught.value.__cause__, CannotCapture if failing else type(None))
        assert ("test_escapes.py" in str(caught.value)) or name in ("as a number", "in a generator")
        del caught
        assert LOST.items == [], name  # type: ignore[attr-defined]
        assert LOST.box.empty()  # type: ignore[attr-defined]
        assert not hasattr(LOST, "newname")
        assert _values_of_captures() == 0


def test_a_cached_function_computes_its_result_again_outside() -> None:
    @functools.lru_cache
    def mask(size: int) -> torch.Tensor:
        return torch.ones(size, size).tril()

    step = weft.compile(lambda x: x @ mask(4))
    x = torch.randn(4, 4)
    first, _ = step(x), step(x)
    assert type(mask(4)) is torch.Tensor
    assert torch.equal(first, x @ mask(4))


def test_cycles_of_the_step_are_no_escape() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        holder: Any = types.SimpleNamespace(x=x * 2)
        holder.itself = holder
        return holder.x + 1

    assert torch.equal(weft.compile(step)(torch.ones(2)), torch.full((2,), 3.0))


def test_a_collection_inside_the_step_hides_nothing() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        sys._xoptions["lost"].items.append(x * 2)
        gc.collect()
        return x * 3

    with pytest.raises(CaptureValueEscaped):
        weft.compile(step)(torch.ones(2))
    LOST.items.clear()  # type: ignore[attr-defined]


def test_escapes_are_found_where_the_user_froze_objects() -> None:
    x = torch.ones(2)
    gc.freeze()
    try:
        for name in STORED:
            step = weft.compile(lambda x: (STORED[name](x), x * 3)[1])  # noqa: B023, called in this round
            with pytest.raises(CaptureValueEscaped, match=r"stored a .* of the capture"):
                step(x)
            assert gc.get_freeze_count() > 10_000, "it stays frozen"
            assert LOST.items == []  # type: ignore[attr-defined]
        keeps = weft.compile(lambda x: (x * float(x.shape[0]), x.sum().item()))
        assert keeps(x)[1] == 2.0
    finally:
        gc.unfreeze()


def test_nothing_but_the_captured_step_holds_fakes_after_a_capture() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return Pair(loss.item(), {"loss": [loss]})

    captured = capture_step(step, batches()[0])
    assert _values_of_captures() > 0
    del captured
    assert _values_of_captures() == 0


def test_a_failed_capture_leaves_no_fakes_in_a_model_or_optimizer() -> None:
    model = mlp()
    optimizer = torch.optim.Rprop(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> Any:
        model(x).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["seen"] = model(x).mean()
        return math.fsum([model(x).sum()])

    with pytest.raises(CannotCapture):
        weft.compile(step)(*batches()[0])
    leaves = tree_leaves([snapshot(model), optimizer.state_dict(), vars(model[0])])
    assert not any(isinstance(leaf, FakeTensor) for leaf in leaves)
    assert len(optimizer.state) == 0


# ---- what can be rebuilt


def test_named_tuples_and_nests_come_back_as_eager_returns_them() -> None:
    make = lambda: (lambda x: Pair(x * 2, {"n": x.sum().item(), "t": (x, [None, "a"])}), [])
    both_ways(make, batches(2))


def test_an_error_is_one_of_wefts_with_all_parts_named() -> None:
    with pytest.raises(WeftError, match="make them a list in the step"):
        weft.compile(lambda x: (y for y in [x * 2]))(torch.ones(2))


def test_garbage_that_another_threads_collection_leaves_for_later_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    collect, calls = EscapeCheck.collect, 0

    def while_another_collects(self: EscapeCheck) -> None:
        nonlocal calls
        calls += 1
        if calls > 3:  # before that gc.collect() returns at once
            collect(self)

    monkeypatch.setattr(EscapeCheck, "collect", while_another_collects)

    def step(x: torch.Tensor) -> torch.Tensor:
        cycle: dict[str, Any] = {"doubled": x * 2}
        cycle["itself"] = cycle
        return cycle["doubled"] + 1

    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        assert torch.equal(weft.compile(step)(torch.ones(3)), torch.full((3,), 3.0))
    finally:
        done.set()
        other.join()
    assert calls > 3


def test_a_capture_whose_values_nobody_holds_collects_no_garbage_at_its_end() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    collections: list[int] = []
    count = lambda phase, info: collections.append(info["generation"]) if phase == "start" else None
    x = torch.randn(4, model[0].in_features)
    gc.collect()
    gc.callbacks.append(count)
    try:
        capture_step(step, (x,))
    finally:
        gc.callbacks.remove(count)
    assert len(collections) == 1  # before the capture; another one would walk all that the capture made
