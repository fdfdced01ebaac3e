"""Objects that a step makes: as in eager, each call makes its own, and one object is at all places where it is put."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import logging
import random
import sys
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import weft
from weft.capture.record.live_values import calls_keep_arguments
from weft.errors import EscapedTensor, PythonStateChanged

CALLS = 5


class Out:
    def __init__(self, loss: Any, logits: Any) -> None:
        self.loss, self.logits = loss, logits


@dataclasses.dataclass
class Data:
    loss: Any
    logits: Any = 0
    times_made: int = 0

    def __post_init__(self) -> None:
        self.not_a_field = self.times_made + 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    loss: Any


@dataclasses.dataclass(slots=True)
class WithSlots:
    loss: Any
    unset: Any = dataclasses.field(init=False)


class Pair(NamedTuple):
    first: Any
    second: Any


class Output(OrderedDict[str, Any]):
    """As in transformers: entries are attributes, too."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(**entries)
        for name, value in entries.items():
            object.__setattr__(self, name, value)

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        object.__setattr__(self, name, value)


class Meter:
    def __init__(self) -> None:
        self.sum, self.count, self.values = 0.0, 0, list[float]()

    def update(self, value: float) -> None:
        self.sum += value
        self.count += 1
        self.values.append(value)

    @property
    def mean(self) -> float:
        return self.sum / self.count


class Named(dict[str, Any]):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


class Strict:
    """None of its own methods may run when another one is made."""

    def __init__(self, value: Any) -> None:
        object.__setattr__(self, "value", value)

    def _refuse(self, *_: Any) -> Any:
        raise TypeError

    __setattr__ = __eq__ = __bool__ = __len__ = __reduce_ex__ = _refuse  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


class Items(list[Any]):
    def append(self, value: Any) -> None:
        raise TypeError


class State:
    def __init__(self) -> None:
        self.out: Any = None
        self.other: Any = None
        self.calls = 0
        self.entries: dict[str, Any] = {}
        self.items: list[Any] = [None]
        self.own, self.second = Out(1, 2), Out(3, 4)
        self.data, self.order, self.queue = Data([1]), OrderedDict(a=[1]), collections.deque([[1]])


def canonical(value: Any, met: dict[int, int] | None = None) -> Any:
    """A value as plain data: its types, numbers and bits, and which objects in it are the same."""
    met = {} if met is None else met
    if isinstance(value, torch.Tensor):
        return "tensor", value.dtype, value.tolist(), value.requires_grad
    if value is None or isinstance(value, (bool, int, float, str, type)):
        return type(value).__name__, repr(value)
    if id(value) in met and not isinstance(value, tuple):
        return "again", met[id(value)]
    met[id(value)] = len(met)
    inside: list[Any] = []
    if isinstance(value, dict):
        inside = [(canonical(key, met), canonical(item, met)) for key, item in dict.items(value)]
    elif isinstance(value, (list, collections.deque, tuple)):
        inside = [canonical(item, met) for item in value]
    elif isinstance(value, (set, frozenset)):
        inside = sorted(repr(canonical(item, {})) for item in value)
    attributes = [(name, canonical(item, met)) for name, item in getattr(value, "__dict__", {}).items()]
    names = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ()) if hasattr(value, name)]
    slots = [(name, canonical(getattr(value, name), met)) for name in names if not name.startswith("__")]
    return type(value).__name__, inside, attributes, slots


def added(s: State, loss: Any, of: Callable[[Any], Any]) -> Any:
    """The loss and what an earlier call left."""
    return loss if s.out is None else loss + of(s.out)


def objects_of_classes(s: State, loss: Any, logits: Any) -> Any:
    return Out(loss, logits), Data(loss), Frozen(loss), WithSlots(loss), Pair(loss, [logits])


def objects_with_items(s: State, loss: Any, logits: Any) -> Any:
    items = Items([loss, Items([logits])])
    items.note = "an attribute"  # type: ignore[attr-defined]
    return Output(loss=loss, logits=logits), Named(loss=loss, inner=Named(logits=logits)), items


def objects_of_the_library(s: State, loss: Any, logits: Any) -> Any:
    default = collections.defaultdict(Meter)
    default["a"].update(loss.item())
    count = collections.Counter({"a": loss.item(), "b": 2})
    chain = collections.ChainMap({"a": loss}, collections.UserDict(a=logits))  # type: ignore[arg-type]
    results = torch.topk(logits, 1), logits.max(0), logits.shape
    return (
        types.SimpleNamespace(loss=[loss]),
        count,
        chain,
        default,
        collections.deque([loss], 3),
        {"x": {3, 4}},
        results,
    )


def sets_of_tensors(s: State, loss: Any, logits: Any) -> Any:
    return {loss}, frozenset({logits})


def an_object_that_refuses_everything(s: State, loss: Any, logits: Any) -> Any:
    s.out = Strict(loss)
    return s.out


def read_by_the_next_call(s: State, loss: Any, logits: Any) -> Any:
    result = added(s, loss, lambda out: out.logits.mean())
    s.out = Out(loss, logits)
    return result


def data_read_by_the_next_call(s: State, loss: Any, logits: Any) -> Any:
    result = added(s, loss, lambda out: out.loss * out.not_a_field)
    s.out = Data(loss, logits)
    return result, s.out


def output_read_by_the_next_call(s: State, loss: Any, logits: Any) -> Any:
    result = added(s, loss, lambda out: out.loss + out["logits"].sum())
    s.out = Output(loss=loss, logits=logits)
    return result, s.out


def numbers_read_by_the_next_call(s: State, loss: Any, logits: Any) -> Any:
    count, factor = (0, 0.5) if s.out is None else (s.out.loss, s.out.logits)
    s.out = Out(count + 1, factor * 1.5)
    return loss * count * factor


def a_new_meter(s: State, loss: Any, logits: Any) -> Any:
    meter = Meter()
    meter.update(loss.item())
    meter.update(loss.item() * 2)
    s.out = meter
    return meter.mean, meter


def a_meter_that_is_kept(s: State, loss: Any, logits: Any) -> Any:
    s.out = s.out or Meter()
    s.out.sum += loss.item()
    return s.out.sum


def one_object_in_several_places(s: State, loss: Any, logits: Any) -> Any:
    out = Out(loss, [logits])
    s.out = s.other = out
    s.entries["a"] = s.items[0] = [out, out.logits]
    return out


def a_change_is_seen_at_both_places(s: State, loss: Any, logits: Any) -> Any:
    seen = loss
    if s.out is not None:
        s.out.loss = s.out.loss + 1
        seen = s.other.loss
    s.out = s.other = Out(loss, logits)
    return seen


def a_chain(s: State, loss: Any, logits: Any) -> Any:
    s.out = Out(loss, None if s.out is None else Out(s.out.loss, None))
    return s.out


def a_circle(s: State, loss: Any, logits: Any) -> Any:
    first, second = Out(loss, None), Out(logits, None)
    first.logits, second.logits = second, first
    return [first, second]


def deep_inside(s: State, loss: Any, logits: Any) -> Any:
    s.out = Out([Out(loss, {"k": Data(logits, (3, [loss]))})], (Out(1, 2),))
    return s.out.loss[0].logits["k"].loss.sum()


def own_objects_return(s: State, loss: Any, logits: Any) -> Any:
    s.data.loss.append(loss)
    s.data.loss.pop(0)
    s.own.loss = loss
    return s.own, s.data, s.order, s.queue, (s.order["a"], s.queue[0])


def own_objects_in_another_place(s: State, loss: Any, logits: Any) -> Any:
    s.out, s.other, s.entries["q"] = s.data, s.order, s.queue
    return loss


def own_objects_exchanged(s: State, loss: Any, logits: Any) -> Any:
    s.own, s.second = s.second, s.own
    s.own.loss = loss
    return s.own


def a_copy_of_an_own_object(s: State, loss: Any, logits: Any) -> Any:
    s.own.loss = loss
    made = copy.copy(s.own)
    made.logits = logits
    return made, s.own, dataclasses.replace(s.data, loss=loss)


def an_object_as_a_key(s: State, loss: Any, logits: Any) -> Any:
    key = Out(1, 2)
    return {key: loss, loss: key}, key


STEPS = [
    objects_of_classes,
    objects_with_items,
    objects_of_the_library,
    sets_of_tensors,
    an_object_that_refuses_everything,
    read_by_the_next_call,
    data_read_by_the_next_call,
    output_read_by_the_next_call,
    numbers_read_by_the_next_call,
    a_new_meter,
    a_meter_that_is_kept,
    one_object_in_several_places,
    a_change_is_seen_at_both_places,
    a_chain,
    a_circle,
    deep_inside,
    own_objects_return,
    own_objects_in_another_place,
    own_objects_exchanged,
    a_copy_of_an_own_object,
    an_object_as_a_key,
]


def run(what: Callable[..., Any], compiled: bool) -> tuple[list[Any], Any]:
    """What the calls of a step leave, and the step."""
    torch.manual_seed(0)
    s, model = State(), nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> Any:
        logits = model(x)
        loss = logits.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return what(s, loss.detach(), logits.detach())

    called = weft.compile(step) if compiled else step
    left, kept = [], []
    for at in range(CALLS):
        kept.append(called(torch.full((2, 3), at / 3)))
        left.append(canonical((kept, vars(s))))  # what earlier calls returned must not change
    return left, called


@pytest.mark.parametrize("what", STEPS, ids=lambda what: what.__name__)
def test_what_a_step_makes_is_that_of_eager(what: Callable[..., Any]) -> None:
    expected, _ = run(what, compiled=False)
    found, compiled = run(what, compiled=True)
    for at in range(CALLS):
        assert found[at] == expected[at]
    assert len(compiled.captures) <= 3


@pytest.mark.parametrize(
    "make",
    [
        set,
        bytearray,
        lambda: np.zeros(2),
        lambda: random.Random(3),
        lambda: np.random.default_rng(3),
        collections.Counter,
        types.SimpleNamespace,
        lambda: [{"a": Out(1, 2)}],
    ],
)
def test_each_call_makes_its_own(make: Callable[[], Any]) -> None:
    compiled = weft.compile(lambda x: (x * 2, make()))
    made = [compiled(torch.ones(2))[1] for _ in range(3)]
    assert len({id(each) for each in made}) == 3
    assert len({type(each) for each in made}) == 1
    assert len(compiled.captures) == 1


def test_an_object_with_a_parameter_of_the_user_refers_to_it() -> None:
    model = nn.Linear(2, 2)
    compiled = weft.compile(lambda x: Out(model, [model.weight, x * 2]))
    for _ in range(2):
        out = compiled(torch.ones(2))
        assert out.loss is model
        assert out.logits[0] is model.weight


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that the walk of the Python state does not go into."""
    text = """
class Settings:
    def __init__(self, value): self.value = value
PRESENT = Settings(1)
KNOWN = {}
def present(): return PRESENT
def known(name):
    if name not in KNOWN: KNOWN[name] = Settings(name)
    return KNOWN[name]
"""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "settings_library.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    import settings_library  # type: ignore[import-not-found]

    yield settings_library
    del sys.modules["settings_library"]


def test_what_a_library_keeps_is_not_copied(library: Any) -> None:
    @functools.lru_cache
    def remembered() -> Any:
        return Out(1, [2])

    name = "weft.tests.a_logger_that_the_step_makes"

    def step(x: torch.Tensor) -> Any:
        inside = Out(library.known("b"), [remembered(), library.present()])
        return x * 2, library.present(), library.known("a"), remembered(), logging.getLogger(name), inside

    compiled = weft.compile(step)
    for _ in range(3):
        _, present, known, of_cache, logger, inside = compiled(torch.ones(2))
        assert present is library.PRESENT
        assert known is library.KNOWN["a"]
        assert of_cache is remembered()
        assert logger is logging.getLogger(name)
        assert inside.loss is library.KNOWN["b"]
        assert inside.logits[0] is remembered()
        assert inside.logits[1] is library.PRESENT
    assert len(compiled.captures) == 1


def test_objects_among_the_arguments_are_those_of_the_caller() -> None:
    s = State()

    def step(data: Data, order: OrderedDict[str, Any], names: types.SimpleNamespace) -> Any:
        s.out, s.other = data, names
        return data, [order, data.loss * 2]

    compiled = weft.compile(step)
    names = types.SimpleNamespace(a=1)
    for at in range(3):
        data, order = Data(torch.full((2,), float(at))), OrderedDict(a=torch.ones(2))
        returned, (second, _) = compiled(data, order, names)
        assert returned is data
        assert s.out is data
        assert second is order
        assert s.other is names


@pytest.mark.parametrize("place", ["argument", "state", "list in the state", "inside an argument"])
def test_an_opaque_function_that_changes_what_the_step_made_is_refused(place: str) -> None:
    s = State()

    @weft.opaque
    def note(made: Any, loss: torch.Tensor) -> None:
        target = {"argument": made, "inside an argument": made}.get(place, s.out)
        if place == "inside an argument":
            target = target["meter"]
        target.append(1.0) if isinstance(target, list) else target.update(loss.item())

    def step(x: torch.Tensor) -> Any:
        made: Any = [] if place == "list in the state" else Meter()
        if "state" in place:
            s.out = made
        note({"meter": made} if place == "inside an argument" else made, x.sum())
        return made

    with pytest.raises(PythonStateChanged, match="an object that it made"):
        weft.compile(step)(torch.ones(2))


@pytest.fixture(params=[False, True], ids=["", "another thread runs compiled code"])
def _other_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Torch then evaluates the frames of all threads, and a Python call keeps references to its arguments. It may do so
    for an earlier test too: after an error of a backend it goes on."""
    entered, end = threading.Event(), threading.Event()

    def wait(x: torch.Tensor) -> torch.Tensor:
        entered.set()
        assert end.wait(60)
        return x + 1

    thread = threading.Thread(target=torch.compile(wait, backend="eager"), args=(torch.ones(1),))
    if request.param:
        thread.start()
        assert entered.wait(60)
        assert calls_keep_arguments()
    yield
    end.set()
    if request.param:
        thread.join()


@pytest.mark.usefixtures("_other_thread")
def test_an_opaque_function_may_change_what_it_alone_has() -> None:
    seen = []

    @weft.opaque
    def note(meter: Meter, loss: torch.Tensor) -> None:
        meter.update(loss.item())
        seen.append((meter.count, meter.sum))

    def step(x: torch.Tensor) -> torch.Tensor:
        note(Meter(), x.sum())
        return x * 2

    compiled = weft.compile(step)
    for at in range(3):
        compiled(torch.full((2,), float(at)))
    assert seen == [(1, 0.0), (1, 2.0), (1, 4.0)]


def test_what_cannot_be_made_again_names_its_place() -> None:
    with pytest.raises(EscapedTensor, match="the step's return value holds a partial"):
        weft.compile(lambda x: Out(functools.partial(print, x * 2), 1))(torch.ones(2))


class Log:
    def __init__(self) -> None:
        self.rows: list[float] = []

    @weft.opaque
    def add(self, loss: torch.Tensor) -> None:
        self.rows.append(loss.item())


@weft.opaque
def adds_to_the_first(made: list[Any], loss: torch.Tensor) -> None:
    made[0].rows.append(loss.item())


@weft.opaque
def adds_to_an_array(array: Any, loss: torch.Tensor) -> None:
    array += loss.item()


def through_another_object(x: torch.Tensor) -> Any:
    made = [Log(), x * 2]
    adds_to_the_first(made, x.sum())
    return made[0].rows


def through_itself(x: torch.Tensor) -> Any:
    log = Log()
    log.add(x.sum())
    return log


def through_a_closure(x: torch.Tensor) -> Any:
    rows: list[float] = []

    @weft.opaque
    def add(loss: torch.Tensor) -> None:
        rows.append(loss.item())

    add(x.sum())
    return rows


def an_array(x: torch.Tensor) -> Any:
    array = np.zeros(2)
    adds_to_an_array(array, x.sum())
    return array


@pytest.mark.parametrize("step", [through_another_object, through_itself, through_a_closure, an_array])
def test_wherever_an_opaque_function_finds_what_the_step_made(step: Callable[..., Any]) -> None:
    compiled = weft.compile(step)
    with pytest.raises(PythonStateChanged, match="an object that it made"):
        compiled(torch.ones(2))


def test_an_object_with_weak_references_is_refused() -> None:
    class Child:
        def __init__(self, parent: Out) -> None:
            self.parent = weakref.ref(parent)

    def step(x: torch.Tensor) -> Out:
        out = Out(x * 2, None)
        out.logits = Child(out)
        return out

    with pytest.raises(EscapedTensor, match="refers to it weakly"):
        weft.compile(step)(torch.ones(2))


class Registered:
    alive: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.alive.add(self)


@pytest.mark.parametrize("make", [lambda x: x * 2, lambda x: Out(1, 2)])
def test_a_weak_reference_to_what_a_step_leaves_is_refused(make: Callable[[Any], Any]) -> None:
    s = State()

    def step(x: torch.Tensor) -> Any:
        made = make(x)
        s.last = weakref.ref(made)
        return made

    with pytest.raises(EscapedTensor, match=r"s\.last holds a (Tensor|Out) .*refers to it weakly"):
        weft.compile(step)(torch.ones(2))


def test_a_set_of_weak_references_to_what_a_step_leaves_is_refused() -> None:
    with pytest.raises(EscapedTensor, match=r"alive holds a Registered .*refers to it weakly"):
        weft.compile(lambda x: (Registered(), x * len(Registered.alive)))(torch.ones(2))


def test_a_weak_reference_to_what_a_step_lets_go_of_is_dead() -> None:
    s = State()
    s.last = None

    def step(x: torch.Tensor) -> Any:
        dead = s.last is not None and s.last() is None
        made = x * 2
        s.last = weakref.ref(made)
        return x + dead

    compiled = weft.compile(step)
    for at in range(CALLS):
        assert compiled(torch.ones(2)).tolist() == [1.0 + (at > 0)] * 2
        assert s.last() is None


def test_the_versions_of_modules_in_a_state_dict_are_left() -> None:
    model, s = nn.BatchNorm1d(2), State()

    def step(x: torch.Tensor) -> Any:
        s.last = model.state_dict()
        return model(x)

    compiled = weft.compile(step)
    for _ in range(CALLS):
        compiled(torch.randn(4, 2))
        assert s.last._metadata == model.state_dict()._metadata
        assert list(s.last) == list(model.state_dict())


def test_a_chain_without_end_is_refused() -> None:
    def step(x: torch.Tensor) -> Any:
        out = Out(x * 2, None)
        for _ in range(3000):
            out = Out(1, out)
        return out

    with pytest.raises(EscapedTensor, match="too deep"):
        weft.compile(step)(torch.ones(2))


def compare_with_eager(
    begin: Callable[[State], None],
    what: Callable[[State, torch.Tensor], torch.Tensor],
    between: Callable[[State], None] = lambda s: None,
) -> None:
    """Call a step five times, eagerly and compiled, and change the state by ``between`` before the fourth call."""

    def run(wrap: Callable[..., Any]) -> list[list[float]]:
        begin(s := State())
        called, found = wrap(lambda x: what(s, x)), []
        for at in range(CALLS):
            if at == 3:
                between(s)
            found.append(called(torch.ones(2)).tolist())
        return found

    assert run(weft.compile) == run(lambda step: step)


def test_a_place_that_gets_an_object_of_another_place_is_noticed() -> None:
    def begin(s: State) -> None:
        s.own, s.second = Out(1, 1), Out(2, 2)

    def step(s: State, x: torch.Tensor) -> torch.Tensor:
        result = x * (10 if s.own is s.second else 1) * s.own.loss
        s.second = Out(s.second.loss + 1, 0)
        return result

    compare_with_eager(begin, step, lambda s: setattr(s, "second", s.own))


def test_the_order_of_entries_is_noticed() -> None:
    def begin(s: State) -> None:
        s.entries = {"a": torch.ones(2), "b": torch.ones(2) * 2}

    def step(s: State, x: torch.Tensor) -> torch.Tensor:
        result = x * 0
        for value in s.entries.values():
            result = result * 2 + value
        s.entries = {"a": x, "b": x * 2}
        return result

    compare_with_eager(begin, step, lambda s: setattr(s, "entries", dict(reversed(s.entries.items()))))


def test_one_tensor_at_two_attributes_of_a_replaced_object() -> None:
    def begin(s: State) -> None:
        s.own = Out(torch.zeros(2), torch.zeros(2))

    def step(s: State, x: torch.Tensor) -> torch.Tensor:
        s.own.loss.add_(1)
        result = s.own.logits.sum() + x.sum()
        twice = x * 2
        s.own = Out(twice, twice)
        return result

    compare_with_eager(begin, step)


def test_a_module_that_the_step_makes_and_calls_gives_its_buffers() -> None:
    """They are values of the step, not state that a later call could find."""

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        norm = nn.BatchNorm1d(4)
        with torch.no_grad():
            norm(x)
        return [norm.running_mean, norm.num_batches_tracked]  # type: ignore[list-item]

    compiled = weft.compile(step)
    for _ in range(2):
        x = torch.randn(3, 4)
        for ours, theirs in zip(compiled(x), step(x), strict=True):
            assert type(ours) is torch.Tensor
            assert torch.equal(ours, theirs)
