"""What an opaque function keeps is the object that the step leaves, as in eager."""

from __future__ import annotations

import collections
import dataclasses
import operator
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import weft
from weft.errors import PythonStateChanged

CALLS = 5


class Out:
    def __init__(self, x: Any) -> None:
        self.x: Any = x
        self.y: Any = None


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any
    y: Any = None


class State:
    last: Any = None


log: list[Any] = []
lengths: list[int] = []
s = State()


@weft.opaque
def keep(*made: Any) -> None:
    log.extend(made)
    lengths.extend(len(vars(each)) if hasattr(each, "__dict__") else 0 for each in made)


@weft.opaque
def keep_call(*made: Any, **named: Any) -> None:
    log.append((made, named))


@weft.opaque
def keep_state() -> None:
    log.append(s.last)


def shown(value: Any) -> Any:
    """A value as plain data."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return [(key, shown(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple, collections.deque)):
        return [shown(each) for each in value]
    if isinstance(value, Slotted):
        return shown(value.x), shown(value.y)
    return [(name, shown(each)) for name, each in vars(value).items()] if hasattr(value, "__dict__") else repr(value)


def returned(x: Any) -> Any:
    made = [x * 2]
    keep(made)
    return made


def without_tensors(x: Any) -> Any:
    made = {"a": [1]}
    keep(made["a"])
    return made["a"], x + 1


def of_a_class(x: Any) -> Any:
    made = Out(x * 2)
    keep(made)
    return made


def of_a_class_without_tensors(x: Any) -> Any:
    made = Out(1)
    keep(made)
    made.y = 3
    return made


def left_in_the_state(x: Any) -> Any:
    s.last = {"x": x * 2}
    keep(s.last)
    return s.last


def found_in_the_state(x: Any) -> Any:
    s.last = Out([x * 2])
    keep_state()
    s.last.x.append(3)
    return s.last


def given_twice(x: Any) -> Any:
    made = {"a": x * 2}
    keep(made)
    made["b"] = [x * 3]
    keep(made)
    del made["a"]
    made["b"].append(1)
    keep(made["b"], made)
    return made


def not_left_and_changed_afterwards(x: Any) -> Any:
    made = [x * 2]
    keep(made)
    made.append(x * 3)
    return None


def in_a_closure(x: Any) -> Any:
    made = {"y": x * 2}

    @weft.opaque
    def inner() -> None:
        log.append(made)

    inner()
    return made


def in_a_closure_without_tensors(x: Any) -> Any:
    made = {"y": 1}

    @weft.opaque
    def inner() -> None:
        log.append(made)

    inner()
    return made


def of_many_types(x: Any) -> Any:
    made = Slotted(x * 2), collections.OrderedDict(a=x), collections.deque([x], maxlen=3), types.SimpleNamespace(a=1)
    keep(*made)
    made[0].y = x
    made[1]["z"] = 1
    made[2].append(2)
    del made[3].a
    return made[at_type]


at_type = 0


def in_a_tuple(x: Any) -> Any:
    made = [x * 2]
    keep((made, 1))
    made.append(3)
    return made


def in_an_argument_that_is_kept_whole(x: Any) -> Any:
    made = [x * 2]
    keep_call(made, named=(made, 1))
    return made


def before_a_branch(x: Any) -> Any:
    made = {"a": x * 2}
    keep(made)
    if x.sum() > 3:
        made["large"] = x * 5
    else:
        made["small"] = 1
    return made


STEPS = (
    returned,
    without_tensors,
    of_a_class,
    of_a_class_without_tensors,
    left_in_the_state,
    found_in_the_state,
    given_twice,
    not_left_and_changed_afterwards,
    in_a_closure,
    in_a_closure_without_tensors,
    in_a_tuple,
    in_an_argument_that_is_kept_whole,
    of_many_types,
    before_a_branch,
)


def run(step: Callable[[Any], Any], argument: Callable[[int], Any]) -> list[Any]:
    log.clear()
    lengths.clear()
    s.last = None
    found: list[Any] = []
    for at in range(CALLS):
        passed = argument(at)
        result = step(passed)
        result = result[0] if isinstance(result, tuple) else result
        same = [each is result or each is passed for each in log]
        found += [shown(result), shown(log), same, len(set(map(id, log))), list(lengths), s.last is result]
        if isinstance(result, list):
            result.append("by the caller")
            found.append(shown(log))
    return found


@pytest.mark.parametrize("step", STEPS)
def test_what_it_keeps_is_what_the_step_leaves(step: Callable[[Any], Any]) -> None:
    argument = lambda at: torch.full((2,), float(at % 4))
    assert run(weft.compile(step), argument) == run(step, argument)


class Pair(NamedTuple):
    x: Any
    y: Any = None


TUPLES: dict[str, Callable[[Any], Any]] = {
    "of a tensor": lambda x: (x * 2, 1),
    "of a list": lambda x: ([x * 2], 1),
    "of a tuple": lambda x: ((x, ("a", x * 2)),),
    "of a number": lambda x: (x.sum().item(), 0.5),
    "named": lambda x: Pair(x * 2, [x]),
    "frozen set": lambda x: frozenset([x * 2]),
    "inside of a list": lambda x: [(x * 2, 1)],
}


@pytest.mark.parametrize("name", TUPLES)
def test_a_tuple_that_it_keeps_is_the_one_that_the_step_leaves(name: str) -> None:
    def step(x: torch.Tensor) -> Any:
        made = TUPLES[name](x)
        keep(made)
        s.last = made
        return made

    def run(step: Callable[[Any], Any]) -> list[Any]:
        log.clear()
        found: list[Any] = []
        for at in range(CALLS):
            result = step(torch.full((2,), float(at)))
            inner = list(map(operator.is_, result, log[-1]))
            found += [shown(list(result)), result is log[-1], result is s.last, inner]
        return found

    assert run(weft.compile(step)) == run(step)


def changed_before_and_after(passed: Any) -> Any:
    passed.other = passed.x * 2
    keep(passed)
    passed.y = [passed]
    return passed.x + 1


def written(passed: Any) -> Any:
    passed["a"].add_(1)
    passed["b"] = [passed["a"] * 2]
    keep(passed, passed["b"])
    passed["a"].mul_(2)
    del passed["b"]
    return passed["a"] + 1


def before_a_branch_of_an_argument(passed: Any) -> Any:
    passed["b"] = passed["a"] * 2
    keep(passed)
    if passed["b"].sum() > 3:
        passed["c"] = 3
    return passed["a"] + 1


@pytest.mark.parametrize("step", [changed_before_and_after, written, before_a_branch_of_an_argument])
def test_an_argument_that_it_keeps_is_the_callers(step: Callable[[Any], Any]) -> None:
    def found(step: Any) -> list[Any]:
        log.clear()
        lengths.clear()
        seen: list[Any] = []
        for at in range(CALLS):
            x = torch.full((2,), float(at))
            passed = Out(x) if step_is_of_objects else {"a": x}
            seen += [shown(step(passed)), [each is passed for each in log], list(lengths)]
            seen.append(len(vars(passed)) if step_is_of_objects else shown(passed))
        return seen

    step_is_of_objects = step is changed_before_and_after
    assert found(weft.compile(step)) == found(step)


def a_tensor(x: Any) -> Any:
    made = x * 2
    keep(made)
    return made


def a_tensor_in_the_state(x: Any) -> Any:
    made = {"x": x * 2}
    keep(made["x"], s)
    s.last = made["x"]
    return s.last


def a_tensor_twice(x: Any) -> Any:
    made = x * 2
    keep(made)
    keep([made], made)
    return made


def a_tensor_that_is_written_after(x: Any) -> Any:
    made = x * 2
    keep(made)
    made.add_(1)
    keep(made)
    made.mul_(3)
    return made


def a_tensor_with_a_graph(x: Any) -> Any:
    made = weight * x
    keep(made)
    return made


def a_tensor_before_a_branch(x: Any) -> Any:
    made = x * 2
    keep(made)
    if x.sum() > 3:
        made.add_(10)
    return made


weight = torch.nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(
    "step",
    [
        a_tensor,
        a_tensor_in_the_state,
        a_tensor_twice,
        a_tensor_that_is_written_after,
        a_tensor_with_a_graph,
        a_tensor_before_a_branch,
    ],
)
def test_a_tensor_that_it_keeps_is_the_one_that_the_step_leaves(step: Callable[[Any], Any]) -> None:
    def run(step: Any) -> list[Any]:
        log.clear()
        s.last = None
        found: list[Any] = []
        for at in range(CALLS):
            result = step(torch.full((2,), float(at)))
            with torch.no_grad():
                result.add_(100)
            kept = [each for each in log if isinstance(each, torch.Tensor)]
            found += [shown(kept), shown(result), [each is result for each in kept], kept[-1].requires_grad]
        return found

    assert run(weft.compile(step)) == run(step)


def test_a_tensor_that_it_keeps_alone_has_the_value_of_the_call() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        keep(x * 2)
        return (x * 2 + 1).relu_()

    log.clear()
    compiled = weft.compile(step)
    for at in range(CALLS):
        compiled(torch.full((2,), float(at)))
    assert shown(log) == [[2.0 * at] * 2 for at in range(CALLS)]


def test_a_later_function_that_changes_what_an_earlier_one_kept_is_refused() -> None:
    @weft.opaque
    def change() -> None:
        log[-1]["t"] = 1

    def step(x: torch.Tensor) -> Any:
        made = {"a": x * 2}
        keep(made)
        change()
        return made

    with pytest.raises(PythonStateChanged, match=r"an object that it made.*change"):
        weft.compile(step)(torch.ones(2))


def _kept(kind: str) -> tuple[Callable[[torch.Tensor], Any], list[Any]]:
    """A step that writes to tensors of the user's and gives them, or views, to an opaque function; what that keeps."""
    kept: list[Any] = []
    state, weight = torch.zeros(4), torch.nn.Parameter(torch.zeros(4))

    @weft.opaque
    def keeps(*given: Any) -> None:
        kept.extend(given)

    def step(x: torch.Tensor) -> Any:
        x.mul_(2)
        if kind == "an argument":
            keeps(x)
        elif kind == "an argument in a list":
            keeps([x, x + 1])
        elif kind == "a view of an argument":
            keeps(x[1:], x.view(2, 2).t())
        elif kind == "the state":
            keeps(state)
        elif kind == "a view of the state":
            keeps(state[1:])
        elif kind == "a detached parameter":
            keeps(weight.detach())
        x.add_(1)
        state.add_(x)
        weight.data.add_(x)
        return x

    return step, kept


KINDS = ["an argument", "an argument in a list", "a view of an argument", "the state", "a view of the state"]


@pytest.mark.parametrize("kind", [*KINDS, "a detached parameter"])
def test_a_kept_tensor_of_the_users_has_its_memory(kind: str) -> None:
    (eager, by_eager), (step, by_step) = _kept(kind), _kept(kind)
    compiled = weft.compile(step)
    for number in range(CALLS):
        given = [torch.arange(4.0) + number for _ in range(2)]
        for each, run, kept in zip(given, (eager, compiled), (by_eager, by_step), strict=True):
            assert run(each) is each
            assert (kept[-1] is each) is (kind == "an argument")
            each.sub_(3)
        assert shown(by_step) == shown(by_eager)
    if kind == "an argument in a list":
        assert by_step[-1][0] is given[1]
