"""Python state that a step reads and that changes between calls: the compiled step gives eager's results.

Each row of the table is one way to hold a number: how it is made, how a step reads it, how the training script changes
it. Both steps are called four times.
"""

from __future__ import annotations

import argparse
import array
import collections
import configparser
import contextvars
import ctypes
import dataclasses
import decimal
import enum
import functools
import importlib
import multiprocessing
import string
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import weft

Make = Callable[[], Any]
Read = Callable[[Any], Any]
Change = Callable[[Any, float], Any]


def _assign(name: str) -> Change:
    return lambda holder, value: setattr(holder, name, value)


def _put(key: Any) -> Change:
    return lambda holder, value: holder.__setitem__(key, value)


def _set_text(name: str) -> Change:
    return lambda holder, value: setattr(holder, name, str(value))


def _configuration() -> configparser.ConfigParser:
    found = configparser.ConfigParser()
    found.read_dict({"a": {"rate": "1"}})
    return found


class Plain:
    a: Any

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class WithDefault:
    a = 1.0


class Inherits(WithDefault):
    pass


def _fresh_class(kind: type) -> Any:
    """``kind``, which is ``WithDefault`` or inherits from it, with the attribute as it was first."""
    WithDefault.a = 1.0
    return kind


class InClass:
    shared: ClassVar = {"a": 1.0}

    @classmethod
    def by_class(cls) -> float:
        return cls.shared["a"]

    @staticmethod
    def alone() -> float:
        return InClass.shared["a"]


class Slots:
    __slots__ = ("a", "items")

    def __init__(self) -> None:
        self.a = 1.0
        self.items = [1.0]


class InheritsSlots(Slots):
    __slots__ = ()


@dataclasses.dataclass
class Data:
    a: float = 1.0


@dataclasses.dataclass(slots=True)
class SlottedData:
    a: float = 1.0


class Descriptor:
    def __get__(self, owner: Any, kind: Any = None) -> float:
        return owner.behind


class Hidden:
    """The value is read by methods that no code names, or through other attributes."""

    described = Descriptor()

    def __init__(self) -> None:
        self.hidden = self.behind = 1.0

    @property
    def shown(self) -> float:
        return self._deeper()

    def _deeper(self) -> float:
        return self.hidden

    def __getitem__(self, key: Any) -> float:
        return self.hidden

    def __len__(self) -> int:
        return int(self.hidden)

    def __call__(self) -> float:
        return self.hidden

    def __iter__(self) -> Iterator[float]:
        return iter([self.hidden])

    def __enter__(self) -> float:
        return self.hidden

    def __exit__(self, *error: Any) -> None:
        pass

    def __bool__(self) -> bool:
        return self.hidden > 2

    def __mul__(self, other: float) -> float:
        return self.hidden * other


class Looked:
    def __init__(self) -> None:
        self.__dict__["table"] = {"a": 1.0}

    def __getattr__(self, name: str) -> Any:
        return self.table[name]


class AttributeDict(dict[str, Any]):
    __getattr__ = dict.__getitem__


class Local(threading.local):
    a = 1.0


class Pair(NamedTuple):
    first: float
    rest: list[float]


class Choice(enum.Enum):
    ONE = 1.0
    TWO = 2.0

    @property
    def twice(self) -> float:
        return self.value * 2


class Scaled(nn.Module):
    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.config = Data()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._scaled(x)

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.config.a * self.factor


def _in_with(holder: Any) -> float:
    with holder as value:
        return value


def _function() -> Any:
    def scale(x: float, factor: float = 1.0, *, other: float = 1.0) -> float:
        return x * factor * other * vars(scale).get("attribute", 1.0)

    scale.attribute = 1.0  # type: ignore[attr-defined]
    return scale


def _view(of: Callable[[dict[Any, float]], Any]) -> tuple[Any, dict[Any, float]]:
    values = {1.0: 1.0}
    return of(values), values


def _variable(default: Any) -> contextvars.ContextVar[Any]:
    return contextvars.ContextVar("variable", default=default)


def _scaled() -> Scaled:
    Scaled.factor = 1.0
    return Scaled()


def _in_class() -> Any:
    InClass.shared["a"] = 1.0
    return type("Inherits", (InClass,), {"__module__": __name__})


def _refill(holder: set[float], value: float) -> None:
    holder.clear()
    holder.add(value)


ONE = torch.ones(())
STATE: dict[str, tuple[Make, Read, Change]] = {
    "list": (lambda: [[1.0]], lambda h: h[0][0], lambda h, v: h[0].__setitem__(0, v)),
    "length of a list": (lambda: [1.0], len, lambda h, v: h.append(v)),
    "dict": (lambda: {"a": 1.0}, lambda h: h["a"], _put("a")),
    "key of a dict": (dict, lambda h: 2.0 if 3.0 in h else 1.0, lambda h, v: h.__setitem__(v, v)),
    "view of a dict": (lambda: _view(dict.values), lambda h: sum(h[0]), lambda h, v: h[1].__setitem__(1.0, v)),
    "read-only dict": (lambda: _view(types.MappingProxyType), lambda h: h[0][1.0], lambda h, v: h[1].update({1.0: v})),
    "method of a dict": (lambda: _view(lambda d: d.get), lambda h: h[0](1.0), lambda h, v: h[1].update({1.0: v})),
    "default dict": (lambda: collections.defaultdict(float, a=1.0), lambda h: h["a"], _put("a")),
    "counter": (collections.Counter, lambda h: h["a"], lambda h, v: h.update(["a"])),
    "user dict": (lambda: collections.UserDict(a=1.0), lambda h: h["a"], _put("a")),
    "user list": (lambda: collections.UserList([1.0]), lambda h: h[0], _put(0)),
    "chain of dicts": (lambda: collections.ChainMap({"a": 1.0}), lambda h: h["a"], _put("a")),
    "configuration": (_configuration, lambda h: h.getfloat("a", "rate"), lambda h, v: h.set("a", "rate", str(v))),
    "section": (lambda: _configuration()["a"], lambda h: float(h["rate"]), lambda h, v: h.update(rate=str(v))),
    "template": (
        lambda: string.Template("1"),
        lambda h: float(h.substitute()),
        lambda h, v: setattr(h, "template", str(v)),
    ),
    "deque": (lambda: collections.deque([1.0], maxlen=2), sum, lambda h, v: h.append(v)),
    "set": (lambda: {1.0}, max, _refill),
    "growing set": (set, lambda h: 2.0 if 3.0 in h else 1.0, lambda h, v: h.add(v)),
    "set in a dict": (lambda: {"s": {1.0}}, lambda h: sum(h["s"]), lambda h, v: h["s"].add(v)),
    "frozen set": (lambda: [frozenset({1.0})], lambda h: sum(h[0]), lambda h, v: h.__setitem__(0, frozenset({v}))),
    "tuple in a list": (lambda: [Pair(1.0, [])], lambda h: h[0].first, lambda h, v: h.__setitem__(0, Pair(v, []))),
    "list in a tuple": (lambda: Pair(1.0, [1.0]), lambda h: h.rest[0], lambda h, v: h.rest.__setitem__(0, v)),
    "attribute": (lambda: Plain(a=1.0), lambda h: h.a, _assign("a")),
    "attribute by name": (lambda: Plain(a=1.0), lambda h: getattr(h, "a"), _assign("a")),  # noqa: B009
    "attribute that comes": (Plain, lambda h: getattr(h, "late", 1.0), _assign("late")),
    "question for an attribute": (Plain, lambda h: 2.0 if hasattr(h, "late") else 1.0, _assign("late")),
    "vars": (lambda: Plain(a=1.0), lambda h: vars(h)["a"], _assign("a")),
    "__dict__": (lambda: Plain(a=1.0), lambda h: h.__dict__["a"], _assign("a")),
    "namespace": (lambda: types.SimpleNamespace(a=1.0), lambda h: h.a, _assign("a")),
    "arguments of a script": (lambda: argparse.Namespace(a=1.0), lambda h: h.a, _assign("a")),
    "dataclass": (Data, lambda h: h.a, _assign("a")),
    "all fields of a dataclass": (Data, lambda h: dataclasses.astuple(h)[0], _assign("a")),
    "dataclass with slots": (SlottedData, lambda h: h.a, _assign("a")),
    "slot": (Slots, lambda h: h.a, _assign("a")),
    "inherited slot": (InheritsSlots, lambda h: h.a, _assign("a")),
    "list in a slot": (Slots, lambda h: h.items[0], lambda h, v: h.items.__setitem__(0, v)),
    "class": (lambda: _fresh_class(WithDefault), lambda h: h.a, lambda h, v: setattr(WithDefault, "a", v)),
    "base class": (lambda: _fresh_class(Inherits), lambda h: h.a, lambda h, v: setattr(WithDefault, "a", v)),
    "class of an object": (lambda: _fresh_class(Inherits)(), lambda h: h.a, lambda h, v: setattr(WithDefault, "a", v)),
    "object hides its class": (lambda: _fresh_class(Inherits)(), lambda h: h.a, _assign("a")),
    "class method": (_in_class, lambda h: h.by_class(), lambda h, v: h.shared.update(a=v)),
    "static method": (_in_class, lambda h: h.alone(), lambda h, v: h.shared.update(a=v)),
    "method replaced": (_in_class, lambda h: h.alone(), lambda h, v: setattr(h, "alone", staticmethod(lambda: v))),
    "property": (Hidden, lambda h: h.shown, _assign("hidden")),
    "descriptor": (Hidden, lambda h: h.described, _assign("behind")),
    "operator []": (Hidden, lambda h: h[0], _assign("hidden")),
    "operator *": (Hidden, lambda h: h * 2.0, _assign("hidden")),
    "len": (Hidden, len, _assign("hidden")),
    "call": (Hidden, lambda h: h(), _assign("hidden")),
    "iteration": (Hidden, lambda h: sum(h), _assign("hidden")),
    "with": (Hidden, _in_with, _assign("hidden")),
    "truth": (Hidden, lambda h: 2.0 if h else 1.0, _assign("hidden")),
    "__getattr__": (Looked, lambda h: h.a, lambda h, v: h.table.update(a=v)),
    "dict with attributes": (lambda: AttributeDict(a=1.0), lambda h: h.a, _put("a")),
    "enumeration": (lambda: Plain(a=Choice.ONE), lambda h: h.a.twice, lambda h, v: setattr(h, "a", Choice.TWO)),
    "configuration of a module": (_scaled, lambda h: h(ONE), lambda h, v: setattr(h.config, "a", v)),
    "class of a module": (_scaled, lambda h: h(ONE), lambda h, v: setattr(Scaled, "factor", v)),
    "defaults": (_function, lambda h: h(2.0), lambda h, v: setattr(h, "__defaults__", (v,))),
    "named defaults": (_function, lambda h: h(2.0), lambda h, v: h.__kwdefaults__.update(other=v)),
    "attribute of a function": (_function, lambda h: h(2.0), _assign("attribute")),
    "code of a function": (
        lambda: lambda: 1.0,
        lambda h: h(),
        lambda h, v: setattr(h, "__code__", (lambda: 3.0).__code__),
    ),
    "partial": (
        lambda: functools.partial(_function(), other=1.0),
        lambda h: h(2.0),
        lambda h, v: h.keywords.update(other=v),
    ),
    "bound method": (lambda: Hidden()._deeper, lambda h: h(), lambda h, v: setattr(h.__self__, "hidden", v)),
    "context variable": (lambda: _variable(1.0), lambda h: h.get(), lambda h, v: h.set(v)),
    "list in a context variable": (
        lambda: _variable([1.0]),
        lambda h: h.get()[0],
        lambda h, v: h.get().__setitem__(0, v),
    ),
    "tensor in a context variable": (lambda: _variable(ONE), lambda h: h.get(), lambda h, v: h.set(ONE * v)),
    "default of a context variable": (
        lambda: contextvars.ContextVar("unset"),
        lambda h: h.get(7.0),
        lambda h, v: h.set(v),
    ),
    "variable of a thread": (threading.local, lambda h: getattr(h, "a", 1.0), _assign("a")),
    "class of variables of a thread": (Local, lambda h: h.a, _assign("a")),
    "array": (lambda: array.array("d", [1.0]), lambda h: h[0], _put(0)),
    "bytes": (lambda: bytearray([1]), lambda h: h[0], lambda h, v: h.__setitem__(0, int(v))),
    "memory": (lambda: memoryview(bytearray([1])), lambda h: h[0], lambda h, v: h.__setitem__(0, int(v))),
    "numpy": (lambda: np.ones(2), lambda h: float(h[0]), _put(0)),
    "numpy of objects": (lambda: np.array([1.0, None], dtype=object), lambda h: h[0], _put(0)),
    "polynomial": (lambda: np.poly1d([1.0, 2.0]), lambda h: float(h(2.0)), lambda h, v: h.coeffs.__setitem__(0, v)),
    "polynomial of a package": (
        lambda: np.polynomial.Polynomial([1.0, 2.0]),
        lambda h: float(h(2.0)),
        lambda h, v: setattr(h, "coef", np.array([v, 2.0])),
    ),
    "masked array": (
        lambda: np.ma.masked_array([1.0, 2.0, 3.0, 4.0], mask=[False] * 4),
        lambda h: float(h.sum()),
        lambda h, v: h.mask.__setitem__(int(v) - 1, True),
    ),
    "context of decimals": (
        lambda: decimal.Context(prec=1),
        lambda h: float(h.divide(1, 3)),
        lambda h, v: setattr(h, "prec", int(v)),
    ),
    "number of C": (lambda: ctypes.c_double(1.0), lambda h: h.value, _assign("value")),
    "array of C": (lambda: (ctypes.c_double * 2)(1.0, 2.0), lambda h: h[0], _put(0)),
    "shared number": (lambda: multiprocessing.Value("d", 1.0), lambda h: h.value, _assign("value")),
    "flag": (threading.Event, lambda h: 2.0 if h.is_set() else 1.0, lambda h, v: h.set()),
}


@pytest.mark.parametrize("name", STATE)
def test_a_change_between_calls_is_seen(name: str) -> None:
    make, read, change = STATE[name]

    def results(wrap: Callable[..., Any]) -> list[float]:
        holder = make()
        step = wrap(lambda x: x * read(holder))
        found = []
        for at in range(4):
            if at:
                change(holder, at + 1.0)
            found.append(step(torch.tensor(1.0)).item())
        return found

    eager = results(lambda step: step)
    assert results(weft.compile) == eager
    assert len(set(eager)) > 1, "the change changes nothing"


SETTINGS = """
SCALE = 1.0
class Options:
    rate = 1.0
options = Options()
def scaled(x):
    return x * SCALE
"""
USES = {
    "attribute of a module": "def step(x): return x * settings_of_test.SCALE",
    "attribute by name": "def step(x): return x * getattr(settings_of_test, 'SCALE')",
    "function of a module": "def step(x): return settings_of_test.scaled(x)",
    "function from a module": "def step(x): return scaled(x)",
    "object of a module": "def step(x): return x * settings_of_test.options.rate",
    "class of a module": "def step(x): return x * settings_of_test.Options.rate",
    "module imported in the step": "def step(x):\n import settings_of_test as s\n return x * s.SCALE",
    "name imported in the step": "def step(x):\n from settings_of_test import SCALE\n return x * SCALE",
    "variable by name": "def step(x): return x * globals()['OWN']",
    "variable that comes": "def step(x):\n try: return x * LATE\n except NameError: return x",
}


@pytest.mark.parametrize("use", USES)
def test_a_change_of_a_users_module_is_seen(use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "settings_of_test.py").write_text(SETTINGS)
    (tmp_path / "step_of_test.py").write_text(
        f"import settings_of_test\nfrom settings_of_test import scaled\nOWN = 1.0\n{USES[use]}\n"
    )

    def results(wrap: Callable[..., Any]) -> list[float]:
        for name in ("settings_of_test", "step_of_test"):
            monkeypatch.delitem(__import__("sys").modules, name, raising=False)
        step_module = __import__("step_of_test")
        settings = step_module.settings_of_test
        step, found = wrap(step_module.step), []
        for at in range(3):
            if at:
                settings.SCALE = settings.Options.rate = step_module.OWN = step_module.LATE = at + 1.0
            found.append(step(torch.tensor(1.0)).item())
        return found

    assert results(weft.compile) == results(lambda step: step) == [1.0, 2.0, 3.0]


def _reader(box: list[float]) -> Callable[[], float]:
    return lambda: box[0]


def test_closures_of_the_same_code_are_told_apart() -> None:
    boxes = [[1.0], [1.0]]
    functions = [functools.partial(lambda box: box[0], box) for box in boxes]
    reads = [_reader(box) for box in boxes]
    step = weft.compile(lambda x: x * reads[0]() * reads[1]() * functions[1]())
    for at in range(3):
        boxes[1][0] = at + 1.0
        assert step(torch.tensor(1.0)).item() == (at + 1.0) ** 2


def test_what_a_step_puts_into_a_set_or_an_array_it_puts_there_at_every_call() -> None:
    seen: set[str] = set()
    data, variable = bytearray(2), contextvars.ContextVar[Any]("variable", default=None)

    def step(x: torch.Tensor) -> torch.Tensor:
        seen.add("a")
        data[1] = 7
        variable.set("in the step")
        return x * 2

    compiled = weft.compile(step)
    for _ in range(3):
        seen.clear()
        data[1] = 0
        variable.set("before the step")
        compiled(torch.ones(2))
        assert (seen, bytes(data), variable.get()) == ({"a"}, b"\0\7", "in the step")
    assert len(compiled.captures) == 1


def test_each_thread_has_its_own_variables() -> None:
    local = threading.local()
    step = weft.compile(lambda x: x * local.a)
    found = []

    def call(value: float) -> None:
        local.a = value
        found.append(step(torch.tensor(1.0)).item())

    call(1.0)
    thread = threading.Thread(target=call, args=(2.0,))
    thread.start()
    thread.join()
    call(1.0)
    assert found == [1.0, 2.0, 1.0]


def test_attributes_that_the_step_makes_are_made_by_every_call() -> None:
    holder, slots, kind = Plain(), Slots(), type("Kind", (Plain,), {"__module__": __name__})

    def step(x: torch.Tensor) -> torch.Tensor:
        holder.made = x * 2
        slots.a = x * 3
        kind.made = x * 4
        return x

    compiled = weft.compile(step)
    for value in (1.0, 2.0, 3.0):
        compiled(torch.tensor(value))
        assert [each.item() for each in (holder.made, slots.a, kind.made)] == [2 * value, 3 * value, 4 * value]


def test_a_step_changes_the_length_of_an_array_of_numbers() -> None:
    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        values = array.array("d", [1.0, 2.0])

        def step(x: torch.Tensor) -> torch.Tensor:
            values[0] += 1
            values.append(values[0])
            return x * values[0] * len(values)

        step = wrap(step)
        return [step(torch.ones(2)).tolist() + list(values) for _ in range(4)]

    assert run(weft.compile) == run(lambda step: step)


class Scales:
    def __init__(self) -> None:
        self.factor = 1.0

    def scaled(self, by: float) -> float:
        return self.factor * by

    tripled = functools.partialmethod(scaled, 3.0)

    @functools.singledispatchmethod
    def of(self, value: Any) -> float:
        return 1.0

    @of.register
    def _(self, value: int) -> float:
        return self.factor * value


class Setting(enum.Enum):
    RATES = {"low": 1.0}  # noqa: RUF012


@pytest.mark.parametrize("read", [lambda s: s.tripled(), lambda s: s.of(2)])
def test_methods_that_another_function_wraps_are_followed(read: Callable[[Any], float]) -> None:
    scales = Scales()
    step = weft.compile(lambda x: x * read(scales))
    for factor in (1.0, 2.0, 3.0):
        scales.factor = factor
        assert step(torch.ones(())).item() == read(scales)


def test_what_the_value_of_an_enumeration_holds_is_read_anew() -> None:
    step = weft.compile(lambda x: x * Setting.RATES.value["low"])
    for rate in (1.0, 2.0, 3.0):
        Setting.RATES.value["low"] = rate
        assert step(torch.ones(())).item() == rate


@pytest.mark.parametrize(
    "find",
    [
        lambda: sys.modules["settings_of_a_test"],
        lambda: importlib.import_module("settings_of_a_test"),
        lambda: __import__("settings_of_a_test"),
    ],
)
def test_variables_of_a_module_that_is_found_by_its_name(
    find: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "settings_of_a_test.py").write_text("rate = 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("settings_of_a_test")
    step = weft.compile(lambda x: x * find().rate)
    for rate in (1.0, 2.0, 3.0):
        module.rate = rate  # type: ignore[missing-attribute]
        assert step(torch.ones(())).item() == rate
    monkeypatch.delitem(sys.modules, "settings_of_a_test")


shift = 1.0


def test_variables_of_a_frame_are_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    step = weft.compile(lambda x: x * sys._getframe().f_globals["shift"])
    for value in (1.0, 2.0, 3.0):
        monkeypatch.setitem(globals(), "shift", value)
        assert step(torch.ones(())).item() == value
