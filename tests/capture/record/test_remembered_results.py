"""Functions with functools.lru_cache whose body runs in the captured call: eager runs it once."""

from __future__ import annotations

import functools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.errors import EscapedTensor, RememberedFunctionReads, RememberedFunctionWrites, UncapturableDraw


def counts(s: Any) -> Any:
    @functools.lru_cache
    def factor(n: int) -> int:
        s.count += 1
        return n * 2

    return lambda x: x * factor(3) + s.count


def logs(s: Any) -> Any:
    @functools.lru_cache
    def positions(n: int) -> Tensor:
        s.log.append(n)
        return torch.ones(n).cumsum(0)

    return lambda x: x * positions(x.shape[0])


def state() -> Any:
    return SimpleNamespace(count=0, log=[], calls=0)


@pytest.mark.parametrize(("make", "names"), [(counts, r"s\.count.*factor"), (logs, r"s\.log.*positions")])
def test_a_body_that_changes_the_state_is_refused(make: Any, names: str) -> None:
    s = state()
    with pytest.raises(RememberedFunctionWrites, match=names):
        weft.compile(make(s))(torch.ones(3))
    assert (s.count, s.log) == (0, [])


@pytest.mark.parametrize("make", [counts, logs])
def test_with_a_fallback_the_body_runs_once(make: Any) -> None:
    ours, theirs = state(), state()
    compiled, eager = weft.compile(make(ours), fallback="eager"), make(theirs)
    for size in (3, 3, 4, 3):
        assert torch.equal(compiled(torch.ones(size)), eager(torch.ones(size)))
        assert vars(ours) == vars(theirs)


@pytest.mark.parametrize("make", [counts, logs])
def test_a_body_that_ran_before_the_compiled_step_is_no_matter(make: Any) -> None:
    ours, theirs = state(), state()
    step, eager = make(ours), make(theirs)
    compiled = weft.compile(step)
    step(torch.ones(3))
    eager(torch.ones(3))
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(3)), eager(torch.ones(3)))
        assert vars(ours) == vars(theirs)


def test_a_body_without_changes_beside_a_step_with_some() -> None:
    def make(s: Any) -> Any:
        @functools.lru_cache
        def positions(n: int) -> Tensor:
            return torch.ones(n).cumsum(0)

        def step(x: Tensor) -> Tensor:
            s.calls += 1
            s.log.append(x.sum())
            return x * positions(x.shape[0]) * s.calls

        return step

    ours, theirs = state(), state()
    compiled, eager = weft.compile(make(ours)), make(theirs)
    for size in (3, 3, 4, 5, 3):
        assert torch.equal(compiled(torch.ones(size)), eager(torch.ones(size)))
        assert vars(ours) == vars(theirs)


def test_a_body_that_changes_the_state_before_a_branch_is_refused() -> None:
    s = state()
    factor = counts(s)

    def step(x: Tensor) -> Tensor:
        y = factor(x)
        return y + 1 if y.sum() > 0 else y

    with pytest.raises(RememberedFunctionWrites, match=r"s\.count"):
        weft.compile(step)(torch.ones(3))


def noise(s: Any) -> Any:
    @functools.lru_cache
    def drawn(n: int) -> Tensor:
        return torch.randn(n)

    return lambda x: x + drawn(x.shape[0])


def number(s: Any) -> Any:
    @functools.lru_cache
    def drawn(n: int) -> float:
        return random.random() * n

    return lambda x: x * drawn(3)


def weights(s: Any) -> Any:
    @functools.lru_cache
    def made(n: int) -> nn.Module:
        return nn.Linear(n, n)

    return lambda x: made(x.shape[0])(x)


def says(s: Any) -> Any:
    @functools.lru_cache
    def once(n: int) -> int:
        print("computed")
        return n

    return lambda x: x * once(3)


@pytest.mark.parametrize(
    ("make", "what"),
    [(noise, "random generator"), (number, "random generator"), (weights, "random generator"), (says, "print")],
)
def test_a_body_that_draws_or_prints_is_refused(make: Any, what: str) -> None:
    """Eager draws once and remembers; a compiled step would draw at every call."""
    with pytest.raises(RememberedFunctionWrites, match=what):
        weft.compile(make(state()))(torch.ones(3))


@pytest.mark.parametrize("make", [noise, number, weights])
def test_what_a_body_drew_before_the_compiled_step_stays(make: Any) -> None:
    def trained(wrap: Any) -> list[Tensor]:
        torch.manual_seed(0)
        random.seed(0)
        step = make(state())
        first = step(torch.ones(3))
        compiled = wrap(step)
        return [first.detach(), *(compiled(torch.ones(3)).detach() for _ in range(3)), torch.randn(2)]

    for ours, theirs in zip(trained(weft.compile), trained(lambda step: step), strict=True):
        assert torch.equal(ours, theirs)


def test_a_body_that_computes_beside_a_step_that_draws() -> None:
    @functools.lru_cache
    def positions(n: int) -> Tensor:
        return torch.ones(n).cumsum(0)

    step = lambda x: torch.nn.functional.dropout(x) * positions(x.shape[0]) + random.random()
    compiled = weft.compile(step)
    for _ in range(3):
        results = []
        for each in (compiled, step):
            torch.manual_seed(0)
            random.seed(0)
            results.append(each(torch.ones(3)))
        assert torch.equal(*results)


@pytest.mark.parametrize(("limit", "before"), [(1, ()), (2, (5, 6, 7)), (8, (3,)), (None, ()), (None, (5, 6, 7))])
def test_results_of_any_number_are_remembered(limit: int | None, before: tuple[int, ...]) -> None:
    @functools.lru_cache(maxsize=limit)
    def positions(n: int) -> Tensor:
        return torch.arange(n)

    for n in before:
        positions(n)
    step = lambda x: x + positions(x.shape[0])
    compiled = weft.compile(step)
    for n in (3, 3, 4, 5, 3, 6):
        assert torch.equal(compiled(torch.ones(n)), step(torch.ones(n)))
        assert type(positions(n)) is Tensor


def test_results_from_before_the_capture_are_not_forgotten() -> None:
    @functools.cache
    def positions(n: int) -> Tensor:
        return torch.arange(n)

    known = [positions(n) for n in (5, 6)]
    compiled = weft.compile(lambda x: x + positions(x.shape[0]))
    for n in (3, 4, 5):
        compiled(torch.ones(n))
    assert positions(5) is known[0]
    assert positions(6) is known[1]


@pytest.mark.parametrize("remember", [functools.lru_cache, functools.cache, functools.lru_cache(typed=True)])
def test_results_from_before_are_found_by_numbers_that_change(remember: Any) -> None:
    """The key of a call with a symbolic number is not that of the number: the body would run, on other tensors."""

    def trained(wrap: Any) -> list[Tensor]:
        @remember
        def table(at: int) -> Tensor:
            return torch.full((3,), float(at)).requires_grad_()

        @remember
        def total(size: int) -> Tensor:
            return torch.zeros(2)

        tables, totals = [table(at) for at in range(4)], [total(size) for size in range(3, 6)]
        optimizer = torch.optim.SGD(tables, lr=0.1)

        def step(x: Tensor, at: int) -> Tensor:
            optimizer.zero_grad()
            loss = (x.sum() * table(at)).sum()
            loss.backward()
            optimizer.step()
            total(x.shape[0]).add_(loss.detach())
            return loss.detach()

        compiled = wrap(step)
        losses = [compiled(torch.full((3 + at % 3,), at / 2), at) for at in (0, 1, 2, 3, 1)]
        assert all(table(at) is tables[at] for at in range(4))
        return [*losses, *tables, *totals]

    for ours, theirs in zip(trained(weft.compile), trained(lambda step: step), strict=True):
        assert torch.equal(ours, theirs)


def held(kind: str, body: Any, remember: Any) -> tuple[Any, Any]:
    """A function that remembers results, where user code holds such functions: how the step calls it, and how a loop
    does."""
    if kind == "a static method":
        owner: Any = type("Owner", (), {"f": staticmethod(remember(body))})
    elif kind == "a class method":
        owner = type("Owner", (), {"f": classmethod(remember(lambda cls, n: body(n)))})
    elif kind == "a method":
        owner = type("Owner", (), {"f": remember(lambda self, n: body(n))})()
    elif kind == "an attribute":
        owner = SimpleNamespace(f=remember(body))
    elif kind == "a partial function":
        owner = SimpleNamespace(f=functools.partial(remember(body)))
    else:
        held = [remember(body)]
        return (lambda n: held[0](n)), held[0]
    return (lambda n: owner.f(n)), owner.f


HOLDERS = ["a static method", "a class method", "a method", "an attribute", "a partial function", "a list"]


@pytest.mark.parametrize("remember", [functools.lru_cache, functools.lru_cache(typed=True), functools.cache])
@pytest.mark.parametrize("kind", HOLDERS)
def test_wherever_it_is_held_its_results_are_found(kind: str, remember: Any) -> None:
    def trained(wrap: Any) -> list[Tensor]:
        inside, outside = held(kind, lambda n: torch.zeros(2), remember)
        known = [outside(n) for n in range(4)]

        def step(x: Tensor, n: int) -> Tensor:
            inside(n).add_(x.sum())
            return x * n

        compiled = wrap(step)
        for n in (0, 1, 2, 3, 1):
            compiled(torch.full((2,), n / 2), n)
        assert all(outside(n) is known[n] for n in range(4))
        return known

    for ours, theirs in zip(trained(weft.compile), trained(lambda step: step), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", HOLDERS)
def test_wherever_it_is_held_a_body_that_draws_is_refused(kind: str) -> None:
    inside, _ = held(kind, torch.randn, functools.lru_cache)
    with pytest.raises(RememberedFunctionWrites, match="random generator"):
        weft.compile(lambda x: x + inside(3))(torch.ones(3))


class Counter:
    def __init__(self) -> None:
        self.n = 0


def counts_in_a_dictionary(remember: Any) -> Any:
    meter = remember(lambda key: {"n": 0})

    def step(x: Tensor) -> Any:
        meter("a")["n"] += 1
        return x * meter("a")["n"], meter("a")

    return step, lambda: meter("a")


def counts_in_an_object(remember: Any) -> Any:
    meter = remember(lambda key: Counter())

    def step(x: Tensor) -> Any:
        meter("a").n += 1
        return x * meter("a").n, meter("a")

    return step, lambda: meter("a")


def adds_to_a_buffer(remember: Any) -> Any:
    buffer = remember(lambda key: torch.zeros(2))

    def step(x: Tensor) -> Any:
        buffer("a").add_(x)
        return buffer("a") * 2, buffer("a")

    return step, lambda: buffer("a")


def replaces_a_tensor(remember: Any) -> Any:
    held = remember(lambda key: [1, {"a": torch.ones(2)}])

    def step(x: Tensor) -> Any:
        held("a")[1]["a"] = held("a")[1]["a"] * 2 + x
        return held("a")[1]["a"].sum(), held("a")

    return step, lambda: held("a")


def reads_a_weight(remember: Any) -> Any:
    weight = nn.Parameter(torch.ones(2))
    first = remember(lambda key: weight.detach().clone())

    def step(x: Tensor) -> Any:
        distance = (weight - first("a")).sum()
        (weight * x).sum().backward()
        with torch.no_grad():
            weight.sub_(weight.grad)
        weight.grad = None
        return distance.detach(), first("a")

    return step, lambda: first("a")


CHANGED = [counts_in_a_dictionary, counts_in_an_object, adds_to_a_buffer, replaces_a_tensor, reads_a_weight]


@pytest.mark.parametrize("remember", [functools.cache, functools.lru_cache], ids=["unlimited", "limited"])
@pytest.mark.parametrize("before", [False, True], ids=["first called in the step", "called before"])
@pytest.mark.parametrize("make", CHANGED, ids=lambda make: make.__name__)
def test_what_a_step_changes_of_a_result_stays_changed(make: Any, before: bool, remember: Any) -> None:
    def run(wrap: Any) -> list[Any]:
        step, result = make(remember)
        if before:
            result()
        called, found = wrap(step), []
        for at in range(4):
            value, returned = called(torch.full((2,), at + 1.0))
            assert returned is result()
            found.append((value.tolist(), repr(getattr(returned, "__dict__", returned))))
        return found

    assert run(weft.compile) == run(lambda step: step)


@pytest.mark.parametrize("limit", [None, 3])
def test_a_capture_that_fails_leaves_earlier_results(limit: int | None) -> None:
    @functools.lru_cache(maxsize=limit)
    def table(key: str) -> dict[str, int]:
        return {"n": 0}

    earlier = {key: table(key) for key in "ab"}

    def step(x: Tensor) -> Any:
        table("c")["n"] += 1
        return functools.partial(print, x * 2)

    for _ in range(2):
        with pytest.raises(EscapedTensor):
            weft.compile(step)(torch.ones(1))
    assert all(table(key) is earlier[key] for key in "ab")
    assert [table(key)["n"] for key in "cdef"] == [0] * 4  # and it goes on remembering
    assert table("f") is table("f")


def test_a_body_that_reads_what_the_step_wrote_is_refused() -> None:
    weight = nn.Parameter(torch.ones(2))
    remembered = functools.cache(lambda: weight.detach().clone())

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            weight.mul_(x)
        return remembered() * 2

    with pytest.raises(RememberedFunctionReads, match=r"test_remembered_results\.py:\d+.*before the compiled step"):
        weft.compile(step)(torch.full((2,), 3.0))
    assert torch.equal(weight, torch.ones(2))


def test_a_result_that_a_step_with_a_branch_changes_is_refused() -> None:
    buffer = functools.cache(lambda: torch.zeros(2))

    def step(x: Tensor) -> Tensor:
        buffer().add_(x)
        return x if x.sum() > 3 else buffer() * 1

    with pytest.raises(RememberedFunctionReads):
        weft.compile(step)(torch.ones(2))
    buffer()
    compiled, expected = weft.compile(step), torch.zeros(2)
    for at in range(3):
        expected += at
        assert torch.equal(compiled(torch.full((2,), float(at))), torch.full((2,), float(at)) if at > 1 else expected)


@pytest.mark.parametrize("method", ["cache_info", "cache_clear"])
def test_counts_of_results_are_refused_in_a_step_and_not_outside(method: str) -> None:
    @functools.lru_cache
    def factor(n: int) -> int:
        return n * 2

    def step(x: Tensor) -> tuple[Tensor, Any]:
        return x * factor(3), getattr(factor, method)()

    with pytest.raises(UncapturableDraw, match=rf"factor\.{method}\(\) at .*test_remembered_results.py.*opaque"):
        weft.compile(step)(torch.ones(2))
    told: list[Any] = []
    tell = weft.opaque(lambda: told.append(getattr(factor, method)()))
    weft.compile(lambda x: (tell(), x * factor(3)))(torch.ones(2))
    assert len(told) == 1
    fallen = weft.compile(step, fallback="eager")
    assert [fallen(torch.ones(1))[0].item() for _ in range(3)] == [6, 6, 6]
